"""Masks that are bands: causal attention and windows, written as functions of positions.

Kernels need less for a band than for a mask: they list no blocks, and sum dq without zeros before it. So a mask that is
nothing but an "and" of

    kv_idx - q_idx <= c      kv_idx - q_idx - (kv_len - q_len) <= c      and the same with >=

becomes a part of the call's band, whoever wrote it: it is told from the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gdpa.functions.graph import Arg, Graph, Node, Ref
from gdpa.functions.places.names import POSITIONS
from gdpa.functions.places.program import Program

Sum = dict[str, int]  # of positions, each so many times, and of a number, which is called ""

DISTANCE: Sum = {"kv_idx": 1, "q_idx": -1}
FROM_THE_END: Sum = {**DISTANCE, "kv_len": -1, "q_len": 1}  # counted so that both sequences end together
NEGATED = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le", "ne": "eq"}


@dataclass(frozen=True)
class Bounds:
    """Whole numbers between which a distance lies; None where nothing bounds it."""

    least: int | None = None
    most: int | None = None

    def __and__(self, other: Bounds) -> Bounds:
        least = [b for b in (self.least, other.least) if b is not None]
        most = [b for b in (self.most, other.most) if b is not None]
        return Bounds(max(least, default=None), min(most, default=None))

    def moved(self, by: int) -> Bounds:
        return Bounds(*(None if b is None else b + by for b in (self.least, self.most)))


@dataclass(frozen=True)
class Bands:
    """Pairs are visible where both distances lie inside their bounds."""

    distance: Bounds = Bounds()
    from_the_end: Bounds = Bounds()

    def __and__(self, other: Bands) -> Bands:
        return Bands(self.distance & other.distance, self.from_the_end & other.from_the_end)

    def as_one(self, shift: int | None) -> Bounds | None:
        """Bounds of the distance from the end alone, where kv_len - q_len is ``shift``; None if that is not known and
        would have to be."""
        if shift is None:
            return self.from_the_end if self.distance == Bounds() else None
        return self.from_the_end & self.distance.moved(-shift)


class _NoBandError(Exception):
    pass


def bands_of(program: Program) -> Bands | None:
    """What a mask says, if it says nothing else."""
    if program.tables:
        return None
    (output,) = program.graph.outputs
    found = Bands()
    try:
        for below in _conditions(program.graph, output, True):
            found &= _bands(below)
    except _NoBandError:
        return None
    return found


def _bands(below: Sum) -> Bands:
    """The pairs where ``below`` is at most 0."""
    number, rest = below.get("", 0), {name: n for name, n in below.items() if name and n}
    if not rest and number <= 0:
        return Bands()
    for sign, bounds in ((1, Bounds(most=-number)), (-1, Bounds(least=number))):
        if rest == {name: sign * n for name, n in DISTANCE.items()}:
            return Bands(distance=bounds)
        if rest == {name: sign * n for name, n in FROM_THE_END.items()}:
            return Bands(from_the_end=bounds)
    raise _NoBandError


def _conditions(graph: Graph, a: Arg, holds: bool) -> Iterator[Sum]:
    """Sums that are at most 0 exactly where the condition ``a`` holds, or, if it is not to, where it does not."""
    if not isinstance(a, Ref):
        if bool(a) != holds:
            raise _NoBandError
        return
    node = graph.nodes[a.index]
    if node.op == "not":
        yield from _conditions(graph, node.args[0], not holds)
    elif node.op == ("and" if holds else "or"):
        for part in node.args:
            yield from _conditions(graph, part, holds)
    else:
        yield from _comparison(graph, node, holds)


def _comparison(graph: Graph, node: Node, holds: bool) -> Iterator[Sum]:
    op = node.op if holds else NEGATED.get(node.op)
    if op not in ("le", "lt", "ge", "gt", "eq"):
        raise _NoBandError
    one, other = node.args if op in ("le", "lt", "eq") else node.args[::-1]
    strict = {"": int(op in ("lt", "gt"))}
    for left in _sizes(graph, one):
        yield _plus(left, _sum(graph, other), strict, times=(1, -1, 1))
    if op == "eq":
        yield _plus(_sum(graph, one), _sum(graph, other), times=(-1, 1))


def _sizes(graph: Graph, a: Arg) -> Iterator[Sum]:
    """The sums of which ``a`` is the largest: of x and -x, if it is the absolute value of x."""
    node = graph.nodes[a.index] if isinstance(a, Ref) else None
    if node is not None and node.op == "abs":
        inside = _sum(graph, node.args[0])
        yield from (inside, _plus(inside, times=(-1,)))
    else:
        yield _sum(graph, a)


def _sum(graph: Graph, a: Arg) -> Sum:
    if not isinstance(a, Ref):
        if isinstance(a, float):
            raise _NoBandError
        return {"": int(a)}
    node = graph.nodes[a.index]
    if node.dtype != torch.int64:  # others may wrap around
        raise _NoBandError
    if node.op == "position":
        return {POSITIONS[node.args[0]]: 1}  # type: ignore[index]
    times = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}.get(node.op)
    if times is None:
        raise _NoBandError
    return _plus(*(_sum(graph, part) for part in node.args), times=times)


def _plus(*sums: Sum, times: tuple[int, ...]) -> Sum:
    total: Sum = {}
    for part, n in zip(sums, times, strict=True):
        for name, m in part.items():
            total[name] = total.get(name, 0) + n * m
    return total
