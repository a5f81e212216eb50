"""From a traced aten graph to a Graph of primitive operations: the table of what an activation may use.

``PRIMITIVE`` maps aten operations one to one; ``COMPOSITE`` spells out those that take several primitives. Anything
else is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import fx

from gdpa.compat import OpOverload
from gdpa.errors import UnsupportedActivationError
from gdpa.functions.graph import Arg, Const, Graph, Node, Ref
from gdpa.functions.passes.simplify import Builder
from gdpa.functions.tracing.cancellation import without_cancellation
from gdpa.functions.tracing.steps import before_steps

TRACE_SHAPE = torch.Size((3, 5))  # no dimension of it is 1, so that a lost or broadcast dimension shows

PRIMITIVE = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "neg": "neg", "abs": "abs", "sign": "sign", "sgn": "sign",
    "minimum": "minimum", "maximum": "maximum", "pow": "pow", "fmod": "fmod", "remainder": "remainder",
    "atan2": "atan2", "sqrt": "sqrt", "rsqrt": "rsqrt", "reciprocal": "reciprocal",
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log1p": "log1p",
    "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan",
    "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "sigmoid": "sigmoid", "erf": "erf", "erfc": "erfc",
    "floor": "floor", "ceil": "ceil", "round": "round", "trunc": "trunc", "where": "where",
    "isnan": "isnan", "isinf": "isinf",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne",
    "logical_and": "and", "logical_or": "or", "logical_xor": "xor", "logical_not": "not",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "not",
}  # fmt: skip

SAME_VALUE = {"clone", "alias", "detach", "lift_fresh", "lift_fresh_copy", "contiguous", "positive", "_to_copy"}
FILLED = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # where the value stands
EMPTY = {"empty", "empty_like", "empty_permuted"}  # which functions may fill, and no more
ZEROS = {"zeros", "zeros_like", "new_zeros", "_efficientzerotensor", *EMPTY}
ONES = {"ones", "ones_like", "new_ones"}

RANDOM = {"rand", "rand_like", "randn", "randn_like", "bernoulli", "native_dropout", "normal", "uniform", "exponential"}
ROW_SUMS = {"sum", "mean", "linalg_vector_norm", "norm", "amax", "max", "logsumexp"}  # which normalize= may stand for
PLACES = {"arange", "triu", "tril", "triu_indices", "tril_indices", "iota", "linspace"}  # which positions stand for
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
LOGICAL = {"and", "or", "xor", "not"}


def _clamp(b: Builder, x: Arg, low: Arg | None = None, high: Arg | None = None) -> Arg:
    if low is not None:
        x = b("maximum", x, low)
    return x if high is None else b("minimum", x, high)


def _relu(b: Builder, x: Arg) -> Arg:
    return b("maximum", x, 0.0)


def _leaky_relu(b: Builder, x: Arg, slope: Arg = 0.01) -> Arg:
    return b("where", b("gt", x, 0.0, dtype=torch.bool), x, b("mul", x, slope))


def _elu(b: Builder, x: Arg, alpha: Const = 1.0, scale: Const = 1.0, input_scale: Const = 1.0) -> Arg:
    low = b("mul", b("expm1", b("mul", x, input_scale)), alpha * scale)
    return b("where", b("gt", x, 0.0, dtype=torch.bool), b("mul", x, scale), low)


def _acosh(b: Builder, x: Arg) -> Arg:
    """log1p(t + sqrt(t) sqrt(t + 2)), t = x - 1: no cancellation near 1, no overflow of x^2."""
    t = b("sub", x, 1.0)
    return b("log1p", b("add", t, b("mul", b("sqrt", t), b("sqrt", b("add", t, 2.0)))))


def _asinh(b: Builder, x: Arg) -> Arg:
    """sign(x) log1p(a + a / (1/a + sqrt(1/a^2 + 1))), a = |x|: keeps its digits near 0, no overflow of x^2."""
    a = b("abs", x)
    inverse = b("reciprocal", a)
    root = b("sqrt", b("add", b("mul", inverse, inverse), 1.0))
    return b("mul", b("sign", x), b("log1p", b("add", a, b("div", a, b("add", inverse, root)))))


def _atanh(b: Builder, x: Arg) -> Arg:
    return b("mul", b("sub", b("log1p", x), b("log1p", b("neg", x))), 0.5)


def _shrink_backward(b: Builder, grad: Arg, x: Arg, bound: Const) -> Arg:
    """0 within [-bound, bound], both shrinks' flat part."""
    return b("where", b("le", b("abs", x), bound, dtype=torch.bool), 0.0, grad)


COMPOSITE: dict[str, Callable[..., Arg]] = {
    "clamp": _clamp, "clamp_min": _clamp, "clamp_max": lambda b, x, high: _clamp(b, x, None, high),
    "relu": _relu, "hardtanh": lambda b, x, low=-1.0, high=1.0: _clamp(b, x, low, high),
    "leaky_relu": _leaky_relu, "elu": _elu, "acosh": _acosh, "asinh": _asinh, "atanh": _atanh,
    "log10": lambda b, x: b("mul", b("log2", x), math.log10(2.0)),
    "square": lambda b, x: b("mul", x, x),
    "softshrink_backward": _shrink_backward, "hardshrink_backward": _shrink_backward,
}  # fmt: skip


def lower(traced: fx.GraphModule) -> Graph:
    """``traced`` (one aten operation per node) as a Graph; refuses what is not element-wise."""
    refuse_empty(traced)
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    b = Builder(len(placeholders))
    env: dict[fx.Node, Arg] = {node: b.input(i) for i, node in enumerate(placeholders)}
    exact = before_steps(traced, name_of, placeholders[0])
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            env[node] = constant(getattr(traced, node.target))
        elif node.op == "call_function":
            env[node] = lower_call(b, node, env, node in exact)
        elif node.op == "output":
            return without_cancellation(b.finish(tuple(env[n] for n in node.args[0])))
    raise AssertionError("an fx graph always ends in an output node")


def refuse_empty(traced: fx.GraphModule) -> None:
    """If what nobody has written is a part of the result."""
    waiting = [n for n in traced.graph.nodes if n.op == "output"]
    reached = set(waiting)
    while waiting:
        node = waiting.pop()
        name = name_of(node) if isinstance(node.target, OpOverload) else ""
        if name in EMPTY:
            raise UnsupportedActivationError(
                "the activation returns values of torch.empty or torch.empty_like, which are whatever was in memory; "
                "use zeros_like, ones_like or full_like"
            )
        if name not in FILLED and name not in ZEROS and name not in ONES:  # those take a shape
            found = [n for n in node.all_input_nodes if n not in reached]
            reached.update(found)
            waiting += found


def constant(value: torch.Tensor) -> Const:
    if value.numel() != 1:
        what = f"the activation uses a constant tensor of shape {tuple(value.shape)}"
        if value.shape == TRACE_SHAPE:  # most likely scores that went through numpy, which is not recorded
            raise UnsupportedActivationError(
                f"{what}, that of the scores it is traced with: numpy, or other code that is not torch, has computed "
                "it from them; use torch's functions (torch.exp for np.exp)"
            )
        raise UnsupportedActivationError(f"{what}; only scalars can be constants, tensors go in through params")
    return value.item()


def name_of(node: fx.Node) -> str:
    return node.target._schema.name.removeprefix("aten::").removeprefix("prims::")  # type: ignore[union-attr]


def lower_call(b: Builder, node: fx.Node, env: dict[fx.Node, Arg], exact: bool = False) -> Arg:
    """One aten operation, its arguments found in ``env``; ``exact``: a quotient or a product before a step
    (see steps.py)."""
    name = name_of(node)
    value = node.meta["val"]
    dtype = value.dtype if isinstance(value, torch.Tensor) else None
    args: list[Any] = [env[a] if isinstance(a, fx.Node) else a for a in node.args]
    if name in SAME_VALUE and dtype is not None:
        return b("cast", args[0], dtype=dtype)
    if name == "expand" and node.args[0].meta["val"].shape in (TRACE_SHAPE, ()):  # type: ignore[union-attr]
        return args[0]
    if name in FILLED or name in ZEROS or name in ONES:
        fill = args[FILLED[name]] if name in FILLED else float(name in ONES)
        return _typed(fill, dtype)
    if dtype is None or not (name in PRIMITIVE or name in COMPOSITE):
        raise refusal(node.target if isinstance(node.target, OpOverload) else name)
    _check_shape(name, value)
    alpha: Any = node.kwargs.get("alpha", 1)  # add(a, b, alpha=c) is a + c * b
    if alpha != 1:
        args[1] = b("mul", args[1], alpha)
    _check_keywords(node)
    if name == "div" and node.kwargs.get("rounding_mode") is not None:
        return _rounded_quotient(b, args[0], args[1], node.kwargs["rounding_mode"], dtype)
    if exact and name == "mul":
        wide = _wide(dtype)
        return b("cast", b.intern(Node("mul", tuple(_to(b, a, wide) for a in args), wide)), dtype=dtype)
    return _apply(b, "div_rn" if exact else name, args, dtype)


def _rounded_quotient(b: Builder, x: Arg, y: Arg, mode: Any, dtype: torch.dtype) -> Arg:
    """Whole at exact multiples, as torch has it: a product with 1/y may fall short of the next step. A float64 quotient
    of integers (up to 2^53) is never rounded up to the next one."""
    integers = not dtype.is_floating_point
    wide = torch.float64 if integers else _wide(dtype)
    x, y = (_to(b, a, wide) for a in (x, y))
    if mode == "floor" and not integers:
        multiple = b("sub", x, b("remainder", x, y, dtype=wide), dtype=wide)
        whole = b("round", b("div", multiple, y, dtype=wide), dtype=wide)
    else:
        whole = b("trunc" if mode == "trunc" else "floor", b("div_rn", x, y, dtype=wide), dtype=wide)
    return b("cast", whole, dtype=dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What PyTorch computes in to get ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _check_keywords(node: fx.Node) -> None:
    """Refuse keyword arguments other than those that are honoured and those that change no value."""
    known = {"alpha", "rounding_mode", "dtype", "layout", "device", "pin_memory", "memory_format"}
    if not known.issuperset(node.kwargs):
        raise refusal(f"{node.target} with {dict(node.kwargs)}")


def _apply(b: Builder, name: str, args: list[Any], dtype: torch.dtype) -> Arg:
    """Arithmetic happens in float32 (or float64, or integers); 16-bit results are rounded from it, as torch does."""
    wide = _wide(dtype)
    op = name if name == "div_rn" else PRIMITIVE.get(name)
    if op in COMPARISONS:
        common = _compared_in(b, args)
        return b(op, *(_to(b, a, common) for a in args), dtype=torch.bool)
    if op in ("isnan", "isinf"):
        return b(op, *args, dtype=torch.bool)
    if dtype == torch.bool:
        if op == "mul":
            op = "and"
        if op not in LOGICAL and op != "where":
            raise refusal(f"{name} on booleans")
        return b(op, *(_to(b, a, torch.bool) for a in args), dtype=torch.bool)
    if op == "where":
        return b("cast", b("where", args[0], *(_to(b, a, wide) for a in args[1:]), dtype=wide), dtype=dtype)
    if op in LOGICAL:
        raise refusal(f"{name} on {dtype}")
    args = [_to(b, a, wide) for a in args]
    result = b(op, *args, dtype=wide) if op else COMPOSITE[name](b, *args)
    return b("cast", result, dtype=dtype)


def _compared_in(b: Builder, args: list[Any]) -> torch.dtype:
    """Integers are compared as such; float32 would lose some of their digits."""
    kinds = {b.dtype(a) for a in args if isinstance(a, Ref)} - {torch.bool}
    numbers_are_whole = all(isinstance(a, Ref | int) for a in args)
    if kinds and numbers_are_whole and not any(kind.is_floating_point for kind in kinds):
        return reduce(torch.promote_types, kinds)
    return reduce(torch.promote_types, kinds, torch.float32)


def _to(b: Builder, a: Any, dtype: torch.dtype) -> Any:
    if isinstance(a, Ref):
        return b("cast", a, dtype=dtype)
    return _typed(a, dtype) if isinstance(a, bool | int | float) else a


def _typed(value: Any, dtype: torch.dtype | None) -> Const:
    if not isinstance(value, bool | int | float):
        raise refusal("full with a value that is computed")
    if dtype == torch.bool:
        return bool(value)
    return float(value) if dtype is None or dtype.is_floating_point else int(value)


def _check_shape(name: str, value: torch.Tensor) -> None:
    if value.shape not in (TRACE_SHAPE, torch.Size(())):
        raise refusal(f"{name} giving shape {tuple(value.shape)} from {tuple(TRACE_SHAPE)}")


def refusal(operation: str | OpOverload) -> UnsupportedActivationError:
    """The error for an operation outside the table: its name, and what to do instead."""
    if isinstance(operation, OpOverload):
        name, tags = operation._schema.name.removeprefix("aten::"), operation.tags
    else:
        name, tags = operation, []
    base = name.split(".")[0].split(" ")[0]
    known = f"{', '.join(sorted(PRIMITIVE))}, ..."
    if base in RANDOM or torch.Tag.nondeterministic_seeded in tags:
        advice = "a random function has no reproducible backward here; apply dropout to the attention's output instead"
    elif base == "_local_scalar_dense":
        name, advice = ".item()", "a value cannot leave the kernel; keep it a tensor, or pass it through params"
    elif "softmax" in base:
        advice = (
            'it looks at the whole row; activation="softmax" is softmax, and normalize="sum" divides any function by '
            "its sum over the row"
        )
    elif base in ROW_SUMS:
        advice = (
            "an activation maps each score on its own; to divide by a sum over the row, give the function itself and "
            'normalize="sum" or "abs"'
        )
    elif base in PLACES:
        advice = (
            "a function gets the position of a score by keyword-only arguments: def f(s, *, q_idx, kv_idx), also b, h, "
            "q_len, kv_len, q_row, kv_row (docs/positions.md); a mask says which pairs count (mask=, causal, window)"
        )
    elif torch.Tag.pointwise in tags:
        advice = f"there is no device code for it: write it with operations that have some ({known})"
    else:
        advice = (
            f"an activation maps each score on its own: use element-wise torch operations ({known}), and params for "
            "learned scalars"
        )
    return UnsupportedActivationError(f"the activation uses {name}, which cannot run inside the kernel: {advice}")
