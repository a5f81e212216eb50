"""What torch.compile must know about a Python function that is turned into a constant while it traces.

The key of a function's graph enters compiled code as a constant. Dynamo guards the function's code by itself, but not
what it reads: a closure made with another number, a changed default or global would silently keep the old graph. So
Dynamo traces the function, or mask, once more, on stand-ins. The result is not used, and most compilers remove it;
those that do not ("eager") run it, so the stand-ins are ones that nothing fails on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gdpa.functions.modules import has_parameters
from gdpa.functions.places.names import TableKind, mask_arguments, signature_of
from gdpa.functions.tracing.pending import Span, in_region, nodes_so_far, refuse_pending


class _PinNumbers(TorchFunctionMode):
    """Numbers that reach a torch operation are made constants: Dynamo would leave one open that it saw change."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _pin(*args, *kwargs.values())
        return func(*args, **kwargs)


def _numbers_pinned() -> AbstractContextManager[Any]:
    """Dynamo allows no mode inside of checkpointing and the like: numbers that are open there are refused instead."""
    return nullcontext() if in_region() else _PinNumbers()


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
    span = guard_call(fn, 1 + n_params, tables, positions, flex, like)
    pending_in(fn, 1 + n_params, tables, span)


def guard_call(
    fn: Callable[..., Tensor], n_numbers: int, tables: tuple[TableKind, ...], positions: Sequence[str], flex: bool,
    like: Tensor | None = None,
) -> Span:  # fmt: skip
    """The same, of one that takes ``n_numbers``, the score and params, and whose ``positions`` are known (see
    Signature). Returns where its nodes are in Dynamo's graph (see pending_in)."""
    with _numbers_pinned():
        like = torch.ones(1) if like is None else like
        given = [like.new_ones(1, dtype=dtype) for dtype in _dtypes(fn, n_numbers, tables, positions)]
        first = nodes_so_far()
        found = _call(fn, n_numbers, tables, positions, flex, given)
    return _span(first, found)


def pending_in(fn: Callable[..., Tensor], n_numbers: int, tables: tuple[TableKind, ...], span: Span) -> None:
    """Refuse an activation that Python knows otherwise than Dynamo does, whose guard_call returned ``span``."""
    positions, flex = _positions(fn)
    dtypes = _dtypes(fn, n_numbers, tables, positions)
    refuse_pending("activation", span, dtypes, lambda given: _call(fn, n_numbers, tables, positions, flex, given))


def _dtypes(
    fn: Callable[..., Tensor], n_numbers: int, tables: tuple[TableKind, ...], positions: Sequence[str]
) -> list[torch.dtype]:
    """Of the stand-ins: numbers, which have the dtype of scores, entries of tables, positions, and the parameters of a
    module, each of which is a number to the function, whatever its shape and dtype."""
    own = len(list(fn.parameters())) if has_parameters(fn) else 0
    floats = [torch.float32]
    return floats * n_numbers + [t.dtype for t in tables] + [torch.int64] * len(positions) + floats * own


def _call(
    fn: Callable[..., Tensor], n_numbers: int, tables: tuple[TableKind, ...], positions: Sequence[str], flex: bool,
    given: list[Tensor],
) -> Any:  # fmt: skip
    """``fn`` of the stand-ins ``given``."""
    n_own = n_numbers + len(tables)
    numbers, entries = given[:n_numbers], given[n_numbers:n_own]
    at = dict(zip(positions, given[n_own:], strict=False))
    held = [_Table(entry, t.ndim) for entry, t in zip(entries, tables, strict=True)]
    listed, named = ((*numbers, *at.values()), {}) if flex else ((*numbers, *held), at)
    if not has_parameters(fn):
        return fn(*listed, **named)
    names = [name for name, _ in fn.named_parameters()]
    weights = dict(zip(names, given[n_own + len(positions) :], strict=True))
    return torch.func.functional_call(fn, weights, listed, named)


def _span(first: int, found: Any) -> Span:
    """From the ``first`` node on, to one that is what was ``found``; empty if that is no tensor."""
    if not isinstance(found, Tensor):
        return first, first
    found.clone()
    return first, nodes_so_far()


def guard_what_mask_reads(fn: Callable[..., Tensor], tables: tuple[TableKind, ...]) -> None:
    """The same of a mask."""
    arguments = _mask_arguments(fn)
    with _numbers_pinned():
        like = torch.ones(1)
        given = [like.new_ones(1, dtype=dtype) for dtype in _mask_dtypes(arguments, tables)]
        first = nodes_so_far()
        found = _call_mask(fn, arguments, tables, given)
    _pending_in_mask(fn, tables, _span(first, found))


MaskArguments = tuple[tuple[str, bool, bool], ...]  # of each: its name, whether it is a position, whether keyword-only


def _mask_dtypes(arguments: MaskArguments, tables: tuple[TableKind, ...]) -> list[torch.dtype]:
    return [t.dtype for t in tables] + [torch.int64 for _, is_position, _ in arguments if is_position]


def _call_mask(
    fn: Callable[..., Tensor], arguments: MaskArguments, tables: tuple[TableKind, ...], stand_ins: list[Tensor]
) -> Any:
    left = iter([_Table(entry, t.ndim) for entry, t in zip(stand_ins, tables, strict=False)])
    places = iter(stand_ins[len(tables) :])
    given: list[Any] = []
    named: dict[str, Any] = {}
    for name, is_position, keyword_only in arguments:
        value = next(places) if is_position else next(left)
        if keyword_only:
            named[name] = value
        else:
            given.append(value)
    return fn(*given, **named)


def _pending_in_mask(fn: Callable[..., Tensor], tables: tuple[TableKind, ...], span: Span) -> None:
    arguments = _mask_arguments(fn)
    dtypes = _mask_dtypes(arguments, tables)
    refuse_pending("mask", span, dtypes, lambda given: _call_mask(fn, arguments, tables, given))


def _positions(fn: Callable[..., Tensor]) -> tuple[tuple[str, ...], bool]:
    signature = signature_of(fn)
    return signature.positions, signature.flex


def _mask_arguments(fn: Callable[..., Tensor]) -> MaskArguments:
    return tuple((a.name, a.is_position, a.keyword_only) for a in mask_arguments(fn))


# See api.py.
_positions._dynamo_marked_constant = True  # type: ignore[attr-defined]
_mask_arguments._dynamo_marked_constant = True  # type: ignore[attr-defined]
pending_in._dynamo_marked_constant = True  # type: ignore[attr-defined]
_pending_in_mask._dynamo_marked_constant = True  # type: ignore[attr-defined]
