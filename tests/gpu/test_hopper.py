"""Hopper's kernels where their tiles end: 64 rows per warpgroup, 128 per tile, 64 or 128 columns, any lengths.

What every backend promises is in test_correctness.py and its neighbours, which run on this backend too.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gdpa
from functions.library import BY_NAME
from gdpa import backends
from gdpa.backends import tuning
from gdpa.backends.hopper import config, folding, launch
from gdpa.testing.cases import Case, Inputs, call, dense, make_inputs, offsets
from support import Target, bf16, check, f16, gradients, operands, output_gradient, poisoned, problem_of

pytestmark = pytest.mark.hopper

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 257)
BF16, F16 = Target("hopper", bf16), Target("hopper", f16)
both_dtypes = pytest.mark.parametrize("target", [BF16, F16], ids=repr)
GELU, GELU_TANH, SIGMOID = (BY_NAME[name] for name in ("gelu", "gelu_tanh", "sigmoid"))


def infinite_at_zero(s: Tensor) -> Tensor:
    """A sigmoid but for the one score that padding has."""
    return torch.where(s == 0, torch.inf, torch.sigmoid(s))


def packed(name: str, len_q: tuple[int, ...], len_k: tuple[int, ...], **kwargs: Any) -> Case:
    return Case(name, len_q, len_k, packed_q=True, packed_k=True, **kwargs)


# ---- lengths ---------------------------------------------------------------------------------------------------------
@both_dtypes
@pytest.mark.parametrize("len_q", LENGTHS)
def test_dense_lengths(len_q: int, target: Target) -> None:
    for len_k in LENGTHS:
        check(dense("edge", 2, len_q, len_k, heads=2, d=64), target, GELU.fn, "gelu")


@both_dtypes
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("d", [64, 128])
def test_all_lengths_in_one_batch(d: int, causal: bool, target: Target) -> None:
    """Every pair of lengths as one jagged batch, in random order, empty sequences among them."""
    pairs = list(itertools.product((0, *LENGTHS), (0, *LENGTHS)))
    random.Random(d).shuffle(pairs)
    len_q, len_k = zip(*pairs[:60], strict=True)
    check(packed("edges", len_q, len_k, heads=2, d=d, causal=causal), target, SIGMOID.fn, "sigmoid")


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("longest", [128, 300, 1100, 2100])
def test_few_queries_and_many_keys(longest: int, d: int, deterministic: bool) -> None:
    """From one tile of keys to more tiles than blocks of queries, whose dq is added up in memory, or has a kernel."""
    torch.use_deterministic_algorithms(deterministic)
    check(dense("dq", 3, 300, longest, heads=2, heads_k=1, d=d), BF16, GELU.fn, "gelu")


@both_dtypes
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("window", [None, (None, 0), (20, 30)], ids=["", "causal", "window"])
def test_few_keys(window: tuple[int | None, int] | None, d: int, target: Target) -> None:
    """Blocks of 64 keys: one, several, and more items than programs; sequences without keys or queries among them."""
    rng, few = random.Random(d), (0, 1, 17, 50, 63, 64, 65, 100)
    len_q, len_k = (tuple(rng.choice(few) for _ in range(90)) for _ in range(2))
    for activation, fn in (("sigmoid", SIGMOID.fn), ("gelu_tanh", GELU_TANH.fn)):
        case = packed("few", len_q, len_k, heads=4, heads_k=2, d=d, window=window)
        assert config.has_few_keys(problem_of(case, operands(case, make_inputs(case, target.dtype)), activation))
        check(case, target, fn, activation)
        check(packed("rows", (300, 0, 700, 128), (64, 5, 0, 150), heads=2, d=d, window=window), target, fn, activation)
        for keys in (40, 192):
            check(dense("few", 3, 300, keys, heads=2, heads_k=1, d=d, window=window), target, fn, activation)


@both_dtypes
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("window", [None, (None, 0), (20, 30)], ids=["", "causal", "window"])
def test_few_queries(
    window: tuple[int | None, int] | None, d: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of one consumer, found among the offsets where they are packed: the numbers are those of larger tiles."""
    rng = random.Random(d)
    many = tuple(rng.choice((0, 1, 2, 3)) for _ in range(config.MOST_SCANNED // 4))
    cases = [
        dense("few", 2, 200, 300, heads=2, heads_k=1, d=d, window=window),
        packed("few", (0, 65, 257, 1, 0, 64), (7, 0, 130, 64, 0, 300), heads=4, heads_k=2, d=d, window=window),
        packed("short", many, many[::-1], heads=2, d=d, window=window),
        Case("dense-keys", (0, 65, 130), (70,) * 3, heads=2, d=d, packed_q=True, window=window),
    ]
    for case, name in itertools.product(cases, ("sigmoid", "gelu_tanh", "softmax")):
        x, found = make_inputs(case, target.dtype, "cuda"), []
        for at_once, block_m in ((128, 64), (0, 128)):
            monkeypatch.setattr(config, "AT_ONCE", at_once)
            tuning.forget()
            if name != "softmax":
                problem = problem_of(case, operands(case, x), name)
                plan = launch.forward_plan(problem, None, False)
                assert plan is not None
                assert (plan.config.block_m, plan.items.scans) == (block_m, case.packed_q and at_once > 0)
            found.append(call(case, x, name, backend="hopper"))
        assert torch.equal(*found)
    monkeypatch.setattr(config, "AT_ONCE", 128)
    for case in cases:
        check(case, target, SIGMOID.fn, "sigmoid")


@both_dtypes
@pytest.mark.usefixtures("large_batch")
@pytest.mark.parametrize("len_k", [100, 257, 600])
def test_three_consumers(len_k: int, target: Target) -> None:
    """Forward tiles of 192 queries, which long enough sequences get at D 64: full, and with one or two idle thirds."""
    for len_q in (384, 385, 447, 448, 449, 512, 513, 575, 576, 577):
        check(dense("thirds", 2, len_q, len_k, heads=4, heads_k=2, d=64), target, GELU.fn, "gelu")
    lengths = (1000, 0, 1, 577, 64, 1200, 65, 384)
    check(packed("thirds", lengths, (len_k, 5, 0, 300, 1, 64, 129, 700), heads=2, d=40), target, SIGMOID.fn, "sigmoid")


def test_fast_is_exact_here() -> None:
    """There is no faster form of these kernels, and PyTorch's switch for 16-bit sums plays no part."""
    torch.use_deterministic_algorithms(True)
    case = dense("exact", 2, 200, 600, heads=2, d=128)
    x = make_inputs(case, bf16, "cuda")
    do = output_gradient(case).to("cuda", bf16)

    def run() -> dict[str, Tensor]:
        return gradients(call(case, x, "gelu", backend="hopper"), do, *x.leaves)

    want, matmul = run(), torch.backends.cuda.matmul
    allowed = matmul.allow_bf16_reduced_precision_reduction
    try:
        for matmul.allow_bf16_reduced_precision_reduction in (False, True):
            with gdpa.precision("fast"):
                got = run()
            assert all(torch.equal(got[name], want[name]) for name in want)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = allowed


def test_more_items_than_programs() -> None:
    """Each persistent program takes several tiles of different sequences and heads."""
    rng = random.Random(0)
    len_q, len_k = (tuple(rng.choice([0, 1, 40, 130, 300]) for _ in range(200)) for _ in range(2))
    check(packed("many", len_q, len_k, heads=4, heads_k=2, d=64), BF16, SIGMOID.fn, "sigmoid")


# ---- sums of dq that go from tile to tile ----------------------------------------------------------------------------
def inputs(case: Case, dtype: torch.dtype) -> Inputs:
    """Queries and keys of the same lengths have the same offsets, which the backend sees."""
    x = make_inputs(case, dtype, "cuda")
    return replace(x, cu_k=x.cu_q) if case.len_q == case.len_k else x


def compare_sequences(case: Case, dtype: torch.dtype = bf16, **kwargs: Any) -> None:
    """With float64 on the GPU, sequence by sequence: also where plain PyTorch on a CPU would take too long."""
    x = inputs(case, dtype)
    wide = x.to(torch.float64)
    do = output_gradient(case).to("cuda", dtype)
    got = gradients(call(case, x, "gelu", backend="hopper", **kwargs), do, *x.leaves)
    want = gradients(call(case, wide, "gelu", backend="reference"), do.double(), *wide.leaves)
    for name in want:
        on_q, packed_side = name in ("out", "dq"), case.packed_q if name in ("out", "dq") else case.packed_k
        lengths = case.len_q if on_q else case.len_k
        parts = (torch.split(t[name], lengths) if packed_side else t[name].unbind() for t in (got, want))
        for b, (mine, exact) in enumerate(zip(*parts, strict=True)):
            error, size = float((mine.double() - exact).norm()), float(exact.norm())
            assert error <= 2**-7 * size, f"{name} of sequence {b}: error {error:.3g} of {size:.3g}"


RING_LENGTHS = (1, 63, 64, 65, 127, 128, 129, 255, 257, 1000)
both_modes = pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])


@both_modes
@both_dtypes
@pytest.mark.parametrize("heads_k", [4, 2])
@pytest.mark.parametrize("d", [64, 128])
def test_rings_where_tiles_end(d: int, heads_k: int, target: Target, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    for n in RING_LENGTHS:
        case = dense("ring", 2, n, n, heads=4, heads_k=heads_k, d=d)
        x = operands(case, make_inputs(case, target.dtype))
        assert config.dq_mode(problem_of(case, x, "gelu")) == "ring"
        compare_sequences(case, target.dtype)


@both_modes
@both_dtypes
@pytest.mark.parametrize("heads_k", [4, 1])
@pytest.mark.parametrize("d", [64, 128])
def test_rings_of_all_lengths_in_one_batch(d: int, heads_k: int, target: Target, deterministic: bool) -> None:
    """More tiles than programs; some sequences have no rows."""
    torch.use_deterministic_algorithms(deterministic)
    lengths = [*RING_LENGTHS, 0, 0, 1500] * 6
    random.Random(d).shuffle(lengths)
    compare_sequences(packed("ring", tuple(lengths), tuple(lengths), heads=4, heads_k=heads_k, d=d), target.dtype)


@both_modes
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("d", [64, 128])
def test_rings_with_many_rounds(d: int, group: int, deterministic: bool) -> None:
    """More blocks of queries than there is room for, and other lengths of keys."""
    torch.use_deterministic_algorithms(deterministic)
    for len_q, len_k in ((1500, 100), (1500, 300), (3000, 257), (700, 600)):
        compare_sequences(dense("rounds", 3, len_q, len_k, heads=4, heads_k=4 // group, d=d))
    len_q, len_k = (3000, 0, 100, 1, 777, 2000) * 5, (300, 5, 900, 129, 0, 1100) * 5
    compare_sequences(packed("rounds", len_q, len_k, heads=4, heads_k=4 // group, d=d))
    compare_sequences(Case("rounds", len_q, (300,) * 30, heads=4, heads_k=4 // group, d=d, packed_q=True))


@pytest.mark.parametrize("d", [64, 128])
def test_a_sequence_that_is_too_long_for_a_ring(d: int) -> None:
    """Among short ones: in a pass of its own, unless all are promised to be short; a promise may be too small."""
    lengths = (100, 9000, 0, 700)
    compare_sequences(packed("long", lengths, lengths, heads=2, heads_k=1, d=d))
    compare_sequences(packed("long", lengths, lengths, heads=2, heads_k=1, d=d), max_seqlen_k=9000)
    lengths = (100, 5000, 4000, 700)
    compare_sequences(packed("short", lengths, lengths, heads=2, heads_k=1, d=d), max_seqlen_k=100)


@both_dtypes
@pytest.mark.parametrize("d", [64, 128])
def test_two_passes(d: int, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of more than one tile count as long: their dq and share of dparams come from a second pass."""
    monkeypatch.setattr(config, "MOST_TILES", 1)
    case = packed("passes", (300, 0, 130, 700, 64), (129, 5, 128, 0, 300), heads=4, heads_k=2, d=d)
    check(case, target, GELU.fn, "gelu")
    slope = (torch.tensor([0.3, -0.8, 1.1, 0.5]),)
    check(case, target, lambda s, a: torch.tanh(a * s), params=slope)


@pytest.mark.parametrize("d", [64, 128])
def test_two_passes_with_a_learned_table(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "MOST_TILES", 1)
    case = packed("passes", (300, 0, 130, 700, 64), (129, 5, 128, 0, 300), heads=4, heads_k=2, d=d)
    x, found = make_inputs(case, bf16, "cuda"), []
    do = output_gradient(case).to("cuda", bf16)
    for backend in ("hopper", "reference"):
        y = x if backend == "hopper" else x.to(torch.float64)
        table = torch.linspace(-1, 1, 64, device="cuda", requires_grad=True)
        out = call(case, y, near, backend=backend, tables=(table,))
        found.append([out, *torch.autograd.grad(out, (*y.leaves, table), do.to(out.dtype))])
    for mine, true in zip(*found, strict=True):
        assert (mine.double() - true).norm() <= 0.01 * true.norm()


def near(s: Tensor, t: Tensor, *, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.nn.functional.silu(s + t[(q_idx - kv_idx).clamp(0, 63)])


def test_two_streams_at_once() -> None:
    """Two grids whose programs wait for each other: neither may keep the other's from running for ever."""
    torch.use_deterministic_algorithms(True)
    cases = (dense("first", 16, 1000, 1000, heads=4, d=64), packed("second", (900, 0, 1300) * 8, (900, 0, 1300) * 8))
    data = [(case, inputs(case, bf16), output_gradient(case).to("cuda", bf16)) for case in cases]

    def step(case: Case, x: Inputs, do: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(case, x, "gelu", backend="hopper"), x.leaves, do)

    alone = [step(*each) for each in data]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in data]
    together = []
    for _ in range(10):
        for stream, each in zip(streams, data, strict=True):
            with torch.cuda.stream(stream):
                together.append(step(*each))
    torch.cuda.synchronize()
    for i, found in enumerate(together):
        assert all(torch.equal(a, b) for a, b in zip(found, alone[i % 2], strict=True))


# ---- heads and columns -----------------------------------------------------------------------------------------------
@both_dtypes
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (64, 128), (128, 64), (96, 40)], ids=str)
def test_groups_and_head_dims(dims: tuple[int, int], group: int, target: Target) -> None:
    case = dense("gqa", 2, 150, 200, heads=4, heads_k=4 // group, d=dims[0], dv=dims[1], causal=True)
    check(case, target, GELU.fn, "gelu")


@pytest.mark.parametrize("dims", [(8, 8), (24, 40), (40, 24), (8, 128), (72, 8), (104, 120)], ids=str)
def test_padded_columns(dims: tuple[int, int]) -> None:
    """Columns past the head dimension are zero in shared memory, and never reach the neighbouring head."""
    check(
        packed("padded", (70, 0, 130), (129, 3, 64), heads=4, heads_k=2, d=dims[0], dv=dims[1]), BF16, GELU.fn, "gelu"
    )


# ---- bands -----------------------------------------------------------------------------------------------------------
BANDS = [(0, 0), (None, 0), (0, None), (63, 0), (64, 64), (65, 1), (130, None), (None, 127), (1000, 1000)]


@both_dtypes
@pytest.mark.parametrize("window", BANDS, ids=str)
def test_bands_that_cut_tiles(window: tuple[int | None, int | None], target: Target) -> None:
    """f(0) is not 0: a pair that is masked too early or too late shows, and so does a row past the end."""
    for lengths in ((257, 257), (65, 300), (300, 65)):
        check(dense("band", 1, *lengths, heads=2, d=64, window=window), target, SIGMOID.fn, "sigmoid")
    check(packed("band", (200, 1, 0, 129), (130, 64, 5, 300), heads=2, d=128, window=window), target, SIGMOID.fn)
    many = (700, 3, 0, 1030, 400, 64, 1) * 9  # tiles for more programs than there are
    for d in (64, 128):
        compare_sequences(packed("taken", many, many, heads=4, heads_k=2, d=d, window=window), target.dtype)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("case", ["packed", "qkv", "dense"])
def test_the_quick_way_in_a_band(case: str, d: int) -> None:
    """The first calls of a kind decide, and those that follow launch what was decided, on other memory: full of NaN,
    here, and of other lengths where sequences are packed."""
    for n in (900, 900, 900, 871, 1100):
        cu = torch.tensor([0, n // 3, n // 3, n], dtype=torch.int32, device="cuda")
        qkv = torch.randn(n, 3, 4, d, device="cuda", dtype=bf16)
        split = [t.clone().requires_grad_() for t in qkv.unbind(1)]
        if case == "dense":
            leaves = [t[:800].unflatten(0, (2, 400)).transpose(1, 2).detach().requires_grad_() for t in split]
            given, wide = leaves, [t.detach().double().requires_grad_() for t in leaves]
            out, want = (
                gdpa.attention(*x, "silu", window=(90, 30), backend=backend)
                for x, backend in ((leaves, "hopper"), (wide, "reference"))
            )
        else:
            given = [qkv.requires_grad_()] if case == "qkv" else split
            wide = [t.detach().double().requires_grad_() for t in given]
            attend = gdpa.attention_varlen_qkvpacked if case == "qkv" else gdpa.attention_varlen
            offsets_of = (cu,) if case == "qkv" else (cu, cu)
            out, want = (
                attend(*x, *offsets_of, "silu", causal=True, backend=backend)
                for x, backend in ((given, "hopper"), (wide, "reference"))
            )
        do = torch.randn_like(out)
        del_me = [torch.full_like(t, float("nan"), dtype=torch.float32) for t in (*given, *given)]
        del del_me
        got = torch.autograd.grad(out, given, do)
        for mine, exact in zip(got, torch.autograd.grad(want, wide, do.double()), strict=True):
            assert float((mine.double() - exact).norm()) <= 2**-7 * float(exact.norm())


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kind", ["packed", "short", "dense"])
def test_masks_of_more_tiles_than_programs(kind: str, d: int) -> None:
    """Tiles with nothing to see among them, and each written: the outputs' memory was full of NaN."""
    rng, heads, dense_batch = random.Random(d), 4, kind == "dense"
    some = [0, 1, 70, 300, 900] if kind == "packed" else [0, 1, 17, 50, 64, 65, 150]
    lengths = [600] * 40 if dense_batch else [rng.choice(some) for _ in range(100)]
    cu = offsets(tuple(lengths)).cuda()
    q, k, v = torch.randn(3, sum(lengths), heads, d, device="cuda", dtype=bf16).unbind()
    prefix = torch.tensor([rng.randint(0, n) for n in lengths], device="cuda")
    mask = gdpa.masks.prefix(prefix) & ~gdpa.masks.window(*((20, 30) if kind == "short" else (100, 100)))

    def attend(backend: str, *qkv: Tensor) -> Tensor:
        if dense_batch:
            qkv = tuple(t.unflatten(0, (40, 600)).transpose(1, 2) for t in qkv)
            out = gdpa.attention(*qkv, "sigmoid", mask=mask, backend=backend)
            return out.transpose(1, 2).flatten(0, 1)
        return gdpa.attention_varlen(*qkv, cu, cu, "sigmoid", mask=mask, backend=backend)

    want = attend("reference", *(t.double() for t in (q, k, v)))
    filled = torch.full_like(q, float("nan"))  # freed: the next result lies there
    del filled
    got = attend("hopper", q, k, v)
    assert float((got.double() - want).norm()) <= 2**-7 * float(want.norm())
    assert torch.equal(got, attend("hopper", q, k, v))


@both_dtypes
@pytest.mark.parametrize("d", [64, 128])
def test_few_queries_of_heads_that_share_keys(d: int, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads become queries, unless they cannot."""
    folded: list[int] = []
    fold_heads = folding.fold_heads
    monkeypatch.setattr(folding, "WORTH", 0)
    monkeypatch.setattr(folding, "fold_heads", lambda t, group: folded.append(group) or fold_heads(t, group))
    for rows, len_k, causal in ((1, 700, False), (1, 700, True), (20, 300, False), (1, 9000, False)):
        check(dense("few", 3, rows, len_k, heads=8, heads_k=2, d=d, causal=causal), target, SIGMOID.fn, "sigmoid")
    assert folded


@pytest.mark.parametrize("heads_k", [8, 2])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_long_causal_sequences_of_many_heads(deterministic: bool, heads_k: int) -> None:
    """Programs take tiles of some heads before those of the others; sums are the same every time."""
    torch.use_deterministic_algorithms(deterministic)
    torch.manual_seed(0)
    heads, rows = (8, 4600) if heads_k == 8 else (4, 17000)
    q, do = (torch.randn(1, heads, rows, 128, device="cuda", dtype=bf16) for _ in range(2))
    k, v = (torch.randn(1, heads_k, rows, 128, device="cuda", dtype=bf16) for _ in range(2))

    def run() -> tuple[Tensor, ...]:
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        filled = [torch.full((4 * q.numel(),), torch.nan, device="cuda") for _ in range(2)]
        del filled
        return torch.autograd.grad(gdpa.attention(*x, "silu", causal=True, backend="hopper"), x, do)

    got, group = run(), heads // heads_k
    sums = [torch.zeros(rows, 128, device="cuda", dtype=torch.float64) for _ in range(2)]
    for h in range(heads):
        x = [t[0, i].double().requires_grad_() for t, i in ((q, h), (k, h // group), (v, h // group))]
        p = torch.nn.functional.silu(x[0] @ x[1].mT * 128**-0.5).tril()
        want = torch.autograd.grad(p @ x[2], x, do[0, h].double())
        sums = [old + new if h % group else new for old, new in zip(sums, want[1:], strict=True)]
        found = [(got[0][0, h], want[0])]
        if h % group == group - 1:
            found += [(got[i][0, h // group], sums[i - 1]) for i in (1, 2)]
        for mine, true in found:
            assert float((mine.double() - true).norm()) <= 2**-8 * float(true.norm())
    assert all(torch.equal(a, b) for a, b in zip(got, run(), strict=True))


@both_dtypes
@pytest.mark.parametrize("fn", [SIGMOID.fn, infinite_at_zero], ids=["half", "infinite"])
def test_functions_that_are_not_zero_at_zero(fn: Any, target: Target) -> None:
    """Rows and keys past the end are zeros in shared memory, where f need not be 0."""
    check(dense("tails", 2, 70, 130, heads=2, d=64), target, fn)
    check(packed("tails", (1, 129, 0, 66), (65, 1, 3, 190), heads=4, heads_k=2, d=128, causal=True), target, fn)


# ---- params, shared queries, functions per head ----------------------------------------------------------------------
@both_dtypes
@pytest.mark.parametrize("heads_k", [4, 1])
def test_gradients_of_params_per_head(heads_k: int, target: Target) -> None:
    params = (torch.tensor([0.3, -0.8, 1.1, 0.5]), torch.tensor(0.25))
    fn = lambda s, a, b: torch.tanh(a * s) + b * s
    check(
        packed("params", (130, 0, 257, 64), (190, 7, 65, 0), heads=4, heads_k=heads_k, d=64), target, fn, params=params
    )
    check(dense("params", 2, 100, 300, heads=4, heads_k=heads_k, d=128, causal=True), target, fn, params=params)


@both_dtypes
def test_shared_queries(target: Target) -> None:
    check(dense("shared", 5, 70, 200, heads=2, d=64, shared=True), target, GELU.fn, "gelu")
    case = Case("shared", (70,) * 4, (0, 129, 300, 1), heads=4, heads_k=2, d=128, packed_k=True, shared=True)
    check(case, target, SIGMOID.fn, "sigmoid")
    torch.use_deterministic_algorithms(True)
    check(case, target, SIGMOID.fn, "sigmoid")


@both_dtypes
@pytest.mark.parametrize("heads_k", [4, 2, 1])
@pytest.mark.parametrize("names", [["gelu", "sigmoid"] * 2, ["silu", "relu", "relu", "tanh"]], ids=str)
def test_functions_per_head(names: list[str], heads_k: int, target: Target) -> None:
    """Slices of heads with steps between them, and key heads whose gradients add up over functions."""
    case = packed("heads", (130, 0, 65), (100, 20, 200), heads=4, heads_k=heads_k, d=64)
    check(case, target, [BY_NAME[name].fn for name in names], names)


# ---- nothing to see --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("d", [64, 128])
def test_queries_without_keys_are_exactly_zero(d: int) -> None:
    case = packed("no-keys", (130, 65, 200), (0, 70, 0), heads=2, d=d)
    x = make_inputs(case, bf16, "cuda")
    out = call(case, x, "sigmoid", backend="hopper")
    results = gradients(out, torch.ones_like(out), *x.leaves)
    for name in ("out", "dq"):
        assert not results[name][:130].any()
        assert results[name][130:195].any()
        assert not results[name][195:].any()


CASES = [
    packed("packed", (0, 65, 257, 1, 0), (7, 0, 130, 64, 0), heads=4, heads_k=2, d=64),
    packed("windows", (300, 20), (65, 257), heads=2, d=128, window=(3, 0)),
    dense("no-visible-key", 2, 300, 40, heads=2, d=64, causal=True),
    dense("no-visible-key-by-turns", 40, 900, 300, heads=4, heads_k=2, d=128, causal=True),
    dense("padded", 2, 129, 127, heads=2, d=40, dv=24),
    Case("dense-keys", (0, 65, 130), (70,) * 3, heads=2, d=64, packed_q=True),
    Case("shared", (70,) * 3, (0, 129, 300), heads=2, d=64, packed_k=True, shared=True),
]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_full_of_nan_are_written_in_full(case: Case, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    f = BY_NAME["scaled_sigmoid"]
    x = operands(case, make_inputs(case, bf16, "cuda"), [p.detach().cuda() for p in f.make_params(case.heads)])
    problem = problem_of(case, x, f.fn)
    backend = backends.get("hopper")
    assert backend.supports(problem) is None
    out = poisoned(problem.out_batch, case.heads, problem.rows_q, problem.head_dim_v, like=x.q)
    results = [out, *(poisoned(*t.shape, like=t) for t in (x.q, x.k, x.v, x.params))]
    backend.forward(problem, x, out)
    backend.backward(problem, x, torch.randn_like(out), *results[1:])
    assert all(t.isfinite().all() for t in results)


# ---- strides ---------------------------------------------------------------------------------------------------------
def attend(q: Tensor, k: Tensor, v: Tensor, base: Tensor) -> list[Tensor]:
    torch.use_deterministic_algorithms(True)
    out = gdpa.attention(q, k, v, "gelu", causal=True, backend="hopper")
    do = torch.linspace(-1, 1, out.shape[2], device="cuda", dtype=out.dtype)[:, None].expand_as(out)
    return [out, torch.autograd.grad(out, base, do, retain_graph=True)[0]]


def test_strides_that_descriptors_express() -> None:
    """The bits do not depend on them: fused projections, slices of heads and of rows, transposed memory."""
    rng = torch.Generator(device="cuda").manual_seed(0)

    def base(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device="cuda", dtype=bf16).requires_grad_()

    fused, heads, rows, batch_inside = (
        base(2, 130, 3, 4, 64),
        base(2, 12, 130, 64),
        base(2, 4, 390, 64),
        base(4, 2, 130, 192),
    )
    views = {
        "fused": (fused, [fused[:, :, i].transpose(1, 2) for i in range(3)]),
        "heads": (heads, [heads[:, i::3] for i in range(3)]),
        "rows": (rows, [rows[:, :, 130 * i : 130 * (i + 1)] for i in range(3)]),
        "heads outermost": (batch_inside, [batch_inside.transpose(0, 1)[..., 64 * i : 64 * (i + 1)] for i in range(3)]),
    }
    for name, (leaf, qkv) in views.items():
        strided, plain = attend(*qkv, leaf), attend(*(t.contiguous() for t in qkv), leaf)
        for a, b in zip(strided, plain, strict=True):
            assert torch.equal(a, b), name


def test_packed_projection() -> None:
    """(T, 3, H, D) taken apart, as attention_varlen gets it."""
    case = packed("fused", (65, 0, 130), (65, 0, 130), heads=2, d=64)
    base = torch.randn(195, 3, 2, 64, device="cuda", dtype=bf16)
    cu = offsets(case.len_q, "cuda")
    views = Inputs(*(base[:, i].detach().requires_grad_() for i in range(3)), cu, cu)
    copies = Inputs(*(t.detach().contiguous().requires_grad_() for t in views.leaves), cu, cu)
    do = output_gradient(case).to("cuda", bf16)
    got, want = (gradients(call(case, x, "silu", backend="hopper"), do, *x.leaves) for x in (views, copies))
    assert all(torch.equal(got[name], want[name]) for name in got)


def irregular() -> dict[str, tuple[Tensor, str]]:
    """Tensors the backend refuses, and words of its reason."""
    x = torch.randn(2, 4, 70, 64, device="cuda", dtype=bf16)
    wide = torch.randn(2, 4, 70, 65, device="cuda", dtype=bf16)
    return {
        "unaligned rows": (wide[..., 1:], "multiples of 16 bytes"),
        "unaligned start": (wide.flatten()[1 : 1 + x.numel()].view_as(x), "multiples of 16 bytes"),
        "batch inside rows": (x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), "whole number of rows"),
        "expanded heads": (x[:, :1].expand(-1, 4, -1, -1), "multiples of 16 bytes"),
        "head dimension": (torch.randn(2, 4, 70, 136, device="cuda", dtype=bf16), "D is 136"),
        "float32": (x.float(), "torch.float32"),
    }


@pytest.mark.parametrize("name", ["unaligned rows", "unaligned start", "batch inside rows", "expanded heads",
                                  "head dimension", "float32"])  # fmt: skip
def test_what_is_refused_runs_elsewhere(name: str) -> None:
    x, words = irregular()[name]
    said = gdpa.explain(x, x, x)
    assert said.startswith("backend: triton")
    (line,) = (line for line in said.splitlines() if line.startswith("  hopper: no, "))
    assert words in line
    with pytest.raises(gdpa.UnsupportedProblemError, match="backend='hopper' cannot run this call"):
        gdpa.attention(x, x, x, backend="hopper")
    got, want = gdpa.attention(x, x, x), gdpa.attention(x.double(), x.double(), x.double(), backend="reference")
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def test_ordinary_problems_are_not_refused() -> None:
    """So that no test of this backend is skipped by mistake."""
    for case in CASES:
        for dtype in (f16, bf16):
            x = operands(case, make_inputs(case, dtype, "cuda"))
            assert backends.get("hopper").supports(problem_of(case, x, "gelu")) is None
    x = torch.randn(1, 1, 5, 8, device="cuda", dtype=bf16)
    assert gdpa.explain(x, x, x).startswith("backend: hopper")


# ---- the rest of the API ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("heads_k", [1, 2])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_nested_tensors_are_packed_ones(heads_k: int, causal: bool) -> None:
    case = packed("nested", (65, 0, 200, 2), (70, 4, 1, 0), heads=2, heads_k=heads_k, d=64, causal=causal)
    x = make_inputs(case, bf16, "cuda")
    q = torch.nested.nested_tensor_from_jagged(x.q, x.cu_q.long()).transpose(1, 2)
    cu_k = x.cu_k.long()
    k, v = (torch.nested.nested_tensor_from_jagged(t, cu_k).transpose(1, 2) for t in (x.k, x.v))
    nested = gdpa.attention(q, k, v, "silu", causal=causal, backend="hopper").transpose(1, 2).values()
    plain = call(case, x, "silu", backend="hopper")
    do = torch.randn_like(plain)
    got, want = (gradients(out, do, *x.leaves) for out in (nested, plain))
    assert all(torch.equal(got[name], want[name]) for name in got)


@pytest.mark.parametrize("case", [*CASES[:3], CASES[5]], ids=lambda case: case.name)
def test_opcheck(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    attention = gdpa.ops.attention
    monkeypatch.setattr(gdpa.ops, "attention", lambda *args: seen.append(args) or attention(*args))
    monkeypatch.setattr(gdpa.calling.direct, "nobody_watches", lambda: False)
    torch.use_deterministic_algorithms(True)
    out = call(case, make_inputs(case, bf16, "cuda"), "silu", backend="hopper")
    torch.library.opcheck(torch.ops.gdpa.attention, seen[0])
    x = operands(case, make_inputs(case, bf16, "cuda"))
    grad = torch.randn(out.shape, device="cuda", dtype=bf16)
    grad = grad.transpose(0, 1)[None] if case.packed_q else grad
    grad = grad.view(len(case.len_q), -1, *grad.shape[1:]).transpose(1, 2) if case.shared else grad
    plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in (grad, x.q, x.k, x.v, *seen[0][3:]))
    torch.library.opcheck(torch.ops.gdpa.attention_backward, plain)


def test_each_head_alone() -> None:
    functions = ["relu", lambda s: torch.atan(s), "relu", lambda s: s * s]
    case = dense("alone", 2, 130, 70, heads=4, d=64)
    x = make_inputs(case, bf16, "cuda")
    together = gdpa.attention(*x.leaves, functions, backend="hopper")
    alone = [gdpa.attention(*(t[:, h : h + 1] for t in x.leaves), f, backend="hopper") for h, f in enumerate(functions)]
    assert torch.equal(together, torch.cat(alone, dim=1))


def test_int64_offsets_and_hints_change_no_bit() -> None:
    case = replace(CASES[0], causal=True)
    x = make_inputs(case, bf16, "cuda")
    do = output_gradient(case).to("cuda", bf16)
    want = gradients(call(case, x, "silu", backend="hopper"), do, *x.leaves)
    long = Inputs(*x.leaves, x.cu_q.long(), x.cu_k.long())
    for inputs, kwargs in ((long, {}), (x, {"max_seqlen_q": 257, "max_seqlen_k": 130})):
        got = gradients(call(case, inputs, "silu", backend="hopper", **kwargs), do, *x.leaves)
        assert all(torch.equal(got[name], want[name]) for name in want)


# ---- what must not spread --------------------------------------------------------------------------------------------
def test_a_masked_pair_is_zero_beside_infinite_gradients() -> None:
    """dp may be inf where the mask is not kept: dk of keys that a poisoned query does not see stays what it was."""
    case = dense("masked", 1, 130, 130, heads=1, d=64, causal=True)
    x = make_inputs(case, bf16, "cuda")
    clean = torch.randn(x.q.shape, device="cuda", dtype=bf16)
    poisoned_do = clean.clone()
    poisoned_do[:, :, 40] = torch.inf
    for do in (clean, poisoned_do):
        grads = gradients(call(case, x, "gelu", backend="hopper"), do, *x.leaves)
        assert grads["dk"][:, :, 41:].isfinite().all()
        assert grads["dq"][:, :, torch.arange(130) != 40].isfinite().all()


def test_a_poisoned_head_leaves_the_params_of_others_alone() -> None:
    slope = torch.full((4,), 0.3, device="cuda", requires_grad=True)
    case = packed("params", (130, 257, 64), (190, 65, 300), heads=4, d=64)
    x = make_inputs(case, bf16, "cuda")
    with torch.no_grad():
        x.q[:, 0] = torch.nan
    out = call(case, x, lambda s, a: torch.where(s > 0, s, a * s), params=(slope,), backend="hopper")
    (grad,) = torch.autograd.grad(out, slope, torch.ones_like(out))
    assert grad[0].isnan()
    assert grad[1:].isfinite().all()


@pytest.mark.parametrize("fn", [torch.ones_like, torch.round, lambda s: (s > 0).float()], ids=["one", "round", "step"])
def test_outputs_that_do_not_depend_on_the_score(fn: Any) -> None:
    for causal in (False, True):
        check(dense("constant", 2, 70, 130, heads=2, d=64, causal=causal), BF16, fn)
