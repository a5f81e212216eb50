"""From a traced function of positions and tables to a Graph.

Integers keep torch's meaning: 64 bits, // and % round down. Two operations stand for what a function is given,
"position" with its number in POSITIONS, and "lookup" with a table's number and one index per dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from gdpa.functions.graph import OPS, Arg, Graph, Node, Ref, on_tensors
from gdpa.functions.passes.simplify import Builder
from gdpa.functions.places.names import POSITIONS, TableKind
from gdpa.functions.tracing import lower as floats
from gdpa.functions.tracing.steps import before_steps

INTEGER = {
    "add": "add", "sub": "sub", "mul": "mul", "neg": "neg", "abs": "abs", "sign": "sign", "sgn": "sign",
    "minimum": "minimum", "maximum": "maximum", "remainder": "mod", "fmod": "fmod", "floor_divide": "floordiv",
    "bitwise_and": "bitand", "bitwise_or": "bitor", "bitwise_xor": "bitxor", "bitwise_not": "bitnot",
    "bitwise_left_shift": "shl", "bitwise_right_shift": "shr", "__lshift__": "shl", "__rshift__": "shr",
}  # fmt: skip

# Operations that are the same for integers and others.
UNTYPED = {"where", "expand", *floats.SAME_VALUE, *floats.FILLED, *floats.ZEROS, *floats.ONES}

# The meaning of integer operations in torch; the others are those of functions/graph.py.
INTEGER_OPS: dict[str, Callable[..., Tensor]] = {
    "mod": torch.remainder, "fmod": torch.fmod, "floordiv": partial(torch.div, rounding_mode="floor"),
    "truncdiv": partial(torch.div, rounding_mode="trunc"), "bitand": torch.bitwise_and, "bitor": torch.bitwise_or,
    "bitxor": torch.bitwise_xor, "bitnot": torch.bitwise_not, "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
}  # fmt: skip
NEUTRAL = {"add": (0,), "sub": (0,), "mul": (1,), "floordiv": (1,), "truncdiv": (1,)}
COMMUTATIVE = {"add", "mul", "minimum", "maximum", "bitand", "bitor", "bitxor"}


def meaning(op: str) -> Callable[..., Tensor]:
    """What ``op`` does to tensors and numbers."""
    return on_tensors(INTEGER_OPS[op]) if op in INTEGER_OPS else OPS[op]


def lower_places(traced: fx.GraphModule, positions: tuple[str, ...], tables: tuple[TableKind, ...]) -> Graph:
    """``traced`` takes the named positions, then the tables."""
    floats.refuse_empty(traced)
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    b = Builder(0)
    env: dict[fx.Node, Any] = {}
    for node, name in zip(placeholders, positions, strict=False):
        env[node] = b.intern(Node("position", (POSITIONS.index(name),), torch.int64))
    number = {node: i for i, node in enumerate(placeholders[len(positions) :])}
    exact = before_steps(traced, floats.name_of, None)
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            env[node] = floats.constant(getattr(traced, node.target))
        elif node.op == "call_function":
            env[node] = _call(b, node, env, number, node in exact)
        elif node.op == "output":
            return b.finish(tuple(env[n] for n in node.args[0]))
    raise AssertionError("an fx graph always ends in an output node")


def _call(b: Builder, node: fx.Node, env: dict[fx.Node, Arg], tables: dict[fx.Node, int], exact: bool) -> Arg:
    name = floats.name_of(node)
    value = node.meta["val"]
    if name == "index" and node.args[0] in tables:
        table = tables[node.args[0]]  # type: ignore[index]
        indices = tuple(_as(b, env[i], torch.int64) for i in node.args[1])  # type: ignore[union-attr, index]
        return b.intern(Node("lookup", (table, *indices), value.dtype))
    for a in node.all_input_nodes:
        if a in tables:
            raise floats.refusal(f"{name} of a table")
    if name in floats.COMPARISONS or name in INTEGER or node.kwargs.get("rounding_mode"):
        node.args = _fitted(node)
    integer = isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool
    if not integer:
        return floats.lower_call(b, node, env, exact)
    args: list[Any] = [env[a] if isinstance(a, fx.Node) else a for a in node.args]
    if name == "div":
        op = {"floor": "floordiv", "trunc": "truncdiv"}[node.kwargs["rounding_mode"]]  # type: ignore[index]
        return integer_node(b, op, args, value.dtype)
    if name.startswith("clamp"):
        return _clamp(b, name, args, value.dtype)
    if name == "pow" and isinstance(args[1], int) and 0 <= args[1] <= 8:
        power: Arg = 1
        for _ in range(args[1]):
            power = integer_node(b, "mul", [power, args[0]], value.dtype) if power != 1 else args[0]
        return power
    if name in UNTYPED:
        return floats.lower_call(b, node, env)
    if name not in INTEGER:
        raise floats.refusal(f"{name} of integers")
    alpha: Any = node.kwargs.get("alpha", 1)
    if alpha != 1:
        args[1] = integer_node(b, "mul", [args[1], alpha], value.dtype)
    return integer_node(b, INTEGER[name], args, value.dtype)


def _fitted(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of an operation, whole numbers in the dtype of the tensor beside them: in torch, 300 beside int8 is
    44. Triton would compare with 300, or refuse it."""
    kinds = {a.meta["val"].dtype for a in node.args if isinstance(a, fx.Node)}
    dtype = kinds.pop() if len(kinds) == 1 else torch.bool
    if dtype.is_floating_point or dtype == torch.bool:
        return node.args
    return tuple(int(torch.tensor(a).to(dtype)) if type(a) is int else a for a in node.args)


def integer_node(b: Builder, op: str, args: list[Any], dtype: torch.dtype) -> Arg:
    """``op`` in ``dtype``; numbers are folded."""
    given = tuple(_as(b, a, dtype) for a in args)
    if not any(isinstance(a, Ref) for a in given):
        return int(meaning(op)(*(torch.tensor(a, dtype=dtype) for a in given)))
    if op in COMMUTATIVE and not isinstance(given[0], Ref):
        given = given[::-1]
    if given[1:] == NEUTRAL.get(op) and not isinstance(given[1], Ref):
        return given[0]
    return b.intern(Node(op, given, dtype))


def _clamp(b: Builder, name: str, args: list[Any], dtype: torch.dtype) -> Arg:
    low, high = (None, args[1]) if name == "clamp_max" else (*args[1:], None, None)[:2]
    x = args[0]
    if low is not None:
        x = integer_node(b, "maximum", [x, low], dtype)
    return x if high is None else integer_node(b, "minimum", [x, high], dtype)


def _as(b: Builder, a: Any, dtype: torch.dtype) -> Any:
    if isinstance(a, Ref):
        return a if b.nodes[a.index].dtype == dtype else b.intern(Node("cast", (a,), dtype))
    return bool(a) if dtype == torch.bool else int(a)
