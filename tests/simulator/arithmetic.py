"""What instructions compute, for 32 threads at once: expressions of numpy's arrays, and the functions they call.

A handler takes an instruction and ``value(i, kind)``, the expression for its i-th argument read as ``kind``, and
returns the expression for the result.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from simulator.ptx import WIDTHS, Instruction, UnknownError

Value = Callable[[int, str], str]
U1, U2, U4, U8 = np.uint8, np.uint16, np.uint32, np.uint64
I2, I4, I8 = np.int16, np.int32, np.int64
F2, F4, F8 = np.float16, np.float32, np.float64
DTYPES = {"pred": "BOOL", "b8": "U1", "u8": "U1", "s8": "I1", "b16": "U2", "u16": "U2", "s16": "I2", "f16": "F2",
          "bf16": "U2", "b32": "U4", "u32": "U4", "s32": "I4", "f32": "F4", "b64": "U8", "u64": "U8", "s64": "I8",
          "f64": "F8"}  # fmt: skip
SCOPE: dict[str, Any] = {"np": np, "U1": U1, "U2": U2, "U4": U4, "U8": U8, "I1": np.int8, "I2": I2, "I4": I4, "I8": I8,
                         "F2": F2, "F4": F4, "F8": F8, "BOOL": np.bool_, "where": np.where}  # fmt: skip


def dtype_of(kind: str) -> Any:
    return SCOPE[DTYPES[kind]]


def number(text: str, kind: str) -> Any:
    """A literal, as a number of numpy's."""
    if text.startswith(("0f", "0d")):
        bits: Any = struct.unpack(">f" if text[1] == "f" else ">d", bytes.fromhex(text[2:]))[0]
        if not kind.startswith("f"):  # its bits
            return np.array(bits, F4 if text[1] == "f" else F8).view(f"u{WIDTHS[kind] // 8}")
        return dtype_of(kind)(bits)
    width = max(WIDTHS[kind], 8)
    bits = np.array(int(text.rstrip("U"), 0) % 2**width, f"u{width // 8}")
    return bits.view(dtype_of(kind)) if kind != "pred" else np.bool_(bits)


def in_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """Expressions may call it."""
    SCOPE[function.__name__] = function
    return function


# ---- functions -------------------------------------------------------------------------------------------------------
@in_scope
def put(where: Any, new: Any, old: Any) -> Any:
    """The new values where threads are active."""
    return np.where(where, new, old.view(new.dtype))


@in_scope
def fma(a: Any, b: Any, c: Any) -> Any:
    if a.dtype == F4:
        return (a.astype(F8) * b + c).astype(F4)
    product, lost = a * b, _lost(a, b)
    total = product + c
    part = total - product
    return total + ((product - (total - part)) + (c - part) + lost)


def _lost(a: Any, b: Any) -> Any:
    """What rounding a product of float64 leaves out (Dekker)."""
    upper, lower = [], []
    for x in (a, b):
        scaled = x * F8(2**27 + 1)
        upper.append(scaled - (scaled - x))
        lower.append(x - upper[-1])
    rest = upper[0] * upper[1] - a * b + upper[0] * lower[1] + lower[0] * upper[1]
    return rest + lower[0] * lower[1]


@in_scope
def cut_off(a: Any, b: Any) -> Any:
    """The sum of float32, rounded towards zero."""
    total = a.astype(F8) + b
    part = total - a
    lost = (a - (total - part)) + (b - part)
    nearest = total.astype(F4)
    beyond = (np.abs(nearest) > np.abs(total)) | ((nearest == total) & (np.sign(lost) * np.sign(total) < 0))
    return np.where(beyond, np.nextafter(nearest, F4(0)), nearest)


@in_scope
def saturated(x: Any) -> Any:
    return np.where(x > 0, np.fmin(x, F4(1)), F4(0))


@in_scope
def divided(a: Any, b: Any) -> Any:
    """Rounded to zero, as C does."""
    if a.dtype.kind == "u":
        return a // np.where(b == 0, b.dtype.type(1), b)
    quotient = np.abs(a.astype(I8)) // np.maximum(np.abs(b.astype(I8)), 1)
    return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)


@in_scope
def remainder(a: Any, b: Any) -> Any:
    return a - divided(a, b) * b


@in_scope
def left(a: Any, by: Any) -> Any:
    width = 8 * a.itemsize
    return np.where(by < width, a << np.minimum(by, U4(width - 1)).astype(a.dtype), a.dtype.type(0))


@in_scope
def right(a: Any, by: Any) -> Any:
    """Copies of the sign come in on the left, or zeros."""
    width = 8 * a.itemsize
    moved = a >> np.minimum(by, U4(width - 1)).astype(a.dtype)
    return np.where(by < width, moved, 0).astype(a.dtype) if a.dtype.kind == "u" else moved


@in_scope
def high(a: Any, b: Any) -> Any:
    """The upper half of a product."""
    if a.itemsize < 8:
        wide = I8 if a.dtype.kind == "i" else U8
        return (a.astype(wide) * b.astype(wide) >> wide(8 * a.itemsize)).astype(a.dtype)
    return np.array([int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)], a.dtype)


@in_scope
def field_of(a: Any, start: Any, length: Any) -> Any:
    """Some of the bits; the first of them is the sign, if there is one."""
    one = np.full(32, 1, f"u{a.itemsize}")
    bits = right(a.view(one.dtype), start) & (left(one, length) - one)
    if a.dtype.kind == "i":
        sign = left(one, length - U4(1))
        bits = (bits ^ sign) - sign
    return bits.view(a.dtype)


@in_scope
def funnel(low: Any, high: Any, by: Any, to_left: bool) -> Any:
    both = high.astype(U8) << U8(32) | low
    by = (by & U4(31)).astype(U8)
    return ((both << by) >> U8(32) if to_left else both >> by).astype(U4)


@in_scope
def chosen_bytes(a: Any, b: Any, selector: Any) -> Any:
    """prmt"""
    both = b.astype(U8) << U8(32) | a
    result = np.zeros(32, U4)
    for i in range(4):
        of = selector >> U4(4 * i) & U4(15)
        byte = (both >> ((of & U4(7)) * U4(8)).astype(U8)).astype(U4) & U4(255)
        byte = np.where(of & U4(8), (byte >> U4(7)) * U4(255), byte)
        result |= (byte << U4(8 * i)).astype(U4)
    return result


@in_scope
def by_table(a: Any, b: Any, c: Any, table: int) -> Any:
    """lop3"""
    terms = [
        (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1
    ]  # fmt: skip
    return np.bitwise_or.reduce(terms) if terms else np.zeros(32, U4)


@in_scope
def ones_in(a: Any) -> Any:
    return np.array([int(x).bit_count() for x in a], U4)


@in_scope
def leading_zeros(a: Any) -> Any:
    return np.array([8 * a.itemsize - int(x).bit_length() for x in a], U4)


@in_scope
def from_bfloat16(x: Any) -> Any:
    return (x.astype(U4) << U4(16)).view(F4)


@in_scope
def to_bfloat16(x: Any) -> Any:
    """To the nearest, ties to even."""
    bits = x.view(U4)
    rounded = (bits + U4(0x7FFF) + (bits >> U4(16) & U4(1))) >> U4(16)
    return np.where(np.isnan(x), U4(0x7FFF), rounded).astype(U2)


@in_scope
def packed(high: Any, low: Any, kind: str) -> Any:
    if kind == "bf16x2":
        return to_bfloat16(high).astype(U4) << U4(16) | to_bfloat16(low)
    return high.astype(F2).view(U2).astype(U4) << U4(16) | low.astype(F2).view(U2)


@in_scope
def to_integer(x: Any, rounding: str, dtype: Any) -> Any:
    whole = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}[rounding](np.where(np.isnan(x), 0, x))
    limits = np.iinfo(dtype)
    inside = np.clip(whole.astype(F8), float(limits.min), float(limits.max) if limits.max < 2**53 else 2.0**62)
    return inside.astype(dtype)


# ---- instructions ----------------------------------------------------------------------------------------------------
ROUNDINGS = ("rn", "rz", "rzi", "rmi", "rpi", "rni")


def kind_of(ins: Instruction) -> str:
    """The type that an instruction computes in: the last one it names."""
    found = next((k for k in reversed(ins.kinds) if k in WIDTHS), None)
    if found is None:
        raise UnknownError(f"{ins.name} at {ins.where}")
    return found


def _joined(sign: str) -> Callable[[Instruction, Value], str]:
    def code(ins: Instruction, value: Value) -> str:
        half = {"s16x2": "U2", "u16x2": "U2", "f16x2": "F2"}.get(ins.kinds[-1])
        if half:
            return f"({value(0, 'u32')}.view({half}) {sign} {value(1, 'u32')}.view({half})).view(U4)"
        kind = kind_of(ins)
        found = f"({value(0, kind)} {sign} {value(1, kind)})"
        if "rz" in ins.kinds and (sign, kind) == ("+", "f32"):
            return f"cut_off({value(0, kind)}, {value(1, kind)})"
        if "rz" in ins.kinds or "cc" in ins.kinds:
            raise UnknownError(ins.name)
        return f"saturated({found})" if "sat" in ins.kinds else found

    return code


def _called(name: str) -> Callable[[Instruction, Value], str]:
    def code(ins: Instruction, value: Value) -> str:
        kind = kind_of(ins)
        return f"{name}({', '.join(value(i, kind) for i in range(len(ins.args) - 1))})"

    return code


def _product(ins: Instruction, value: Value, add: bool = False) -> str:
    if ins.kinds[-1] == "f16x2" and ins.op == "mul":
        return f"({value(0, 'u32')}.view(F2) * {value(1, 'u32')}.view(F2)).view(U4)"
    kind = kind_of(ins)
    if kind.startswith("f"):
        a, b = value(0, kind), value(1, kind)
        found = f"fma({a}, {b}, {value(2, kind)})" if add else f"({a} * {b})"
        return f"saturated({found})" if "sat" in ins.kinds else found
    if ins.kinds[0] == "wide":
        wide = f"{kind[0]}{2 * WIDTHS[kind]}"
        dtype = DTYPES[wide]
        found = f"{value(0, kind)}.astype({dtype}) * {value(1, kind)}.astype({dtype})"
    elif ins.kinds[0] == "hi":
        wide, found = kind, f"high({value(0, kind)}, {value(1, kind)})"
    else:
        wide, found = kind, f"{value(0, kind)} * {value(1, kind)}"
    return f"({found} + {value(2, wide)})" if add else f"({found})"


def _least(ins: Instruction, value: Value) -> str:
    kind = kind_of(ins)
    names = {"min": ("fmin", "minimum"), "max": ("fmax", "maximum")}[ins.op]
    name = names["NaN" in ins.kinds] if kind.startswith("f") else names[1]
    found = f"np.{name}({value(0, kind)}, {value(1, kind)})"
    if len(ins.args) > 3:
        found = f"np.{name}({found}, {value(2, kind)})"
    return f"np.maximum({found}, 0)" if "relu" in ins.kinds else found


def _shifted(ins: Instruction, value: Value) -> str:
    return f"{'left' if ins.op == 'shl' else 'right'}({value(0, kind_of(ins))}, {value(1, 'u32')})"


def _negated(ins: Instruction, value: Value) -> str:
    kind = kind_of(ins)
    return f"np.negative({value(0, kind)})" if ins.op == "neg" else f"(~{value(0, kind)})"


def _approximated(ins: Instruction, value: Value) -> str:
    x = value(0, kind_of(ins))
    forms = {
        "ex2": "np.exp2({})", "lg2": "np.log2({})", "rcp": "(F4(1) / {})", "sqrt": "np.sqrt({})", "sin": "np.sin({})",
        "rsqrt": "(F4(1) / np.sqrt({}))", "tanh": "np.tanh({})", "cos": "np.cos({})", "abs": "np.abs({})",
    }  # fmt: skip
    return forms[ins.op].format(x)


def _quotient(ins: Instruction, value: Value) -> str:
    kind = kind_of(ins)
    a, b = value(0, kind), value(1, kind)
    return f"({a} / {b})" if kind.startswith("f") else f"divided({a}, {b})"


def _bits(ins: Instruction, value: Value) -> str:
    return f"field_of({value(0, kind_of(ins))}, {value(1, 'u32')}, {value(2, 'u32')})"


def _chosen(ins: Instruction, value: Value) -> str:
    kind = kind_of(ins)
    return f"where({value(2, 'pred')}, {value(0, kind)}, {value(1, kind)})"


SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">",
         "hs": ">="}  # fmt: skip


def _compared(ins: Instruction, value: Value) -> str:
    comparison, kind = ins.kinds[0], kind_of(ins)
    a, b = value(0, kind), value(1, kind)
    if comparison in ("num", "nan"):
        found = f"np.isnan({a} + {b})" if comparison == "nan" else f"~np.isnan({a} + {b})"
    elif comparison in SIGNS:
        found = f"({a} {SIGNS[comparison]} {b})"
        if comparison == "ne" and kind.startswith("f"):  # of numbers only
            found = f"({found} & ~np.isnan({a} + {b}))"
    else:  # or one of them is NaN
        found = f"({a} {SIGNS[comparison[:-1]]} {b})"
        found = found if comparison == "neu" else f"({found} | np.isnan({a} + {b}))"
    joined = next((k for k in ins.kinds[1:] if k in ("and", "or", "xor")), None)
    return found if joined is None else f"({found} {LOGIC[joined]} {value(2, 'pred')})"


LOGIC = {"and": "&", "or": "|", "xor": "^"}


def _converted(ins: Instruction, value: Value) -> str:
    kinds = [k for k in ins.kinds if k in WIDTHS or k in ("bf16x2", "f16x2")]
    to, of = kinds[0], kinds[-1]
    rounding = next((k for k in ins.kinds if k in ROUNDINGS), None)
    if "sat" in ins.kinds:
        if kinds != ["f32", "f32"] or rounding is not None:
            raise UnknownError(ins.name)
        return f"saturated({value(0, of)})"
    if to in ("bf16x2", "f16x2"):
        return f"packed({value(0, 'f32')}, {value(1, 'f32')}, {to!r})"
    x = f"from_bfloat16({value(0, 'b16')})" if of == "bf16" else value(0, of)
    if to == "bf16":
        return f"to_bfloat16({x})"
    if of.startswith(("f", "bf")) and not to.startswith("f"):
        return f"to_integer({x}, {rounding!r}, {DTYPES[to]})"
    if of.startswith("f") and rounding in ("rzi", "rmi", "rpi", "rni"):
        return {"rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil", "rni": "np.rint"}[rounding] + f"({x})"
    return f"{x}.astype({DTYPES[to]})"


def _moved(ins: Instruction, value: Value) -> str:
    return value(0, kind_of(ins))


def _looked_up(ins: Instruction, value: Value) -> str:
    a, b, c = (value(i, "u32") for i in range(3))
    return f"by_table({a}, {b}, {c}, {int(ins.args[4], 0)})"


HANDLERS: dict[str, Callable[[Instruction, Value], str]] = {
    "add": _joined("+"), "sub": _joined("-"), "and": _joined("&"), "or": _joined("|"), "xor": _joined("^"),
    "mul": _product, "mad": lambda ins, value: _product(ins, value, add=True),
    "fma": lambda ins, value: _product(ins, value, add=True), "div": _quotient, "rem": _called("remainder"),
    "min": _least, "max": _least, "shl": _shifted, "shr": _shifted, "not": _negated, "neg": _negated, "bfe": _bits,
    "selp": _chosen, "setp": _compared, "cvt": _converted, "mov": _moved, "cvta": _moved, "lop3": _looked_up,
    "shf": lambda ins, value: f"funnel({', '.join(value(i, 'u32') for i in range(3))}, {ins.kinds[0] == 'l'})",
    "prmt": lambda ins, value: f"chosen_bytes({', '.join(value(i, 'u32') for i in range(3))})",
    "popc": lambda ins, value: f"ones_in({value(0, kind_of(ins))})",
    "clz": lambda ins, value: f"leading_zeros({value(0, kind_of(ins))})",
    **dict.fromkeys(("ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh", "sin", "cos", "abs"), _approximated),
}  # fmt: skip
