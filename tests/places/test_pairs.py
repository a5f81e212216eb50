"""Lookups for every pair as blocks of PTX: the emitted code, run by torch instead of a GPU."""

from __future__ import annotations

import math
import re
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.functions.activation import resolve_one
from gdpa.functions.emit import emit
from gdpa.functions.passes.simplify import value_of
from gdpa.functions.places.emit import function_writer
from gdpa.functions.places.names import POSITIONS, TableKind
from gdpa.functions.places.pairs import LANES, PairBlock, _of_lane, blocks_of_pairs
from gdpa.functions.places.program import Places
from gdpa.functions.places.tables import TableView
from gdpa.nn.biases import log_buckets
from support import bf16

ADDRESS = 2**40  # of the first table; the next ones are as far from each other
f32, i32, i64 = torch.float32, torch.int32, torch.int64
DTYPES = {"s32": i32, "u32": i32, "b32": i32, "s64": i64, "u64": i64, "b64": i64, "f32": f32, "pred": torch.bool}


def distance(s, t, *, h, q_idx, kv_idx):
    return F.silu(s + t[h, q_idx - kv_idx + 12])


def buckets(s, t, times, *, q_row, kv_row):
    return F.silu(s + t[(times[q_row] - times[kv_row]).clamp(0, 7)])


def logarithms(s, t, times, *, q_row, kv_row):
    return F.silu(s + t[log_buckets(times[q_row] - times[kv_row]).clamp(0, 70)])


def fractions(s, t, *, q_idx, kv_idx):
    """Some are between -1 and 0, and become 0."""
    return F.silu(s + t[(0.3 * (q_idx - kv_idx).clamp(-2, 9)).long()])


def halves(s, t, u, *, h, q_idx, kv_idx):
    return F.gelu(s - 2.0 * t[h % 2, torch.minimum(q_idx, kv_idx)] + u[(q_idx - kv_idx).abs() & 7])


def chosen(s, t, *, q_idx, kv_idx):
    near = ((q_idx - kv_idx).abs() < 4) & (kv_idx != 3)
    return F.silu(s + t[torch.where(near, q_idx - kv_idx, kv_idx)] * (q_idx - kv_idx))


def whole_matrix(s, t, *, q_idx, kv_idx):
    return F.silu(s + t[q_idx, kv_idx])


def last_rows(s, t, *, h, q_idx, kv_idx):
    return F.silu(s + t[-1, h + 1, q_idx - kv_idx])


def nested(s, t, rows, *, q_idx, kv_idx):
    return F.silu(s + t[1, rows[0, q_idx - kv_idx + 10].long()])


FUNCTIONS = {
    "distance": (distance, [(2, f32, (2, 24))]),
    "distance, partly outside": (distance, [(2, f32, (2, 17))]),
    "buckets": (buckets, [(1, f32, (8,)), (1, i32, (40,))]),
    "buckets of 64 bits": (buckets, [(1, f32, (8,)), (1, i64, (40,))]),
    "buckets, too few": (buckets, [(1, f32, (5,)), (1, i32, (40,))]),
    "logarithms": (logarithms, [(1, f32, (71,)), (1, i32, (40,))]),
    "logarithms of 64 bits": (logarithms, [(1, f32, (71,)), (1, i64, (40,))]),
    "fractions": (fractions, [(1, f32, (5,))]),
    "two tables": (halves, [(2, f32, (2, 20)), (1, f32, (8,))]),
    "a choice": (chosen, [(1, f32, (20,))]),
    "rows from the end": (last_rows, [(3, f32, (2, 3, 12))]),
    "rows outside": (last_rows, [(3, f32, (2, 2, 12))]),
    "nested": (nested, [(2, f32, (2, 5)), (2, f32, (1, 21))]),
    "a matrix": (whole_matrix, [(2, f32, (10, 11))]),
}


# ---- a machine -------------------------------------------------------------------------------------------------------
class Lane:
    """Runs the code of the first lane on all scores at once."""

    def __init__(self, inputs: list[Tensor], tables: list[Tensor]) -> None:
        self.registers = {f"${LANES * (1 + i)}": t for i, t in enumerate(inputs)}
        self.shape, self.tables = inputs[0].shape, tables
        self.kinds: dict[str, torch.dtype] = {}

    def run(self, text: str) -> Tensor:
        self.kinds = {name: DTYPES[kind] for kind, name in re.findall(r"\.reg \.(\w+) (\w+);", text)}
        for line in re.findall(r"[^;\n{}]+", text):
            words = line.strip()
            if words and not words.startswith(".reg") and re.search(r"(_0|\$0)\b", words):
                self._step(words)
        return self.registers["$0"]

    def _step(self, words: str) -> None:
        where = torch.ones(self.shape, dtype=torch.bool)
        if words.startswith("@"):
            predicate, words = words[1:].split(" ", 1)
            where = self.registers[predicate]
        name, rest = words.split(" ", 1)
        target, *args = (a.strip() for a in rest.split(","))
        op, *kinds = name.split(".")
        found = self._result(op, kinds, args, where)
        if (op, kinds) == ("mov", ["b32"]) and target in self.kinds:
            found = found.view(self.kinds[target])
        self.registers[target] = torch.where(where, found, self.registers.get(target, torch.zeros_like(found)))

    def _value(self, text: str, kind: str) -> Tensor:
        text = text.strip("[]")
        if text in self.registers:
            return self.registers[text].expand(self.shape)
        number = struct.unpack(">f", bytes.fromhex(text[2:]))[0] if text.startswith("0f") else int(text)
        return torch.full(self.shape, number, dtype=DTYPES[kind])

    def _result(self, op: str, kinds: list[str], args: list[str], where: Tensor) -> Tensor:
        if op == "ld":
            return self._load(self._value(args[0], "s64"), kinds[-1], where)
        kind = kinds[-1]
        values = [self._value(a, kind) for a in args]
        if op == "cvt":
            to = {"f32": f32, "s64": i64, "s32": i32}[kinds[-2]]
            return values[0].to(to)
        if op == "setp":
            return getattr(torch, {"neu": "ne"}.get(kinds[0], kinds[0]))(*self._unsigned(values, kind))
        if op == "selp":
            return torch.where(self._value(args[2], "pred"), *values[:2])
        if op == "mad":
            wide = i64 if kinds[0] == "wide" else i32
            return values[0].to(wide) * values[1].to(wide) + self._value(args[2], "s64" if wide == i64 else "s32")
        if op == "fma":
            return (values[0].double() * values[1].double() + values[2].double()).float()
        if kinds[0] == "rz":
            return rounded_to_zero(values[0].double() + values[1].double())
        calls = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "min": torch.minimum, "max": torch.maximum,
                 "neg": torch.neg, "abs": torch.abs, "and": torch.bitwise_and, "or": torch.bitwise_or,
                 "mov": torch.clone}  # fmt: skip
        return calls[op](*values)

    def _unsigned(self, values: list[Tensor], kind: str) -> list[Tensor]:
        """Negative numbers are the largest ones."""
        if not kind.startswith("u"):
            return values
        return [torch.where(v < 0, v.double() + 2.0 ** int(kind[1:]), v.double()) for v in values]

    def _load(self, address: Tensor, kind: str, where: Tensor) -> Tensor:
        found = torch.zeros(self.shape)
        for n, table in enumerate(self.tables):
            here = where & (address >= ADDRESS * (n + 1)) & (address < ADDRESS * (n + 2))
            at = (address[here] - ADDRESS * (n + 1)) // table.element_size()
            assert (at < table.numel()).all(), "read outside of a table"
            found[here] = table.flatten()[at].float()
            where = where & ~here
        assert not where.any(), "read before a table"
        return found


def rounded_to_zero(x: Tensor) -> Tensor:
    near = x.float()
    return torch.where(near.double().abs() > x.abs(), near.nextafter(torch.zeros_like(near)), near)


def look_up(table: Tensor, at: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, table.flatten()[at.clamp(0, table.numel() - 1).long()], 0)


class Pointer:
    """A table, as emitted code takes it."""

    def __init__(self, number: int, table: Tensor, at: Tensor | None = None) -> None:
        self.number, self.table, self.at = number, table, at

    def to(self, dtype: torch.dtype) -> Tensor:
        return torch.tensor(ADDRESS * (self.number + 1)) + (0 if self.at is None else 4 * self.at)

    def __add__(self, at: Tensor) -> Pointer:
        return Pointer(self.number, self.table, at)


class Unchecked(TableView):
    """With zeros outside, as kernels have it."""

    def _refuse_outside(self, dim: int, index: Tensor, within: Tensor) -> None:
        pass


def run(fn: Any, tables: list[Tensor], inside: bool) -> tuple[Tensor, Tensor, str]:
    """What the code makes of scores, what it should, and its text. ``inside``: the code without bounds."""
    act = resolve_one(fn, 0, tuple(TableKind(t.ndim, t.dtype) for t in tables))
    program, sums = act.placed.program, value_of(act.placed.shift.joint)
    block = PairBlock(program, sums, function_writer(program, inside=inside))
    i, j = torch.arange(10, dtype=i32)[:, None], torch.arange(11, dtype=i32)[None]
    h = torch.tensor(1, dtype=i32)
    named = {"b": h, "h": h, "q_idx": i, "kv_idx": j, "q_len": torch.tensor(10), "kv_len": torch.tensor(11),
             "q_row": i + 20, "kv_row": j + 25}  # fmt: skip
    s, texts = torch.randn(10, 11), []

    def assembly(text, constraints, given, dtype, is_pure, pack):
        texts.append(text)
        inputs = [torch.as_tensor(t).expand(s.shape) for t in given]
        letters = constraints.split(",")[LANES::LANES]
        assert [{i64: "l"}.get(t.dtype, "r") for t in inputs] == letters
        return Lane(inputs, tables).run(text)

    tl = SimpleNamespace(
        int32=i32, int64=i64, float32=f32, minimum=torch.minimum, where=torch.where, inline_asm_elementwise=assembly,
        load=lambda p, mask, other: look_up(p.table, p.at, mask),
    )  # fmt: skip
    scope: dict[str, Any] = {
        "tl": tl, "s": s, "at": tuple(named[n] for n in POSITIONS), "tables": [Pointer(*x) for x in enumerate(tables)],
        "sizes": [[torch.tensor(n, dtype=i32) for n in t.shape] for t in tables],
        "places": SimpleNamespace(
            even=lambda n: n, from_end=lambda x, n: torch.where(x < 0, x + n, x),
            number=lambda c, like: like * 0 + c, inside=lambda x, n: (x >= 0) & (x < n), mod=torch.remainder,
        ),
    }  # fmt: skip
    exec("\n".join([*block.lines, f"u = {block.call}"]), scope)
    views = [Unchecked(t, "t", torch.tensor(True)) for t in tables]
    leaves = program.evaluate(Places({n: t.long() for n, t in named.items()}, views), s)
    (want,) = sums.evaluate(s, *leaves)
    return scope["u"], want, texts[0]


def tables_of(name: str) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(1)
    fn, kinds = FUNCTIONS[name]
    return fn, [
        torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 20, shape, dtype=dtype)
        for _, dtype, shape in kinds
    ]


# ---- tests -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sums(name: str) -> None:
    fn, tables = tables_of(name)
    found, want, _ = run(fn, tables, inside=False)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("name", ["distance", "buckets", "buckets of 64 bits", "two tables", "a matrix"])
def test_sums_without_bounds(name: str) -> None:
    """Where all lookups are inside: the same, and no predicate."""
    fn, tables = tables_of(name)
    found, want, text = run(fn, tables, inside=True)
    torch.testing.assert_close(found, want)
    assert "@" not in text


def logarithm_of(x: Tensor) -> Tensor:
    """What the code for it makes of numbers."""
    block = PairBlock.__new__(PairBlock)
    block._registers, block._code = [], []
    result = block._logarithm("$<0>")
    declared = [f".reg .{kind} {name};" for name, kind in block._registers]
    lines = [_of_lane(line, 0) for line in (*declared, *block._code)]
    lane = Lane([x], [])
    lane.run("\n".join([*lines, "mov.f32 $0, " + _of_lane(result, 0) + ";"]))
    return lane.registers["$0"]


def test_the_logarithm_is_good_to_the_last_digit() -> None:
    generator = torch.Generator().manual_seed(0)
    anywhere = (torch.rand(2**20, generator=generator, dtype=torch.float64) * 43).exp()
    x = torch.cat([torch.arange(1, 2**20).double(), anywhere]).float()
    found, want = logarithm_of(x), x.double().log()
    digit = torch.where(want > 0, want, 1.0).float()
    digit = digit.nextafter(torch.tensor(torch.inf)).double() - digit.double()
    assert ((found.double() - want).abs() / digit).max() < 0.9
    assert found[0] == 0
    assert torch.equal((found / 0.301).long(), (x.log() / 0.301).long())


def test_buckets_of_logarithms_are_small() -> None:
    """So small that they are counted in 32 bits."""
    for dtype in (i32, i64):
        act = resolve_one(logarithms, 0, (TableKind(1, f32), TableKind(1, dtype)))
        program = act.placed.program
        (cast,) = (i for i, n in enumerate(program.graph.nodes) if n.op == "cast" and n.dtype == i64)
        low, high = program.ranges[cast]
        assert low == 0
        assert math.log(2.0**31) / 0.301 - 1 < high < 150


def test_lanes_have_registers_of_their_own() -> None:
    fn, tables = tables_of("buckets of 64 bits")
    *_, text = run(fn, tables, inside=False)
    lines = text.strip("{}\n").split("\n")
    first = [line for line in lines if re.search(r"_0\b", line)]
    for lane in range(1, LANES):
        own = [line for line in lines if re.search(rf"_{lane}\b", line)]
        moved = [re.sub(r"\$(\d+)", lambda m: f"${int(m[1]) + lane}", line) for line in first]  # noqa: B023
        assert own == [re.sub(r"_0\b", f"_{lane}", line) for line in moved]


def test_what_has_no_block() -> None:
    """Nothing to look up for every pair, or an operation that PTX has not."""
    table = TableKind(1, f32)
    for fn in (
        lambda s, t, *, q_row, kv_row: F.silu(s + t[q_row] - t[kv_row]),
        lambda s, t, *, q_idx, kv_idx: F.silu(s + t[(q_idx * kv_idx) % 7]),
    ):
        act = resolve_one(fn, 0, (table,))
        assert blocks_of_pairs(act.placed.program, value_of(act.placed.shift.joint)) is None
        assert "ld.global" not in emit(act, bf16, "sm90").source


def test_only_hopper_has_blocks() -> None:
    act = resolve_one(distance, 0, (TableKind(2, f32),))
    assert "ld.global" in emit(act, bf16, "sm90").source
    assert "ld.global" not in emit(act, bf16, "cuda").source
