"""Lookups for every pair as blocks of PTX: the emitted code, run by torch instead of a GPU."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.functions.activation import resolve_one
from gdpa.functions.emit import emit
from gdpa.functions.passes.simplify import value_of
from gdpa.functions.places.emit import function_writer
from gdpa.functions.places.names import TableKind
from gdpa.functions.places.pairs import ALONG_DIAGONALS, LANES, PairBlock, PairCode, blocks_of_pairs
from gdpa.functions.places.program import Places
from gdpa.functions.places.tables import TableView
from gdpa.nn.biases import log_buckets
from places.machine import THREADS, Machine, emitted_scope, place_of
from support import bf16

f32, i32, i64 = torch.float32, torch.int32, torch.int64


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


def small_integers(s, t, u, *, q_idx, kv_idx, kv_row):
    return F.silu(s + t[q_idx - kv_idx + 10] + u[kv_row])


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
        letters = constraints.split(",")[pack::pack]
        assert [{i64: "l"}.get(t.dtype, "r") for t in inputs] == letters
        return of_first_lane(inputs, tables, text, pack)

    scope = emitted_scope(named, tables, assembly) | {"s": s}
    exec("\n".join([*block.lines, f"u = {block.call}"]), scope)
    views = [Unchecked(t, "t", torch.tensor(True)) for t in tables]
    leaves = program.evaluate(Places({n: t.long() for n, t in named.items()}, views), s)
    (want,) = sums.evaluate(s, *leaves)
    return scope["u"], want, texts[0]


def of_first_lane(inputs: list[Tensor], tables: list[Tensor], text: str, lanes: int = LANES) -> Tensor:
    """What the code of the first lane makes of all scores at once."""
    machine = Machine({f"${lanes * (1 + i)}": t for i, t in enumerate(inputs)}, tables)
    machine.run(text, lambda words: re.match(r"(@\S+ )?\S+ (\w+_0|\$0),", words) is not None)
    return machine.registers["$0"]


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


def relative(s, t, *, h, q_idx, kv_idx):
    return F.silu(s + t[h, (q_idx - kv_idx).clamp(-31, 31) + 31])


def relative_and_times(s, t, u, times, *, h, q_row, kv_row):
    distance = q_row - kv_row
    return F.silu(s + 0.5 * t[h, distance.abs()] + u[(times[q_row] - times[kv_row]).clamp(0, 7)] * distance)


def signs(s, t, u, times, *, h, q_row, kv_row):
    """A sign takes several instructions, of which the last one writes it."""
    gap = torch.sign((times[q_row] - times[kv_row]).float() * 0.5 - 1.0)
    return F.silu(s + torch.sign(t[h, (q_row - kv_row).abs()]) * u[(times[q_row] - times[kv_row]).clamp(0, 7)] * gap)


TILE = 64
TWO_AND_TIMES = [(2, 40), (8,), (140,)]


@pytest.mark.parametrize("rows_are_keys", [False, True])
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [(relative, [(2, 63)]), (relative, [(2, 50)]), (relative_and_times, TWO_AND_TIMES), (signs, TWO_AND_TIMES)],
)
def test_lookups_along_diagonals_serve_both_rows_of_a_thread(fn: Any, shapes: list[Any], rows_are_keys: bool) -> None:
    """18 instead of 32 lookups per thread; some are outside of the tables."""
    torch.manual_seed(0)
    tables = [torch.randn(shape) if len(shapes) < 3 or n < 2 else torch.randint(0, 9, shape, dtype=i64).cumsum(0)
              for n, shape in enumerate(shapes)]  # fmt: skip
    act = resolve_one(fn, 0, tuple(TableKind(t.ndim, t.dtype) for t in tables))
    program, sums = act.placed.program, value_of(act.placed.shift.joint)
    block = PairBlock(program, sums, function_writer(program))
    i, j = torch.arange(TILE, dtype=i32)[:, None], torch.arange(TILE, dtype=i32)[None]
    i, j = (j, i) if rows_are_keys else (i, j)
    h, length = torch.tensor(1, dtype=i32), torch.tensor(300)
    named = {
        "b": h,
        "h": h,
        "q_idx": i,
        "kv_idx": j,
        "q_len": length,
        "kv_len": length,
        "q_row": i + 70,
        "kv_row": j + 60,
    }
    s = torch.randn(TILE, TILE)

    def assembly(text, constraints, given, dtype, is_pure, pack):
        assert pack == ALONG_DIAGONALS
        assert constraints.startswith("=&r")  # results are written before all is read
        assert len(re.findall("ld.global", text)) == 18 + 32 * (len(tables) == 3)
        scores = [place_of(k, THREADS) for k in range(pack)]
        tiles = [torch.as_tensor(value).expand(s.shape) for value in given]
        machine = Machine(
            {f"${pack * (1 + n) + k}": t[at] for n, t in enumerate(tiles) for k, at in enumerate(scores)}, tables
        )
        machine.run(text)
        made = torch.full(s.shape, torch.nan)
        for k, at in enumerate(scores):
            made[at] = machine.registers[f"${k}"]
        return made

    scope = emitted_scope(named, tables, assembly) | {"s": s}
    exec("\n".join([*block.lines, f"u = {block.call}"]), scope)
    views = [Unchecked(t, "t", torch.tensor(True)) for t in tables]
    leaves = program.evaluate(Places({n: t.long() for n, t in named.items()}, views), s)
    (want,) = sums.evaluate(s, *leaves)
    torch.testing.assert_close(scope["u"], want)


def logarithm_of(x: Tensor) -> Tensor:
    """What the code for it makes of numbers."""
    code: Any = PairCode(None, None, "x", LANES)  # type: ignore[arg-type]
    result = code._logarithm("$<0>")
    text = [*code._declarations(), *code._code, f"mov.f32 $@, {result};"]
    return of_first_lane([x], [], "\n".join(code._of_lane(line, 0) for line in text))


def test_leaves_without_a_form_in_ptx_are_left_to_triton() -> None:
    act = resolve_one(small_integers, 0, (TableKind(1, f32), TableKind(1, torch.int16)))
    assert blocks_of_pairs(act.placed.program, value_of(act.placed.shift.joint)) is None
    assert "small_integers_shifted" in emit(act, torch.bfloat16, "sm90").source


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
