"""gdpa.merge, and gradients through row sums, which it needs."""

from __future__ import annotations

import pytest
import torch

import gdpa
from support import f32, targets


@pytest.mark.parametrize("target", targets(f32, backends=("reference", "cpu", "triton")))
@pytest.mark.parametrize(("activation", "kind"), [("softmax", "softmax"), ("silu", "sum")])
def test_parts_of_the_keys_make_the_whole(activation, kind, target):
    """Three parts, one of which nobody sees: output, sums and gradients are those of one call."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, device=target.device, requires_grad=True) for n in (5, 21, 21))
    sink = torch.rand(2, device=target.device, requires_grad=True)
    options = {"normalize": "sum" if activation == "softmax" else "abs", "return_weights_sum": True}
    options |= {"backend": target.backend}
    whole = gdpa.attention(q, k, v, activation, sink=sink, **options)
    parts = []
    for start, stop in ((0, 16), (16, 21), (21, 21)):
        own = {"sink": sink} if start == 0 else {}
        parts.append(gdpa.attention(q, k[:, :, start:stop], v[:, :, start:stop], activation, **own, **options))
    merged = gdpa.merge(*zip(*parts, strict=True), kind=kind)
    weights = torch.randn_like(whole[0])
    results = [
        (out, sums, *torch.autograd.grad((out * weights).sum() + sums.sin().sum(), (q, k, v, sink)))
        for out, sums in (whole, merged)
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_rows_that_see_nothing():
    """Of no part: zeros, -inf, and gradients without NaN."""
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    k = torch.randn(1, 1, 2, 8)
    parts = [gdpa.attention(q, k, k, "softmax", causal=True, return_weights_sum=True) for _ in range(2)]
    out, lse = gdpa.merge(*zip(*parts, strict=True))
    assert bool((out[:, :, :2] == 0).all())
    assert bool((lse[:, :, :2] == -torch.inf).all())
    assert bool(torch.autograd.grad(out.sum(), q)[0].isfinite().all())


def test_refusals():
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    for outs, sums, kind, words in (
        ([out], [lse], "log", "kind must be one of softmax, sum, got 'log'"),
        ([], [], "sum", "0 and 0"),
        ([out, out], [lse], "sum", "2 and 1"),
        ([out, out], [lse, lse[:, :1]], "sum", r"sums\[1\] must have shapes"),
    ):
        with pytest.raises(ValueError, match=words):
            gdpa.merge(outs, sums, kind)
