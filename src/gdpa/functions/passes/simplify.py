"""Rewrites applied to every node as a graph is built: constants folded, identities dropped, cheap forms chosen.

Building is hash-consing (equal subexpressions are one node) and goes through ``rewrite``, so a finished graph is
already folded and free of duplicates; ``Builder.finish`` drops what no output needs.

Rules keep inf and NaN where PyTorch has them: ``x * 0`` stays, since x may be inf. Rounding may change by an ulp
(``x / 3`` becomes ``x * (1/3)``), which is far below what reaches the output; where it is not, the quotient is a
``div_rn`` (see tracing/steps.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gdpa.functions.graph import OPS, Arg, Const, Graph, Node, Ref

MAX_UNROLLED_POWER = 8  # s**8 is three multiplications; beyond that pow() is no worse and the code stays short


class Builder:
    """Makes a Graph node by node, each one simplified and shared on the way in."""

    def __init__(self, n_inputs: int) -> None:
        self.n_inputs = n_inputs
        self.nodes: list[Node] = []
        self._index: dict[Node, Ref] = {}

    def input(self, number: int) -> Ref:
        return self.intern(Node("input", (number,), torch.float32))

    def intern(self, node: Node) -> Ref:
        """The Ref of ``node``, which is added unless an equal one exists (0.0, 0 and False are told apart)."""
        key = Node(node.op, tuple((type(a), a) for a in node.args), node.dtype)  # type: ignore[misc]
        if key not in self._index:
            self._index[key] = Ref(len(self.nodes))
            self.nodes.append(node)
        return self._index[key]

    def node(self, arg: Arg) -> Node | None:
        return self.nodes[arg.index] if isinstance(arg, Ref) else None

    def dtype(self, arg: Arg) -> torch.dtype:
        if isinstance(arg, Ref):
            return self.nodes[arg.index].dtype
        return torch.bool if isinstance(arg, bool) else torch.float32

    def __call__(self, op: str, *args: Arg, dtype: torch.dtype = torch.float32) -> Arg:
        return rewrite(self, op, args, dtype)

    def finish(self, outputs: tuple[Arg, ...]) -> Graph:
        """The graph of ``outputs`` without the nodes they do not need."""
        needed: set[int] = set()
        stack = [o.index for o in outputs if isinstance(o, Ref)]
        while stack:
            index = stack.pop()
            if index not in needed:
                needed.add(index)
                stack += [a.index for a in self.nodes[index].args if isinstance(a, Ref)]
        order = sorted(needed)
        new = {old: i for i, old in enumerate(order)}

        def move(a: Arg) -> Arg:
            return Ref(new[a.index]) if isinstance(a, Ref) else a

        nodes = tuple(Node(n.op, tuple(map(move, n.args)), n.dtype) for n in (self.nodes[i] for i in order))
        return Graph(self.n_inputs, nodes, tuple(map(move, outputs)))


Rule = Callable[[Builder, tuple[Arg, ...], torch.dtype], Arg | None]


def rewrite(b: Builder, op: str, args: tuple[Arg, ...], dtype: torch.dtype) -> Arg:
    """The simplest value equal to ``op(*args)``: a constant, an argument, or a (shared) node."""
    if op != "input" and not any(isinstance(a, Ref) for a in args):
        return fold_constants(op, args, dtype)
    rule = RULES.get(op)
    if rule is not None:
        result = rule(b, args, dtype)
        if result is not None:
            return result
    if op in COMMUTATIVE:  # one spelling for a+b and b+a, constants last
        args = tuple(sorted(args, key=lambda a: (not isinstance(a, Ref), a.index if isinstance(a, Ref) else 0)))
    return b.intern(Node(op, args, dtype))


COMMUTATIVE = {"add", "mul", "minimum", "maximum", "and", "or", "xor", "eq", "ne"}


def fold_constants(op: str, args: tuple[Arg, ...], dtype: torch.dtype) -> Const:
    """The value of an operation on constants, computed in float64."""
    if op == "cast":
        (value,) = args[:1]
        assert not isinstance(value, Ref)
        return torch.tensor(value, dtype=torch.float64).to(dtype).item()
    tensors = [torch.tensor(a, dtype=torch.bool if isinstance(a, bool) else torch.float64) for a in args]
    result = OPS[op](*tensors)
    if dtype == torch.bool:
        return bool(result.item())
    return result.double().item() if dtype.is_floating_point else int(result.item())


def _is(a: Arg, value: float) -> bool:
    return not isinstance(a, Ref) and a == value


def _number(a: Arg) -> float | None:
    """The constant ``a`` as a number, None for a node."""
    return None if isinstance(a, Ref) else float(a)


def _same_type(b: Builder, a: Arg, dtype: torch.dtype) -> bool:
    return b.dtype(a) == dtype


def _add(b: Builder, args: tuple[Arg, ...], dtype: torch.dtype) -> Arg | None:
    x, y = args
    if _is(y, 0) and _same_type(b, x, dtype):
        return x
    if _is(x, 0) and _same_type(b, y, dtype):
        return y
    return None


def _sub(b: Builder, args: tuple[Arg, ...], dtype: torch.dtype) -> Arg | None:
    x, y = args
    if _is(y, 0) and _same_type(b, x, dtype):
        return x
    if _is(x, 0):
        return b("neg", y, dtype=dtype)
    c = _number(y)
    return b("add", x, -c, dtype=dtype) if c is not None and dtype.is_floating_point else None


def _mul(b: Builder, args: tuple[Arg, ...], dtype: torch.dtype) -> Arg | None:
    x, y = args
    if not isinstance(x, Ref):
        x, y = y, x
    if not dtype.is_floating_point:
        return None
    c = _number(y)
    if c is None:
        return None
    if c == 1 and _same_type(b, x, dtype):
        return x
    if c == -1 and _same_type(b, x, dtype):
        return b("neg", x, dtype=dtype)
    n = b.node(x)
    if n is not None and n.dtype == dtype:
        if n.op == "mul" and not isinstance(n.args[1], Ref):  # (x * c1) * c2
            product = float(n.args[1]) * c
            if _is_normal_float32(product):
                return b("mul", n.args[0], product, dtype=dtype)
        if n.op == "neg":
            return b("mul", n.args[0], -c, dtype=dtype)
        if n.op == "where" and all(not isinstance(a, Ref) for a in n.args[1:]):  # a choice of constants
            yes, no = (float(a) * c for a in n.args[1:] if not isinstance(a, Ref))
            return b("where", n.args[0], yes, no, dtype=dtype)
    return None


def _is_normal_float32(c: float) -> bool:
    """Whether ``c`` is a normal float32: merging constants must not create an overflow or underflow."""
    return math.isfinite(c) and 1e-30 < abs(c) < 1e30


def _div(b: Builder, args: tuple[Arg, ...], dtype: torch.dtype) -> Arg | None:
    x, y = args
    c = _number(y)
    if c is not None and c != 0 and _is_normal_float32(1 / c):
        return b("mul", x, 1 / c, dtype=dtype)
    if _is(x, 1):
        return b("reciprocal", y, dtype=dtype)
    return None


def _neg(b: Builder, args: tuple[Arg, ...], dtype: torch.dtype) -> Arg | None:
    n = b.node(args[0])
    if n is not None and n.op == "neg":
        return n.args[0]
    if n is not None and n.op == "mul" and not isinstance(n.args[1], Ref):
        return b("mul", n.args[0], -float(n.args[1]), dtype=dtype)
    return None


def _pow(b: Builder, args: tuple[Arg, ...], dtype: torch.dtype) -> Arg | None:
    x, y = args
    c = _number(y)
    if c is None or not math.isfinite(c):
        return None
    special = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
    if c in special:
        return b(special[c], x, dtype=dtype)
    if c != int(c) or not 0 <= c <= MAX_UNROLLED_POWER:
        return None
    if c == 0:
        return 1.0
    result: Arg | None = None
    square, n = x, int(c)
    while n:
        if n & 1:
            result = square if result is None else b("mul", result, square, dtype=dtype)
        n >>= 1
        if n:
            square = b("mul", square, square, dtype=dtype)
    return result


def _cast(b: Builder, args: tuple[Arg, ...], dtype: torch.dtype) -> Arg | None:
    x = args[0]
    n = b.node(x)
    if n is None or n.dtype == dtype:
        return x
    if n.op == "where" and all(not isinstance(a, Ref) for a in n.args[1:]):
        yes, no = (fold_constants("cast", (a,), dtype) for a in n.args[1:])
        return b("where", n.args[0], yes, no, dtype=dtype)
    return None


def _where(b: Builder, args: tuple[Arg, ...], dtype: torch.dtype) -> Arg | None:
    cond, yes, no = args
    if isinstance(cond, bool):
        return yes if cond else no
    if yes == no and type(yes) is type(no) and yes == yes:
        return yes
    n = b.node(cond)
    if n is not None and n.op == "not":
        return b("where", n.args[0], no, yes, dtype=dtype)
    if _is(yes, 0.0) and n is not None and n.op == "le" and _is(n.args[1], 0.0):
        return no if _is_multiple_of_relu(b, no, n.args[0]) else None
    return None


def _is_multiple_of_relu(b: Builder, x: Arg, r: Arg) -> bool:
    """Whether x is c r, for r = max(s, 0): so it is 0 where r is."""
    multiple, relu = b.node(x), b.node(r)
    if multiple is None or relu is None or relu.op != "maximum" or not _is(relu.args[1], 0.0):
        return False
    if x == r:
        return True
    is_product = multiple.op == "mul" and not isinstance(multiple.args[1], Ref)
    return multiple.args[0] == r and (is_product or multiple.op == "neg")


def _logical(neutral: bool) -> Rule:
    def rule(b: Builder, args: tuple[Arg, ...], dtype: torch.dtype) -> Arg | None:
        x, y = args
        for a, other in ((x, y), (y, x)):
            if isinstance(a, bool):
                return other if a is neutral else not neutral
        return x if x == y else None

    return rule


def _xor(b: Builder, args: tuple[Arg, ...], dtype: torch.dtype) -> Arg | None:
    x, y = args
    for a, other in ((x, y), (y, x)):
        if isinstance(a, bool):
            return b("not", other, dtype=dtype) if a else other
    return None


def _not(b: Builder, args: tuple[Arg, ...], dtype: torch.dtype) -> Arg | None:
    n = b.node(args[0])
    return n.args[0] if n is not None and n.op == "not" else None


RULES = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "neg": _neg, "pow": _pow, "cast": _cast,
    "where": _where, "and": _logical(True), "or": _logical(False), "xor": _xor, "not": _not,
}  # fmt: skip


def value_of(joint: Graph) -> Graph:
    """The graph of p alone, without what only the derivatives need."""
    b = Builder(joint.n_inputs)
    new: list[Arg] = []
    for node in joint.nodes:
        args = tuple(new[a.index] if isinstance(a, Ref) else a for a in node.args)
        kept = node.op == "input"
        new.append(b.intern(Node(node.op, args, node.dtype)) if kept else b(node.op, *args, dtype=node.dtype))
    p = joint.outputs[0]
    return b.finish((new[p.index] if isinstance(p, Ref) else p,))
