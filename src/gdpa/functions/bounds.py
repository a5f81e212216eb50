"""Whether a function and its derivatives are finite at a score of 0, whatever its params: intervals over its graph.

Every node gets the least and the largest value it may have (a tensor of these two), NaN where nothing is known. With no
param in it, both are its value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gdpa.functions.graph import OPS, Arg, Graph, Node, Ref

# Learned params are about 1, also where they are logarithms (of a temperature): the square of e^40 is still finite.
# A function that is finite up to here and overflows further on is one whose params have made it useless.
LARGEST_PARAM = 40.0
UNKNOWN = torch.tensor([torch.nan, torch.nan])
EITHER = torch.tensor([False, True])

Limits = dict[Ref, tuple[float, float]]  # what a condition says about nodes, where it holds


def is_finite_at_zero(graph: Graph) -> bool:
    """Whether all outputs are finite at s = 0, in float32, for any params up to LARGEST_PARAM."""
    found = _intervals(graph, {})
    return all(bool(_interval(output, found).isfinite().all()) for output in graph.outputs)


def _intervals(graph: Graph, limits: Limits) -> list[Tensor]:
    """Of every node; those in ``limits`` are known to lie within them."""
    found: list[Tensor] = []
    for index, node in enumerate(graph.nodes):
        args = [_interval(a, found) for a in node.args]
        if node.op == "where" and not limits:  # of conditions within branches both outcomes count
            args[1:] = [
                _interval(branch, _intervals(graph, known) if known else found)
                for branch, known in zip(node.args[1:], _limits(graph, node.args[0]), strict=True)
            ]
        value = _result(node, args)
        found.append(value.clamp(*limits[Ref(index)]) if Ref(index) in limits else value)
    return found


def _interval(arg: Arg, found: list[Tensor]) -> Tensor:
    return found[arg.index] if isinstance(arg, Ref) else torch.tensor([arg, arg], dtype=torch.float32)


def _limits(graph: Graph, condition: Arg) -> tuple[Limits, Limits]:
    """What is known where a condition holds, and where it does not."""
    node = graph.nodes[condition.index] if isinstance(condition, Ref) else None
    if node is None or node.op not in ("lt", "le", "gt", "ge"):
        return {}, {}
    a, b = node.args
    if isinstance(a, Ref) and not isinstance(b, Ref):
        small, large = {a: (-math.inf, float(b))}, {a: (float(b), math.inf)}
    elif isinstance(b, Ref) and not isinstance(a, Ref):
        small, large = {b: (float(a), math.inf)}, {b: (-math.inf, float(a))}
    else:
        return {}, {}
    return (small, large) if node.op in ("lt", "le") else (large, small)


def _result(node: Node, args: list[Tensor]) -> Tensor:
    """The interval of a node's value, from those of its arguments."""
    if node.op == "input":
        return torch.zeros(2) if node.args[0] == 0 else torch.tensor([-LARGEST_PARAM, LARGEST_PARAM])
    if all(_is_point(a) for a in args):
        return OPS[node.op](*args).to(node.dtype)
    if node.dtype == torch.bool:
        return EITHER
    if not node.dtype.is_floating_point:
        return UNKNOWN
    if node.op == "where":
        return _span(torch.cat(args[1:]))
    if node.op in ("mul", "abs") and node.args[0] == node.args[-1]:  # a square, or |x|
        return _span(OPS[node.op](*args), zero=_holds_zero(args[0]))
    if node.op in ("sin", "cos"):
        return torch.tensor([-1.0, 1.0]) if bool(args[0].isfinite().all()) else UNKNOWN
    if node.op in CORNERS and not (node.op in DIVIDE and _holds_zero(args[-1])):
        corners = args if len(args) == 1 else [args[0].repeat_interleave(2), args[1].repeat(2)]
        return _span(OPS[node.op](*corners))
    return UNKNOWN


def _is_point(interval: Tensor) -> bool:
    return bool(interval[0] == interval[1])


def _holds_zero(interval: Tensor) -> bool:
    return not bool((interval > 0).all() or (interval < 0).all())


def _span(values: Tensor, zero: bool = False) -> Tensor:
    """The least and the largest of some values, NaN if one of them is; and zero, if that is among them."""
    values = torch.cat([values, values.new_zeros(1)]) if zero else values
    return torch.stack([values.amin(), values.amax()])


DIVIDE = {"div", "reciprocal", "rsqrt"}
# Monotone in each argument (where nothing is divided by zero), so that the ends of the arguments make the ends.
CORNERS = DIVIDE | {
    "add", "sub", "mul", "neg", "sign", "minimum", "maximum", "cast", "floor", "ceil", "round", "trunc",
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "sinh", "tanh", "sigmoid", "erf", "erfc", "atan",
}  # fmt: skip
