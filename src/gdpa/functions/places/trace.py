"""Tracing of functions and masks that are given places."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from gdpa.errors import UnsupportedActivationError
from gdpa.functions.places.lower import lower_places
from gdpa.functions.places.names import POSITIONS, Argument, Signature, TableKind, call_mask
from gdpa.functions.places.program import Places, Program
from gdpa.functions.places.split import split
from gdpa.functions.places.tables import Indexed, Wrapped
from gdpa.functions.tracing.lower import TRACE_SHAPE
from gdpa.functions.tracing.trace import (
    IS_A_TABLE,
    check_callable,
    checked_call,
    compare,
    control_flow,
    decomposition_table,
    hint,
    known_kinds,
    make_constants_follow_input,
    make_graph,
    other_numbers,
    score_inputs,
)

if TYPE_CHECKING:
    from gdpa.functions.traced import TracedFunction


def trace_placed(
    fn: Callable[..., Any], signature: Signature, n_params: int, tables: tuple[TableKind, ...]
) -> tuple[Program, fx.GraphModule, tuple[int, ...]]:
    """A function of places as well (see places/split.py): the program of its places, the aten operations of what
    takes its results after the params, and which of those are entries of differentiable tables."""
    check_callable(fn, n_params, len(tables), signature)

    def run(*args: Tensor) -> Tensor:
        first = len(args) - len(tables)
        numbers, places, held = args[: 1 + n_params], args[1 + n_params : first], args[first:]
        views = _indexed(tables, [partial(_index, t) for t in held])

        def call(*given: Tensor) -> Any:
            at = dict(zip(signature.positions, given[1 + n_params :], strict=True))
            return signature.call(fn, [*given[: 1 + n_params], *views], at)

        try:
            return checked_call(call, *numbers, *places)
        except UnsupportedActivationError:
            _refuse_indexing(call, n_params, (*numbers, *places))
            raise

    places = place_inputs(signature.positions, tables)
    raw = known_kinds(make_graph(run, [*score_inputs(n_params), *places], {}))
    parts = split(raw, 1 + n_params, len(signature.positions))
    program = trace_places(lambda *a: parts.places.forward(*a), signature.positions, tables)
    return program, make_constants_follow_input(parts.scores), parts.learned


class _Unindexed(Tensor):
    """A param, once tracing has failed: what PyTorch says of the shape of params does not tell that a table was meant.
    (A mode would not see it: torch function is off where functions are traced.)"""

    number = 0

    def __getitem__(self, index: Any) -> Any:
        if any(isinstance(i, Tensor) for i in (index if isinstance(index, tuple) else (index,))):
            raise UnsupportedActivationError(f"the activation indexes params[{self.number}]: {IS_A_TABLE}")
        return super().__getitem__(index)


def _refuse_indexing(call: Callable[..., Any], n_params: int, given: tuple[Tensor, ...]) -> None:
    """If ``call``, which has failed, indexes a param by a tensor."""
    params = [t.clone().as_subclass(_Unindexed) for t in given[1 : 1 + n_params]]
    for number, param in enumerate(params):
        param.number = number
    try:
        call(given[0].clone(), *params, *(t.clone() for t in given[1 + n_params :]))
    except UnsupportedActivationError:
        raise
    except Exception:
        return  # what it has failed with says more


def trace_places(fn: Callable[..., Any], positions: tuple[str, ...], tables: tuple[TableKind, ...]) -> Program:
    """The program of ``fn``, which takes positions and tables as tensors and returns a tuple."""
    recorded = make_graph(fn, place_inputs(positions, tables), decomposition_table())
    return Program(lower_places(recorded, positions, tables), tables)


def place_inputs(positions: tuple[str, ...], tables: tuple[TableKind, ...]) -> list[Tensor]:
    """Positions and tables to trace with."""
    at = [torch.empty(TRACE_SHAPE, dtype=torch.int64) for _ in positions]
    return at + [torch.empty((7, 11, 13, 17, 19, 23, 29, 31)[: t.ndim], dtype=t.dtype) for t in tables]


def _index(t: Tensor, indices: list[Any]) -> Tensor:
    tensors = [i if isinstance(i, Tensor) else torch.full(TRACE_SHAPE, i, dtype=torch.int64) for i in indices]
    tensors = [i.long() if i.dtype in (torch.int8, torch.int16) else i for i in tensors]  # PyTorch wants wide ones
    return torch.ops.aten.index.Tensor(t, tensors)


def trace_mask(fn: Callable[..., Any], arguments: tuple[Argument, ...], tables: tuple[TableKind, ...]) -> Program:
    """The program of a mask."""
    positions = tuple(a.name for a in arguments if a.is_position)

    def run(*args: Tensor) -> tuple[Tensor]:
        at = dict(zip(positions, (a.clone() for a in args), strict=False))
        held = _indexed(tables, [partial(_index, t) for t in args[len(positions) :]])
        try:
            return (_checked_truth(call_mask(fn, arguments, at, held)),)
        except Exception as e:
            if isinstance(e, (AssertionError, UnsupportedActivationError, *control_flow())):
                raise
            said = f"the activation raised {type(e).__name__} when traced: {e}{hint(e)}"
            raise UnsupportedActivationError(said) from e

    return trace_places(run, positions, tables)


def _checked_truth(found: Any) -> Tensor:
    if not isinstance(found, Tensor) or found.dtype != torch.bool:
        kind = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise UnsupportedActivationError(f"the activation must return a bool tensor, but it returned {kind}")
    if found.shape not in (TRACE_SHAPE, ()):
        raise UnsupportedActivationError(
            f"the activation must return one truth value per pair, but it returned shape {tuple(found.shape)} for "
            f"{tuple(TRACE_SHAPE)}"
        )
    return found


def _indexed(tables: tuple[TableKind, ...], look_up: list[Callable[..., Tensor]]) -> list[Indexed]:
    return [Indexed(i, kind, fn) for i, (kind, fn) in enumerate(zip(tables, look_up, strict=True))]


def _some_places(like: Tensor) -> dict[str, Tensor]:
    """Of all kinds, in a shape of their own."""
    n, order = like.numel(), torch.arange(like.numel()).view_as(like)
    return {name: (order * (2 * i + 3) + i) % (n - i) for i, name in enumerate(POSITIONS)}


def try_out(program: Program) -> tuple[Places, list[Tensor]]:
    """Some places, and the program's results there."""
    like = other_numbers(0)[0]
    places = Places(_some_places(like), [Wrapped(_grid(kind), "a table") for kind in program.tables])
    return places, program.evaluate(places, like)


def check_mask_faithful(fn: Callable[..., Any], arguments: tuple[Argument, ...], program: Program) -> None:
    """Refuse a mask that depends on more than its places, or is not what was recorded of it."""
    places, (recorded,) = try_out(program)
    called = call_mask(fn, arguments, places.at, _indexed(program.tables, [t.look_up for t in places.tables]))
    if not bool((called == recorded.bool()).all()):
        raise UnsupportedActivationError(
            "the activation depends on more than positions and tables: on a shape, or on something that changed "
            "between two calls"
        )


def check_placed_faithful(fn: Callable[..., Any], act: TracedFunction, signature: Signature) -> None:
    """Refuse a function that computes something else than was recorded of it, as trace.check_faithful does. Indices
    are taken modulo the sizes of some tables."""
    at = _some_places(other_numbers(0)[0])
    tables = [_grid(kind) for kind in act.tables]

    def held(args: tuple[Tensor, ...]) -> list[Wrapped]:
        floats = iter(args[1 + act.n_params :])
        return [Wrapped(next(floats) if t.is_floating_point() else t, "a table") for t in tables]

    def called(*args: Tensor) -> Tensor:
        indexed = _indexed(act.tables, [t.look_up for t in held(args)])
        p: Tensor = signature.call(fn, [*args[: 1 + act.n_params], *indexed], at)
        return p

    def recorded(*args: Tensor) -> Tensor:
        return act.eager(*args[: 1 + act.n_params], places=Places(at, held(args)))

    compare(called, recorded, [*other_numbers(act.n_params), *(t for t in tables if t.is_floating_point())])


def _grid(kind: TableKind) -> Tensor:
    """A table of some shape, different everywhere."""
    shape = (5, 4, 3, 2, 2, 2, 2, 2)[: kind.ndim]
    values = torch.arange(math.prod(shape)).view(shape)
    return (0.7 * values).cos().float() if kind.differentiable else ((7 * values) % 6).to(kind.dtype)
