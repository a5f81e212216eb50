"""Which arithmetic calls use: exact by default, or fast, where a person has asked for it.

A choice belongs to the call: the operator takes it as an argument, so the backward computes as its forward did, and
torch.compile compiles once for each.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

PRECISIONS = ("exact", "fast")


class _OfThread(threading.local):
    """The innermost ``precision`` of this thread. Set in __init__: Dynamo does not guard an attribute of the class."""

    def __init__(self) -> None:
        self.value: str | None = None


class _OfProcess:
    def __init__(self) -> None:
        self.value = PRECISIONS[0]


_of_thread = _OfThread()
_of_process = _OfProcess()


def set_precision(value: str) -> None:
    """The arithmetic of calls outside any ``precision`` block, in all threads: "exact" (the default) or "fast".

    exact   no error beyond the roundings of the definition: p and ds once to the dtype of q, each result once
    fast    cheaper arithmetic where a backend has one that is worth its errors: products of float32 inputs in TF32 on
            GPUs (10 bits of each number). For 16-bit inputs there is none at present, so that calls compute the same
            as with "exact"; ``gdpa.explain`` tells.

    >>> gdpa.set_precision("fast")
    """
    _of_process.value = checked(value)


class precision:  # noqa: N801  # a context manager, named as torch.no_grad and torch.autocast are
    """Calls of this thread inside the block use ``value``; see :func:`set_precision`.

    >>> with gdpa.precision("fast"):
    ...     out = gdpa.attention(q, k, v)
    """

    def __init__(self, value: str) -> None:
        self.value = checked(value)
        self.before: list[str | None] = []  # one object may be entered twice

    def __enter__(self) -> None:
        self.before.append(_of_thread.value)
        _of_thread.value = self.value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _of_thread.value = self.before.pop()


def current() -> str:
    """The precision of a call made here and now."""
    inner = _of_thread.value
    return _of_process.value if inner is None else inner


def checked(value: Any) -> str:
    if value not in PRECISIONS:
        raise ValueError(f"precision must be 'exact' or 'fast', got {value!r}")
    return str(value)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under torch.autocast, cast as F.scaled_dot_product_attention is cast: to the region's dtype, float64 excepted."""
    device = tensors[0].device.type
    wide = any(t.dtype == torch.float64 for t in tensors)
    if device == "meta" or not torch.is_autocast_enabled(device) or wide:
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) for t in tensors)
