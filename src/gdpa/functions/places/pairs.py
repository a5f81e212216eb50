"""A shift s + leaves with lookups for every pair as blocks of PTX, a few scores at a time.

Triton would load all table entries of a tile before it adds the first of them to a score, and a thread with 64 scores
in registers has none left for 64 entries. In a block of PTX an entry is added as soon as it arrives. Values that depend
on the query or the key alone are inputs, computed by Triton code; everything else (indices, bounds, lookups, the sum)
is written here.
"""

from __future__ import annotations

import math
import re

import torch

from gdpa.functions.emission.ptx import EXACT, float32_literal
from gdpa.functions.graph import Arg, Graph, Node, Ref
from gdpa.functions.places import gather
from gdpa.functions.places.emit import COMPARE, LOGIC, Write, Writer
from gdpa.functions.places.program import EXACT_INTEGERS, Program, refs

KIND = {torch.int32: "s32", torch.int64: "s64", torch.float32: "f32", torch.bool: "pred"}
INTEGER = {
    "add": "add.{t}", "sub": "sub.{t}", "mul": "mul.lo.{t}", "minimum": "min.{t}", "maximum": "max.{t}",
    "neg": "neg.{t}", "abs": "abs.{t}", "bitand": "and.b{n}", "bitor": "or.b{n}", "bitxor": "xor.b{n}",
}  # fmt: skip
# A product and a sum may become one instruction here, as elsewhere in kernels.
SUMS = {"add": "add.f32 {d}, {0}, {1};", "sub": "sub.f32 {d}, {0}, {1};", "mul": "mul.f32 {d}, {0}, {1};"}
FLOAT = {**{op: code for op, code in EXACT.items() if op not in ("and", "or", "xor", "not")}, **SUMS}
# ln(1 + f) is f - f^2 / 2 + f^3 P(f) from f = -1/3 to 1/3, where 1 + f is x divided by a power of two: relative errors
# of at most 5e-9, the least that eight coefficients can have. In float32 it is 0.85 units of the last digit at most.
LOGARITHM = (
    0.3333321511745453, -0.24999797344207764, 0.20010405778884888, -0.16680486500263214, 0.14005862176418304,
    -0.12184277921915054, 0.13984467089176178, -0.12891601026058197,
)  # fmt: skip
LANES = 4  # scores that a block takes: HSTU's two tables spill less than with eight, others the same
# Along diagonals a block takes 32. As the tensor cores leave scores, a thread has two of every 8 columns, in two rows,
# 8 apart: what is looked up in the second row was looked up in the first one, 8 columns before.
ALONG_DIAGONALS = 32
SMALL = 2**22  # below it the digits of 2^23 + x have the integer in x


def blocks_of_pairs(program: Program, sums: Graph) -> Write | None:
    """A function that writes the shift ``sums`` (of the score and the program's outputs) as such blocks. None if
    nothing is looked up for every pair, or if some operation on pairs has no form in PTX."""
    pairs = [i for i, sides in enumerate(program.sides) if len(sides) == 2]
    written = all(has_code(program, i) for i in pairs) and all(n.op in (*FLOAT, "input") for n in sums.nodes)
    written &= all(program.graph.nodes[o.index].dtype in KIND for o in refs(program.graph.outputs))
    if not program.gathers or not written:
        return None

    def write(writer: Writer) -> list[str]:
        block = PairBlock(program, sums, writer)
        return [*block.lines, f"u = {block.call}"]

    return write


def has_code(program: Program, index: int) -> bool:
    """Whether PairCode can write an operation on pairs."""
    node = program.graph.nodes[index]
    if node.op == "lookup":
        return node.dtype == torch.float32
    kinds = {program.graph.nodes[a.index].dtype for a in node.args if isinstance(a, Ref)} | {node.dtype}
    if not kinds <= set(KIND) or any(isinstance(a, bool) for a in node.args):
        return False
    if node.op == "cast":
        return torch.bool not in kinds
    if node.op == "where":
        return node.dtype != torch.bool
    if node.op in COMPARE:
        return torch.bool not in kinds - {node.dtype}
    if node.op in LOGIC or node.op == "not":
        return kinds == {torch.bool}
    if node.op == "log":  # of a count: no 0, no negative number, nothing denormal
        of = program.graph.nodes[node.args[0].index]  # type: ignore[union-attr]
        known = program.ranges[of.args[0].index] if of.op == "cast" and isinstance(of.args[0], Ref) else None
        return known is not None and known[0] >= 1
    return node.op in (FLOAT if node.dtype == torch.float32 else INTEGER)


class PairCode:
    """PTX for values that depend on both sides. A block takes several scores; code is written once, for one of them,
    its *lane*. Inputs are Triton expressions, whose ``lines`` must come first; every lane has its element of each."""

    def __init__(self, program: Program, writer: Writer, first: str, lanes: int) -> None:
        """``first``: code of the first input, of float32."""
        self.program, self.writer, self.lanes = program, writer, lanes
        self._inputs = {first: "r"}  # code of what comes from outside, and the letter of its registers
        self._registers: list[tuple[str, str]] = []  # name and kind of those of a lane
        self._code: list[str] = []  # of a lane, whose number stands where @ does; $<i> is its part of input i
        self._targets: list[str] = []  # the registers that its lines write
        self._written: dict[int, str] = {}

    @property
    def lines(self) -> list[str]:
        return self.writer.lines

    def _declarations(self) -> list[str]:
        return [f".reg .{kind} {name};" for name, kind in self._registers]

    def _of_lane(self, line: str, lane: int) -> str:
        line = re.sub(r"\$<(\d+)>", lambda found: f"${self.lanes * (1 + int(found[1])) + lane}", line)
        return line.replace("@", str(lane)).replace("#", "@")  # which is a predicate's sign in PTX

    def _assembly(self, code: list[str], output: str, dtype: str) -> str:
        """Triton code that runs ``code`` on every ``lanes`` scores; ``output``: the letter of the results."""
        text = "\\n".join(["{", *code, "}"])
        letters = [output] * self.lanes + [letter for letter in self._inputs.values() for _ in range(self.lanes)]
        # Not pure: behind a branch it reads what only that branch knows to be there.
        return (
            f'tl.inline_asm_elementwise("{text}", "{",".join(letters)}", [{", ".join(self._inputs)}], '
            f"dtype={dtype}, is_pure=False, pack={self.lanes})"
        )

    # ---- values ----
    def _outside(self, code: str, letter: str) -> str:
        """Something that one side, or none, has to do with."""
        self._inputs.setdefault(code, letter)
        return f"$<{list(self._inputs).index(code)}>"

    def _value(self, a: Arg, dtype: torch.dtype, is_index: bool = False) -> str:
        """A register of ``a`` in ``dtype``, or a number."""
        if not isinstance(a, Ref):
            return _number(a, dtype)
        own = self.writer.dtype(a)
        if len(self.program.sides[a.index]) == 2:
            name = self._pair(a.index)
        else:
            code = self.writer.index(a) if is_index else self.writer.value(a)
            code = f"{code}.to(tl.int32)" if own == torch.bool else code
            name = self._outside(code, "l" if own == torch.int64 else "r")
            if own == torch.bool:
                name = self._new("pred", "setp.ne.s32 {d}, {0}, 0;", name)
        return name if own == dtype else self._converted(name, own, dtype)

    def _converted(self, name: str, own: torch.dtype, dtype: torch.dtype) -> str:
        if dtype == torch.float32:
            return self._new("f32", f"cvt.rn.f32.{KIND[own]} {{d}}, {{0}};", name)
        if own == torch.float32:
            return self._new(KIND[dtype], f"cvt.rzi.{KIND[dtype]}.f32 {{d}}, {{0}};", name)
        return self._new(KIND[dtype], f"cvt.{KIND[dtype]}.{KIND[own]} {{d}}, {{0}};", name)

    def _float_of(self, a: Arg) -> str:
        """An integer as float32. Signs and bounds of 64 bits are left to floats, which rounding keeps in order and has
        the same for both signs: one instruction instead of three or four."""
        node = self.program.graph.nodes[a.index] if isinstance(a, Ref) else None
        if node is not None and self._sides(a) == 2 and self._is_wide(a):
            if node.op in ("abs", "neg"):
                return self._new("f32", f"{node.op}.f32 {{d}}, {{0}};", self._float_of(node.args[0]))
            bound = node.args[-1]
            if node.op in ("minimum", "maximum") and not isinstance(bound, Ref) and abs(bound) <= EXACT_INTEGERS:
                code = f"{node.op[:3]}.f32 {{d}}, {{0}}, {{1}};"
                return self._new("f32", code, self._float_of(node.args[0]), _number(bound, torch.float32))
        return self._value(a, torch.float32)

    def _as_float(self, output: Arg) -> str:
        if isinstance(output, Ref) and self.writer.dtype(output) == torch.bool:
            return self._new("f32", "selp.f32 {d}, 0f3F800000, 0f00000000, {0};", self._value(output, torch.bool))
        return self._value(output, torch.float32)

    def _register(self, kind: str) -> str:
        name = f"y{len(self._registers)}_@"
        self._registers.append((name, kind))
        return name

    def _new(self, kind: str, code: str, *args: str) -> str:
        """The register that ``code`` writes."""
        name = self._register(kind)
        self._code.append(code.format(*args, d=name))
        self._targets.append(name)
        return name

    def _pair(self, index: int) -> str:
        if index not in self._written:
            node = self.program.graph.nodes[index]
            self._written[index] = self._entry(index, node) if node.op == "lookup" else self._operation(index, node)
        return self._written[index]

    def _operation(self, index: int, node: Node) -> str:
        own = self.writer.dtype(Ref(index))
        if node.op == "cast":
            known = self.program.ranges[index]
            if known is not None and known[0] >= 0 and known[1] < SMALL and self._is_float(node.args[0]):
                return self._whole(self._value(node.args[0], torch.float32))
            return self._float_of(node.args[0]) if own == torch.float32 else self._value(node.args[0], own)
        if node.op == "log":
            return self._logarithm(self._value(node.args[0], torch.float32))
        if node.op in LOGIC or node.op == "not":
            return self._new("pred", EXACT[node.op], *(self._value(a, torch.bool) for a in node.args))
        if node.op == "where":
            yes, no = (self._value(a, own) for a in node.args[1:])
            code = f"selp.{_bits(own)} {{d}}, {{1}}, {{2}}, {{0}};"
            return self._new(KIND[own], code, self._value(node.args[0], torch.bool), yes, no)
        work = self._work(node, own)
        args = [self._value(a, work) for a in node.args]
        if node.op in COMPARE:
            return self._new("pred", f"setp.{'neu' if node.op == 'ne' and work.is_floating_point else node.op}."
                             f"{KIND[work]} {{d}}, {{0}}, {{1}};", *args)  # fmt: skip
        if work == torch.float32:
            return self._new("f32", FLOAT[node.op], *args)
        operands = ", ".join(["{d}", *(f"{{{i}}}" for i in range(len(args)))])
        code = INTEGER[node.op].format(t=KIND[work], n=torch.iinfo(work).bits)
        name = self._new(KIND[work], f"{code} {operands};", *args)
        return name if work == own else self._converted(name, work, own)

    def _work(self, node: Node, own: torch.dtype) -> torch.dtype:
        """What an operation is computed in."""
        kinds = [self.writer.dtype(a) for a in node.args] + [own] * (node.op not in COMPARE)
        for wide in (torch.float32, torch.int64):
            if wide in kinds:
                return wide
        return torch.int32

    def _whole(self, x: str) -> str:
        """A number from 0 to SMALL as an integer, rounded to 0; a conversion takes four times as long as additions."""
        digits = self._new("f32", f"add.rz.f32 {{d}}, {{0}}, {float32_literal(2.0 * SMALL)};", x)
        bits = self._new("s32", "mov.b32 {d}, {0};", digits)
        return self._new("s32", f"sub.s32 {{d}}, {{0}}, {_bits_of(2.0 * SMALL)};", bits)

    def _logarithm(self, x: str) -> str:
        """The natural one, of numbers from 1 on, without the cases that others need."""
        bits = self._new("s32", "mov.b32 {d}, {0};", x)
        above = self._new("s32", f"sub.s32 {{d}}, {{0}}, {_bits_of(2 / 3)};", bits)
        exponent = self._new("s32", f"and.b32 {{d}}, {{0}}, {-(2**23)};", above)
        rest = self._new("s32", "sub.s32 {d}, {0}, {1};", bits, exponent)
        one_more = self._new("f32", "mov.b32 {d}, {0};", rest)
        f = self._new("f32", f"add.f32 {{d}}, {{0}}, {float32_literal(-1.0)};", one_more)
        squared = self._new("f32", "mul.f32 {d}, {0}, {0};", f)
        fma = "fma.rn.f32 {d}, {0}, {1}, {2};"
        total = float32_literal(LOGARITHM[-1])
        for c in (*LOGARITHM[-2::-1], -0.5):
            total = self._new("f32", fma, f, total, float32_literal(c))
        total = self._new("f32", fma, squared, total, f)
        times = self._new("f32", "cvt.rn.f32.s32 {d}, {0};", exponent)
        return self._new("f32", fma, times, float32_literal(math.log(2) * 2.0**-23), total)

    # ---- lookups ----
    def _entry(self, index: int, node: Node) -> str:
        """An entry, 0 if it is outside and ``inside`` has not shown that none is."""
        start, flat, within = self._place(index, node, f"tables[{node.args[0]}]")
        address = self._new("s64", "mad.wide.u32 {d}, {0}, 4, {1};", flat, self._outside(start, "l"))
        if within is None:
            return self._new("f32", "ld.global.nc.f32 {d}, [{0}];", address)
        return self._new("f32", "mov.f32 {d}, 0f00000000; #{0} ld.global.nc.f32 {d}, [{1}];", within, address)

    def _place(self, index: int, node: Node, table: str) -> tuple[str, str, str | None]:
        """Of a lookup in what begins at ``table``: code of the address that it is counted from, the register of the
        number of its entry from there, and of whether there is one, unless that is known."""
        start, known, indices = self._row(index, node, table)
        flat, bounds = "", []
        for dim, a in indices:
            length = f"places.even(sizes[{node.args[0]}][{dim}]).to(tl.int32)"
            size = self._outside(length, "r")
            i = self._value(a, torch.int64 if self._is_wide(a) else torch.int32, is_index=True)
            if not self.writer.inside:
                # Where the row of the table is outside, nothing of it is inside.
                most = f"tl.where({known}, {length}, 0)" if known else ""
                i, within = self._bounded(i, size, self._outside(most, "r") if most else size, a)
                bounds.append(within)
            i = self._converted(i, torch.int64, torch.int32) if self._is_wide(a) else i
            flat = self._new("s32", "mad.lo.s32 {d}, {0}, {1}, {2};", flat, size, i) if flat else i
        for one in bounds[1:]:
            bounds[0] = self._new("pred", EXACT["and"], bounds[0], one)
        return start, flat, bounds[0] if bounds else None

    def _row(self, index: int, node: Node, table: str) -> tuple[str, str, list[tuple[int, Arg]]]:
        """The first indices may be the same for all pairs, such as a head: code of the address of what they leave of
        the table, code of whether they are inside, if there are any, and the other indices with their dimensions."""
        indices = list(enumerate(node.args[1:]))
        sizes = [f"places.even(sizes[{node.args[0]}][{dim}])" for dim, _ in indices]
        first, inside = "", []
        while len(indices) > 1 and not self._sides(indices[0][1]):
            (dim, a), *indices = indices
            name = f"row{index}_{dim}"
            code = self.writer.index(a)
            code = code if isinstance(a, Ref) else f"places.number({code}, {sizes[dim]})"
            self.writer.lines.append(f"{name} = places.from_end({code}, {sizes[dim]})")
            inside.append(f"places.inside({name}, {sizes[dim]})")
            first = f"({first}) * {sizes[dim]} + {name}" if first else f"{name}.to(tl.int64)"
        for dim, _ in indices:
            first = f"({first}) * {sizes[dim]}" if first else ""
        start = f"({table} + {first})" if first else table
        return f"{start}.to(tl.int64)", " & ".join(inside), indices

    def _sides(self, a: Arg) -> int:
        return len(self.program.sides[a.index]) if isinstance(a, Ref) else 0

    def _is_float(self, a: Arg) -> bool:
        return isinstance(a, Ref) and self.writer.dtype(a) == torch.float32

    def _is_wide(self, a: Arg) -> bool:
        return isinstance(a, Ref) and self.writer.dtype(a) == torch.int64

    def _bounded(self, i: str, size: str, most: str, a: Arg) -> tuple[str, str]:
        """A negative index counts from the end; and whether it is below ``most``."""
        wide = self._is_wide(a)
        if wide:
            size, most = (self._converted(x, torch.int32, torch.int64) for x in (size, most))
        known = self.program.ranges[a.index] if isinstance(a, Ref) else (int(a), int(a))
        if known is None or known[0] < 0:
            kind = "s64" if wide else "s32"
            below = self._new("pred", f"setp.lt.{kind} {{d}}, {{0}}, 0;", i)
            i = self._new(kind, f"mov.{kind} {{d}}, {{0}}; #{below} add.{kind} {{d}}, {{0}}, {{1}};", i, size)
        return i, self._new("pred", f"setp.lt.u{'64' if wide else '32'} {{d}}, {{0}}, {{1}};", i, most)


class PairBlock(PairCode):
    """Triton code of one block: ``lines`` that make what it takes, and ``call``, which makes the sum of ``s``."""

    def __init__(self, program: Program, sums: Graph, writer: Writer) -> None:
        nodes = enumerate(zip(program.graph.nodes, program.sides, strict=True))
        pairs = [i for i, (node, sides) in nodes if node.op == "lookup" and len(sides) == 2]
        self._diagonals = [i for i in pairs if gather.is_along_diagonals(program, i)]
        super().__init__(program, writer, "s", ALONG_DIAGONALS if self._diagonals else LANES)
        self._sum(sums, [self._as_float(o) for o in program.graph.outputs])

    @property
    def call(self) -> str:
        declared = [self._of_lane(x, lane) for x in self._declarations() for lane in range(self.lanes)]
        code = [x for first in range(0, self.lanes, LANES) for x in self._group(range(first, first + LANES))]
        # Results of one group are written before the next one takes what it is given.
        return self._assembly([*declared, *code], "=&r" if self._diagonals else "=r", "tl.float32")

    def _group(self, lanes: range) -> list[str]:
        """The code of some lanes, which they run through together."""
        entries = [self._written[i] for i in self._diagonals]
        needed = self._needed(entries)
        found = []
        for line, target in zip(self._code, self._targets, strict=True):
            for lane in lanes:
                before = lane - LANES - LANES // 2  # of the first row, 8 columns before
                if before < 0 or lane % LANES < LANES // 2:
                    found.append(self._of_lane(line, lane))
                elif target in needed:
                    again = [(entry, entry.replace("@", str(before))) for entry in entries]
                    found.append(self._of_lane(_replaced(line, again), lane))
        return found

    def _needed(self, known: list[str]) -> set[str]:
        """The registers that must be written to have the result, if some are known."""
        needed = {self._targets[-1]}
        for line, target in zip(reversed(self._code), reversed(self._targets), strict=True):
            if target in needed:
                needed.update(set(re.findall(r"y\d+_@", line)) - set(known))
        return needed

    def _sum(self, sums: Graph, leaves: list[str]) -> None:
        names: dict[int, str] = {}

        def show(a: Arg) -> str:
            return names[a.index] if isinstance(a, Ref) else _number(a, torch.float32)

        for i, node in enumerate(sums.nodes):
            if node.op == "input":
                names[i] = ["$<0>", *leaves][int(node.args[0])]  # type: ignore[arg-type]
            else:
                names[i] = self._new("f32", FLOAT[node.op], *map(show, node.args))
        self._code.append(f"mov.b32 $@, {show(sums.outputs[0])};")
        self._targets.append("$@")


def _replaced(line: str, names: list[tuple[str, str]]) -> str:
    for name, other in names:
        line = line.replace(name, other)
    return line


def _number(c: float, dtype: torch.dtype) -> str:
    if dtype == torch.float32:
        return float32_literal(float(c))
    return str(int(c))


def _bits_of(x: float) -> int:
    """Of a positive float32."""
    return int(float32_literal(x)[2:], 16)


def _bits(dtype: torch.dtype) -> str:
    return "f32" if dtype == torch.float32 else f"b{torch.iinfo(dtype).bits}"
