"""Sums in the units in which the function that takes them needs the fewest instructions.

silu by one tanh begins with half of its argument. A sum comes in halves for nothing: the scale of the scores is a
number of the kernel, and of what the places bring it is a slope that is halved, once per head, and not its product with
every pair's distance. Units are powers of two, so that nothing is rounded.
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
    """Those in which the cheap code of ``outer`` is shortest; 1 if there is none."""
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
    """``sums`` divided by ``units``, of a score that is divided already. None if that would cost something for every
    pair. ``sides``: of each leaf, how many of query and key it differs with."""
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
    """How many of query and key a value differs with; the score differs with both."""
    if not isinstance(a, Ref):
        return 0
    node = sums.nodes[a.index]
    if node.op == "input":
        return 2 if node.args[0] == 0 else sides[int(node.args[0]) - 1]  # type: ignore[arg-type]
    return max((sides_of(sums, sides, x) for x in node.args), default=0)


class _NotFreeError(Exception):
    """Every pair would pay for it."""
