"""Sums that cancel, written as functions that do not: 1 + tanh(z), 1 - erf(z) and what is made of them.

Far to the left gelu(s) = 0.5 s (1 + erf(s / sqrt 2)) is the small rest of two numbers near 1, and any error of erf,
small beside 1, is large beside the rest. As 0.5 s erfc(-s / sqrt 2) its relative error is that of erfc. Where tanh is
good enough all the same, fold.expand writes sigmoid through it again, at no cost.
"""

from __future__ import annotations

import math
from collections import Counter

import torch

from gdpa.functions.graph import Arg, Graph, Node, Ref
from gdpa.functions.passes.simplify import Builder

Monomial = tuple[float, Counter[Ref]]  # a constant times nodes

SMALL_PART = 1e-3  # what is left of it cancels as little as other sums do
# Products of the same constants in another order; autograd has rounded those of derivatives to float32.
SAME_NUMBER, SAME_IN_A_DERIVATIVE = 1e-12, 2.0**-22


def without_cancellation(graph: Graph) -> Graph:
    """``graph`` with 1 +- tanh(z), 1 - tanh(z)^2 and 1 +- erf(z), and products of those, as sigmoid and erfc."""
    b = Builder(graph.n_inputs)
    new: list[Arg] = []
    of_value = _below(graph, graph.outputs[0])
    for i, node in enumerate(graph.nodes):
        args = tuple(new[a.index] if isinstance(a, Ref) else a for a in node.args)
        if node.op == "input":
            new.append(b.intern(Node(node.op, args, node.dtype)))
            continue
        found = None
        if node.dtype == torch.float32 and node.op in ("add", "sub"):
            same = SAME_NUMBER if i in of_value else SAME_IN_A_DERIVATIVE
            found = _sum(b, args[0], args[1], -1.0 if node.op == "sub" else 1.0, same)
        elif node.dtype == torch.float32 and node.op == "mul":
            found = _variance(b, *args) or _variance(b, *args[::-1])
        new.append(b(node.op, *args, dtype=node.dtype) if found is None else found)
    return b.finish(tuple(new[o.index] if isinstance(o, Ref) else o for o in graph.outputs))


def _below(graph: Graph, output: Arg) -> set[int]:
    """The nodes that it is made of."""
    found = {output.index} if isinstance(output, Ref) else set()
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in found and graph.nodes[i].op != "input":
            found |= {a.index for a in graph.nodes[i].args if isinstance(a, Ref)}
    return found


def _monomial(b: Builder, a: Arg) -> Monomial:
    node = b.node(a)
    if node is None:
        return float(a), Counter()  # type: ignore[arg-type]
    if node.op == "neg" and node.dtype == torch.float32:
        c, factors = _monomial(b, node.args[0])
        return -c, factors
    if node.op == "mul" and node.dtype == torch.float32:
        (c, factors), (d, more) = (_monomial(b, x) for x in node.args)
        return c * d, factors + more
    return 1.0, Counter([a])  # type: ignore[list-item]


def _sum(b: Builder, x: Arg, y: Arg, sign: float, same: float) -> Arg | None:
    """x + sign * y, if that is  c rest (1 +- g)  or  c rest (1 - tanh(z)^2), or is so but for a small part of ``rest``:
    1 + 1e-6 - tanh(z) keeps weights positive, and is 1e-6 where tanh(z) is 1."""
    (c, short), (d, long) = _monomial(b, x), _monomial(b, y)
    d *= sign
    if len(short) and short.total() > long.total():
        c, short, d, long = d, long, c, short
    extra = long - short
    if short - long or not math.isclose(abs(c), abs(d), rel_tol=SMALL_PART) or c == 0:
        return None
    found = _one_plus(b, extra, math.copysign(1.0, c * d))
    if found is None:
        return None
    cancelled = math.copysign(d, c)
    if math.isclose(c, cancelled, rel_tol=same):
        return b("mul", _product(b, found, short), c)
    return b("add", b("mul", _product(b, found, short), cancelled), _product(b, c - cancelled, short))


def _product(b: Builder, first: Arg, factors: Counter[Ref]) -> Arg:
    for factor in factors.elements():
        first = b("mul", factor, first)
    return first


def _one_plus(b: Builder, factors: Counter[Ref], sign: float) -> Arg | None:
    """1 + sign * (the product of ``factors``), without cancellation if that is tanh, erf or -tanh^2."""
    if len(factors) != 1:
        return None
    ((g, power),) = factors.items()
    node = b.node(g)
    assert node is not None
    z = node.args[0]
    if node.op == "erf" and power == 1:
        return b("erfc", b("mul", z, -sign))
    if node.op == "tanh" and power == 1:
        return b("mul", b("sigmoid", b("mul", z, 2.0 * sign)), 2.0)
    if node.op == "tanh" and power == 2 and sign < 0:
        q = b("sigmoid", b("mul", z, 2.0))
        return b("mul", b("sub", q, b("mul", q, q)), 4.0)
    return None


def _variance(b: Builder, q: Arg, rest: Arg) -> Arg | None:
    """q (1 - q) of a sigmoid as q - q^2, which is one instruction."""
    node, other = b.node(q), b.node(rest)
    if node is None or other is None or node.op != "sigmoid" or other.op != "sub" or other.args != (1.0, q):
        return None
    return b("sub", q, b("mul", q, q))
