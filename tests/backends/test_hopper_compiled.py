"""Hopper's kernels compiled for sm_90a without a GPU: asynchronous tensor cores, no waits between products, few spills.

`make test` runs this file twice: with the Triton of the environment, and with the newest release. The second run
compiles the first case of some tests: what a release changes shows in any kernel with its passes, a band, row sums, a
mask and a table. Cases are chosen so that each path of a kernel is compiled, and each function and head dim in some
test. All functions at all head dims are compiled with GDPA_FULL_GRID=1 (`make test-all`).
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa import masks
from gdpa.functions import stored
from gdpa.functions.activation import from_name, resolve_one
from gdpa.functions.mask import mask_from_key
from gdpa.functions.places.names import TableKind
from gdpa.masks.band import Band
from gdpa.nn.biases import log_buckets
from gdpa.problem import Operands, Problem, make_problem
from support import FULL

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this run, not compiled", allow_module_level=True)

from aot import RELEASE, Recorder, compile_for, resources  # noqa: E402
from gdpa.backends.hopper import binding, config, launch, split_kv, visits, wide_dq  # noqa: E402
from gdpa.backends.hopper.backward.function import HIDDEN  # noqa: E402
from gdpa.backends.hopper.scheduling import sorting, work  # noqa: E402
from gdpa.backends.hopper.scheduling.schedule import Listed  # noqa: E402
from gdpa.backends.hopper.scheduling.sorting import EVERY  # noqa: E402
from gdpa.backends.triton import arguments  # noqa: E402
from gdpa.backends.triton.row_sums import RowTerms  # noqa: E402
from gdpa.backends.triton.tables import NOTHING_LEARNED, LearnedTables  # noqa: E402

SHARED_MEMORY = 227 * 1024  # of one program: 232448 bytes
EXPECTED = os.environ.get("EXPECTED_TRITON")  # set where the newest release should be found


def some(cases: list, others: list) -> list:
    """Which cases of a test run: the first with the newest Triton; ``others`` only in the full grid."""
    if FULL:
        return cases + others
    return cases[:1] if EXPECTED else cases


# Variants of what other tests compile with the newest release too.
once = pytest.mark.skipif(bool(EXPECTED) and not FULL, reason="compiled with the environment's Triton only")


def squared_softplus(s: Tensor) -> Tensor:
    return F.softplus(s) ** 2


def learned_slope(s: Tensor, slope: Tensor) -> Tensor:
    return torch.where(s > 0, s, slope * s)


def learned_wave(s: Tensor, height: Tensor, width: Tensor, slope: Tensor) -> Tensor:
    return height * torch.tanh(width * s) + slope * s


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """Kernels launched while the test runs, recorded instead, as on an H100 where compiled kernels are kept."""
    found: list = []
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path))
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    monkeypatch.setattr(work, "ordered_records_kernel", Recorder(work.ordered_records_kernel, []))
    monkeypatch.setattr(arguments, "zero_unused_kernel", Recorder(arguments.zero_unused_kernel, []))
    monkeypatch.setattr(wide_dq, "round_rows_kernel", Recorder(wide_dq.round_rows_kernel, []))
    for name in ("forward_kernel", "backward_kernel"):
        monkeypatch.setattr(binding, name, Recorder(getattr(binding, name), found))
    return found


NO_BAND = Band()
CAUSAL = Band(None, 0)


def make(
    activation, d, dtype=torch.bfloat16, band=NO_BAND, packed=True, group=1, n_params=0, length=2048
) -> tuple[Problem, Operands]:
    """Tensors that are never touched, with the usual scale."""
    batch, heads = 4, 4
    if packed:
        q, k = (torch.empty(batch * length, h, d, dtype=dtype).transpose(0, 1)[None] for h in (heads, heads // group))
        cu = torch.arange(batch + 1, dtype=torch.int32) * length
    else:
        q, k = (torch.empty(batch, h, length, d, dtype=dtype) for h in (heads, heads // group))
        cu = None
    params = torch.empty(n_params, heads) if n_params else None
    x = Operands(q, k, k, cu, cu, params)
    return make_problem(x, (resolve_one(activation, n_params),), d**-0.5, 1.0, band), x


def forward(problem: Problem, x: Operands) -> None:
    launch.forward(problem, x, torch.empty_like(x.q), config.default(problem, "fwd"))


def backward(problem: Problem, x: Operands, mode: str, listed: Listed = EVERY) -> None:
    dparams = None if x.params is None else torch.empty_like(x.params)
    gradients = (torch.empty_like(x.q), torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v), dparams)
    launch.launch_backward(problem, x, *gradients, mode, config.default(problem, "bwd"), listed)


def in_a_band(d: int) -> str:
    """See config.dq_mode."""
    return "turns" if d > 64 else "add"


# Bytes of spilled registers that are accepted: today's with a small margin. The forward fits its 240 registers. A
# consumer of the backward holds dk, dv and a block of scores in as many; the assembler of Triton 3.9 spills more. (With
# torch's CUDA builds 3.6 and 3.7 come along.)
NEWEST = RELEASE >= (3, 9)
FORWARD = 0
PLAIN_FORWARD = 256 if NEWEST else 64  # Triton's own code for f, operation by operation
RING_BACKWARD = 512 if NEWEST else 256
BACKWARD = 192  # no ring
# With a mask there is more to hold.
MASKED_FORWARD = 448 if NEWEST else 0
MASKED_BACKWARD = {64: 1024 if NEWEST else 192, 128: 320}  # 284 by turns, nearly all of them the producer's
SUMS_BACKWARD = 1024 if NEWEST else 448
# Sums for the gradients of params besides: one per key and param. (With the newest release consumers have a copy of
# their code each, which spill several times as much; see compiled/sharing.py.)
PARAMS_BACKWARD = 2432 if NEWEST else 256


def check(found: list, allowed: int) -> None:
    """Compile what was launched and compare."""
    ((kernel, args, kwargs),) = found
    r = resources(compile_for(kernel, args, kwargs, 90))
    assert r.hgmma > 0, f"no asynchronous tensor core instructions: {r}"
    assert r.hmma == 0, f"synchronous tensor core instructions: {r}"
    assert r.shared <= SHARED_MEMORY, r
    assert r.spills <= allowed, r
    assert not r.advice, f"products wait for each other: {r}"


def test_the_release_is_the_expected_one():
    """The second run of this file must not find the first one's Triton."""
    if EXPECTED is None:
        pytest.skip("EXPECTED_TRITON is not set")
    assert triton.__version__ == EXPECTED


@pytest.mark.parametrize(
    ("activation", "d"),
    some([("gelu_tanh", 128)],  # D 64: a function with params below
         [("gelu_tanh", 64), ("silu", 64), ("silu", 128), ("relu", 64), ("relu", 128), (squared_softplus, 64),
          (squared_softplus, 128)]),
)  # fmt: skip
def test_forward(launches, activation, d):
    forward(*make(activation, d))
    check(launches, FORWARD)


@pytest.mark.parametrize(
    ("activation", "d", "band", "packed"),
    some([("gelu_tanh", 128, CAUSAL, True)],
         [("silu", 64, CAUSAL, False), ("gelu_tanh", 64, NO_BAND, True), ("silu", 128, NO_BAND, False)]),
)  # fmt: skip
def test_forward_of_few_queries(launches, activation, d, band, packed):
    """By one consumer, without a list."""
    problem, x = make(activation, d, band=band, packed=packed, length=200)
    forward(problem, x)
    ((_, _, constants),) = launches
    tile = constants["T"]
    assert tile.CONSUMERS == 1
    assert tile.SCANS is packed
    assert not tile.TAKES
    check(launches, 128 if NEWEST else FORWARD)


@pytest.mark.usefixtures("large_batch")
@pytest.mark.parametrize(
    ("activation", "d", "band"),
    some([("gelu_tanh", 128, NO_BAND)], [("silu", 64, CAUSAL), ("gelu_tanh", 64, NO_BAND), ("silu", 128, CAUSAL)]),
)
def test_forward_of_few_keys(launches, activation, d, band):
    problem, x = make(activation, d, band=band, length=50)
    assert config.default(problem, "fwd").block_n == 64
    forward(problem, x)
    check(launches, FORWARD)


@pytest.mark.parametrize(
    ("activation", "d", "packed", "few"),
    [("silu", 64, True, range(1, 105)), ("gelu_tanh", 128, True, range(1, 65)),
     ("silu", 64, False, range(1, 65)), ("gelu_tanh", 128, False, [*range(1, 65), *range(129, 193)])],
)  # fmt: skip
def test_what_few_keys_are(activation, d, packed, few):
    found = [n for n in range(1, 300) if config.has_few_keys(make(activation, d, packed=packed, length=n)[0])]
    assert found == [*few]


@pytest.mark.parametrize(("activation", "most"), [("silu", 320), ("gelu_tanh", 640)])
def test_what_few_keys_behind_a_mask_are(activation, most):
    mask = mask_from_key(masks.causal().key)
    for packed in (False, True):
        problems = {
            n: replace(make(activation, 64, packed=packed, length=n)[0], mask=mask) for n in (1, most, most + 1)
        }
        assert [n for n, problem in problems.items() if config.has_few_keys(problem)] == [1, most]


@once
@pytest.mark.parametrize("d", some([64], [128]))
def test_forward_of_a_function_that_is_no_block_of_ptx(launches, d):
    """Two consumers at D 64 as well: three would spill 2 KB."""
    forward(*make(torch.atan, d))
    check(launches, PLAIN_FORWARD)


WAITING = pytest.mark.xfail(strict=True, reason="C7512: registers are short, products wait")


@pytest.mark.parametrize(
    ("activation", "d"),
    some([("gelu_tanh", 128)],
         [("gelu_tanh", 64), ("silu", 64), ("silu", 128), ("relu", 128), (squared_softplus, 64),
          (squared_softplus, 128), pytest.param("relu", 64, marks=WAITING)]),
)  # fmt: skip
def test_backward(launches, activation, d):
    backward(*make(activation, d), "ring")
    check(launches, RING_BACKWARD)


def long_function(s: Tensor) -> Tensor:
    return F.gelu(s, approximate="tanh") + 0.5 * s


@once
@pytest.mark.parametrize("packed", [True, False] if FULL else [True])
def test_backward_with_one_copy_of_its_consumers(launches, packed):
    backward(*make(long_function, 64, packed=packed), "ring")
    assert launches[0][2]["T"].ALIKE
    check(launches, RING_BACKWARD)


KINDS = {
    "dense": {"packed": False},
    "gqa": {"group": 4},
    "dense gqa in float16": {"dtype": torch.float16, "packed": False, "group": 4},
}


@once
@pytest.mark.parametrize(
    ("kind", "d"),
    some([("dense gqa in float16", 128)],
         [("dense", 64), ("dense", 128), ("gqa", 64), ("gqa", 128), ("dense gqa in float16", 64)]),
)  # fmt: skip
def test_kinds_of_rings(launches, kind, d):
    backward(*make("gelu_tanh", d, **KINDS[kind]), "ring")
    check(launches, RING_BACKWARD)


@once
@pytest.mark.parametrize("d", some([64], [128]))
def test_sums_in_a_fixed_order(launches, d):
    torch.use_deterministic_algorithms(True)
    backward(*make("gelu_tanh", d), "ring")
    assert launches[0][2]["T"].ORDERED
    check(launches, RING_BACKWARD)


@once
@pytest.mark.parametrize(("mode", "d"), some([("none", 128)], [("none", 64), ("add", 64), ("add", 128)]))
def test_other_ways_to_make_dq(launches, mode, d):
    """Added up in memory (also with a band or a mask, below), left to a kernel of its own."""
    backward(*make("gelu_tanh", d), mode)
    check(launches, BACKWARD)


@once
@pytest.mark.parametrize(
    ("activation", "d", "band"),
    some([("gelu_tanh", 128, CAUSAL)],
         [("relu", 64, Band(64, 64)), ("gelu_tanh", 128, Band(130, None)), ("gelu_tanh", 128, Band(64, 64)),
          (squared_softplus, 64, CAUSAL)]),
)  # fmt: skip
def test_bands(launches, activation, d, band):
    problem, x = make(activation, d, band=band)
    forward(problem, x)
    check(launches, MASKED_FORWARD)
    launches.clear()
    backward(problem, x, in_a_band(d))
    check(launches, MASKED_BACKWARD[d])


@once
def test_some_heads_come_first(launches):
    """In long causal sequences by turns; consumers have one copy of their code there, too."""
    backward(*make("gelu", 64, band=CAUSAL, length=16384), "turns")
    assert launches[0][2]["T"].SOME_HEADS
    assert launches[0][2]["T"].ALIKE
    check(launches, MASKED_BACKWARD[64])


@pytest.mark.skipif(not FULL, reason="only with the full grid: causal attention takes turns, above")
@pytest.mark.parametrize(("d", "band"), [(128, Band(130, 64)), (64, Band(130, 64)), (64, NO_BAND), (128, NO_BAND)])
def test_sums_by_turns(launches, d, band):
    backward(*make("gelu_tanh", d, band=band), "turns")
    check(launches, MASKED_BACKWARD[d])


@pytest.mark.parametrize(("activation", "d"), some([("gelu_tanh", 128)], [("gelu", 64)]))  # a kernel of test_bands
def test_hidden_pairs_have_a_derivative_of_their_own(launches, activation, d):
    """Their ds must be 0 whatever dp is, and 0 times infinity is not."""
    problem, x = make(activation, d, band=CAUSAL)
    backward(problem, x, in_a_band(d))
    ((kernel, args, kwargs),) = launches
    ptx = compile_for(kernel, args, kwargs, 90).ptx
    hidden = f"{HIDDEN.value & 0xFFFFFFFF:08X}"
    assert re.search(rf"selp\.\w+\s+[^;]*(0f{hidden}|{HIDDEN.value})\b", ptx)
    assert re.search(rf"setp\.(eq|ne)\.\w+\s+[^;]*{HIDDEN.value};", ptx)


@once
def test_causal_goes_round(launches):
    backward(*make("gelu_tanh", 128, band=CAUSAL, packed=False), "ring")
    check(launches, RING_BACKWARD)


@pytest.mark.skipif(not FULL, reason="only with the full grid: keys in parts are compiled with all of it, below")
def test_forward_of_dense_gqa_in_float16(launches):
    forward(*make("gelu_tanh", 128, torch.float16, packed=False, group=4))
    check(launches, FORWARD)


def backward_with_sums(problem: Problem, x: Operands, mode: str, learn: LearnedTables = NOTHING_LEARNED) -> None:
    terms = torch.empty(2, problem.out_batch, problem.heads_q, problem.rows_q)
    dparams = None if x.params is None else torch.empty_like(x.params)
    gradients = (torch.empty_like(x.q), torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v), dparams)
    terms_of = RowTerms(terms[0], terms[1], terms.stride(1), terms.stride(2))
    launch.launch_backward(problem, x, *gradients, mode, config.default(problem, "bwd"), EVERY, terms_of, learn)


@pytest.mark.parametrize(
    ("activation", "norm", "d", "band"),
    some([("exp", "sum", 128, CAUSAL)],
         [("silu", "abs", 64, NO_BAND), ("exp", "sum", 64, NO_BAND), ("exp", "sum", 128, NO_BAND),
          ("exp", "sum", 64, CAUSAL), ("silu", "sum", 64, NO_BAND), ("relu", "sum", 128, NO_BAND),
          ("tanh", "abs", 128, CAUSAL)]),
)  # fmt: skip
def test_row_sums(launches, activation, norm, d, band):
    """The function's values are not packed here: sums are of unrounded ones."""
    problem, x = make(activation, d, band=band, packed=False)
    problem = problem.normalized((norm,))
    sums = torch.empty(x.q.shape[:3])
    launch.forward(problem, x, torch.empty_like(x.q), config.default(problem, "fwd"), sums)
    check(launches, max(MASKED_FORWARD, 64 if d == 64 else 0))
    launches.clear()
    backward_with_sums(problem, x, "ring" if band == NO_BAND else in_a_band(d))
    check(launches, SUMS_BACKWARD)


def linear_bias(s: Tensor, slopes: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return F.silu(s - slopes[h] * (q_idx - kv_idx).abs())


def relative(s: Tensor, bias: Tensor, *, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return F.silu(s + bias[q_idx - kv_idx + 1023])


def fading(s: Tensor, gates: Tensor, *, kv_row: Tensor, kv_idx: Tensor, kv_len: Tensor) -> Tensor:
    return F.silu(s) * gates[kv_row] / (kv_len - kv_idx)


# Of each function: whether it is a function of a sum, whether it is finite past the ends of sequences, and bytes of
# spills, forward and backward. Those that are not finite there are masked, whatever the band is.
PLACED = {
    "sum": (linear_bias, True, True, 448 if NEWEST else 64, 512 if NEWEST else 192),
    "sum of pairs": (relative, True, False, 3072 if NEWEST else 128, 2048 if NEWEST else 448),
    "product": (fading, False, False, 2432 if NEWEST else 448, 3072 if NEWEST else 384),
}


def with_table(fn, d: int, band: Band, timed: bool = False) -> tuple[Problem, Operands]:
    """``timed``: there is a second table, of times."""
    problem, x = make("silu", d, band=band)
    tables = [torch.empty(4), torch.empty(8192, dtype=torch.int64)][: 1 + timed]
    act = resolve_one(fn, 0, tuple(TableKind(1, t.dtype) for t in tables))
    return replace(problem, activations=(act,)), replace(x, tables=tables)


@pytest.mark.skipif(not FULL, reason="only with the full grid: a minute")
@pytest.mark.parametrize("d", [64, 128])
def test_hstus_biases(launches, d):
    """Blocks of 64 keys: with 128 there are 3 KB of spills and twice the code."""
    problem, x = with_table(hstu, d, CAUSAL, timed=True)
    forward(problem, x)
    assert launches[0][2]["T"].BLOCK_N == 64
    check(launches, 448 if NEWEST else 64)


def slope_and_key(s: Tensor, slopes: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return F.silu(s + slopes[h] * (kv_idx - q_idx) - slopes[kv_idx])


@pytest.mark.parametrize(("d", "band"), some([(128, NO_BAND)], [(128, CAUSAL), (64, NO_BAND), (64, CAUSAL)]))
def test_biases_that_tensor_cores_add(launches, d, band):
    """They are in the producer's few registers. Three consumers have none to spare, most of all before their loop."""
    problem, x = with_table(slope_and_key, d, band)
    forward(problem, x)
    tile, consumers = launches[0][2]["T"], 3 if (d, band) == (64, NO_BAND) else 2
    assert (False, consumers) == (tile.SHIFTED, tile.CONSUMERS)
    assert math.isclose(tile.BIAS_FACTOR, d**0.5)
    check(launches, {2: 256 if NEWEST else 64, 3: 1024 if NEWEST else 704}[consumers])
    kernel, args, kwargs = launches[0]
    assert compile_for(kernel, args, kwargs, 90).shared <= config.SHARED_MEMORY


def test_biases_that_consumers_add():
    """Where the scale is not the usual one, values have another width than keys, or there are parts of keys."""
    problem, _ = with_table(slope_and_key, 128, NO_BAND)
    assert config.has_bias(problem)
    assert binding.forward_items(problem, config.default(problem, "fwd"), 1).adds_bias
    assert not binding.forward_items(problem, split_kv.IN_PARTS[128], 2).adds_bias
    assert not config.has_bias(replace(problem, scale=0.1))
    assert not config.has_bias(replace(problem, head_dim_v=64))
    assert not config.has_bias(with_table(linear_bias, 128, NO_BAND)[0])


# Sums without lookups for pairs are compiled below: forward in a band, and backward with the gradients of a table.
@once
@pytest.mark.parametrize(("name", "d"), some([("product", 128), ("sum of pairs", 128)], [("sum", 64), ("sum", 128)]))
def test_positions(launches, name, d):
    fn, is_sum, finite, most, most_backward = PLACED[name]
    problem, x = with_table(fn, d, NO_BAND)
    forward(problem, x)
    tile = launches[0][2]["T"]
    assert (is_sum, not is_sum, not finite) == (tile.SHIFTED, tile.PLACED, tile.MASKED)
    check(launches, most)
    launches.clear()
    if name == "sum of pairs" and not FULL:  # with the gradient of its table besides, below
        return
    backward(problem, x, "ring")
    assert finite == launches[0][2]["T"].FINITE_AT_ZERO
    check(launches, most_backward)


def bucketed(s: Tensor, bias: Tensor, *, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return F.silu(s + bias[q_idx * kv_idx % 4])


def timed(s: Tensor, bias: Tensor, time: Tensor, *, q_row: Tensor, kv_row: Tensor) -> Tensor:
    return F.silu(s + bias[(time[q_row] - time[kv_row]).clamp(0, 127)])


def hstu(
    s: Tensor, bias: Tensor, time: Tensor, *, q_idx: Tensor, kv_idx: Tensor, q_row: Tensor, kv_row: Tensor
) -> Tensor:  # fmt: skip
    distance = (q_idx - kv_idx).clamp(-99, 99) + 99
    return F.silu(s + bias[distance] + bias[log_buckets(time[q_row] - time[kv_row]).clamp(0, 128)])


LEARNED = {  # bytes of spills
    "of a head": (linear_bias, 2048 if NEWEST else 192),
    "along diagonals": (relative, 2048 if NEWEST else 960 if RELEASE >= (3, 7) else 320),
    "pair by pair": (timed, 2048 if NEWEST else 320),
    "pair by pair, by Triton": (bucketed, 4096 if NEWEST else 384),
    "HSTU's": (hstu, 4096 if NEWEST else 320),
}


@pytest.mark.parametrize(
    ("name", "d"),
    some(
        [("along diagonals", 128), ("pair by pair", 128)],
        [("of a head", 128), ("pair by pair, by Triton", 128), ("HSTU's", 128), ("along diagonals", 64)],
    ),
)
def test_gradients_of_tables(launches, name, d):
    fn, most = LEARNED[name]
    problem, x = with_table(fn, d, NO_BAND, timed=fn in (timed, hstu))
    problem = replace(problem, learn=True)
    assert binding.learns(problem)
    gradients = [torch.empty_like(q) for q in (x.q, x.q, x.k, x.k)]
    learn = LearnedTables.of(problem, [t if t.is_floating_point() else None for t in x.tables])
    launch.launch_backward(problem, x, *gradients, None, "ring", config.default(problem, "bwd"), EVERY, None, learn)
    check(launches, most)


@once
@pytest.mark.skipif(not FULL, reason="only with the full grid: half a minute")
@pytest.mark.parametrize("d", [64, 128])
def test_gradients_of_tables_with_row_sums(launches, d):
    def biased(s: Tensor, bias: Tensor, *, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.exp(s + bias[q_idx - kv_idx + 1023])

    problem, x = with_table(biased, d, NO_BAND)
    problem = replace(problem.normalized(("sum",)), learn=True)
    assert binding.learns(problem)
    backward_with_sums(problem, x, "ring", LearnedTables.of(problem, x.tables))
    assert not launches[0][2]["T"].FINITE_AT_ZERO  # keys past the end are no part of the gradient
    check(launches, 1024)


@pytest.mark.skipif(not FULL, reason="only with the full grid: half a minute")
def test_values_of_columns_fit_beside_row_sums(launches):
    """What conversions of 64-bit columns take of shared memory, where least is left."""
    problem, x = with_table(timed, 128, NO_BAND, timed=True)
    problem = problem.normalized(("sum",))
    launch.forward(problem, x, torch.empty_like(x.q), config.default(problem, "fwd"), torch.empty(x.q.shape[:3]))
    backward_with_sums(problem, x, "add")
    for which, (kernel, args, kwargs) in zip(("fwd", "bwd"), launches, strict=True):
        assert kwargs["CODE"].COLUMNS is not None
        planned = config.shared_memory(which, config.default(problem, which), 128)
        assert compile_for(kernel, args, kwargs, 90).shared <= planned <= config.SHARED_MEMORY


def test_functions_of_params_and_positions_leave_their_backward_to_triton():
    problem, _ = make("silu", 128)
    act = resolve_one(lambda s, a, *, q_idx, kv_idx: F.silu(a * s) + a * (q_idx - kv_idx), 1)
    assert config.no_room_for_params(replace(problem, activations=(act,))) is not None


def test_keys_past_the_end_are_no_part_of_a_row_sum():
    """The score there is 0, and so is silu of it, but not silu of it and a bias."""
    problem, _ = make("silu", 128)
    biased, _ = with_table(linear_bias, 128, NO_BAND)
    plain, summed, of_biased = problem, problem.normalized(("sum",)), biased.normalized(("sum",))
    problems, items = (plain, summed, biased, of_biased), binding.Items(1, 1, whole=False)
    tiles = [binding.forward_tile(p, config.default(p, "fwd"), items) for p in problems]
    assert [(t.MASKED, t.FINITE_AT_ZERO) for t in tiles] == [(False, True), (False, True), (False, True), (True, False)]


def test_whole_blocks_of_keys_need_no_mask():
    for packed, length, whole in ((False, 256, True), (False, 250, False), (True, 256, False)):
        problem, _ = make("exp", 128, packed=packed, length=length)
        softmax, c = problem.normalized(("sum",)), config.default(problem, "fwd")
        items = binding.forward_items(softmax, c, 1)
        assert (items.tiles, items.whole) == (1, whole)  # there are too few for several tiles to an item
        assert binding.forward_tile(softmax, c, items).MASKED is not whole
        assert not binding.forward_items(problem, c, 1).whole  # nothing counts there anyway: no second kernel


def test_sums_of_keys_past_the_end_do_not_vote():
    """Where there may be any; and a band is masked all the same."""
    act = resolve_one(linear_bias, 0, (TableKind(1, torch.float32),))
    for packed, length, votes in ((False, 256, False), (False, 250, True), (True, 256, True)):
        for band in (NO_BAND, CAUSAL):
            plain, _ = make("silu", 128, packed=packed, length=length, band=band)
            tiles = []
            for problem in (replace(plain, activations=(act,)), plain):
                c = config.default(problem, "fwd")
                tiles.append(binding.forward_tile(problem, c, binding.forward_items(problem, c, 1)))
            assert [(t.VOTES, t.MASKED) for t in tiles] == [(votes, band == CAUSAL), (False, band == CAUSAL)]


def test_hidden_pairs_do_not_mislead_a_vote():
    """A lane may sample none but keys before a window, or behind a mask; hidden sums vote unless they are 0."""

    def biased(s: Tensor, slopes: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.sigmoid(s - 8 + slopes[h] * (kv_idx - q_idx))

    mask = mask_from_key(masks.causal().key)
    kinds = (TableKind(1, torch.float32),)
    for fn, by_band in (
        (from_name("gelu_tanh"), {NO_BAND: True, CAUSAL: True, Band(15, 0): False}),
        (resolve_one(linear_bias, 0, kinds), {NO_BAND: True, CAUSAL: True, Band(15, 0): False}),
        (resolve_one(biased, 0, kinds), {NO_BAND: True, CAUSAL: False, Band(15, 0): False}),
    ):
        for band, votes in by_band.items():
            problem = replace(make("silu", 128, band=band)[0], activations=(fn,))
            c = config.default(problem, "fwd")
            for items in (binding.forward_items(problem, c, 1), binding.ADDED_BY_CONSUMERS):
                f = binding.forward_function_of(problem, items)
                assert f.packed_forward is not f.careful_forward
                voting = (f if items.adds_bias else binding.voting_function(problem)).packed_forward
                masked = f.forward if items.adds_bias and not f.zero_at_zero else f.careful_forward
                alone = f.careful_forward if band == NO_BAND else masked
                assert binding.forward_function(problem, c, items) is (voting if votes else alone)
                assert binding.forward_function(replace(problem, mask=mask), c, items) is masked


def test_a_part_without_keys_is_masked():
    """It reads zeros, where this function is infinite; all other blocks are whole."""
    x = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
    k = torch.empty(1, 1, 40 * 4096 + 128, 64, dtype=torch.bfloat16)
    problem = make_problem(Operands(x, k, k), (resolve_one(lambda s: torch.log(s.abs()), 0),), 0.125, 1.0, NO_BAND)
    c = split_kv.IN_PARTS[64]
    assert binding.forward_items(problem, c, 1).whole
    assert not binding.forward_items(problem, c, split_kv.parts_of(problem, 132)).whole


@once
def test_positions_in_a_band(launches):
    problem, x = with_table(linear_bias, 128, CAUSAL)
    forward(problem, x)
    assert launches[0][2]["T"].MASK_SCORES  # guarded code holds the sums in any case
    check(launches, 1024 if NEWEST else 64)
    if FULL:  # functions of positions, and bands, each have a backward above
        launches.clear()
        backward(problem, x, "add")
        check(launches, 1536 if NEWEST else 512)


MASKS = {
    "targets": (masks.targets(torch.zeros(4, dtype=torch.int64)), 512 if NEWEST else 160, 512 if NEWEST else 320),
    "documents": (masks.document(torch.zeros(8192, dtype=torch.int32)), 512 if NEWEST else 192, 512 if NEWEST else 320),
}


@once
@pytest.mark.parametrize(
    ("name", "activation"), some([("documents", "silu")], [("targets", "silu"), ("targets", "gelu_tanh")])
)
def test_masks(launches, monkeypatch, name, activation):
    """The main kernels, and the one that lists the blocks they visit."""
    listing: list = []
    monkeypatch.setattr(visits, "list_visits_kernel", Recorder(visits.list_visits_kernel, listing))
    mask, most, most_backward = MASKS[name]
    problem, x = make(activation, 128)
    problem = replace(problem, mask=mask_from_key(mask.key))
    x = replace(x, tables=list(mask.tables))
    forward(problem, x)
    check(launches, most)
    launches.clear()
    backward(problem, x, "add")
    check(launches, most_backward)
    for kernel, args, kwargs in listing:
        assert resources(compile_for(kernel, args, kwargs, 90)).spills == 0
    assert len(listing) == 2


@once
@pytest.mark.parametrize(
    ("d", "band", "dtype", "group"),
    some([(128, CAUSAL, torch.float16, 4)],
         [(128, CAUSAL, torch.bfloat16, 1), (128, NO_BAND, torch.bfloat16, 1), (64, NO_BAND, torch.bfloat16, 1)]),
)  # fmt: skip
def test_forward_with_keys_in_parts(launches, monkeypatch, d, band, dtype, group):
    adding: list = []
    monkeypatch.setattr(split_kv, "add_parts_kernel", Recorder(split_kv.add_parts_kernel, adding))
    problem, x = make("gelu_tanh", d, dtype, band, packed=False, group=group, length=16384)
    few = [t[:1] for t in (x.q[:, :, :128], x.k, x.v)]
    launch.forward(make_problem(Operands(*few), problem.activations, d**-0.5, 1.0, band), Operands(*few), few[0])
    assert launches[0][2]["T"].PARTS == 4
    check(launches, MASKED_FORWARD)
    ((kernel, args, kwargs),) = adding
    assert resources(compile_for(kernel, args, kwargs, 90)).spills == 0


@once
@pytest.mark.parametrize(
    ("fn", "n_params", "d", "band"),
    some([(learned_wave, 3, 64, NO_BAND)],
         [(learned_slope, 1, 128, CAUSAL), (learned_wave, 3, 128, CAUSAL), (learned_slope, 1, 128, NO_BAND),
          (learned_slope, 1, 64, CAUSAL)]),
)  # fmt: skip
def test_params(fn, n_params, d, band, launches):
    problem, x = make(fn, d, band=band, n_params=n_params)
    forward(problem, x)
    check(launches, FORWARD if band == NO_BAND else MASKED_FORWARD)
    launches.clear()
    backward(problem, x, "ring" if band == NO_BAND else "add")
    check(launches, PARAMS_BACKWARD)


SUMS_WITH_PARAMS = {"softmax": (lambda s, a: torch.exp(a * s), 448), "relu": (lambda s, a: F.relu(s - a), 512)}


@once
@pytest.mark.parametrize(("name", "d"), some([("softmax", 128)], [("softmax", 64), ("relu", 128)]))
def test_params_through_row_sums(name, d, launches):
    fn, most = SUMS_WITH_PARAMS[name]
    problem, x = make(fn, d, packed=False, n_params=1)
    problem = problem.normalized(("sum",))
    assert binding.left_to_triton(problem, False, False) is None
    backward_with_sums(problem, x, "ring")
    assert not launches[0][2]["T"].FINITE_AT_ZERO  # keys past the end are no part of the params' gradients
    check(launches, most)


@once
@pytest.mark.parametrize("d", some([64], [128]))
def test_params_behind_a_mask(d, launches, monkeypatch):
    monkeypatch.setattr(visits, "list_visits_kernel", Recorder(visits.list_visits_kernel, []))
    mask, _, _ = MASKS["targets"]
    problem, x = make(lambda s, a: F.silu(a * s), d, n_params=1)
    problem, x = replace(problem, mask=mask_from_key(mask.key)), replace(x, tables=list(mask.tables))
    assert binding.left_to_triton(problem, False, False) is None
    backward(problem, x, "add")
    check(launches, 256)


def test_functions_that_are_no_block_of_ptx_are_computed_by_halves(launches):
    problem, x = make(lambda s, a: torch.atan(a * s), 64, n_params=1)
    backward(problem, x, "ring")
    assert not launches[0][2]["T"].BY_EIGHT
    check(launches, PARAMS_BACKWARD if NEWEST else 512)


def temperature(s: Tensor, a: Tensor) -> Tensor:
    return F.silu(a * s)


@once
@pytest.mark.parametrize("d", some([128], [64]))
def test_functions_of_few_scores_at_a_time(d, launches):
    """Each block of PTX of the backward lies behind a branch (see backward/function.py): fewer spills, and none are
    read again inside of it."""
    problem, x = make(temperature, d, n_params=1)
    forward(problem, x)
    check(launches, 96)  # for the end of a tile
    launches.clear()
    backward(problem, x, "ring")
    check(launches, PARAMS_BACKWARD)
    ((kernel, args, kwargs),) = launches
    ptx = compile_for(kernel, args, kwargs, 90).ptx
    tile = kwargs["T"]
    blocks = 2 * tile.BLOCK_M // 16  # of both consumers
    assert ptx.count("@skips bra.uni SKIPPED;") == blocks


@pytest.fixture
def lists(monkeypatch):
    """Kernels that make lists of tiles, recorded."""
    found: list = []
    monkeypatch.setattr(work, "ordered_records_kernel", Recorder(work.ordered_records_kernel, found))
    for name in ("count_tiles_kernel", "place_records_kernel"):
        monkeypatch.setattr(sorting, name, Recorder(getattr(sorting, name), found))
    return found


def check_lists(found: list, n: int) -> None:
    """No tensor cores, hardly a spill."""
    assert len(found) == n
    for kernel, args, kwargs in found:
        assert resources(compile_for(kernel, args, kwargs, 90)).spills <= 32  # of 32 threads' 56 registers: no loss


def make_list(
    n_seqs: int, cu: bool, cu_other: bool, used: bool = False, dtype=torch.int32, d: int = 64, **kwargs: Any
) -> None:
    """Of queries; what is asked for is set to zero with it."""
    offsets, lengths = torch.zeros(n_seqs + 1, dtype=dtype), torch.zeros(n_seqs, dtype=dtype)
    q, k = (torch.empty(1 if packed else n_seqs, 4, 100, d, dtype=torch.bfloat16) for packed in (cu, cu_other))
    x = Operands(
        q, k, k, offsets if cu else None, offsets if cu_other else None, None, lengths if used and cu else None,
        lengths if used else None,
    )  # fmt: skip
    problem = make_problem(x, (resolve_one("gelu", 0),), 0.1, 1.0, NO_BAND)
    tiling = work.Tiling(False, 128, 128, **kwargs)
    work.make_list(problem, x, work.listing(problem, tiling), q, None, k, torch.empty(1000, dtype=torch.int32))


def test_the_list_of_tiles(lists):
    for other in (True, False):
        make_list(4, True, other)
        make_list(4, other, True, used=True)
    check_lists(lists, 4)


@once
@pytest.mark.parametrize("d", [64, 104])
def test_the_list_of_tiles_with_zeros(d, lists):
    make_list(4, True, True, d=d, zeros=True)
    make_list(4, True, True, used=True, d=d, zeros=True, flags=528)
    check_lists(lists, 2)


@once
@pytest.mark.parametrize("dtype", some([torch.int64], [torch.int32]), ids=str)  # int32: of some sequences, below
def test_the_list_of_tiles_of_many_sequences(dtype, lists):
    for other in (True, False):
        make_list(sorting.MANY_SEQUENCES + 1, True, other, dtype=dtype)
    check_lists(lists, 4)


@pytest.mark.parametrize("listed", [Listed(1, 8192), Listed(1, 8192, False), Listed(1, 8192, True)], ids=str)
def test_the_list_of_tiles_of_some_sequences(listed, lists):
    for n_seqs in (4, sorting.MANY_SEQUENCES + 1):
        make_list(n_seqs, True, True, listed=listed)
    check_lists(lists, 3)
    # Where none may be long, one that is would make tiles wait for ever: the device stops with a message instead.
    for kernel, args, kwargs in lists:
        assert ("__assertfail" in compile_for(kernel, args, kwargs, 90).ptx) == (listed.LONG is None)


@pytest.mark.parametrize("d", [64, 128])
def test_rounding_of_sums(d, monkeypatch):
    found: list = []
    monkeypatch.setattr(wide_dq, "round_rows_kernel", Recorder(wide_dq.round_rows_kernel, found))
    problem, x = make("gelu_tanh", d)
    wide_dq.launch_round_rows(problem, torch.empty_like(x.q, dtype=torch.float32), torch.empty_like(x.q), 0.125)
    ((kernel, args, kwargs),) = found
    compiled = compile_for(kernel, args, kwargs, 90)
    assert resources(compiled).spills == 0
    for wide in ("ld.global.v4.b32", "st.global.v4.b32"):
        assert wide in compiled.ptx
