"""In deterministic mode PyTorch fills every new tensor, so that reading one before it is written gives NaN every time.
Our results are written whole, which tests hold on memory full of NaN, and filling them costs a quarter of the time of a
short forward: it is left out while they are made."""

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
    """The setting is one for all threads: the first to need it off turns it off, the last turns it on again."""

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
    """``fn``, which writes every element of the tensors that it makes; nobody need fill them before."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.are_deterministic_algorithms_enabled():
            return fn(*args, **kwargs)
        with _unfilled:
            return fn(*args, **kwargs)

    return run
