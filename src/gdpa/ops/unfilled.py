"""Results are not filled with NaN in deterministic mode.

There PyTorch fills every new tensor, so that whoever reads one before it is written gets the same NaN every time. Our
kernels write every element of their results (tests run them on memory full of NaN), and filling takes a quarter of the
time of a short forward: so it is switched off while results are allocated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.deterministic

P = ParamSpec("P")
R = TypeVar("R")
SETTINGS: Any = torch.utils.deterministic  # a module with a property


class _Unfilled:
    """All threads share PyTorch's setting: the first thread inside switches it off, the last one restores it."""

    def __init__(self) -> None:
        self._lock, self._inside, self._filled = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._filled = SETTINGS.fill_uninitialized_memory
                SETTINGS.fill_uninitialized_memory = False
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                SETTINGS.fill_uninitialized_memory = self._filled


_unfilled = _Unfilled()


def unfilled(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator for functions that write every element of the tensors they allocate: these are not filled before."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.are_deterministic_algorithms_enabled():
            return fn(*args, **kwargs)
        with _unfilled:
            return fn(*args, **kwargs)

    return run
