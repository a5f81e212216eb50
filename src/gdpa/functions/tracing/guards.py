"""What torch.compile must know about a Python function that is turned into a constant while it traces.

The key of a function's graph enters compiled code as a constant. Dynamo guards the function's code by itself, but not
what it reads: a closure made with another number, a changed default or global would silently keep the old graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gdpa.functions.places.names import TableKind, signature_of


class _PinNumbers(TorchFunctionMode):
    """Numbers that reach a torch operation are made constants: Dynamo would leave one open that it saw change."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.fx.experimental.symbolic_shapes import guard_scalar  # here, since it takes long to import

        kwargs = kwargs or {}
        for a in (*args, *kwargs.values()):
            if isinstance(a, int | float):
                guard_scalar(a)
        return func(*args, **kwargs)


def guard_what_it_reads(fn: Callable[..., Tensor], n_params: int, tables: tuple[TableKind, ...], like: Tensor) -> None:
    """Let Dynamo trace ``fn`` once, to guard on all it reads. The result is not used and the compiler removes it."""
    with _PinNumbers():
        numbers = [like.new_empty(1, dtype=torch.float32) for _ in range(1 + n_params)]  # the dtype of scores
        held = [like.new_empty((1,) * t.ndim, dtype=t.dtype) for t in tables]
        positions, flex = _positions(fn)
        at = {name: like.new_empty(1, dtype=torch.int64) for name in positions}
        if flex:
            fn(*numbers, *at.values())
        else:
            fn(*numbers, *held, **at)


def _positions(fn: Callable[..., Tensor]) -> tuple[tuple[str, ...], bool]:
    signature = signature_of(fn)
    return signature.positions, signature.flex


_positions._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see api.py
