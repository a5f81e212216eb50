"""Shifts in the units in which g(u) needs the fewest instructions.

silu by one tanh begins with u / 2. Half of the sum costs nothing: the scale of the scores is a number that the kernel
is given, and of the leaves a factor that is the same for all pairs can be halved, such as a slope, once per head. Units
are powers of two, so that nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gdpa.functions.accuracy.precision import keeps_rounding
from gdpa.functions.emission.guarded import choose_guard_of_sums
from gdpa.functions.graph import Arg, Graph, Node, Ref
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.fold import factor_of, fold
from gdpa.functions.passes.simplify import Builder, value_of
from gdpa.functions.traced import TracedFunction

UNITS = (1.0, 2.0, 0.5)


def best_units(outer: TracedFunction, dtype: torch.dtype, target: str) -> float:
    """The units in which the cheap code of ``outer`` is shortest; 1 if it has no guarded code."""
    guard = choose_guard_of_sums(outer, dtype, target)
    if guard is None:
        return 1.0
    cheap = expand(value_of(outer.joint), guard.cheap)

    def length(units: float) -> int:
        factor = factor_of(cheap, units)
        kept = dtype != torch.float16 and keeps_rounding(outer, dtype, factor, units)  # as emit._factors has it
        return min(len(fold(cheap, units, c).nodes) for c in (factor if kept else 1.0, 1.0))

    return min(UNITS, key=length)


def in_units(sums: Graph, sides: Sequence[int], units: float) -> Graph | None:
    """``sums`` divided by ``units``, for scores that are already divided by them. None if that would take an
    instruction for every pair. ``sides``: for each leaf, whether it depends on neither, one or both of query and key:
    0, 1 or 2."""
    if units == 1.0:
        return sums
    divided = _Divided(sums, sides, 1 / units)
    try:
        return divided.b.finish((divided.divided(sums.outputs[0]),))
    except _NotFreeError:
        return None


class _Divided:
    def __init__(self, sums: Graph, sides: Sequence[int], by: float) -> None:
        self.sums, self.sides, self.by, self.b = sums, sides, by, Builder(sums.n_inputs)

    def divided(self, a: Arg) -> Arg:
        if not isinstance(a, Ref):
            return a * self.by
        node = self.sums.nodes[a.index]
        if node.op == "input":
            if node.args[0] == 0:
                return self.b.input(0)
            if sides_of(self.sums, self.sides, a) == 2:
                raise _NotFreeError
            return self.b("mul", self._same(a), self.by)
        if node.op in ("add", "sub", "neg"):
            return self.b(node.op, *map(self.divided, node.args))
        if node.op in ("mul", "mul_rn"):
            least = min(range(2), key=lambda i: sides_of(self.sums, self.sides, node.args[i]))
            return self.b(node.op, *((self.divided if i == least else self._same)(a) for i, a in enumerate(node.args)))
        raise _NotFreeError

    def _same(self, a: Arg) -> Arg:
        if not isinstance(a, Ref):
            return a
        node = self.sums.nodes[a.index]
        args = node.args if node.op == "input" else tuple(map(self._same, node.args))
        return self.b.intern(Node(node.op, args, node.dtype))


def sides_of(sums: Graph, sides: Sequence[int], a: Arg) -> int:
    """On how many of query and key a value depends; the score depends on both."""
    if not isinstance(a, Ref):
        return 0
    node = sums.nodes[a.index]
    if node.op == "input":
        return 2 if node.args[0] == 0 else sides[int(node.args[0]) - 1]  # type: ignore[arg-type]
    return max((sides_of(sums, sides, x) for x in node.args), default=0)


class _NotFreeError(Exception):
    """It would take an instruction for every pair."""
