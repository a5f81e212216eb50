"""The accuracy contract (gdpa.exactness) on every backend: values and all gradients, scores of several means."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from exactness.grid import ALL, BY_NAME, FEW_SCORES, SHIPPED, broken_rules, medium
from functions.library import Function
from gdpa.exactness.draw import Scores
from gdpa.testing.cases import Case, dense
from support import FULL, GPU, INTERPRET, Target, bf16, f16, in_turn, targets

KERNELS = ("triton", "hopper")
# The slow interpreter gets functions that differ in what a kernel does with them.
INTERPRETED = ("relu", "gelu", "small_sigmoid", "mean_of_squares", "prelu")
SHIPPED_HERE, USERS_HERE = (
    [f for f in some if not INTERPRET or f.name in INTERPRETED]
    for some in (SHIPPED, [f for f in ALL if f not in SHIPPED])
)


# PyTorch computes all functions there: of the users' own every third.
ON_THE_CPU = [f for i, f in enumerate(ALL) if FULL or f in SHIPPED or i % 3 == 0]


@pytest.mark.parametrize(
    ("f", "dtype"), [(f, dtype) for i, f in enumerate(ON_THE_CPU) for dtype in in_turn((bf16, f16), i)], ids=str
)
@pytest.mark.parametrize("d", [64, 128] if FULL else [64])
def test_on_the_cpu(f, dtype, d):
    target = Target("cpu", dtype)
    assert not broken_rules(target, f, medium(target, d))


@pytest.mark.parametrize("target", targets(bf16, f16, backends=KERNELS))
@pytest.mark.parametrize("f", SHIPPED_HERE, ids=repr)
@pytest.mark.parametrize("d", [64] if INTERPRET else [64, 128])
def test_what_is_shipped_on_the_gpu(f, d, target):
    assert not broken_rules(target, f, medium(target, d))


@pytest.mark.parametrize("backend", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in KERNELS])
@pytest.mark.parametrize(
    ("f", "dtype"), [(f, f16 if INTERPRET or i % 2 else bf16) for i, f in enumerate(USERS_HERE)], ids=str
)
def test_what_people_write_on_the_gpu(f, dtype, backend):
    """In turns of dtype and head dim: each compiles two kernels."""
    target = Target(backend, dtype)
    assert not broken_rules(target, f, medium(target, 64 if dtype == bf16 else 128))


# ---- lengths ---------------------------------------------------------------------------------------------------------
def shapes(rows: int, batch: int) -> dict[str, Case]:
    """1 to 4096 keys; packed, causal. ``rows`` and ``batch``: what the machine can afford."""
    jagged = ((0, 37, 64, 1, 18, 130), (9, 37, 5, 40, 0, 300))
    found = [
        dense("1 key", 16 * batch, 16, 1, heads=2, d=64),
        dense("7 keys, 3 queries", 48 * batch, 3, 7, heads=2, d=64),
        Case("packed", *jagged, heads=4, heads_k=2, d=64, packed_q=True, packed_k=True),
        dense("causal", batch, 256, 256, heads=2, d=64, causal=True),
        dense("1024 keys", batch, 2 * rows, 1024, heads=1, d=128),
        dense("4096 keys", batch, rows, 4096, heads=1, d=64),
    ]
    return {case.name: case for case in found}


INTERPRETED_SHAPES = {
    "packed": Case("packed", (5, 0, 17, 20), (9, 4, 1, 35), heads=2, d=16, packed_q=True, packed_k=True)
}
SHAPES = {"cpu": INTERPRETED_SHAPES if INTERPRET else shapes(48, 1), "cuda": shapes(512, 4)}
LENGTH_SCORES = (Scores(0, 2.5), Scores(-2, 1), Scores(-4, 1))
if INTERPRET and not FULL:  # the code of the kernel is one for all scores, which functions above meet
    LENGTH_SCORES = LENGTH_SCORES[:1]
LENGTH_FUNCTIONS = ("gelu", "relu", "silu", "prelu") if GPU else ("prelu",) if INTERPRET else ("gelu", "prelu")


@pytest.mark.parametrize("target", targets(bf16, f16))
@pytest.mark.parametrize(("name", "shape"), [
    (name, shape)
    for i, shape in enumerate(SHAPES["cpu"])
    for name in (LENGTH_FUNCTIONS if GPU or INTERPRET else in_turn(LENGTH_FUNCTIONS, i))
])  # fmt: skip
def test_any_length(name, shape, target):
    assert not broken_rules(target, BY_NAME[name], SHAPES[target.device][shape], LENGTH_SCORES)


@pytest.mark.parametrize("target", targets(f16, backends=("cpu", "triton")))
def test_a_small_out_scale_costs_float16_no_digits(target):
    """With all of its factor, ds would lie below the normal numbers of float16."""
    scores = [Scores(-1, 2), Scores(0, 0.5)]
    assert not broken_rules(target, BY_NAME["silu"], medium(target, 64), scores, out_scale=2**-16)


def gelu_and_sigmoid(s):
    return torch.stack([(F.gelu, torch.sigmoid)[h % 2](s[:, h]) for h in range(s.shape[1])], 1)


@pytest.mark.parametrize("target", targets(bf16, f16, backends=("cpu", "triton", "hopper")))
def test_a_key_head_of_query_heads_with_different_functions(target):
    """Its gradients are sums over functions, and rounded once."""
    case = medium(target, 64)
    functions = ["gelu", "sigmoid"] * (case.heads // 2)
    assert not broken_rules(target, Function("mixed", gelu_and_sigmoid), case, FEW_SCORES, activation=functions)
