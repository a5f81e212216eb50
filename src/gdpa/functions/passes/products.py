"""What a backward with params needs of every score: p, ds = dp df/ds, and dp df/dparam, a term of a param's gradient.

Gradients of params are sums over scores. A factor that is the same for all scores, a constant or made of params, is
therefore left out of the terms and multiplied into the finished sum. What ds and all terms have in common, as the
derivative of g in g(a s), is multiplied by dp once; a term that is a product with the score is left to the instruction
that adds it up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gdpa.functions.graph import Arg, Graph, Node, Ref
from gdpa.functions.passes.fold import fold_terms
from gdpa.functions.passes.simplify import Builder


@dataclass(frozen=True)
class Products:
    """``code``: p, ds and a number for each param, of s, the params, dp and, if it is ``prescaled``, a factor of ds. A
    param's term is its number times the score, times dp, or that alone: "s", "dp" or "" in ``times``. ``gains``: what
    the sums of the terms must be multiplied by, of the same inputs as f."""

    code: Graph
    times: tuple[str, ...]
    gains: Graph


def split_products(joint: Graph, scale: float, factor: float, prescaled: bool) -> Products:
    """``joint``, expanded, of scale * s and divided by ``factor`` (see fold.py)."""
    parts = _Parts(joint, prescaled)
    code, constants = fold_terms(parts.code(), scale, factor, joint.n_inputs - 1)
    constants = [c * scale if times == "s" else c for c, times in zip(constants, parts.times, strict=True)]
    return Products(code, parts.times, parts.gains(constants))


class _Parts:
    """``alike``: what is the same for all scores. ``common``: the factors of ds and of each term."""

    def __init__(self, joint: Graph, prescaled: bool) -> None:
        self.graph = joint
        self.prescaled = prescaled
        self.alike: set[Arg] = set()
        for i, node in enumerate(joint.nodes):
            is_param = node.op == "input" and node.args != (0,)
            if is_param or (node.op != "input" and all(a in self.alike or not isinstance(a, Ref) for a in node.args)):
                self.alike.add(Ref(i))
        self.factors = [self.factors_of(output) for output in joint.outputs[1:]]
        varying = [Counter(a for a in found if not self.is_alike(a)) for found in self.factors]
        self.common = varying[0]
        for found in varying[1:]:
            self.common = self.common & found
        score = next((Ref(i) for i, n in enumerate(joint.nodes) if n.op == "input" and n.args == (0,)), None)
        left = [found - self.common for found in varying[1:]]
        self.times = tuple(("s" if score in found else "") if self.common else "dp" for found in left)
        self.score = score

    def is_alike(self, a: Arg) -> bool:
        return a in self.alike or not isinstance(a, Ref)

    def factors_of(self, a: Arg) -> list[Arg]:
        """``a`` as a product."""
        node = self.graph.nodes[a.index] if isinstance(a, Ref) else None
        if node is None or self.is_alike(a) or node.op not in ("mul", "neg"):
            return [a]
        return [*([-1.0] if node.op == "neg" else []), *(x for part in node.args for x in self.factors_of(part))]

    def code(self) -> Graph:
        n = self.graph.n_inputs
        b = Builder(n + 1 + self.prescaled)
        new: list[Arg] = []
        for node in self.graph.nodes:
            args = tuple(new[a.index] if isinstance(a, Ref) else a for a in node.args)
            new.append(b.intern(Node(node.op, args, node.dtype)))
        p, slope, *terms = self.graph.outputs
        dp = b.input(n)

        def moved(a: Arg) -> Arg:
            return new[a.index] if isinstance(a, Ref) else a

        def rest(a: Arg, without: Counter[Arg], alike: bool) -> Arg:
            """The product ``a`` without some of its factors, as it was put together."""
            if without[a] > 0:
                without[a] -= 1
                return 1.0
            if self.is_alike(a):
                return moved(a) if alike else 1.0
            node = self.graph.nodes[a.index]  # type: ignore[union-attr]
            if node.op not in ("mul", "neg"):
                return moved(a)
            made = [rest(x, without, alike) for x in node.args]
            return b(node.op, *made) if node.op == "mul" or alike else made[0]

        both: Arg = dp
        for a in self.common.elements():
            both = b("mul", both, moved(a))
        ds = b("mul", both, rest(slope, Counter(self.common), True))
        if self.prescaled:
            ds = b("mul", ds, b.input(n + 1))
        numbers = []
        for term, times in zip(terms, self.times, strict=True):
            without = Counter(self.common)
            if times == "s":
                without[self.score] += 1  # type: ignore[index]
            number = rest(term, without, False)
            numbers.append(number if times == "dp" else b("mul", both, number))
        return b.finish((moved(p), ds, *numbers))

    def gains(self, constants: list[float]) -> Graph:
        b = Builder(self.graph.n_inputs)
        found = []
        for factors, c in zip(self.factors[1:], constants, strict=True):
            total: Arg = c
            for a in factors:
                total = b("mul", total, self._copied(b, a)) if self.is_alike(a) else total
            found.append(total)
        return b.finish(tuple(found))

    def _copied(self, b: Builder, a: Arg) -> Arg:
        if not isinstance(a, Ref):
            return a
        node = self.graph.nodes[a.index]
        return b.intern(Node(node.op, tuple(self._copied(b, x) for x in node.args), node.dtype))
