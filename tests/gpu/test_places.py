"""Functions of positions and masks in Hopper's kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import gdpa
from gdpa.testing.cases import Case, dense
from places.library import FUNCTIONS, MASKS, PLACED_CASES, Function, Masked
from places.test_functions import check
from support import Target, bf16, f16, skipping_refusals

pytestmark = pytest.mark.hopper

LONG = [
    dense("long", 2, 200, 300, heads=2, d=128),
    dense("causal", 1, 300, 400, heads=4, heads_k=2, d=128, causal=True),
    dense("narrow window", 1, 300, 300, heads=2, d=64, window=(70, 30)),
    Case("jagged", (5, 0, 64, 130), (300, 300, 0, 65), packed_q=True, packed_k=True, heads=2, d=128),
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    """Each in three layouts and both dtypes, over several tiles unless it has tables, which are small."""
    first = list(FUNCTIONS).index(name)
    _, tables = FUNCTIONS[name].make(LONG[0])
    cases = PLACED_CASES if tables else LONG
    for n in range(3):
        target = Target("hopper", (bf16, f16)[n % 2])
        with skipping_refusals(target):
            check(cases[(first + n) % len(cases)], target, FUNCTIONS[name])


def test_tables_over_several_tiles() -> None:
    """Of the query's and the key's row, without gradients of their own, and with."""

    def gate(s, gates, shifts, *, q_row, kv_row):
        return torch.sigmoid(s + shifts[kv_row]) * gates[q_row]

    for case in LONG:
        rows = [max(sum(lengths), 1) for lengths in (case.len_q, case.len_k)]
        tables = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in rows]
        check(case, Target("hopper", bf16), Function(gate, lambda case, tables=tables: ((), tables)))


CAUSAL_SQUARE = [dense("square", 2, 300, 300, heads=2, d=d, causal=True) for d in (64, 128)]
LEARNED = {  # by how an index depends on pairs, see functions/places/learned/
    "tile": (lambda s, t, *, h, q_idx, kv_idx: F.silu(s - t[h] * (q_idx - kv_idx)), lambda case: (case.heads,)),
    "query": (lambda s, t, *, h, q_idx: F.silu(s + t[h, q_idx]), lambda case: (case.heads, max(case.len_q))),
    "key": (lambda s, t, *, kv_row: torch.sigmoid(s + t[kv_row]), lambda case: (sum(case.len_k),)),
    "diagonal": (
        lambda s, t, *, h, q_idx, kv_idx: F.gelu(s + t[h, q_idx - kv_idx + 400]),
        lambda case: (case.heads, 401 + max(case.len_q)),
    ),
    "diagonal, clamped": (
        lambda s, t, *, q_idx, kv_idx: F.silu(s + 2 * t[(q_idx - kv_idx).clamp(-31, 32)]),
        lambda case: (64,),
    ),
    "pair": (lambda s, t, *, q_idx, kv_idx: F.silu(s + t[q_idx * kv_idx % 97]), lambda case: (97,)),
    "derivative without a value": (  # for keys behind the query, which causal cases do not see
        lambda s, t, *, h, q_idx, kv_idx: F.silu(s - t[h] * torch.log1p((q_idx - kv_idx).float())),
        lambda case: (case.heads,),
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_learned_tables_over_several_tiles(name: str) -> None:
    fn, shape = LEARNED[name]
    cases = LONG if "without" not in name else CAUSAL_SQUARE
    for n, case in enumerate(cases):
        table = torch.randn(shape(case), generator=torch.Generator().manual_seed(n)) * 0.3
        check(case, Target("hopper", (bf16, f16)[n % 2]), Function(fn, lambda case, table=table: ((), [table])))


def bucketed(s, t, bias, times, *, h, q_idx, kv_idx, q_row, kv_row):
    """HSTU's: relative positions and buckets of times."""
    return F.silu(s + bias[h, q_idx - kv_idx + 400] + t[(times[q_row] - times[kv_row]).abs().clamp(0, 127)])


@pytest.mark.parametrize("times", [torch.int32, torch.int64], ids=str)
def test_time_buckets(times: torch.dtype) -> None:
    """Lookups for every pair, two of them, in blocks of PTX (functions/places/pairs.py)."""
    for n, case in enumerate(LONG):
        rng = torch.Generator().manual_seed(n)
        rows = max(sum(case.len_q), sum(case.len_k), 1)
        tables = [
            torch.randn(128, generator=rng), torch.randn(case.heads, 401 + max(case.len_q), generator=rng),
            torch.randint(0, 300, (rows,), generator=rng).sort().values.to(times),
        ]  # fmt: skip
        check(case, Target("hopper", (bf16, f16)[n % 2]), Function(bucketed, lambda case, x=tables: ((), x)))


def test_indices_out_of_range_read_zero() -> None:
    """The table lies between sentinels: what is outside reads as the zeros of a longer one."""

    def relative(s, t, *, h, q_idx, kv_idx):
        return F.silu(s + t[h, torch.where(q_idx - kv_idx < -40, 399, q_idx - kv_idx + 40)])

    memory = torch.full((5000,), 1e30, device="cuda")
    short = memory[2000:2200].view(2, 100)
    short.copy_(torch.randn(2, 100))
    longer = torch.cat([short, torch.zeros(2, 300, device="cuda")], 1)
    inputs = [torch.randn(2, 2, 300, 128, device="cuda", dtype=bf16, requires_grad=True) for _ in range(3)]

    def run(table: torch.Tensor) -> list[torch.Tensor]:
        out = gdpa.attention(*inputs, relative, tables=(table,), backend="hopper")
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    assert all(torch.equal(a, b) for a, b in zip(run(short), run(longer), strict=True))


def test_keys_past_the_end_do_not_vote() -> None:
    """Short sequences whose scores are all in the tail of gelu, with a small bias: past the end a sum is the bias
    alone, and would call for the cheap code. No less accurate than plain PyTorch."""

    def biased(s, t, *, q_idx, kv_idx):
        return F.gelu(s + t[q_idx - kv_idx + 64], approximate="tanh")

    rng, n, length = torch.Generator("cuda").manual_seed(0), 64, 20
    table = 0.1 * torch.randn(128, device="cuda", generator=rng)
    noise, v = (torch.randn(n, length, 128, device="cuda", generator=rng) for _ in range(2))
    q, k = torch.full_like(noise, -0.73) + 0.1 * noise, torch.full_like(noise, 0.73) + 0.1 * noise.roll(1, 0)
    q, k, v = (t.to(bf16) for t in (q, k, v))  # scores of -6
    i = torch.arange(length, device="cuda")
    bias = table[i[:, None] - i + 64]

    def formula(dtype: torch.dtype) -> torch.Tensor:
        s = (q.to(dtype) @ k.to(dtype).mT) * 128**-0.5
        return F.gelu(s + bias.to(dtype), approximate="tanh") @ v.to(dtype)

    rows = [t.reshape(n * length, 1, 128) for t in (q, k, v)]
    cu = torch.arange(n + 1, device="cuda", dtype=torch.int32) * length
    out = gdpa.attention_varlen(*rows, cu, cu, biased, tables=(table,), backend="hopper").view(n, length, 128)
    exact = formula(torch.float64)
    mine, plain = ((x.double() - exact).norm() / exact.norm() for x in (out, formula(bf16)))
    assert mine <= 1.05 * plain


def test_poison_of_another_sequence() -> None:
    """Past the end of a sequence rows of tables are the next one's; and a function may have no value there."""

    def gated(s, t, *, q_row, kv_row, kv_idx, kv_len):
        return torch.sigmoid(s) * t[q_row] + t[kv_row] / (kv_len - kv_idx)

    cu = torch.tensor([0, 70, 200], device="cuda", dtype=torch.int32)
    inputs = [torch.randn(200, 2, 64, device="cuda", dtype=bf16, requires_grad=True) for _ in range(3)]
    clean = torch.linspace(-1, 1, 200, device="cuda")

    def run(table: torch.Tensor) -> list[torch.Tensor]:
        out = gdpa.attention_varlen(*inputs, cu, cu, gated, tables=(table,), backend="hopper")
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    want = run(clean)
    assert all(bool(t.isfinite().all()) for t in want)
    for others, own in ((slice(70), slice(70, None)), (slice(70, None), slice(70))):
        poisoned = clean.clone()
        poisoned[others] = torch.nan
        assert all(torch.equal(a[own], b[own]) for a, b in zip(want, run(poisoned), strict=True))


WIDE = {
    "documents": (lambda q_row, kv_row: q_row // 90 == kv_row // 90, lambda p: p.row_q // 90 == p.row_k // 90),
    "two parts": (
        lambda q_idx, kv_idx: (kv_idx < 20) | ((kv_idx - q_idx).abs() < 30),
        lambda p: p.j < 20 or abs(p.j - p.i) < 30,
    ),
    "by head": (lambda h, q_idx, kv_idx: kv_idx >= q_idx * h, lambda p: p.j >= p.i * p.h),
}  # over several tiles: some are empty, some whole


@pytest.mark.parametrize("name", [*MASKS, *WIDE])
def test_masks(name: str) -> None:
    """Each in three layouts and both dtypes, with a plain function and with one of positions."""
    masked = MASKS.get(name) or Masked(lambda c: WIDE[name][0], WIDE[name][1])
    first = [*MASKS, *WIDE].index(name)
    has_short_tables = name in ("document_2d", "document_both", "tree")
    cases = PLACED_CASES if has_short_tables else LONG
    for n, f in enumerate((None, None, FUNCTIONS["relative_length"])):
        target = Target("hopper", (bf16, f16)[n % 2])
        with skipping_refusals(target):
            check(cases[(first + n) % len(cases)], target, f, masked)


def test_gradients_of_q_k_and_v_with_a_table_of_pairs_that_needs_none() -> None:
    """Otherwise the triton backend has the backward."""

    def relative(s, bias, *, q_idx, kv_idx):
        return torch.sigmoid(s + bias[q_idx - kv_idx + 300])

    table = torch.linspace(-1, 1, 600, device="cuda")
    inputs = [torch.randn(2, 2, 300, 64, device="cuda", dtype=bf16, requires_grad=True) for _ in range(3)]

    def run(backend: str) -> list[torch.Tensor]:
        out = gdpa.attention(*inputs, relative, tables=(table,), backend=backend)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    for mine, other in zip(run("hopper"), run("triton"), strict=True):
        assert float((mine - other).float().norm() / other.float().norm()) < 0.01


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_masks_and_row_sums(activation: str) -> None:
    mask = gdpa.masks.targets(torch.tensor([90, 0], device="cuda")) & gdpa.masks.causal()
    inputs = [torch.randn(2, 2, 300, 128, device="cuda", dtype=bf16, requires_grad=True) for _ in range(3)]
    more = {} if activation == "softmax" else {"normalize": "sum", "sink": 50.0}

    def run(backend: str) -> list[torch.Tensor]:
        out = gdpa.attention(*inputs, activation, mask=mask, backend=backend, **more)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    for mine, other in zip(run("hopper"), run("triton"), strict=True):
        assert float((mine - other).float().norm() / other.float().norm()) < 0.01


def test_poison_of_another_sequence_in_a_table_of_pairs() -> None:
    """The tile's rows past the end of a sequence are inside the table all the same."""
    cu = torch.tensor([0, 100, 200], device="cuda", dtype=torch.int32)
    inputs = [torch.randn(200, 2, 64, device="cuda", dtype=bf16, requires_grad=True) for _ in range(3)]
    same = torch.arange(200, device="cuda")[:, None] // 100 == torch.arange(200, device="cuda")[None] // 100
    fn = lambda s, t, *, q_row, kv_row: F.silu(s + t[q_row, kv_row])
    found = []
    for poison in (0.0, torch.nan):
        table = torch.where(same, torch.linspace(-1, 1, 200, device="cuda"), poison).requires_grad_()
        out = gdpa.attention_varlen(*inputs, cu, cu, fn, tables=(table,), backend="hopper")
        found.append([out, *torch.autograd.grad(out, [*inputs, table], torch.ones_like(out))])
    for a, b in zip(*found, strict=True):
        assert bool(b.isfinite().all())
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)  # sums over a table's entries have no fixed order


@pytest.mark.parametrize("activation", ["silu", "softmax"])
@pytest.mark.parametrize("dense_batch", [False, True], ids=["packed", "dense"])
def test_the_quick_way_of_tables_and_masks(dense_batch: bool, activation: str) -> None:
    """The first calls of a kind decide, and those that follow launch what was decided, with other tables: of other
    sizes, elsewhere, and in memory that was full of NaN."""

    def biased(s, t, *, q_idx, kv_idx):
        s = s + t[q_idx - kv_idx + 600]
        return F.silu(s) if activation == "silu" else torch.exp(s)

    for n in (600, 600, 600, 671, 900):
        qkv = torch.randn(3, n, 4, 64, device="cuda", dtype=bf16)
        ids = torch.arange(n, device="cuda") // 37
        cu = torch.tensor([0, n // 3, n // 3, n], dtype=torch.int32, device="cuda")
        table = torch.randn(1201 + n, device="cuda", requires_grad=activation == "silu")
        learned = [table] if table.requires_grad else []
        more = {"normalize": None if activation == "silu" else "sum", "tables": (table,)}

        def attend(backend: str, *x: torch.Tensor, ids=ids, cu=cu, more=more) -> torch.Tensor:
            mask = gdpa.masks.document(ids[:600].view(2, 300) if dense_batch else ids)
            if not dense_batch:
                return gdpa.attention_varlen(*x, cu, cu, biased, mask=mask, causal=True, backend=backend, **more)
            x = tuple(t[:600].unflatten(0, (2, 300)).transpose(1, 2) for t in x)
            return gdpa.attention(*x, biased, mask=mask, causal=True, backend=backend, **more)

        given = [t.clone().requires_grad_() for t in qkv]
        wide = [t.double().requires_grad_() for t in qkv]
        filled = [torch.full_like(qkv, float("nan"), dtype=torch.float32) for _ in range(2)]
        del filled
        out, want = attend("hopper", *given), attend("reference", *wide)
        do = torch.randn_like(out)
        got = (out, *torch.autograd.grad(out, [*given, *learned], do))
        exact = (want, *torch.autograd.grad(want, [*wide, *learned], do.double()))
        for mine, true in zip(got, exact, strict=True):
            assert float((mine.double() - true.double()).norm()) <= 2**-7 * float(true.double().norm())
