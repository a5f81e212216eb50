"""Costly operations written through those that the hardware has, at a level of precision (see precision.py).

Constants of these forms are then part of the graph, where fold.py moves them to where they cost nothing. What is tiny
keeps its digits: sigmoid is 1 / (1 + e^-x), erfc a power of 2, and only the level "approx" takes the rest of tanh
beside 1. At "close" so do both tails of sigmoid's derivative, 1 - sigmoid, and log(1 + x) near 0.
"""

from __future__ import annotations

import torch

from gdpa.functions.graph import Arg, Graph, Node, Ref
from gdpa.functions.passes.simplify import Builder

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LARGEST_EXPONENT = 126.0  # of 2, whose reciprocal is a normal number too

# log2(erfc(z) / 2) for z >= 0 in powers of z, the highest first, by how good it must be. Fitted with weights that ask
# for a relative error of erfc of 3.5e-4 up to z = 3 ("short") and of 1.7e-5 up to 3.5, and for less and less beyond,
# where erfc is below 1e-5 and 1e-6. Their highest powers make them fall for ever: no argument is too large.
LOG2_TAIL_SHORT = (-0.00112324493, 0.0178201769, -0.121271673, -0.945139866, -1.61870138, -1.0005090905)
LOG2_TAIL = (
    -1.54495414e-05, 0.000409783274, -0.00475499709, 0.0324840688, -0.15019627, -0.918760462, -1.62758054,
    -1.00002362,
)  # fmt: skip

# erf(x) / x in powers of x^2 on [-3, 3], constant beyond: 2.2e-5. The highest power first.
ERF = (
    4.074208703741533e-08, -1.9448218608886236e-06, 4.106050982954912e-05, -0.0005110367783345282,
    0.0042354268953204155, -0.025102859362959862, 0.11107933521270752, -0.375314861536026, 1.1282684803009033,
)  # fmt: skip

# atanh(erf(z)) / z as c0 + z^2 (c1 + c2 z^2), the highest power first: gelu is right to 6e-5, and to a thousandth of
# itself down to -3.5. What is in brackets must not become negative: from z^2 = 48 on it is 0, which costs nothing (see
# "saturate" in graph.py). Where z^2 overflows, from 1.8e19 on, the result is NaN.
ERF_AS_TANH = (-0.002216, 0.10548, 1.12738)


def expand(graph: Graph, level: str, keep_erfc: bool = False) -> Graph:
    """``graph`` with operations replaced by what ``level`` computes them with (see emit.py and ptx.py)."""
    return _with_both_tails(graph) if level == "accurate" else _Expander(graph, level, keep_erfc).run()


def _with_both_tails(graph: Graph) -> Graph:
    """``graph`` with q - q^2 of a sigmoid q(z) as q(z) q(-z), which has all its digits near q = 1 too."""
    b = Builder(graph.n_inputs)
    new: list[Arg] = []
    for node in graph.nodes:
        args = tuple(new[a.index] if isinstance(a, Ref) else a for a in node.args)
        q, square = (b.node(a) for a in args) if node.op == "sub" else (None, None)
        if q is not None and q.op == "sigmoid" and square == Node("mul", (args[0], args[0]), q.dtype):
            other = b("sigmoid", b("neg", q.args[0], dtype=q.dtype), dtype=q.dtype)
            new.append(b("mul", args[0], other, dtype=q.dtype))
        else:
            new.append(b.intern(Node(node.op, args, node.dtype)))
    return b.finish(tuple(new[o.index] if isinstance(o, Ref) else o for o in graph.outputs))


class _Expander:
    def __init__(self, graph: Graph, level: str, keep_erfc: bool) -> None:
        self.graph, self.level, self.keep_erfc = graph, level, keep_erfc
        self.b = Builder(graph.n_inputs)
        self.new: list[Arg] = []
        self.subtracts_sigmoid = any(
            node.op == "sub" and any(isinstance(a, Ref) and graph.nodes[a.index].op == "sigmoid" for a in node.args)
            for node in graph.nodes
        )
        self.uses = [0] * len(graph.nodes)
        for a in (*(a for node in graph.nodes for a in node.args), *graph.outputs):
            if isinstance(a, Ref):
                self.uses[a.index] += 1

    def run(self) -> Graph:
        for node in self.graph.nodes:
            args = tuple(map(self._moved, node.args))
            if node.op == "input":
                self.new.append(self.b.intern(node))
            elif node.dtype == torch.float32:
                self.new.append(self._expanded(node, args))
            else:
                self.new.append(self.b(node.op, *args, dtype=node.dtype))
        return self.b.finish(tuple(map(self._moved, self.graph.outputs)))

    def _moved(self, a: Arg) -> Arg:
        return self.new[a.index] if isinstance(a, Ref) else a

    def _expanded(self, node: Node, args: tuple[Arg, ...]) -> Arg:
        rule = getattr(self, f"_{node.op}", None)
        return self.b(node.op, *args) if rule is None else rule(node, *args)

    # ---- tanh and sigmoid --------------------------------------------------------------------------------------------
    def _tanh(self, node: Node, x: Arg) -> Arg:
        b = self.b
        if self.level == "approx":
            return b("tanh", x)
        return b("sub", b("mul", self._logistic(b("mul", x, 2.0)), 2.0), 1.0)

    def _sigmoid(self, node: Node, x: Arg) -> Arg:
        b = self.b
        if self.level != "approx":
            return self._logistic(x)
        t, sign = self._half_tanh(x)
        return b("add", b("mul", t, 0.5 * sign), 0.5)

    def _logistic(self, x: Arg) -> Arg:
        """1 / (1 + e^-x); where e^-x is infinite it is 0."""
        b = self.b
        if self.level == "close" and self.subtracts_sigmoid:
            return self._both_tails(x)[0]
        return b("reciprocal", b("add", b("exp2", b("mul", x, -LOG2E)), 1.0))

    def _both_tails(self, x: Arg) -> tuple[Arg, Arg]:
        """sigmoid(x) and sigmoid(-x), both with a small relative error. e^-x stays finite, or 0 times it were NaN:
        below x = -87 the first is 2^-126 instead of less. (At -inf, x sigmoid(x) is then -inf, in PyTorch NaN.)"""
        b = self.b
        e = b("exp2", b("minimum", b("mul", x, -LOG2E), LARGEST_EXPONENT))
        q = b("reciprocal", b("add", e, 1.0))
        return q, b("mul", e, q)

    def _half_tanh(self, x: Arg) -> tuple[Arg, float]:
        """tanh(|c| z / 2) and the sign of c, for x = c z: sigmoid(x) and sigmoid(-x) share it."""
        b, node = self.b, self.b.node(x)
        if node is not None and node.op == "neg":
            return b("tanh", b("mul", node.args[0], 0.5)), -1.0
        if node is not None and node.op == "mul" and not isinstance(node.args[1], Ref) and node.args[1] < 0:
            return b("tanh", b("mul", node.args[0], -0.5 * node.args[1])), -1.0
        return b("tanh", b("mul", x, 0.5)), 1.0

    def _sub(self, node: Node, x: Arg, y: Arg) -> Arg:
        """q - q^2 of a sigmoid is (1 - tanh^2) / 4, and the product of both tails; 1 - q is the other tail."""
        old, square = (self.graph.nodes[a.index] if isinstance(a, Ref) else None for a in node.args)
        if self.level == "close" and x == 1.0 and square is not None and square.op == "sigmoid":
            return self._both_tails(self._moved(square.args[0]))[1]
        same = square is not None and square.op == "mul" and square.args == (node.args[0], node.args[0])
        if self.level == "short" or not same or old is None or old.op != "sigmoid":
            return self.b("sub", x, y)
        z = self._moved(old.args[0])
        if self.level == "close":
            return self.b("mul", *self._both_tails(z))
        t, _ = self._half_tanh(z)
        return self.b("sub", 0.25, self.b("mul", self.b("mul", t, t), 0.25))

    # ---- error functions ---------------------------------------------------------------------------------------------
    def _erf(self, node: Node, x: Arg) -> Arg:
        b = self.b
        if self.level == "approx":
            return self._erf_as_tanh(x)
        z = b("minimum", b("maximum", x, -3.0), 3.0)
        return b("mul", self._polynomial(ERF, b("mul", z, z)), z)

    def _erfc(self, node: Node, z: Arg) -> Arg:
        b = self.b
        if self.level == "approx":
            return b("add", self._erf_as_tanh(b("neg", z)), 1.0)
        if self.keep_erfc:
            return b("erfc", z)
        tail = self._tail(b("abs", z))
        return b("mul", b("where", b("lt", z, 0.0, dtype=torch.bool), b("sub", 1.0, tail), tail), 2.0)

    def _mul(self, node: Node, x: Arg, y: Arg) -> Arg:
        """x erfc(-c x) is x + |x| - |x| erfc(c |x|), if nothing else needs that erfc: two instructions less."""
        b = self.b
        if self.keep_erfc or self.level == "approx":
            return b("mul", x, y)
        for one, other in (node.args, node.args[::-1]):
            erfc = self.graph.nodes[other.index] if isinstance(other, Ref) else None
            if erfc is None or erfc.op != "erfc" or self.uses[other.index] > 1:  # type: ignore[union-attr]
                continue
            z = self.graph.nodes[erfc.args[0].index] if isinstance(erfc.args[0], Ref) else None
            if z is None or z.op != "mul" or z.args[0] != one or isinstance(z.args[1], Ref) or z.args[1] >= 0:
                continue
            a = b("abs", self._moved(one))
            rest = b("mul", a, self._tail(b("mul", a, -z.args[1]), 1.0))
            return b("sub", b("add", self._moved(one), a), rest)
        return b("mul", x, y)

    def _erf_as_tanh(self, z: Arg) -> Arg:
        b = self.b
        c2, c1, c0 = ERF_AS_TANH
        square = b("mul", z, z)
        bounded = b("saturate", b("add", b("mul", square, c2), c1))
        return b("tanh", b("mul", z, b("add", b("mul", square, bounded), c0)))

    def _tail(self, z: Arg, exponent: float = 0.0) -> Arg:
        """erfc(z) / 2 for z >= 0, times 2^exponent."""
        *powers, last = LOG2_TAIL if self.level == "close" else LOG2_TAIL_SHORT
        return self.b("exp2", self._polynomial((*powers, last + exponent), z))

    def _polynomial(self, coefficients: tuple[float, ...], x: Arg) -> Arg:
        p: Arg = coefficients[0]
        for c in coefficients[1:]:
            p = self.b("add", self.b("mul", x, p), c)
        return p

    # ---- exponentials and logarithms ---------------------------------------------------------------------------------
    def _exp(self, node: Node, x: Arg) -> Arg:
        return self.b("exp2", self.b("mul", x, LOG2E))

    def _expm1(self, node: Node, x: Arg) -> Arg:
        return self.b("sub", self._exp(node, x), 1.0)

    def _sinh(self, node: Node, x: Arg) -> Arg:
        return self._hyperbolic("sub", x)

    def _cosh(self, node: Node, x: Arg) -> Arg:
        return self._hyperbolic("add", x)

    def _hyperbolic(self, op: str, x: Arg) -> Arg:
        up, down = (self.b("exp2", self.b("mul", x, c)) for c in (LOG2E, -LOG2E))
        return self.b("mul", self.b(op, up, down), 0.5)

    def _log(self, node: Node, x: Arg) -> Arg:
        return self.b("mul", self.b("log2", x), LN2)

    def _log1p(self, node: Node, x: Arg) -> Arg:
        b = self.b
        log = self._log(node, b("add", x, 1.0))
        if self.level != "close":
            return log
        series = b("mul", x, self._polynomial((1 / 3, -0.5, 1.0), x))  # to x^3 / 4
        return b("where", b("lt", b("abs", x), 0.02, dtype=torch.bool), series, log)

    def _div(self, node: Node, x: Arg, y: Arg) -> Arg:
        return self.b("mul", x, self.b("reciprocal", y))
