"""Traces a function in isolation, whatever modes and transforms surround the call that needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any, TypeVar

import torch

from gdpa import compat
from gdpa.compat import (
    DisableTorchFunction,
    disable_current_modes,
    has_global_hooks,
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
    checkpointing), anomaly mode and what tracks modules (for FLOP counters)."""
    with (
        _untracked(),
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


class _Elsewhere:
    """A tracker's hook of all modules, in all threads but those that trace."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.tracing: list[int] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if threading.get_ident() in self.tracing else self.hook(*args, **kwargs)


_replacing = threading.Lock()


def _hooks_of_all_modules() -> list[dict[int, Any]]:
    return [
        compat.global_forward_pre_hooks, compat.global_forward_hooks,
        compat.global_backward_pre_hooks, compat.global_backward_hooks,
    ]  # fmt: skip


def _only_observes(hook: Any) -> bool:
    """Whether it is one of PyTorch's trackers, which never change what a module computes."""
    if isinstance(hook, _Elsewhere):
        return True
    return isinstance(hook, MethodType) and getattr(hook, "__module__", None) in compat.TRACKERS


def hooks_change_modules() -> bool:
    """Whether hooks of all modules (torch.nn.modules.module) may change what modules compute."""
    if not has_global_hooks():
        return False
    return not all(_only_observes(hook) for hooks in _hooks_of_all_modules() for hook in list(hooks.values()))


@contextmanager
def _untracked() -> Iterator[None]:
    """Trackers would take the modules that tracing runs, and their backward, for those of the model around it: the
    backward makes torch.utils.module_tracker.ModuleTracker forget which modules are running."""
    if not has_global_hooks():
        yield
        return
    here, quiet = threading.get_ident(), []
    with _replacing:
        for hooks in _hooks_of_all_modules():
            for number, hook in list(hooks.items()):
                if _only_observes(hook):
                    hooks[number] = found = hook if isinstance(hook, _Elsewhere) else _Elsewhere(hook)
                    found.tracing.append(here)
                    quiet.append((hooks, number, found))
    try:
        yield
    finally:
        with _replacing:
            for hooks, number, found in quiet:
                found.tracing.remove(here)
                if not found.tracing and hooks.get(number) is found:  # else the tracker has ended
                    hooks[number] = found.hook


def run_alone(make: Callable[[], T]) -> T:
    """``make()``, isolated and in a thread of its own: the first run of a program may need it inside the operator, and
    the dispatch keys excluded there, which tracing needs, are those of its thread."""

    def run() -> T:
        with isolated():
            return make()

    with ThreadPoolExecutor(1) as alone:
        return alone.submit(run).result()
