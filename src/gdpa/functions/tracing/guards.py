"""What torch.compile must know about a Python function that is turned into a constant while it traces.

The key of a function's graph enters compiled code as a constant. Dynamo guards the function's code by itself, but not
what it reads: a closure made with another number, a changed default or global would silently keep the old graph. So
Dynamo traces the function, or mask, once more, on stand-ins. The result is not used, and most compilers remove it;
those that do not ("eager") run it, so the stand-ins are ones that nothing fails on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gdpa.functions.modules import has_parameters
from gdpa.functions.places.names import TableKind, mask_arguments, signature_of


class _PinNumbers(TorchFunctionMode):
    """Numbers that reach a torch operation are made constants: Dynamo would leave one open that it saw change."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _pin(*args, *kwargs.values())
        return func(*args, **kwargs)


def pinned(number: Any) -> Any:
    """A number that Dynamo may have left open, as a constant of the compiled code: it cannot be in a closure else."""
    if not torch.compiler.is_compiling():
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # here, since it takes long to import

    return guard_scalar(number)


def _pin(*values: Any) -> None:
    for a in values:
        if isinstance(a, int | float):
            pinned(a)


class _Table:
    """Any index has the same entry."""

    def __init__(self, entry: Tensor, ndim: int) -> None:
        self.entry, self.ndim, self.dtype = entry, ndim, entry.dtype

    def __getitem__(self, indices: Any) -> Tensor:
        if isinstance(indices, tuple):
            _pin(*indices)
        else:
            _pin(indices)
        return self.entry

    def dim(self) -> int:
        return self.ndim


def guard_what_it_reads(fn: Callable[..., Tensor], n_params: int, tables: tuple[TableKind, ...], like: Tensor) -> None:
    """Let Dynamo guard on all that the activation ``fn`` reads."""
    positions, flex = _positions(fn)
    guard_call(fn, 1 + n_params, tables, positions, flex, like)


def guard_call(
    fn: Callable[..., Tensor], n_numbers: int, tables: tuple[TableKind, ...], positions: Sequence[str], flex: bool,
    like: Tensor | None = None,
) -> None:  # fmt: skip
    """The same, of one that takes ``n_numbers``, the score and params, and whose ``positions`` are known (see
    Signature)."""
    with _PinNumbers():
        like = torch.ones(1) if like is None else like
        numbers = [like.new_ones(1, dtype=torch.float32) for _ in range(n_numbers)]  # the dtype of scores
        held = [_Table(like.new_ones(1, dtype=t.dtype), t.ndim) for t in tables]
        at = {name: like.new_ones(1, dtype=torch.int64) for name in positions}
        given, named = ((*numbers, *at.values()), {}) if flex else ((*numbers, *held), at)
        if has_parameters(fn):  # each is a number to the function, whatever its shape and dtype
            weights = {name: like.new_ones(1, dtype=torch.float32) for name, _ in fn.named_parameters()}
            torch.func.functional_call(fn, weights, given, named)
        else:
            fn(*given, **named)


def guard_what_mask_reads(fn: Callable[..., Tensor], tables: tuple[TableKind, ...]) -> None:
    """The same of a mask."""
    with _PinNumbers():
        left = iter([_Table(torch.ones(1, dtype=t.dtype), t.ndim) for t in tables])
        given: list[Any] = []
        named: dict[str, Any] = {}
        for name, is_position, keyword_only in _mask_arguments(fn):
            value = torch.ones(1, dtype=torch.int64) if is_position else next(left)
            if keyword_only:
                named[name] = value
            else:
                given.append(value)
        fn(*given, **named)


def _positions(fn: Callable[..., Tensor]) -> tuple[tuple[str, ...], bool]:
    signature = signature_of(fn)
    return signature.positions, signature.flex


def _mask_arguments(fn: Callable[..., Tensor]) -> tuple[tuple[str, bool, bool], ...]:
    return tuple((a.name, a.is_position, a.keyword_only) for a in mask_arguments(fn))


# See api.py.
_positions._dynamo_marked_constant = True  # type: ignore[attr-defined]
_mask_arguments._dynamo_marked_constant = True  # type: ignore[attr-defined]
