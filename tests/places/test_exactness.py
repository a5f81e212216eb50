"""The accuracy contract (gdpa.exactness) on functions of positions and tables. Dense calls: their formulas find the
positions from the shape of the scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gdpa
from exactness.grid import FEW_SCORES, MEANS, medium
from gdpa.exactness import results, rules
from gdpa.exactness.draw import draw
from support import INTERPRET, Target, bf16, f16, skipping_refusals, targets


def distance(s: Tensor) -> Tensor:
    """q_idx - kv_idx of scores (..., Lq, Lk)."""
    return torch.arange(s.shape[-2], device=s.device)[:, None] - torch.arange(s.shape[-1], device=s.device)


def heads(s: Tensor) -> Tensor:
    return torch.arange(s.shape[-3], device=s.device)[:, None, None]


BIAS = torch.randn(2, 600, generator=torch.Generator().manual_seed(5))


def table(s: Tensor) -> Tensor:
    return BIAS.to(s.device, s.dtype)[heads(s) % 2, distance(s) + 300]


def alibi(s, *, h, q_idx, kv_idx):
    return F.silu(s - torch.exp2(-2.0 * (h + 1)) * (q_idx - kv_idx).abs())


def biased(s, bias, *, h, q_idx, kv_idx):
    return F.gelu(s + bias[h % 2, q_idx - kv_idx + 300])


def sloped(s, bias, *, h, q_idx, kv_idx):
    return F.silu(s + torch.exp2(-2.0 * (h + 1)) * (kv_idx - q_idx) + bias[h % 2, kv_idx])


def rows(s: Tensor) -> Tensor:
    return BIAS.to(s.device, s.dtype)[heads(s) % 2, torch.arange(s.shape[-1], device=s.device)]


def gated(s, bias, *, h, q_idx, kv_idx):
    return torch.sigmoid(s) * bias[h % 2, q_idx - kv_idx + 300]


Case = tuple[Callable[..., Tensor], Callable[[Tensor], Tensor], tuple[Tensor, ...]]
FUNCTIONS: dict[str, Case] = {
    "alibi": (alibi, lambda s: F.silu(s - torch.exp2(-2.0 * (heads(s) + 1)) * distance(s).abs()), ()),
    "sloped": (sloped, lambda s: F.silu(s - torch.exp2(-2.0 * (heads(s) + 1)) * distance(s) + rows(s)), (BIAS,)),
    "biased": (biased, lambda s: F.gelu(s + table(s)), (BIAS,)),
    "gated": (gated, lambda s: torch.sigmoid(s) * table(s), (BIAS,)),
}


@pytest.mark.parametrize("target", targets(bf16, f16, backends=("cpu", "triton", "hopper")))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_contract(name: str, target: Target) -> None:
    fn, formula, tables = FUNCTIONS[name]
    case = medium(target, 64)
    whole = results.Formula.of(case, formula)
    found = []
    for scores, (v_mean, do_mean) in zip(FEW_SCORES[: 1 if INTERPRET else None], MEANS, strict=False):
        x = draw(case, scores, target.dtype, target.device, v_mean=v_mean, do_mean=do_mean)
        held = tuple(t.to(target.device) for t in tables)
        compute = partial(results.ours, whole, activation=fn, backend=target.backend, tables=held)
        with skipping_refusals(target):
            found += rules.problems(rules.measure(whole, scores, [x], compute))
    assert not found


def steep(s, *, q_idx, kv_idx):
    return F.silu(s - 1000.0 * (q_idx - kv_idx))


@pytest.mark.parametrize("target", targets(bf16, f16, backends=("cpu", "triton", "hopper")))
def test_nothing_is_left_of_a_slope_on_the_diagonal(target: Target) -> None:
    """Which is all that causal attention sees under a steep one, so that a rounding of a product would show there."""
    g = torch.Generator().manual_seed(0)
    length = 40 if INTERPRET else 300
    q, k, v = torch.randn(3, 2, 2, length, 64, generator=g).to(target.device, target.dtype).unbind()
    out = gdpa.attention(q, k, v, steep, causal=True, backend=target.backend)
    p = F.silu((q.double() * k.double()).sum(-1, keepdim=True) / 8)
    exact, definition = p * v.double(), (p.to(q.dtype).double() * v.double()).to(q.dtype)
    error, own = ((x.double() - exact).pow(2).mean().sqrt() for x in (out, definition))
    assert error <= 1.15 * own


def test_the_cheapest_code_depends_on_the_function_of_the_scores_alone() -> None:
    """Positions change nothing about the approximations that a function may use."""
    act = gdpa.activation(alibi)
    assert "(short, packed guarded maths)" in act.source()
