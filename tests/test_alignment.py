"""Rows that do not start at multiples of 16 bytes: views cut out of wider tensors, with padded head dimensions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gdpa
from support import INTERPRET, Target, bf16, f16, in_turn, skipping_refusals, targets


def wide(shape: tuple[int, ...], shift: int, target: Target, seed: int) -> Tensor:
    """A (B, H, L, D) view that starts ``shift`` elements into each row of a wider tensor."""
    rng = torch.Generator().manual_seed(seed)
    whole = torch.randn(*shape[:-1], shape[-1] + shift, generator=rng).to(target.device, target.dtype)
    return whole[..., shift:].detach().requires_grad_()


def run(q: Tensor, k: Tensor, v: Tensor, backend: str) -> list[Tensor]:
    out = gdpa.attention(q, k, v, "gelu", causal=True, backend=backend)
    do = torch.linspace(-1, 1, out.shape[2], device=out.device, dtype=out.dtype)[:, None].expand_as(out)
    return [out, *torch.autograd.grad(out, (q, k, v), do)]


@pytest.mark.parametrize("target", targets(f16, bf16, backends=("cpu", "triton", "hopper")))
@pytest.mark.parametrize(
    ("dims", "shift"),
    [
        (dims, shift)
        for i, dims in enumerate([(40, 8), (24, 8), (104, 24), (64, 8)])
        for shift in (in_turn((1, 2, 0), i) if INTERPRET else (0, 1, 2))
    ],
    ids=str,
)
def test_unaligned_rows(dims, shift, target):
    d, dv = dims
    q, k, v = (
        wide((1, h, n, c), shift, target, i) for i, (h, n, c) in enumerate([(2, 37, d), (1, 45, d), (1, 45, dv)])
    )
    exact = run(*(t.detach().double().requires_grad_() for t in (q, k, v)), "reference")
    with skipping_refusals(target):
        results = run(q, k, v, target.backend)
    for name, got, expected in zip(("out", "dq", "dk", "dv"), results, exact, strict=True):
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < (2e-2 if target.dtype == bf16 else 3e-3), f"{name}: {error}"


@pytest.mark.parametrize("target", targets(f16, backends=("cpu", "triton", "hopper")))
def test_gradient_at_an_odd_address(target):
    """All of its rows are in order, but for where they begin."""
    q, k, v = (wide((1, 2, 37, 64), 0, target, seed) for seed in range(3))
    out = gdpa.attention(q, k, v, "gelu", backend=target.backend)
    do = torch.randn(out.numel() + 1, generator=torch.Generator().manual_seed(3)).to(out)
    odd = do[1:].view_as(out)
    for got, expected in zip(
        torch.autograd.grad(out, (q, k, v), odd, retain_graph=True),
        torch.autograd.grad(out, (q, k, v), odd.clone(memory_format=torch.contiguous_format)),
        strict=True,
    ):
        assert torch.equal(got, expected)
