"""Autograd inside an operator, for backends that let PyTorch differentiate the function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def recording() -> Iterator[None]:
    """Record gradients even inside a torch.library op, whose kernels run with the autograd dispatch keys excluded.

    enable_grad() alone does not lift that; torch.utils.checkpoint uses the same guard.
    """
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
        torch.enable_grad(),
    ):
        yield
