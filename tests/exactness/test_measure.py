"""What the contract is measured with: scores as asked for, and results that agree with code of another origin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from functions.library import BY_NAME
from gdpa.exactness import results, rules
from gdpa.exactness.draw import Scores, Tensors, draw
from gdpa.exactness.layout import as_rows
from gdpa.testing.cases import Case, dense
from support import CASES, bf16, f16, f64, run_naive

CASE = dense("measured", 1, 40, 48, heads=2, heads_k=1, d=64)


@pytest.mark.parametrize("scale", [None, -0.3])
@pytest.mark.parametrize("scores", [Scores(0, 2.5), Scores(-8, 0.1), Scores(3, 4)], ids=str)
def test_scores_have_the_mean_and_the_spread(scores, scale):
    case = replace(CASE, heads_k=None)
    x, formula = draw(case, scores, bf16, scale=scale).x, results.Formula.of(case, torch.sigmoid, scale)
    s = formula.scale * x.q.detach().double() @ x.k.detach().double().mT
    assert float(s.mean()) == pytest.approx(scores.mean, abs=0.05 * scores.spread + 0.005 * abs(scores.mean))
    assert float(s.std()) == pytest.approx(scores.spread, rel=0.1)


@pytest.mark.parametrize("name", CASES)
def test_exact_and_plain_results_agree_with_another_implementation(name):
    """The loop over sequences of tests/support.py: in float64 to the last digits, in float16 to its roundings."""
    case, f = CASES[name], BY_NAME["gelu_with_temperature"]
    x = draw(case, Scores(-1, 1), f16, params=f.make_params(case.heads))
    formula = results.Formula.of(case, f.fn)
    truth, plain = results.exact(formula, x).values, results.plain(formula, x)
    for found, dtype, tolerance in ((truth, f64, 1e-12), (plain, f16, 2e-3)):
        want = run_naive(case, x.x, dtype, f.fn, x.params, x.do)
        dparams = torch.cat([want[f"dparam{i}"].reshape(-1) for i in range(len(x.params))])
        for key, t in found.items():
            other = dparams if key == "dparams" else as_rows(case, want[key])
            # dparams and sums over a group: plain code rounds terms that partly cancel
            torch.testing.assert_close(t, other, rtol=tolerance, atol=4 * tolerance * float(other.abs().max()))


def test_the_definition_rounds_p_and_ds_and_results_and_nothing_else():
    case = dense("one", 1, 5, 7, heads=1, d=16)
    x = draw(case, Scores(1, 1), bf16)
    q, k, v = (t.detach()[0, 0].double() for t in x.x.leaves)
    do, s = x.do[0, 0].double(), (0.25 * q @ k.mT).requires_grad_()
    (slope,) = torch.autograd.grad(F.silu(s).sum(), s)
    p, ds = F.silu(s.detach()).to(bf16).double(), ((do @ v.mT) * slope * 0.25).to(bf16).double()
    want = {"out": p @ v, "dq": ds @ k, "dk": ds.mT @ q, "dv": p.mT @ do}
    for name, t in results.definition(results.Formula.of(case, F.silu), x).items():
        if name != "dparams":
            torch.testing.assert_close(t[:, 0], want[name].to(bf16), rtol=0, atol=0)


@pytest.mark.parametrize(("factor", "boost"), [(1.0, 1.0), (2**-6, 1.0), (2**-7, 2.0), (1e-6, 2.0**14), (0.0, 1.0)])
def test_a_tiny_factor_of_ds_is_applied_after_the_rounding(factor, boost):
    formula = results.Formula(CASE, F.relu, scale=factor)
    assert formula.boost(f16) == boost
    assert formula.boost(bf16) == 1


def test_rows_at_a_step_are_left_out():
    """The score of query 0 and key 1 is 2^-30 of its terms: relu's derivative there is 0 or 1."""
    case = Case("step", (2,), (3,), heads=1, d=8)
    q, k = torch.zeros(1, 1, 2, 8), torch.ones(1, 1, 3, 8)
    q[..., 0] = 1.0
    q[..., 0, 1], k[..., 1, 1] = 1.0, -1.0
    q[..., 0, 2], k[..., 1, 2] = 2.0**-15, 2.0**-15
    x = draw(case, Scores(), f16)
    leaves = [t.to(f16).requires_grad_() for t in (q, k)]
    x = Tensors(replace(x.x, q=leaves[0], k=leaves[1]), x.do)
    decided = results.exact(results.Formula.of(case, F.relu), x).decided
    assert decided["dq"].flatten().tolist() == decided["out"].flatten().tolist() == [False, True]
    assert decided["dk"].flatten().tolist() == decided["dv"].flatten().tolist() == [True, False, True]
    assert all(bool(t.all()) for t in results.exact(results.Formula.of(case, F.silu), x).decided.values())


def test_what_is_zero_must_be_zero():
    formula, scores = results.Formula.of(CASE, F.relu), Scores(-3, 0.3)
    x = draw(CASE, scores, f16)
    found = results.ours(formula, x, "relu", backend="cpu")
    assert not rules.problems(rules.measure(formula, scores, [x], lambda _: found))
    found["dq"][3, 1, 2] = 6e-8
    broken = rules.problems(rules.measure(formula, scores, [x], lambda _: found))
    assert broken
    assert all(text.startswith("dq: ") for text in broken)


FEW_KEYS = dense("few keys", 1, 48, 16, heads=2, heads_k=1, d=64, dv=128)


@pytest.mark.parametrize("seed", [27, 197, 615])
def test_the_place_of_a_factor_is_no_error(seed):
    """In these draws the largest error of dq is more than 2 times as large if ds is rounded before its factor."""
    scores, scale = Scores(0, 2.5), 0.0875
    formula = results.Formula.of(FEW_KEYS, lambda s: F.softplus(s) ** 2, scale)
    x = draw(FEW_KEYS, scores, bf16, seed=seed, scale=scale, v_mean=1.0)
    q, k, v = (t.detach()[0].float() for t in x.x.leaves)
    s = (scale * q @ k.mT).requires_grad_()
    (slope,) = torch.autograd.grad((F.softplus(s) ** 2).sum(), s)
    ours, exact = results.definition(formula, x), results.exact(formula, x).values["dq"]
    before = (ours["dq"].double() - exact).abs().max()
    ours["dq"] = (scale * ((x.do[0].float() @ v.mT) * slope).to(bf16).float() @ k).to(bf16).transpose(0, 1)
    after = (ours["dq"].double() - exact).abs().max()
    assert after > 2 * before
    truth, own, plain = (f(formula, x) for f in (results.exact, results.definition, results.plain))

    def problems(few_terms):
        return rules.problems(rules.compare(scores, [ours], [truth], [own], [plain], few_terms))

    assert problems(few_terms=False)
    assert not problems(few_terms=True)
    ours["dq"][40, 1, 3] = exact[40, 1, 3] + 3 * after  # one wrong element
    (broken,) = problems(few_terms=True)
    assert broken.startswith("dq: largest error")


def test_where_the_others_overflow_nothing_is_asked_and_elsewhere_no_overflow_passes():
    formula, scores = results.Formula.of(CASE, torch.exp), Scores(3, 4)
    x = draw(CASE, scores, f16)
    compared = rules.measure(formula, scores, [x], lambda x: results.ours(formula, x, "exp", backend="cpu"))
    assert {c.name for c in compared if c.definition.rms == torch.inf} >= {"out", "dv"}
    assert not rules.problems(compared)
    formula, scores = results.Formula.of(CASE, torch.sigmoid), Scores(0, 1)
    infinite = {name: t / 0 for name, t in results.definition(formula, x).items()}
    assert len(rules.problems(rules.measure(formula, scores, [x], lambda _: infinite))) == 3 * 4


def test_digits_that_float64_has_lost_are_not_asked_for():
    """1 + tanh(-25) is 0 in float64; what keeps its digits is right all the same."""
    formula, scores = results.Formula.of(CASE, lambda s: 1 + torch.tanh(4 * s)), Scores(-8, 0.1)
    x = draw(CASE, scores, bf16)
    found = results.ours(formula, x, "relu", backend="cpu")
    found = {name: torch.full_like(t, 1e-20) for name, t in found.items()}
    assert not rules.problems(rules.measure(formula, scores, [x], lambda _: found))
