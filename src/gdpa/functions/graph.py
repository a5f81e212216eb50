"""A function of one score as a small graph of scalar operations: what the compiler works on.

Nodes are kept in the order they are computed. Graphs are made by passes.simplify.Builder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Const = bool | int | float


@dataclass(frozen=True)
class Ref:
    """The result of node ``index``."""

    index: int


Arg = Ref | Const


@dataclass(frozen=True)
class Node:
    """``op`` is a key of OPS, or "input" with the input's number as its only argument; graphs of positions and tables
    have more (see places/lower.py)."""

    op: str
    args: tuple[Arg, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Graph:
    """``outputs`` of a forward graph: (p,). Of a joint graph: (p, dp/ds, dp/dparam...)."""

    n_inputs: int
    nodes: tuple[Node, ...]
    outputs: tuple[Arg, ...]

    def text(self) -> str:
        """One line per node, for people."""

        def show(a: Arg) -> str:
            return f"%{a.index}" if isinstance(a, Ref) else repr(a)

        lines = [
            f"%{i} = {n.op}({', '.join(map(show, n.args))}) : {str(n.dtype).removeprefix('torch.')}"
            for i, n in enumerate(self.nodes)
        ]
        return "\n".join([f"inputs {self.n_inputs}", *lines, f"return {', '.join(map(show, self.outputs))}"])

    def evaluate(self, *inputs: Tensor, hook: Callable[[int, Tensor], Tensor] | None = None) -> list[Tensor]:
        """Run the graph in eager torch, in the dtype of ``inputs``; ``hook(node's index, result)`` may replace each.

        float32 nodes follow the inputs' dtype, so float64 inputs give a float64 evaluation.
        """
        wide = inputs[0].dtype
        values: list[Tensor] = []

        def get(a: Arg) -> Tensor | Const:
            return values[a.index] if isinstance(a, Ref) else a

        for index, node in enumerate(self.nodes):
            dtype = wide if node.dtype == torch.float32 else node.dtype
            if node.op == "input":
                number = node.args[0]
                assert isinstance(number, int)
                value = inputs[number]
            else:
                value = as_tensor(OPS[node.op](*map(get, node.args)), inputs[0]).to(dtype)
            values.append(hook(index, value) if hook else value)
        return [as_tensor(get(o), inputs[0]).expand_as(inputs[0]) for o in self.outputs]


def as_tensor(x: Tensor | Const, like: Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=like.dtype, device=like.device)


def on_tensors(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``fn`` over tensors, made to accept constants too (one argument is always a tensor)."""

    def call(*args: Tensor | Const) -> Tensor:
        like = next(a for a in args if isinstance(a, Tensor))
        return fn(*(as_tensor(a, like) for a in args))

    return call


def _where(cond: Tensor, a: Tensor | Const, b: Tensor | Const) -> Tensor:
    return torch.where(cond, a, b)


def _cast(x: Tensor, _: Const = 0) -> Tensor:
    return x  # the node's dtype does the work


# The primitive operations. emission/code.py has the device code of each under the same name. mul_rn is a product that
# is rounded by itself, never one instruction with a sum; div_rn a quotient that is rounded as PyTorch rounds it, never
# a product with an inverse (see tracing/steps.py). saturate makes 0 of what is negative, in numbers of at most 1: on
# NVIDIA GPUs the instruction before does that for nothing. Only expand.py makes it.
OPS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": lambda a, b: a - b, "mul": torch.mul, "mul_rn": torch.mul,
    "div": lambda a, b: a / b, "div_rn": lambda a, b: a / b,
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign,
    "minimum": on_tensors(torch.minimum), "maximum": on_tensors(torch.maximum),
    "pow": lambda a, b: torch.pow(a, b), "fmod": on_tensors(torch.fmod),
    "remainder": lambda a, b: torch.remainder(a, b), "atan2": on_tensors(torch.atan2),
    "saturate": lambda x: torch.clamp(x, 0.0, 1.0),
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1,
    "log": torch.log, "log2": torch.log2, "log1p": torch.log1p,
    "sin": torch.sin, "cos": torch.cos, "tan": torch.tan,
    "asin": torch.asin, "acos": torch.acos, "atan": torch.atan,
    "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "erf": torch.erf, "erfc": torch.erfc,
    "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc,
    "where": _where, "cast": _cast, "isnan": torch.isnan, "isinf": torch.isinf,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
    "and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor, "not": torch.logical_not,
}  # fmt: skip


def vanishes_at_zero(graph: Graph) -> bool:
    """Whether p is exactly 0 at s = 0 in any arithmetic: because s is a factor of it, not because terms cancel. What
    is made of params is taken to be finite."""
    zero, one = torch.zeros((), dtype=torch.float32), torch.ones(())  # which may overflow on the way
    if not bool(graph.evaluate(zero, *[one] * (graph.n_inputs - 1))[0] == 0):
        return False
    vanishing: set[Arg] = {0.0}
    for index, node in enumerate(graph.nodes):
        needed = {"mul": any, "where": lambda zeros: all(list(zeros)[1:])}.get(node.op, all)
        score = node.op == "input" and node.args == (0,)
        if score or (node.op in KEEP_ZERO and needed(a in vanishing for a in node.args)):
            vanishing.add(Ref(index))
    return graph.outputs[0] in vanishing


# Zero where their arguments are (a product where one is; a choice where both branches are).
KEEP_ZERO = {"add", "sub", "mul", "neg", "abs", "minimum", "maximum", "tanh", "sqrt", "where"}
