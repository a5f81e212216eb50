"""Functions c g(a s) with a and c made of params: the most common use of one, a temperature or a gain for each head.

All scores of a row are stretched alike, so what holds of g for rows of every mean and spread holds here too; and a pair
that does not exist, whose score is 0, stays at 0. A factor s of the whole, as in s sigmoid(a s), may stand beside g.
"""

from __future__ import annotations

from dataclasses import dataclass

from gdpa.functions.graph import Arg, Graph, Node, Ref
from gdpa.functions.passes.fold import fold
from gdpa.functions.passes.simplify import Builder


@dataclass(frozen=True)
class Stretch:
    """f(s, *params) = outer(factor * s, rest), where factor and rest are made of the params, rest of s^power, too."""

    factor: Graph | None  # of all inputs of f; None for 1
    rest: Graph | None  # without s^power; None if outer has one input
    power: int
    outer: Graph


def split_stretch(value: Graph) -> Stretch | None:
    """The parts of ``value``, the graph of p; None if it is not of that form, or has no params."""
    if value.n_inputs == 1:
        return None
    parts = _Parts(value)
    leaves = parts.factors(value.outputs[0])
    inside = [a for a in leaves if a not in parts.outside and a != parts.score]
    rest = [a for a in leaves if a in parts.outside]
    power = leaves.count(parts.score)
    if parts.stretched == parts.score:
        inside, power = inside + [parts.score] * power, 0
    while power and parts.factor in rest:  # a s, in two places of the product
        rest.remove(parts.factor)
        inside, power = [*inside, parts.stretched], power - 1
    if not inside or not all(parts.is_inside(a) for a in inside):
        return None
    outer = parts.outer(inside, bool(rest) or power > 0)
    if parts.stretched == parts.score and not rest:
        return None
    factor = None if parts.factor is None else parts.product([parts.factor])
    return Stretch(factor, parts.product(rest) if rest or power else None, power, outer)


UNITS = (1.0, 2.0, 0.5)


def best_units(outer: Graph, factor: float, scale: float, n_params: int) -> float:
    """What ``outer`` may take its argument in units of: the one with the shortest code (see fold.py)."""
    return min((*UNITS, scale), key=lambda units: len(fold(outer, units, factor, n_params).nodes))


def composed(code: Graph, stretch: Stretch) -> Graph:
    """``code`` of ``stretch.outer`` as one of the score and, where there are any, of factor and of rest without the
    powers of the score."""
    has_factor, has_rest = stretch.factor is not None, has_rest_of_params(stretch)
    b = Builder(1 + has_factor + has_rest)
    score = b.input(0)
    rest: Arg = b.input(1 + has_factor) if has_rest else 1.0
    for _ in range(stretch.power):
        rest = b("mul", score, rest)
    inputs = (b("mul", score, b.input(1)) if has_factor else score, rest)
    new: list[Arg] = []
    for node in code.nodes:
        args = tuple(new[a.index] if isinstance(a, Ref) else a for a in node.args)
        new.append(inputs[node.args[0]] if node.op == "input" else b.intern(Node(node.op, args, node.dtype)))  # type: ignore[index]
    return b.finish(tuple(new[o.index] if isinstance(o, Ref) else o for o in code.outputs))


def has_rest_of_params(stretch: Stretch) -> bool:
    """Whether ``stretch.rest`` is more than powers of the score."""
    return stretch.rest is not None and isinstance(stretch.rest.outputs[0], Ref)


class _Parts:
    """``outside``: what is made of params and constants alone. ``stretched``: the product of the score and some of it,
    ``factor``, or the score itself."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        nodes = enumerate(graph.nodes)
        self.score: Arg = next((Ref(i) for i, n in nodes if n.op == "input" and n.args == (0,)), 0.0)
        self.outside: set[Arg] = set()
        for i, node in enumerate(graph.nodes):
            if Ref(i) != self.score and all(not isinstance(a, Ref) or a in self.outside for a in node.args):
                self.outside.add(Ref(i))
        self.stretched, self.factor = self.score, None
        for i, node in enumerate(graph.nodes):
            if node.op == "mul" and self.score in node.args:
                (other,) = [a for a in node.args if a != self.score] or [self.score]
                if other in self.outside:
                    self.stretched, self.factor = Ref(i), other
                    break

    def factors(self, a: Arg) -> list[Arg]:
        """``a`` as a product, as far as it is one and not the stretched score."""
        node = self.graph.nodes[a.index] if isinstance(a, Ref) else None
        if node is None or node.op != "mul" or a == self.stretched or a in self.outside:
            return [a]
        return [leaf for part in node.args for leaf in self.factors(part)]

    def is_inside(self, a: Arg) -> bool:
        """Whether ``a`` is made of the stretched score and constants alone."""
        if not isinstance(a, Ref) or a == self.stretched:
            return True
        node = self.graph.nodes[a.index]
        return node.op != "input" and all(self.is_inside(b) for b in node.args)

    def product(self, factors: list[Arg]) -> Graph:
        b = Builder(self.graph.n_inputs)
        return b.finish((self._product(b, factors, {}),))

    def outer(self, factors: list[Arg], rest: bool) -> Graph:
        b = Builder(1 + rest)
        made = self._product(b, factors, {self.stretched: b.input(0)})
        return b.finish((b("mul", made, b.input(1)) if rest else made,))

    def _product(self, b: Builder, factors: list[Arg], new: dict[Arg, Arg]) -> Arg:
        total: Arg = 1.0
        for a in factors:
            total = b("mul", self._copied(b, a, new), total)
        return total

    def _copied(self, b: Builder, a: Arg, new: dict[Arg, Arg]) -> Arg:
        if isinstance(a, Ref) and a not in new:
            node = self.graph.nodes[a.index]
            new[a] = b.intern(Node(node.op, tuple(self._copied(b, x, new) for x in node.args), node.dtype))
        return new.get(a, a)
