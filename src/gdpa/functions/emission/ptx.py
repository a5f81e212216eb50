"""A function of LANES = 8 scores at a time as one block of PTX, with p rounded to 16 bits and packed (but in guarded
code, which takes GUARDED_LANES, and leaves the rounding to the kernel).

The Hopper kernels have no register to spare. Triton computes a function operation by operation over a whole tile, which
keeps every intermediate of every score alive; in blocks of a few scores, interleaved to hide each other's latency, the
intermediates of one block die before the next begins, and p is rounded and packed at once. Functions with an operation
that has no short PTX form are computed tile by tile instead (``assemble`` returns None).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gdpa.functions.graph import Arg, Graph, Node, Ref

EXACT = {
    "neg": "neg.f32 {d}, {0};", "abs": "abs.f32 {d}, {0};",
    "add": "add.rn.f32 {d}, {0}, {1};", "sub": "sub.rn.f32 {d}, {0}, {1};", "mul": "mul.rn.f32 {d}, {0}, {1};",
    "maximum": "max.NaN.f32 {d}, {0}, {1};", "minimum": "min.NaN.f32 {d}, {0}, {1};",
    "saturate": "cvt.sat.f32.f32 {d}, {0};",  # a modifier of what makes {0}; 0 for NaN
    "floor": "cvt.rmi.f32.f32 {d}, {0};", "ceil": "cvt.rpi.f32.f32 {d}, {0};", "trunc": "cvt.rzi.f32.f32 {d}, {0};",
    "round": "cvt.rni.f32.f32 {d}, {0};",  # half to even
    "sign": "{{ .reg .pred more, less; setp.gt.f32 more, {0}, 0f00000000; setp.lt.f32 less, {0}, 0f00000000; "
            "selp.f32 {d}, 0f3F800000, 0f00000000, more; selp.f32 {d}, 0fBF800000, {d}, less; }}",  # 0 for NaN
    "where": "selp.f32 {d}, {1}, {2}, {0};",
    "lt": "setp.lt.f32 {d}, {0}, {1};", "le": "setp.le.f32 {d}, {0}, {1};", "gt": "setp.gt.f32 {d}, {0}, {1};",
    "ge": "setp.ge.f32 {d}, {0}, {1};", "eq": "setp.eq.f32 {d}, {0}, {1};", "ne": "setp.neu.f32 {d}, {0}, {1};",
    "isnan": "setp.nan.f32 {d}, {0}, {0};",
    "and": "and.pred {d}, {0}, {1};", "or": "or.pred {d}, {0}, {1};", "xor": "xor.pred {d}, {0}, {1};",
    "not": "not.pred {d}, {0};",
}  # fmt: skip
CLOSE = {
    "exp2": "ex2.approx.ftz.f32 {d}, {0};", "log2": "lg2.approx.ftz.f32 {d}, {0};",
    "reciprocal": "rcp.approx.ftz.f32 {d}, {0};", "sqrt": "sqrt.approx.ftz.f32 {d}, {0};",
    "rsqrt": "rsqrt.approx.ftz.f32 {d}, {0};",
}  # fmt: skip
CODE = {
    "accurate": EXACT,
    "close": {**EXACT, **CLOSE},
    "short": {**EXACT, **CLOSE},
    "approx": {**EXACT, **CLOSE, "tanh": "tanh.approx.f32 {d}, {0};"},
}
PACK = {torch.bfloat16: "cvt.rn.bf16x2.f32", torch.float16: "cvt.rn.f16x2.f32"}


LANES = 8


def float32_literal(c: float) -> str:
    return "0f" + struct.pack(">f", c).hex().upper()


@dataclass(frozen=True)
class Dialect:
    """How operations are written in one kind of arithmetic, by name; ``constant`` writes a number."""

    code: dict[str, str]
    multiply_add: str
    negate: str
    registers: dict[torch.dtype, str]
    constant: Callable[[float], str]


FLOAT32 = {
    level: Dialect(
        code, "fma.rn.f32 {d}, {0}, {1}, {2};", "neg.f32 {d}, {0};", {torch.float32: ".f32", torch.bool: ".pred"},
        float32_literal,
    )
    for level, code in CODE.items()
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """Arguments of ``inline_asm_elementwise``."""

    text: str
    constraints: str
    pack: int = LANES  # how many scores it takes
    votes: bool = False  # all lanes of a warp take part together: the compiler must not move it into a branch


def assemble(graph: Graph, level: str, dtype: torch.dtype) -> Block | None:
    """``graph`` on LANES scores, its first output rounded to ``dtype`` and packed, the others float32. None if PTX has
    no short form of some operation at this level."""
    return _assembled(graph, level, dtype, 1, False)


def assemble_products(graph: Graph, level: str, dtype: torch.dtype) -> Block | None:
    """The same with two outputs rounded and packed, and one more input: where that is not 0, which all threads agree
    on, a branch skips everything and all outputs are 0."""
    return _assembled(graph, level, dtype, 2, True)


def _assembled(graph: Graph, level: str, dtype: torch.dtype, packed: int, skips: bool) -> Block | None:
    dialect = FLOAT32[level]
    if dtype not in PACK or not has_code(graph, dialect):
        return None
    # The registers of the outputs come first, half as many for packed ones, then those of the inputs.
    first = [0]
    for i in range(len(graph.outputs)):
        first.append(first[-1] + (LANES // 2 if i < packed else LANES))
    n_inputs = graph.n_inputs + skips
    inputs = [f"${i}" for i in range(first[-1], first[-1] + LANES * n_inputs)]
    lanes = [Lane(graph, dialect, lane, inputs[lane::LANES]) for lane in range(LANES)]
    lines = interleaved(lanes)
    for i, output in enumerate(graph.outputs):
        values = [lane.value(output) for lane in lanes]
        if i < packed:
            pairs = zip(values[::2], values[1::2], strict=True)
            lines += [f"{PACK[dtype]} ${first[i] + k}, {high}, {low};" for k, (low, high) in enumerate(pairs)]
        else:
            lines += [f"mov.b32 ${first[i] + k}, {value};" for k, value in enumerate(values)]
    if skips:
        test = [".reg .pred skips;", f"setp.ne.u32 skips, {inputs[-1]}, 0;", "@skips bra.uni SKIPPED;"]
        zeros = [f"mov.b32 ${k}, 0;" for k in range(first[-1])]
        lines = [*test, *lines, "bra.uni DONE;", "SKIPPED:", *zeros, "DONE:"]
    return Block("\n".join(["{", *lines, "}"]), ",".join(["=r"] * first[-1] + ["r"] * len(inputs)))


# ---- two codes, chosen by the scores ---------------------------------------------------------------------------------
GUARDED_LANES = 64  # all of a thread's, of a block of 64 x 128
# An accumulator of the tensor cores gives a thread two scores of one row, two of the row 8 below, then the same in the
# next columns. Three scores of each row are looked at, in columns far apart.
ROW_SAMPLES = ((0, 29, 56), (2, 31, 58))
LANES_OF_ROW = 4  # that hold scores of the same row


def assemble_guarded(
    cheap: Graph, cheap_level: str, careful: Graph, careful_level: str, threshold: float, dtype: torch.dtype,
    stretched: bool = False,
) -> Block | None:  # fmt: skip
    """Two codes of one value: the cheap one, unless in some row of some lane of the warp all sampled scores lie beyond
    ``threshold``, as seen from 0. Scores that are exactly 0 say nothing: they stand for pairs that do not exist. The
    codes may take more numbers; if the scores are ``stretched``, the first of them is the factor of what the vote is
    about. Values are float32: rounded here, behind a branch, they would have to be moved once more to where a product
    reads them."""
    codes = ((cheap, FLOAT32[cheap_level]), (careful, FLOAT32[careful_level]))
    if dtype not in PACK or not all(has_code(graph, dialect) for graph, dialect in codes):
        return None
    outputs = [f"${i}" for i in range(GUARDED_LANES)]
    inputs = [f"${len(outputs) + i}" for i in range(GUARDED_LANES * careful.n_inputs)]
    scores, factors = inputs[:GUARDED_LANES], inputs[GUARDED_LANES : 2 * GUARDED_LANES] if stretched else None
    first, second = (
        [line for i in range(0, GUARDED_LANES, LANES) for line in _part(*code, i, inputs, outputs)] for code in codes
    )
    lines = [
        "{", *_vote(scores, threshold, factors), "@careful bra.uni CAREFUL;", *first, "bra.uni DONE;", "CAREFUL:",
        *second, "DONE:", "}",
    ]  # fmt: skip
    tied = [str(i) for i in range(GUARDED_LANES)]  # each value takes the place of its score
    constraints = ["=r"] * len(outputs) + tied + ["r"] * (len(inputs) - len(tied))
    return Block("\n".join(lines), ",".join(constraints), GUARDED_LANES, votes=True)


def _part(graph: Graph, dialect: Dialect, start: int, inputs: list[str], outputs: list[str]) -> list[str]:
    """LANES scores from ``start`` on."""
    lanes = [Lane(graph, dialect, i, inputs[start + i :: GUARDED_LANES]) for i in range(LANES)]
    results = [f"mov.b32 {outputs[start + i]}, {lane.value(graph.outputs[0])};" for i, lane in enumerate(lanes)]
    return ["{", *interleaved(lanes), *results, "}"]


def _vote(scores: list[str], threshold: float, factors: list[str] | None = None) -> list[str]:
    """The predicate ``careful``, the same in all lanes, by scores or their products with ``factors``.

    Bits of floats are compared as unsigned integers. Seen from a negative threshold with bits t, the scores from +0 up
    and then from -0 down to it are 0 to t, and those beyond are larger. Less 1, a zero is the largest of all numbers.
    For a positive threshold signs are turned first (0 - x). Otherwise x + 0 has no -0 either, which a negative param or
    scale makes of a zero.
    """
    bits = struct.unpack(">I", struct.pack(">f", -abs(threshold)))[0] - 1
    lines = [".reg .pred careful;", ".reg .b32 bits, nearest;"]
    for row, samples in enumerate(ROW_SAMPLES):
        for n, i in enumerate(samples):
            score = scores[i]
            if factors is not None:
                lines.append(f"mul.rn.f32 bits, {score}, {factors[i]};")
                score = "bits"
            lines.append(f"{'sub' if threshold > 0 else 'add'}.rn.f32 bits, {float32_literal(0.0)}, {score};")
            lines.append(f"sub.u32 {'bits' if n else 'nearest'}, bits, 1;")
            lines += ["min.u32 nearest, nearest, bits;"] * (n > 0)
        lines.append(f"sub.u32 nearest, nearest, {bits:#x};")
        left = 0xFFFFFFFF - bits
        condition = ("setp.lt.or.u32", ", careful") if row else ("setp.lt.u32", "")
        lines.append(f"{condition[0]} careful, nearest, {left:#x}{condition[1]};")
    return [*lines, "vote.sync.any.pred careful, careful, 0xffffffff;"]


def has_code(graph: Graph, dialect: Dialect) -> bool:
    """Whether the dialect has every operation and every kind of number of ``graph``."""
    return all(_is_written(node, dialect) for node in graph.nodes if node.op != "input")


def _is_written(node: Node, dialect: Dialect) -> bool:
    if node.op not in dialect.code or (node.op == "where" and node.dtype == torch.bool):  # selp takes no predicates
        return False
    kinds = {node.dtype} | {
        torch.bool if isinstance(a, bool) else torch.float32 for a in node.args if not isinstance(a, Ref)
    }
    return kinds <= set(dialect.registers)


def interleaved(lanes: list[Lane]) -> list[str]:
    """Declarations, then the same operation of every lane side by side."""
    lines = [line for lane in lanes for line in lane.declarations()]
    for side_by_side in zip(*(lane.lines for lane in lanes), strict=True):
        lines += side_by_side
    return lines


class Lane:
    """The instructions of one score, or of one register of scores."""

    def __init__(self, graph: Graph, dialect: Dialect, lane: int, inputs: list[str]) -> None:
        self.graph, self.dialect, self.lane, self.inputs = graph, dialect, lane, inputs
        self.fused = fused_products(graph)
        self.lines = [
            self._line(i, node) for i, node in enumerate(graph.nodes) if node.op != "input" and i not in self.fused
        ]

    def declarations(self) -> list[str]:
        return [
            f".reg {self.dialect.registers[n.dtype]} {self._name(i)};"
            for i, n in enumerate(self.graph.nodes)
            if n.op != "input" and i not in self.fused
        ]

    def _name(self, index: int) -> str:
        return f"x{index}_{self.lane}"

    def value(self, a: Arg) -> str:
        if not isinstance(a, Ref):
            return self.dialect.constant(float(a))
        node = self.graph.nodes[a.index]
        return self.inputs[int(node.args[0])] if node.op == "input" else self._name(a.index)  # type: ignore[arg-type]

    def _line(self, index: int, node: Node) -> str:
        if node.op in ("add", "sub"):
            for place, a in enumerate(node.args):
                if isinstance(a, Ref) and a.index in self.fused and self.fused[a.index] == index:
                    return self._multiply_add(index, node, place, self.graph.nodes[a.index])
        return self.dialect.code[node.op].format(*(self.value(a) for a in node.args), d=self._name(index))

    def _multiply_add(self, index: int, node: Node, place: int, product: Node) -> str:
        name, before = self._name(index), ""
        x, y = (self.value(a) for a in product.args)
        z = self.value(node.args[1 - place])
        if node.op == "sub":  # x y - z, or z - x y
            if place == 0:
                z = self._negated(node.args[1])
            elif not isinstance(product.args[1], Ref):
                y = self._negated(product.args[1])
            else:
                before, x = self.dialect.negate.format(x, d=name) + " ", name
        return before + self.dialect.multiply_add.format(x, y, z, d=name)

    def _negated(self, a: Arg) -> str:
        assert not isinstance(a, Ref)
        return self.value(-float(a))


def fused_products(graph: Graph) -> dict[int, int]:
    """Products that are part of a multiply-add: {product: its only user, a sum}."""
    users: dict[int, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        for a in node.args:
            if isinstance(a, Ref):
                users.setdefault(a.index, []).append(i)
    outputs = {o.index for o in graph.outputs if isinstance(o, Ref)}
    fused: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        if node.op not in ("add", "sub"):
            continue
        for place, a in enumerate(node.args):
            if not isinstance(a, Ref) or graph.nodes[a.index].op != "mul" or a.index in outputs:
                continue
            other_is_node = isinstance(node.args[1 - place], Ref)
            if users[a.index] == [i] and not (node.op == "sub" and place == 0 and other_is_node):
                fused[a.index] = i
                break
    return fused
