"""Traces a function in isolation, whatever modes and transforms surround the call that needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

from gdpa import compat
from gdpa.compat import (
    DisableTorchFunction,
    disable_current_modes,
    temporarily_clear_interpreter_stack,
    tracing,
    usual_keys,
)

T = TypeVar("T")


@contextmanager
def isolated() -> Iterator[None]:
    """Outside of the transforms of torch.func, dispatch modes (FLOP counters, fake tensors), torch function modes
    (``torch.device("cuda")``), torch.export (whose fake tensors would take over ours), compiled code that calls an
    operator (where most dispatch keys are off), autocast, inference mode, hooks on saved tensors (activation
    checkpointing) and anomaly mode."""
    with (
        tracing(None),
        temporarily_clear_interpreter_stack(),
        disable_current_modes(),
        DisableTorchFunction(),
        torch.inference_mode(False),
        _no_saved_tensor_hooks(),
        torch.autograd.set_detect_anomaly(False) if torch.is_anomaly_enabled() else nullcontext(),
        usual_keys(),  # last: those before it change some
    ):
        yield


@contextmanager
def _no_saved_tensor_hooks() -> Iterator[None]:
    """``torch.autograd.graph.disable_saved_tensors_hooks`` would refuse those that are there."""
    kept = []
    while (top := compat.top_saved_tensors_hooks(True)) is not None:
        kept.append(top)
        compat.pop_saved_tensors_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(kept):
            compat.push_saved_tensors_hooks(pack, unpack)


def run_alone(make: Callable[[], T]) -> T:
    """``make()``, isolated and in a thread of its own: the first run of a program may need it inside the operator, and
    the dispatch keys excluded there, which tracing needs, are those of its thread."""

    def run() -> T:
        with isolated():
            return make()

    with ThreadPoolExecutor(1) as alone:
        return alone.submit(run).result()
