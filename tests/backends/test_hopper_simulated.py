"""Hopper's compiled kernels, forward and backward, run by the simulator and held against float64.

A case of every kind of kernel, small enough for a machine without a GPU. Everything is as on the GPU, the launches of
repeated calls among it, but for time: which warp goes on, and when copies and products are done, is drawn at random.
With GDPA_SIMULATE=1 any test marked "hopper" runs so (`make simulate`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this run, not compiled", allow_module_level=True)

import gdpa
from exactness.grid import FEW_SCORES
from gdpa.backends import tuning
from gdpa.backends.hopper import config, launch
from gdpa.exactness import results, rules
from gdpa.exactness.draw import draw
from gdpa.fuzz import draw as fuzzer
from gdpa.fuzz import run
from gdpa.testing.cases import Case, dense
from simulator.launching import Simulator, simulated_hopper
from support import FULL, SIMULATE, bf16, f16, in_turn

JAGGED = Case("jagged", (70, 0, 65), (40, 129, 0), heads=2, heads_k=1, packed_q=True, packed_k=True)
LONG = Case("long", (65, 0, 200), (65, 0, 200), heads=1, packed_q=True, packed_k=True)


@pytest.fixture(autouse=True)
def simulator() -> Iterator[Simulator]:
    tuning.forget()  # plans are for a number of processors
    with nullcontext(Simulator(4, 0)) if SIMULATE else simulated_hopper() as found:
        yield found
    tuning.forget()


def softmax(s: Tensor) -> Tensor:
    return torch.exp(s)


def squared_softplus(s: Tensor) -> Tensor:
    return F.softplus(s) ** 2


# The case, the function, and how it is divided.
KINDS: dict[str, tuple[Case, Any, str | None]] = {
    "dense, dq by a ring": (dense("dense", 1, 130, 257, heads=1), "gelu_tanh", None),
    "more tiles of keys than blocks of queries": (dense("few", 1, 70, 420, heads=1), "silu", None),
    "few keys": (dense("keys", 2, 200, 50, heads=1), "relu", None),
    "packed": (replace(JAGGED, len_k=(150, 129, 0)), "gelu", None),
    "causal": (replace(JAGGED, causal=True), "silu", None),
    "a window": (replace(LONG, window=(40, 20)), "sigmoid", None),
    "shared queries": (replace(JAGGED, len_q=(70,) * 3, packed_q=False, shared=True), "silu", None),
    "softmax": (replace(LONG, causal=True), "softmax", "softmax"),
    "sums of absolute weights": (dense("sums", 1, 100, 150, heads=2), "tanh", "abs"),
    "a function that is no block of PTX": (dense("plain", 1, 70, 130, heads=2), squared_softplus, None),
}
FUNCTIONS = {"gelu_tanh": lambda s: F.gelu(s, approximate="tanh"), "gelu": F.gelu, "silu": F.silu, "relu": F.relu,
             "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softmax": softmax}  # fmt: skip


def broken_rules(
    case: Case, activation: Any, normalize: str | None, dtype: torch.dtype, seed: int = 0, out_scale: float = 1.0
) -> list[str]:
    """Of the accuracy contract, for scores with a mean of their own for each seed."""
    formula = results.Formula.of(case, FUNCTIONS.get(activation, activation), None, out_scale, normalize)
    scores = FEW_SCORES[seed % len(FEW_SCORES)]
    given = None if normalize == "softmax" else normalize
    x = draw(case, scores, dtype, seed=seed)

    def compute(x: Any) -> Any:
        return results.ours(formula, x, activation=activation, normalize=given, backend="hopper")

    return rules.problems(rules.measure(formula, scores, [x], compute))


OFTEN = ("dense, dq by a ring", "packed", "a window", "shared queries", "softmax")  # others in the full grid


@pytest.mark.parametrize("name", KINDS if FULL else OFTEN)
def test_the_accuracy_contract(name: str, simulator: Simulator) -> None:
    """Head dims and dtypes take turns."""
    case, activation, normalize = KINDS[name]
    turn = list(KINDS).index(name)
    for d, dtype in in_turn([(128, bf16), (64, f16), (64, bf16), (128, f16)], turn):
        assert not broken_rules(replace(case, d=d), activation, normalize, dtype, seed=turn)
    assert SIMULATE or {"forward_kernel", "backward_kernel"} <= {*simulator.launched.values()}


def temperature(s: Tensor, a: Tensor) -> Tensor:
    return torch.exp(a * s)


def shifted(s: Tensor, a: Tensor) -> Tensor:
    return F.relu(s - a)


def swish(s: Tensor, a: Tensor) -> Tensor:
    return F.silu(a * s)


def sloped(s: Tensor, slope: Tensor, bias: Tensor, *, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return F.silu(s - slope * (q_idx - kv_idx).abs() + bias)


def biased_exp(s: Tensor, bias: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.exp(s + bias[h, (q_idx - kv_idx).clamp(-9, 9) + 9])


def test_softmax_with_a_learned_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys past the end, of which there are some in every sequence, are no part of the table's gradient."""
    monkeypatch.setattr(launch.portable, "backward", None)
    case = Case("bias", (70, 0, 5), (50, 129, 3), heads=2, packed_q=True, packed_k=True)
    formula = replace(results.Formula.of(case, biased_exp, normalize="sum"), at=("h", "q_idx", "kv_idx"))
    x = draw(case, FEW_SCORES[0], bf16)
    x = replace(x, tables=(torch.randn(2, 19, generator=torch.Generator().manual_seed(0)).requires_grad_(),))

    def compute(x: Any) -> Any:
        return results.ours(formula, x, activation=biased_exp, normalize="sum", backend="hopper")

    assert not rules.problems(rules.measure(formula, FEW_SCORES[0], [x], compute))


def slope_and_key(s: Tensor, slopes: Tensor, bias: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.sigmoid(s - slopes[h] * (q_idx - kv_idx) + bias[kv_idx])


def exp_of_keys(s: Tensor, slopes: Tensor, bias: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.exp(s + slopes[h] * (kv_idx - q_idx) + bias[kv_idx])


# The function, how it is divided, whether it is causal, columns and dtype.
BIASES = [
    (slope_and_key, None, True, 64, f16), (exp_of_keys, "sum", False, 128, bf16),
    (slope_and_key, None, True, 128, bf16), (exp_of_keys, "sum", False, 64, f16),
    (slope_and_key, "abs", False, 128, f16), (slope_and_key, None, False, 64, bf16),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "normalize", "causal", "d", "dtype"), BIASES if FULL else BIASES[:2])
def test_biases_that_tensor_cores_add(
    fn: Any, normalize: str | None, causal: bool, d: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two consumers, whose results take the place of their queries at D 128. Some biases are infinite, so that
    keys are hidden, and one is as near to it as people write."""
    monkeypatch.setattr(config, "has_few_queries", lambda problem: False)
    rng = torch.Generator().manual_seed(0)
    cu_q, cu_k = (torch.tensor(n, dtype=torch.int32) for n in ((0, 300, 300, 301, 440), (0, 290, 330, 330, 500)))
    x = [torch.randn(n, 2, d, generator=rng).to(dtype) for n in (440, 500, 500)]
    tables = [0.05 * torch.randn(2, generator=rng), torch.randn(300, generator=rng)]
    tables[1][3], tables[1][70:80], tables[1][100] = -1e38, -torch.inf, -1e4
    found = {}
    for backend in ("hopper", "reference"):
        given = [t.double() for t in x] if backend == "reference" else x
        with torch.no_grad():
            found[backend] = gdpa.attention_varlen(
                *given, cu_q, cu_k, fn, tables=tuple(tables), normalize=normalize, causal=causal, backend=backend
            )
    wanted = found["reference"]
    assert wanted.isfinite().all()
    assert (found["hopper"].double() - wanted).norm() < (3e-3 if dtype == bf16 else 4e-4) * wanted.norm()


# The function, its params, how it is divided, and whether it is behind a mask.
WITH_PARAMS: dict[str, tuple[Any, tuple[float, ...], str | None, bool]] = {
    "a temperature of softmax": (temperature, (0.8,), "sum", True),
    "a slope of distances": (sloped, (0.02, 0.1), None, False),
    "behind a mask": (swish, (1.2,), None, True),
    "row sums": (shifted, (0.3,), "sum", False),
    "row sums behind a mask": (shifted, (0.3,), "abs", True),
}


def is_seen(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx + kv_idx) % 3 > 0


@pytest.mark.parametrize("name", WITH_PARAMS if FULL else list(WITH_PARAMS)[:3])
def test_gradients_of_params(name: str, simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these leaves its backward to the triton backend. Gradients of params through row sums are two numbers,
    whose errors are those of the rounded output, by chance: they are compared with the cpu backend's."""
    monkeypatch.setattr(launch.portable, "backward", None)
    fn, params, normalize, masked = WITH_PARAMS[name]
    turn = list(WITH_PARAMS).index(name)
    for d, dtype in in_turn([(64, bf16), (128, f16), (128, bf16), (64, f16)], turn):
        case = Case("params", (70, 0, 5), (150, 129, 3), heads=2, packed_q=True, packed_k=True, d=d)
        formula = replace(
            results.Formula.of(case, fn, normalize=normalize), at=("q_idx", "kv_idx") if fn is sloped else (),
            visible=(lambda at: is_seen(at.q_idx, at.kv_idx)) if masked else None,
        )  # fmt: skip
        scores, found = FEW_SCORES[turn % len(FEW_SCORES)], {}
        x = draw(case, scores, dtype, params=[torch.tensor([p, 1.5 * p]) for p in params])
        given: dict[str, Any] = {"activation": fn, "normalize": normalize, "mask": is_seen if masked else None}

        def compute(x: Any, formula: Any = formula, given: Any = given, found: Any = found) -> Any:
            found["hopper"] = results.ours(formula, x, backend="hopper", **given)
            return found["hopper"]

        problems = rules.problems(rules.measure(formula, scores, [x], compute))
        near, ours = results.ours(formula, x, backend="cpu", **given)["dparams"], found["hopper"]["dparams"]
        assert [text for text in problems if not (normalize and text.startswith("dparams"))] == []
        assert (ours - near).norm() < 0.01 * near.norm()
    assert SIMULATE or "backward_kernel" in simulator.launched.values()


def test_keys_past_the_end_are_no_part_of_row_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask cuts no tile, but the last one has fewer keys: the others have a dp less delta, and a derivative."""
    monkeypatch.setattr(launch.portable, "backward", None)
    rng = torch.Generator().manual_seed(0)
    *leaves, do = (torch.randn(1, 1, n, 64, generator=rng).to(bf16) for n in (128, 50, 50, 128))
    a, found = torch.tensor(0.3, requires_grad=True), {}
    for backend in ("hopper", "cpu"):
        out = gdpa.attention(
            *leaves, lambda s, a: F.relu(s + a), params=(a,), normalize="sum", mask=lambda kv_idx: kv_idx < 1000,
            backend=backend,
        )  # fmt: skip
        (found[backend],) = torch.autograd.grad(out, a, do)
    assert (found["hopper"] - found["cpu"]).abs() < 0.02 * found["cpu"].abs()


def test_gelu_of_far_scores() -> None:
    """Where its polynomial would turn round but for a saturation (functions/passes/expand.py)."""
    wide = max(range(len(FEW_SCORES)), key=lambda i: FEW_SCORES[i].spread)
    assert not broken_rules(dense("far", 1, 64, 130, heads=1, d=64), "gelu", None, bf16, seed=wide)


def test_small_gradients_in_float16() -> None:
    """The scale is in the derivative: if ds had the whole of out_scale besides, most of it would be subnormal."""
    case = dense("small", 1, 64, 130, heads=1, d=64)
    assert not broken_rules(case, lambda s: torch.sigmoid(s - 7), None, f16, out_scale=1 / 64)


@pytest.mark.skipif(not FULL, reason="only with the full grid: each pass is one of those above")
def test_sequences_in_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backward does with very long sequences, here with short ones."""
    monkeypatch.setattr(config, "MOST_TILES", 1)
    assert not broken_rules(replace(LONG, d=64), "silu", None, bf16)


def test_lengths_of_nothing_are_not_divided_by() -> None:
    """A tile of a sequence without rows on the other side is computed once, times zero."""

    def averaged(s: Tensor, *, q_len: Tensor, kv_len: Tensor) -> Tensor:
        return F.silu(s) / (q_len * kv_len)

    offsets = [torch.tensor(n, dtype=torch.int32) for n in ((0, 0, 20, 60), (0, 40, 90, 90))]
    leaves = [torch.randn(n, 1, 64, dtype=f16).requires_grad_() for n in (60, 90, 90)]
    out = gdpa.attention_varlen(*leaves, *offsets, averaged, backend="hopper")
    found = [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
    alone = [(20, 60), (20, 60), (0, 40), (0, 40)]  # the rows without anything on the other side
    for t, (start, end) in zip(found, alone, strict=True):
        assert t.isfinite().all()
        assert t[start:end].count_nonzero() == 0


def test_steps_of_few_queries_of_a_sum_with_positions() -> None:
    """Most of a step's queries are past the end."""
    leaves = [torch.randn(n, 1, 128, dtype=bf16).requires_grad_() for n in (132, 200, 200)]
    offsets = [torch.tensor(n, dtype=torch.int32) for n in ((0, 6, 39, 132), (0, 70, 70, 200))]
    bias = torch.randn(200)

    def biased(s: Tensor, bias: Tensor, *, q_idx: Tensor, kv_row: Tensor) -> Tensor:
        return F.silu(s + bias[kv_row] - 0.05 * q_idx)

    out = gdpa.attention_varlen(*leaves, *offsets, biased, tables=(bias,), backend="hopper")
    do = torch.randn_like(out)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = gdpa.attention_varlen(*wide, *offsets, biased, tables=(bias,), backend="reference")
    found, wanted = torch.autograd.grad(out, leaves, do), torch.autograd.grad(exact, wide, do.double())
    for t, want in zip((out, *found), (exact, *wanted), strict=True):
        assert (t - want).square().mean() < (0.004**2) * want.square().mean()


def test_sums_in_a_fixed_order() -> None:
    torch.use_deterministic_algorithms(True)
    case = dense("fixed", 1, 130, 260, heads=1, d=128)
    x = draw(case, FEW_SCORES[0], bf16)

    def gradients() -> Any:
        return results.ours(results.Formula.of(case, F.silu), x, activation="silu", backend="hopper")

    first, again = gradients(), gradients()  # in another order of events
    assert all(torch.equal(first[name], again[name]) for name in first)


# Calls of the fuzzer: masks, tables, params, used rows, poisoned neighbours, and whatever else it draws.
SPACE = replace(
    fuzzer.GPU, dtypes=("bfloat16", "float16"), tiles=(64, 128), longest=260, most_seqs=5, most_heads_k=2,
    work=10**6, dims={(64, 64): 4, (128, 128): 4, (24, 24): 1, (40, 96): 1}, session=1,
)  # fmt: skip


@pytest.mark.parametrize("first", range(0, 4000 if FULL else 200, 100))
def test_random_calls(first: int) -> None:
    """The first one from there on that these kernels take."""
    target = run.Target(torch.device("cpu"), "hopper")
    outcomes = (run.run_call(fuzzer.draw(seed, SPACE), target) for seed in range(first, first + 100))
    outcome = next(outcome for outcome in outcomes if not outcome.skipped)
    assert not outcome.findings, outcome
