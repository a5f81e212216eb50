"""A slope times the distance of query and key, a (i - j), as the difference a i - a j: one instruction per pair.

Positions are counted from the block's first key, so that both products are small where the distance is: what they
lose by rounding is 2^-16 of a where the distance is 1 at least, and nothing where it is 0, since both are rounded alike
(mul_rn). (|i - j| is no such difference. In blocks on one side of the diagonal it is, but code for those beside
the usual one spills and is slower: docs/kernels-log.md.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gdpa.functions.graph import Arg, Graph, Node, Ref
from gdpa.functions.passes.simplify import Builder
from gdpa.functions.places.names import POSITIONS
from gdpa.functions.places.program import Program
from gdpa.functions.places.terms.units import sides_of

# Code of the two leaves that take the place of distances: i and j, counted from the block's first key.
COUNTED = tuple(
    f"places.as_float(at[{POSITIONS.index(name)}] - ends[2], spot[5].small)" for name in ("q_idx", "kv_idx")
)


@dataclass(frozen=True)
class _Difference:
    """``plus`` - ``minus``, one of which depends on the query alone and the other on the key."""

    plus: Arg
    minus: Arg


def by_sides(program: Program, sums: Graph, sides: Sequence[int]) -> tuple[Graph, tuple[int, ...]] | None:
    """``sums`` rewritten with two more leaves, COUNTED, and the number of sides of every leaf. None if no leaf is a
    distance, or if one is used for anything but a term of the sum."""
    signs = [_sign_of_distance(program, o) for o in program.graph.outputs]
    rewritten = _Rewritten(sums, sides, signs)
    return (rewritten.graph, (*sides, 1, 1)) if any(signs) and rewritten.are_terms else None


class _Rewritten:
    def __init__(self, sums: Graph, sides: Sequence[int], signs: Sequence[int]) -> None:
        self.sums, self.sides, self.signs = sums, sides, signs
        self.b, self.are_terms = Builder(sums.n_inputs + len(COUNTED)), True
        values: list[Arg | _Difference] = []
        for node in sums.nodes:
            args = [values[a.index] if isinstance(a, Ref) else a for a in node.args]
            values.append(self._input(int(node.args[0])) if node.op == "input" else self._operation(node, args))  # type: ignore[arg-type]
        total = sums.outputs[0]
        self.graph = self.b.finish((self._made(values[total.index] if isinstance(total, Ref) else total),))

    def _input(self, number: int) -> Arg | _Difference:
        sign = self.signs[number - 1] if number else 0
        if sign == 0:
            return self.b.input(number)
        query, key = (self.b.input(len(self.signs) + 1 + i) for i in range(2))
        return _Difference(query, key) if sign > 0 else _Difference(key, query)

    def _operation(self, node: Node, args: list[Arg | _Difference]) -> Arg | _Difference:
        found = [a for a in args if isinstance(a, _Difference)]
        others = [a for a in args if not isinstance(a, _Difference)]
        if node.op == "neg" and found:
            return _Difference(found[0].minus, found[0].plus)
        same_for_all = 0 in (sides_of(self.sums, self.sides, a) for a in node.args)
        if node.op == "mul" and len(found) == 1 and same_for_all:
            return _Difference(*(self.b("mul_rn", others[0], x) for x in (found[0].plus, found[0].minus)))
        self.are_terms &= not found or node.op in ("add", "sub")
        return self.b(node.op, *map(self._made, args))

    def _made(self, x: Arg | _Difference) -> Arg:
        return self.b("sub", x.plus, x.minus) if isinstance(x, _Difference) else x


def _sign_of_distance(program: Program, a: Arg) -> int:
    """1 if a leaf is i - j, -1 if it is j - i, be it an integer or a float; 0 otherwise."""
    node = program.graph.nodes[a.index] if isinstance(a, Ref) else None
    if node is not None and node.op == "cast" and node.dtype == torch.float32 and isinstance(node.args[0], Ref):
        node = program.graph.nodes[node.args[0].index]
    if node is None or node.op != "sub":
        return 0
    names = [_position(program, x) for x in node.args]
    return {("q_idx", "kv_idx"): 1, ("kv_idx", "q_idx"): -1}.get((names[0], names[1]), 0)


def _position(program: Program, a: Arg) -> str:
    node = program.graph.nodes[a.index] if isinstance(a, Ref) else None
    return POSITIONS[node.args[0]] if node is not None and node.op == "position" else ""  # type: ignore[index]
