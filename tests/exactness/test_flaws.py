"""The contract must reject what is not exact: flaws that the old comparison on centred scores let pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from exactness.grid import BY_NAME, broken_rules
from gdpa.backends import cpu
from gdpa.backends.cpu import schedule
from gdpa.exactness.draw import Scores
from gdpa.testing.cases import dense
from support import Target, bf16, f16

CASE = dense("flaws", 1, 64, 512, heads=2, d=64)
BF16, F16 = Target("cpu", bf16), Target("cpu", f16)


def in_bfloat16(fn):
    """Every operation rounded, as packed bfloat16 instructions do it."""
    return lambda s: fn(s.to(torch.bfloat16)).to(s.dtype)


STEP_BY_STEP = {
    "gelu_tanh": lambda s: 0.5 * s * (1 + torch.tanh(0.79788456 * (s + 0.044715 * s * s * s))),
    "silu": lambda s: s * (0.5 + 0.5 * torch.tanh(0.5 * s)),
    "sigmoid": lambda s: 0.5 + 0.5 * torch.tanh(0.5 * s),
}


def gelu_of_a_short_erf(s: Tensor) -> Tensor:
    """With an erf that is good to 1e-5 absolute."""
    return 0.5 * s * (1 + (1 - 1e-5) * torch.erf(s / 2**0.5))


def biased_tanh(s: Tensor) -> Tensor:
    return torch.tanh(s) + 4e-4


@pytest.mark.parametrize("target", [BF16, F16], ids=repr)
def test_dq_summed_in_16_bits(target, monkeypatch):
    right = cpu._add_product

    def rounded(total, a, b, alpha):
        """As a buffer of the input's dtype would keep it."""
        return right(total, a, b, alpha).to(target.dtype).float()

    def backward_chunk(*args):
        with monkeypatch.context() as m:
            m.setattr(cpu, "_add_product", rounded)
            right_chunk(*args)

    right_chunk = cpu._backward_chunk
    assert not broken_rules(target, BY_NAME["silu"], CASE, [Scores(0, 2.5)])
    monkeypatch.setattr(schedule, "_dense_chunks", schedule._dense_chunks.__wrapped__)  # nothing is kept
    monkeypatch.setattr(schedule, "SIDE", 64)  # tiles of 64 x 64: 8 additions to a row of dq, one of dk and dv
    monkeypatch.setattr(cpu, "_backward_chunk", backward_chunk)
    found = broken_rules(target, BY_NAME["silu"], CASE, [Scores(0, 2.5)])
    assert any(" dq: rms" in text for text in found)
    assert not any(" dk: " in text or " dv: " in text or " out: " in text for text in found)


@pytest.mark.parametrize("target", [BF16, F16], ids=repr)
@pytest.mark.parametrize("name", STEP_BY_STEP)
def test_a_function_in_bfloat16_arithmetic(name, target):
    fn, scores = STEP_BY_STEP[name], [Scores(-2, 1)]
    assert not broken_rules(target, BY_NAME[name], CASE, scores, activation=fn)
    found = broken_rules(target, BY_NAME[name], CASE, scores, activation=in_bfloat16(fn))
    assert any(" out: rms" in text and "the definition's" in text for text in found)


@pytest.mark.parametrize("target", [BF16, F16], ids=repr)
def test_an_erf_of_small_absolute_error(target):
    gelu = BY_NAME["gelu"]
    assert not broken_rules(target, gelu, CASE, [Scores(0, 2.5)], activation=gelu_of_a_short_erf)
    found = broken_rules(target, gelu, CASE, [Scores(-4, 0.3)], activation=gelu_of_a_short_erf)
    assert any(" out: rms" in text and "plain PyTorch's" in text for text in found)


def test_a_biased_function():
    """No single p shows it, nor do values without a mean."""
    tanh = BY_NAME["tanh"]
    assert not broken_rules(BF16, tanh, CASE, [Scores(0, 2.5)], [(0, 0)], activation=biased_tanh)
    found = broken_rules(BF16, tanh, CASE, [Scores(0, 2.5)], [(1, 0)], activation=biased_tanh)
    assert any(" out: rms" in text for text in found)


def test_a_wrong_slope_of_a_param():
    """By a thousandth: only dparams shows it."""

    def prelu(s: Tensor, slope: Tensor) -> Tensor:
        return torch.where(s > 0, s, slope * s)

    f = BY_NAME["prelu"]
    assert not broken_rules(BF16, f, CASE, [Scores(0, 2.5)], activation=prelu)
    factor = lambda s, slope: prelu(s, slope.detach() - (slope.detach() - slope) * 1.001)
    found = broken_rules(BF16, f, CASE, [Scores(0, 2.5)], activation=factor)
    assert found
    assert all(" dparams: " in text for text in found)


def test_noise_does_not_hide_a_few_percent():
    """An output 20 % less exact than the definition's is above 1.15 times, on 128 rows."""
    from gdpa.exactness import results, rules
    from gdpa.exactness.draw import draw

    scores, formula = Scores(1, 1), results.Formula.of(CASE, F.silu)
    x = draw(CASE, scores, bf16)

    def worse(factor: float):
        exact, definition = results.exact(formula, x).values, results.definition(formula, x)
        return lambda _: {name: exact[name] + factor * (definition[name].double() - exact[name]) for name in exact}

    assert not rules.problems(rules.measure(formula, scores, [x], worse(1.1)))
    found = rules.problems(rules.measure(formula, scores, [x], worse(1.2)))
    assert {text.split(":")[0] for text in found} == {"out", "dq", "dk", "dv"}
