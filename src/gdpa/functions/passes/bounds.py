"""Whether a function and its derivatives are finite at a score of 0, whatever its params: intervals over its graph.

A node that does not depend on any param has a value, computed as the function computes it. Other nodes have an
interval: the least and the largest value that they may take, NaN where nothing is known.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from gdpa.functions.graph import OPS, Arg, Const, Graph, Node, Ref, as_tensor

# Learned params are about 1, also where they are logarithms (of a temperature): the square of e^40 is still finite.
# Of what is finite up to here and overflows further on, the gradients would have overflowed as well.
LARGEST_PARAM = 40.0
LARGEST_LEAF = 2.0**40  # of positions times what they are usually multiplied by

Interval = tuple[float, float]
Value = Tensor | Const | Interval
Limit = tuple[Ref, float, float]  # a node lies between two numbers
UNKNOWN = (math.nan, math.nan)


def is_finite_at_zero(graph: Graph, n_leaves: int = 0) -> bool:
    """Whether all outputs are finite at s = 0, in float32, for any params up to LARGEST_PARAM, and for any of the last
    ``n_leaves`` inputs up to LARGEST_LEAF."""
    if graph.n_inputs == 1:
        return all(bool(value.isfinite()) for value in graph.evaluate(_zero()))
    values: list[Value] = []
    for node in graph.nodes:
        args = [_value(a, values) for a in node.args]
        if node.op == "where" and isinstance(args[0], tuple):
            args[1:] = [
                _where_it_is_taken(graph, branch, limit, values)
                for branch, limit in zip(node.args[1:], _limits(graph, node.args[0]), strict=True)
            ]
        is_leaf = node.op == "input" and int(node.args[0]) >= graph.n_inputs - n_leaves  # type: ignore[arg-type]
        values.append((-LARGEST_LEAF, LARGEST_LEAF) if is_leaf else _result(graph, node, args))
    return all(_is_finite(_value(output, values)) for output in graph.outputs)


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float32)


def _value(arg: Arg, values: list[Value]) -> Value:
    return values[arg.index] if isinstance(arg, Ref) else arg


def _ends(value: Value) -> Interval:
    return value if isinstance(value, tuple) else (float(value), float(value))


def _is_finite(value: Value) -> bool:
    return all(map(math.isfinite, _ends(value)))


# ---- branches --------------------------------------------------------------------------------------------------------
def _limits(graph: Graph, condition: Arg) -> tuple[Limit | None, Limit | None]:
    """What is known where a condition holds, and where it does not."""
    node = graph.nodes[condition.index] if isinstance(condition, Ref) else None
    if node is None or node.op not in ("lt", "le", "gt", "ge"):
        return None, None
    a, b = node.args
    if isinstance(a, Ref) and not isinstance(b, Ref):
        small, large = (a, -math.inf, float(b)), (a, float(b), math.inf)
    elif isinstance(b, Ref) and not isinstance(a, Ref):
        small, large = (b, float(a), math.inf), (b, -math.inf, float(a))
    else:
        return None, None
    return (small, large) if node.op in ("lt", "le") else (large, small)


def _where_it_is_taken(graph: Graph, branch: Arg, limit: Limit | None, values: list[Value]) -> Value:
    """The value of a branch: that it overflows does not count where another is taken."""
    if limit is None or not isinstance(branch, Ref) or _is_finite(values[branch.index]):
        return _value(branch, values)
    limited, least, largest = limit
    low, high = _ends(values[limited.index])
    values = list(values)
    values[limited.index] = (min(max(low, least), largest), max(min(high, largest), least))
    changed: set[Arg] = {limited}
    for index in range(limited.index + 1, branch.index + 1):
        node = graph.nodes[index]
        if not changed.isdisjoint(node.args):
            values[index] = _result(graph, node, [_value(a, values) for a in node.args])
            changed.add(Ref(index))
    return values[branch.index]


# ---- one operation ---------------------------------------------------------------------------------------------------
def _result(graph: Graph, node: Node, args: list[Value]) -> Value:
    """A node's value from those of its arguments."""
    if node.op == "input":
        return _zero() if args[0] == 0 else (-LARGEST_PARAM, LARGEST_PARAM)
    if node.op == "where":
        if isinstance(args[0], tuple):
            return _span([*_ends(args[1]), *_ends(args[2])])
        taken = args[1] if args[0] else args[2]
        return taken if isinstance(taken, tuple) else as_tensor(taken, _zero()).to(node.dtype)
    if not any(isinstance(a, tuple) for a in args):
        return as_tensor(OPS[node.op](*args), _zero()).to(node.dtype)
    if node.dtype == torch.bool:
        return (0.0, 1.0)
    ends = [_ends(a) for a in args]
    if any(map(math.isnan, itertools.chain(*ends))):
        return UNKNOWN
    if _is_tail(graph, node) and all(low >= 0 and math.isfinite(high) for low, high in ends):
        return (0.0, 1.0)
    return _interval(node, ends)


def _is_tail(graph: Graph, node: Node) -> bool:
    """Whether it is x (1 / (x + 1)), which is at most 1: the other tail of a sigmoid (see expand.py)."""

    def made_by(a: Arg, op: str) -> Node | None:
        found = graph.nodes[a.index] if isinstance(a, Ref) else None
        return found if found is not None and found.op == op else None

    for x, inverse in (node.args, node.args[::-1]) if node.op == "mul" else ():
        divided = made_by(inverse, "reciprocal")
        total = made_by(divided.args[0], "add") if divided else None
        if total is not None and set(total.args) == {x, 1.0}:
            return True
    return False


def _interval(node: Node, args: list[Interval]) -> Interval:
    """Of an operation on intervals. NaN in arguments has been dealt with: some operations would lose it."""
    op, first, last = node.op, args[0], args[-1]
    if op in ("mul", "abs") and node.args[0] == node.args[-1]:  # a square, or |x|
        turns = [*first, 0.0] if _holds_zero(first) else list(first)
        return _at([turns] * len(args), node)
    if op in ("sin", "cos"):
        return (-1.0, 1.0) if _is_finite(first) else UNKNOWN
    if op == "mul" and any(_holds_zero(a) and not _is_finite(b) for a, b in (args, args[::-1])):
        return UNKNOWN  # 0 times infinity
    if op not in MONOTONE or (op in DIVIDE and _holds_zero(last)):
        return UNKNOWN
    return _at([list(corners) for corners in zip(*itertools.product(*args), strict=True)], node)


def _holds_zero(interval: Interval) -> bool:
    return interval[0] <= 0 <= interval[1]


def _at(args: list[list[float]], node: Node) -> Interval:
    """The span of what a node makes of some values of its arguments, in its dtype."""
    found = OPS[node.op](*(torch.tensor(a, dtype=torch.float64) for a in args))
    if not node.dtype.is_floating_point:
        least, largest = torch.iinfo(node.dtype).min, min(torch.iinfo(node.dtype).max, 2**31)  # exact in float64
        if not bool(((found >= least) & (found <= largest)).all()):
            return UNKNOWN  # it would wrap around
    return _span(found.to(node.dtype).double().tolist())


def _span(values: list[float]) -> Interval:
    if any(map(math.isnan, values)):
        return UNKNOWN
    # GPUs take subnormal numbers for zero.
    values = [0.0 if abs(v) < torch.finfo(torch.float32).tiny else v for v in values]
    return min(values), max(values)


DIVIDE = {"div", "div_rn", "reciprocal", "rsqrt"}
# Monotone in each argument (where nothing is divided by zero), so that the ends of the arguments make the ends.
MONOTONE = DIVIDE | {
    "add", "sub", "mul", "neg", "sign", "minimum", "maximum", "cast", "floor", "ceil", "round", "trunc", "saturate",
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "sinh", "tanh", "sigmoid", "erf", "erfc", "atan",
}  # fmt: skip
