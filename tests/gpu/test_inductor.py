"""torch.compile with Inductor on a GPU, plain and with its CUDA graphs."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import Tensor

import gdpa
from gdpa.testing.cases import offsets

pytestmark = pytest.mark.gpu

SWISH = gdpa.activation(lambda s, b: s * torch.sigmoid(b * s))  # finite at 0: Hopper adds up its gradients itself


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(mode: str) -> None:
    torch._dynamo.reset()
    a = torch.full((2,), 1.5, device="cuda", requires_grad=True)

    def attend(x: Tensor, a: Tensor, cu: Tensor) -> Tensor:
        q, k, v = (2 * x).unflatten(-1, (6, 64)).chunk(3, dim=1)
        return x[:, :128] + gdpa.attention_varlen(q, k, v, cu, cu, SWISH, params=(a,), causal=True).flatten(1)

    fast = torch.compile(attend, fullgraph=True, mode=mode)
    for lengths in ((100, 0, 200), (50, 150, 100), (300, 0, 0)):
        x = torch.randn(300, 384, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        cu = offsets(lengths, "cuda")
        results = []
        for fn in (fast, attend):
            out = fn(x, a, cu)
            results.append([t.clone() for t in (out, *torch.autograd.grad(out.float().square().sum(), (x, a)))])
        for got, want in zip(*results, strict=True):
            error = (got.float() - want.float()).abs().max() / want.float().abs().max()
            assert error < 2e-2
