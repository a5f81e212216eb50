"""Rows so far apart that offsets within one tile of them do not fit 32 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gdpa
from support import GPU, Target, f16, skipping_refusals, targets

D = 16
# A tile's last row is 2^31 elements from its first. Tiles have 16 rows under the interpreter.
ROWS, STRIDE = (40, 2**26 + 64) if GPU else (20, 2**31 // 15 + 2**10)


@pytest.fixture(scope="module")
def far() -> Tensor:
    """(ROWS, STRIDE): 5 GB, of which on a CPU only the pages take memory that are written to."""
    return torch.empty(ROWS, STRIDE, dtype=f16, device="cuda" if GPU else "cpu")


@pytest.mark.parametrize("target", targets(f16, backends=("cpu", "triton", "hopper")))
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("which", ["q", "k", "v", "do", "all"])
def test_far_rows(which: str, shift: int, target: Target, far: Tensor) -> None:
    near = [t[None, None].to(target.dtype) for t in torch.randn(4, ROWS, D, device=far.device)]
    operands = []
    for n, (name, t) in enumerate(zip(("q", "k", "v", "do"), near, strict=True)):
        if which in (name, "all"):
            view = far[:, n * D + shift : (n + 1) * D + shift][None, None]
            view.copy_(t)
            t = view
        operands.append(t.detach().requires_grad_(name != "do"))

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        out = gdpa.attention(q, k, v, "gelu", causal=True, backend=target.backend)
        return [out, *torch.autograd.grad(out, (q, k, v), do)]

    with skipping_refusals(target):
        results = run(*operands)
    for got, expected in zip(results, run(*near), strict=True):
        assert torch.allclose(got.float(), expected.float(), atol=2e-3)  # sums of dq may be in another order
