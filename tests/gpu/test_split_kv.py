"""Few tiles of queries and many keys: keys in parts, on several programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from functions.library import BY_NAME
from gdpa.backends.hopper import launch, split_kv
from gdpa.functions.activation import resolve_one
from gdpa.testing.cases import Case, dense, make_inputs
from support import Target, bf16, check, f16, operands, poisoned, problem_of

pytestmark = pytest.mark.hopper

BF16, F16 = Target("hopper", bf16), Target("hopper", f16)
both_dtypes = pytest.mark.parametrize("target", [BF16, F16], ids=repr)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of few keys, so that small inputs have many, of which some are empty and some end inside a block."""
    monkeypatch.setattr(split_kv, "LEAST_KEYS", 64)
    for name in ("gelu", "sigmoid"):  # calls of these shapes may have plans
        resolve_one(name, 0).plans.clear()


def n_parts(case: Case, target: Target) -> int:
    x = operands(case, make_inputs(case, target.dtype, "cuda", 0))
    return split_kv.parts_of(problem_of(case, x, "gelu"), launch.processors(x.q.device))


CASES: dict[str, Any] = {
    "batch of one": dense("one", 1, 200, 1000, heads=2, d=128),
    "few queries": dense("few", 2, 64, 2048, heads=2, d=128),
    "one query": dense("query", 3, 1, 777, heads=2, d=64),
    "causal": dense("causal", 1, 300, 700, heads=2, d=128, causal=True),
    "window": dense("window", 1, 300, 700, heads=2, d=64, window=(70, 30)),
    "grouped heads": dense("grouped", 1, 130, 900, heads=4, heads_k=2, d=128),
    "jagged": Case("jagged", (5, 0, 64, 130), (1000, 300, 0, 65), packed_q=True, packed_k=True, heads=2, d=128),
    "shared queries": Case("shared", (64, 64, 64), (1000, 1, 300), packed_k=True, shared=True, heads=2, d=128),
}


@both_dtypes
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, target):
    case = CASES[name]
    assert n_parts(case, target) > 1
    check(case, target, BY_NAME["gelu"].fn, "gelu")


def test_a_function_without_a_value_at_zero():
    check(CASES["jagged"], BF16, BY_NAME["sigmoid"].fn, "sigmoid")


def test_repeats_are_equal():
    case = CASES["batch of one"]
    x = operands(case, make_inputs(case, bf16, "cuda", 0))
    problem = problem_of(case, x, "silu")
    results = []
    for _ in range(20):
        results.append(poisoned(*x.q.shape, like=x.q))
        launch.forward(problem, x, results[-1])
    assert all(torch.equal(r, results[0]) for r in results)
