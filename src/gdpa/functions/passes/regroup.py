"""What is left to do when constants are where they cost nothing: sums in fewer instructions, through products that
there are already.

Of p = s q(s), which the value is in any case, the derivative is q + s q'. Autograd writes it in terms of s and q, as
q (1 + s (1 - q)) for silu; in terms of p, as q + p (1 - q), it is an instruction less.
"""

from __future__ import annotations

import torch

from gdpa.functions.graph import Arg, Graph, Node, Ref
from gdpa.functions.passes.simplify import Builder


def regroup(graph: Graph) -> Graph:
    """``graph`` with a (x + 1) as a x + a, one instruction; through a b if x = b c, and that is needed anyway; with
    (q - q^2) (s c) as (p - p q) c, where p = s q is; and without products with what is 1 as a float32. Only float32
    numbers are touched."""
    return _Regrouped(graph).run()


def _is_one(a: Arg) -> bool:
    return not isinstance(a, Ref) and abs(a - 1.0) < 2.0**-25


class _Regrouped:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.b = graph, Builder(graph.n_inputs)
        self.products = {frozenset(n.args) for n in graph.nodes if n.op == "mul" and self._is_float32(n)}
        self.uses = [0] * len(graph.nodes)
        for a in (*(a for node in graph.nodes for a in node.args), *graph.outputs):
            if isinstance(a, Ref):
                self.uses[a.index] += 1
        self.new: list[Arg] = []

    def run(self) -> Graph:
        for node in self.graph.nodes:
            found = self._rewritten(*node.args) if node.op == "mul" and self._is_float32(node) else None
            self.new.append(found or self.b.intern(Node(node.op, tuple(map(self._moved, node.args)), node.dtype)))
        return self.b.finish(tuple(map(self._moved, self.graph.outputs)))

    def _is_float32(self, node: Node) -> bool:
        """Whether it and all that it takes are."""
        args = [self.graph.nodes[a.index] for a in node.args if isinstance(a, Ref)]
        return all(n.dtype == torch.float32 for n in (node, *args))

    def _moved(self, a: Arg) -> Arg:
        return self.new[a.index] if isinstance(a, Ref) else a

    def _rewritten(self, x: Arg, y: Arg) -> Arg | None:
        """The product of x and y in another way."""
        if _is_one(y):
            return self._moved(x)
        return self._sum(x, y) or self._sum(y, x) or self._slope(x, y) or self._slope(y, x)

    def _sum(self, a: Arg, y: Arg) -> Arg | None:
        """a y, for y = x + 1."""
        total = self._only_here(y, "add")
        if total is None or not _is_one(total.args[1]):
            return None
        for b, c in self._factors(total.args[0]):
            if self._is_product(a, b):
                return self.b("add", self.b("mul", self._product(a, b), self._moved(c)), self._moved(a))
        return self.b("add", self.b("mul", self._moved(a), self._moved(total.args[0])), self._moved(a))

    def _slope(self, x: Arg, y: Arg) -> Arg | None:
        """x y, for x = q - q^2 and y = s c."""
        difference = self._only_here(x, "sub")
        q = None if difference is None else difference.args[0]
        if difference is None or not isinstance(q, Ref):
            return None
        square = self._only_here(difference.args[1], "mul")
        if square is None or square.args != (q, q):
            return None
        for s, c in (*self._factors(y), (y, 1.0)):
            if self._is_product(s, q):
                p = self._product(s, q)
                return self.b("mul", self.b("sub", p, self.b("mul", p, self._moved(q))), self._moved(c))
        return None

    def _only_here(self, a: Arg, op: str) -> Node | None:
        """The node of ``a``, if it is an ``op`` that nothing else needs."""
        node = self.graph.nodes[a.index] if isinstance(a, Ref) and self.uses[a.index] == 1 else None
        return node if node is not None and node.op == op and self._is_float32(node) else None

    def _factors(self, a: Arg) -> tuple[tuple[Arg, Arg], ...]:
        node = self._only_here(a, "mul")
        return () if node is None else ((node.args[0], node.args[1]), (node.args[1], node.args[0]))

    def _is_product(self, a: Arg, b: Arg) -> bool:
        return isinstance(a, Ref) and isinstance(b, Ref) and frozenset((a, b)) in self.products

    def _product(self, a: Arg, b: Arg) -> Arg:
        return self.b("mul", self._moved(a), self._moved(b))
