"""torch.autocast casts q, k and v as it does for F.scaled_dot_product_attention, and nothing after that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gdpa
from gdpa.testing.cases import offsets

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [(d,) * 3 for d in (f16, bf16, f32, f64)] + [(f32, bf16, f16), (bf16, f32, f32), (f64, f32, f32)]


def outcome(attention: Any, x: list[Tensor]) -> torch.dtype | str:
    try:
        return attention(*x).dtype
    except (RuntimeError, ValueError):
        return "refused"


def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cu = offsets((2, 3))
    return gdpa.attention_varlen(*(t[0].transpose(0, 1) for t in (q, k, v)), cu, cu)


@pytest.mark.parametrize("region", [bf16, f16, None])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_dtypes_are_those_of_sdpa(region: torch.dtype | None, dtypes: tuple[torch.dtype, ...]) -> None:
    x = [torch.randn(1, 2, 5, 8).to(dtype) for dtype in dtypes]
    with torch.autocast("cpu", region or bf16, enabled=region is not None):
        theirs = outcome(F.scaled_dot_product_attention, x)
        assert outcome(gdpa.attention, x) == theirs
        assert outcome(varlen, x) == theirs
        assert outcome(lambda *x: gdpa.attention(*x, backend="reference"), x) == theirs


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("region", [bf16, f16])
def test_only_the_inputs_are_cast(backend: str | None, region: torch.dtype) -> None:
    """Scores and sums stay in float32: the result is exactly that of inputs cast by hand."""
    x = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]
    power = gdpa.activation(lambda s, a: torch.relu(s) ** a)
    a = torch.tensor([1.5, 2.0], requires_grad=True)
    by_hand = gdpa.attention(*(t.to(region) for t in x), power, params=(a,), backend=backend)
    want = torch.autograd.grad(by_hand.float().square().sum(), (*x, a))
    with torch.autocast("cpu", region):
        out = gdpa.attention(*x, power, params=(a,), backend=backend)
    assert torch.equal(out, by_hand)
    got = torch.autograd.grad(out.float().square().sum(), (*x, a))
    for g, w in zip(got, want, strict=True):
        assert g.dtype == f32
        assert torch.equal(g, w)


def test_a_backward_inside_the_region_is_the_same() -> None:
    x = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]
    with torch.autocast("cpu", bf16):
        out = gdpa.attention(*x, "silu")
        inside = torch.autograd.grad(out.sum(), x, retain_graph=True)
    outside = torch.autograd.grad(out.sum(), x)
    assert all(map(torch.equal, inside, outside))
