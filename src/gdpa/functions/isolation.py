"""Tracing sees a function alone, whatever happens to run around the call that needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def isolated() -> Iterator[None]:
    """Outside of the transforms of torch.func, dispatch modes (FLOP counters, fake tensors), torch function modes
    (``torch.device("cuda")``) and inference mode."""
    with (
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
    ):
        yield
