"""The accuracy contract (gdpa.exactness) with row sums."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from exactness.grid import FEW_SCORES, FULL, FULL_SCORES, MEANS, medium
from gdpa.exactness import results, rules
from gdpa.exactness.draw import draw
from gdpa.testing.cases import dense
from support import INTERPRET, bf16, f16, targets

# What gdpa is given, the function, and how it is divided.
FUNCTIONS = {
    "softmax": ("softmax", torch.exp, "softmax"),
    "sigmoid": ("sigmoid", torch.sigmoid, "sum"),
    "silu": ("silu", F.silu, "abs"),
    "relu_squared": ("relu_squared", lambda s: F.relu(s) ** 2, "sum"),
}
KERNELS = ("cpu", "triton", "hopper")


@pytest.mark.parametrize("target", targets(bf16, f16, backends=KERNELS))
@pytest.mark.parametrize("name", ["softmax", "silu"] if INTERPRET else FUNCTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_contract(name, causal, target):
    activation, fn, normalize = FUNCTIONS[name]
    case = medium(target, 64)
    if causal:
        case = dense("causal", 1, case.len_q[0], case.len_q[0], heads=2, d=case.d, causal=True)
    formula = results.Formula.of(case, fn, normalize=normalize)
    all_scores = FULL_SCORES if FULL or target.device == "cuda" else FEW_SCORES
    if name == "relu_squared":  # with one positive score in a row its gradient is 0, and any rounding of o an error
        all_scores = [scores for scores in all_scores if scores.mean > -3]
    found = []
    for i, scores in enumerate(all_scores[: 1 if INTERPRET else None]):
        v_mean, do_mean = MEANS[i % len(MEANS)]
        x = draw(case, scores, target.dtype, target.device, v_mean=v_mean, do_mean=do_mean)
        given = None if normalize == "softmax" else normalize
        compute = partial(results.ours, formula, activation=activation, normalize=given, backend=target.backend)
        found += rules.problems(rules.measure(formula, scores, [x], compute))
    assert not found
