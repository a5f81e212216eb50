"""The device code of each operation, in Triton."""

from __future__ import annotations

import math
from typing import Any

import torch

from gdpa.functions.accuracy.precision import LEVELS
from gdpa.functions.graph import Node, Ref

# Device code of each operation, from the most accurate; other levels replace some (see precision.py), and expand.py
# writes more through these.
CODE = {
    "accurate": {
        "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "mul_rn": "places.product({}, {})",
        "div": "tl.div_rn({}, {})", "div_rn": "tl.div_rn({}, {})", "neg": "-{}",
        "abs": "tl.abs({})", "sign": "maths.sign({})", "minimum": "tl.minimum({}, {}, tl.PropagateNan.ALL)",
        "maximum": "tl.maximum({}, {}, tl.PropagateNan.ALL)", "pow": "maths.pow({}, {})",
        "fmod": "maths.fmod({}, {})", "remainder": "maths.remainder({}, {})", "atan2": "maths.atan2({}, {})",
        "saturate": "tl.minimum(tl.maximum({}, 0.0), 1.0)",
        "sqrt": "tl.sqrt_rn({})", "rsqrt": "tl.rsqrt({})", "reciprocal": "1.0 / {}",
        "exp": "maths.exp({})", "exp2": "tl.exp2({})", "expm1": "maths.expm1({})",
        "log": "tl.log({})", "log2": "tl.log2({})", "log1p": "maths.log1p({})",
        "sin": "tl.sin({})", "cos": "tl.cos({})", "tan": "maths.tan({})",
        "asin": "maths.asin({})", "acos": "maths.acos({})", "atan": "maths.atan({})",
        "sinh": "maths.sinh({})", "cosh": "maths.cosh({})", "tanh": "maths.tanh({})",
        "sigmoid": "maths.sigmoid({})", "erf": "tl.erf({})", "erfc": "maths.erfc({})",
        "floor": "tl.floor({})", "ceil": "tl.ceil({})", "round": "maths.round({})", "trunc": "maths.trunc({})",
        "where": "tl.where({}, {}, {})", "isnan": "{0} != {0}", "isinf": "tl.abs({}) == float('inf')",
        "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}", "eq": "{} == {}", "ne": "{} != {}",
        "and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}", "not": "{} == 0",
    },
    "close": {
        "log2": "maths.log2_close({})", "pow": "maths.pow_close({}, {})",
        "reciprocal": "maths.rcp_close({})", "sqrt": "tl.sqrt({})",
    },
    "short": {},
    "approx": {
        "tanh": "maths.tanh_approx({})",
    },
}  # fmt: skip

TL_DTYPE = {
    torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32",
    torch.float64: "tl.float64", torch.bool: "tl.int1", torch.uint8: "tl.uint8", torch.int8: "tl.int8",
    torch.int16: "tl.int16", torch.int32: "tl.int32", torch.int64: "tl.int64",
}  # fmt: skip


def literal(c: bool | int | float) -> str:
    if isinstance(c, float) and not math.isfinite(c):
        return f"float('{c}')"
    return repr(c) if not isinstance(c, bool) else str(int(c))


def expression(node: Node, level: str, show: Any) -> str:
    """Code of one operation on what ``show`` makes of its arguments."""
    args = [show(a) for a in node.args]
    if node.op == "cast":
        if node.dtype == torch.bool:
            return f"{args[0]} != 0"
        return f"{args[0]}.to({TL_DTYPE[node.dtype]})"
    if node.dtype == torch.float64:  # shortcuts and div_rn are float32 instructions
        level = "accurate"
        if node.op in ("div", "div_rn"):
            return "{} / {}".format(*args)
    code = next(CODE[one][node.op] for one in LEVELS[LEVELS.index(level) :] if node.op in CODE[one])
    text = code.format(*(f"({a})" if a.startswith("-") else a for a in args))
    if node.op == "where" and not any(isinstance(a, Ref) for a in node.args[1:]):
        return f"{text}.to({TL_DTYPE[node.dtype]})"
    return text
