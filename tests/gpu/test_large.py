"""Tensors of more than 2^31 elements: offsets into them do not fit 32 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa.testing.cases import offsets
from support import Target, on_each_gpu_backend, skipping_refusals

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
HEADS, D = 8, 64
ROWS = 2**31 // (HEADS * D) + 4096  # times HEADS * D > 2^31: 4.3 GB in bfloat16


@pytest.fixture(autouse=True)
def _memory():
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    yield
    torch.cuda.empty_cache()


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def close(got: Tensor, want: Tensor, tolerance: float = 2e-2) -> None:
    assert got.isfinite().all()
    error = (got.float() - want.float()).abs().max() / want.float().abs().max()
    assert error < tolerance, float(error)


def split(rows: int, n: int) -> tuple[int, ...]:
    return (rows // n,) * (n - 1) + (rows - rows // n * (n - 1),)


@on_each_gpu_backend
@pytest.mark.parametrize("max_seqlen_k", [None, 64], ids=["", "max_seqlen"])
def test_queries_and_outputs(max_seqlen_k: int | None, backend: str) -> None:
    """q, out, do, dq past 2^31; few keys."""
    n = 64
    len_q, len_k = split(ROWS, n), (64,) * n
    cu_q, cu_k = offsets(len_q, "cuda"), offsets(len_k, "cuda")
    q, k, v = randn(ROWS, HEADS, D), randn(64 * n, HEADS, D), randn(64 * n, HEADS, D)
    assert q.numel() > 2**31
    for t in (q, k, v):
        t.requires_grad_()
    out = gdpa.attention_varlen(q, k, v, cu_q, cu_k, "silu", max_seqlen_k=max_seqlen_k, backend=backend)
    do = randn(*out.shape)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
    for b in (0, n // 2, n - 1):
        rows_q, rows_k = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        mine = [t.detach().transpose(0, 1)[None].requires_grad_() for t in (q[rows_q], k[rows_k], v[rows_k])]
        want = gdpa.attention(*mine, "silu", backend="reference")
        grads = torch.autograd.grad(want, mine, do[rows_q].transpose(0, 1)[None])
        close(out[rows_q], want[0].transpose(0, 1))
        for got, grad, rows in zip((dq, dk, dv), grads, (rows_q, rows_k, rows_k), strict=True):
            close(got[rows], grad[0].transpose(0, 1))


@on_each_gpu_backend
def test_keys_and_their_gradients(backend: str) -> None:
    """k, v, dk, dv past 2^31; a few shared queries."""
    n = 64
    len_k = split(ROWS, n)
    cu_k = offsets(len_k, "cuda", torch.int64)
    q, k, v = randn(32, HEADS, D), randn(ROWS, HEADS, D), randn(ROWS, HEADS, D)
    for t in (q, k, v):
        t.requires_grad_()
    out = gdpa.attention_varlen(q, k, v, None, cu_k, "silu", out_scale=1e-2, backend=backend)
    do = randn(*out.shape)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
    assert dq.isfinite().all()
    for b in (0, n // 2, n - 1):
        rows = slice(int(cu_k[b]), int(cu_k[b + 1]))
        mine = [t.detach().transpose(0, 1)[None].requires_grad_() for t in (q, k[rows], v[rows])]
        want = gdpa.attention(*mine, "silu", out_scale=1e-2, backend="reference")
        block = slice(32 * b, 32 * (b + 1))
        _, want_dk, want_dv = torch.autograd.grad(want, mine, do[block].transpose(0, 1)[None])
        close(out[block], want[0].transpose(0, 1))
        close(dk[rows], want_dk[0].transpose(0, 1))
        close(dv[rows], want_dv[0].transpose(0, 1))


@on_each_gpu_backend
@pytest.mark.parametrize("dimension", ["batch", "head", "row"])
def test_strides(dimension: str, backend: str) -> None:
    """A stride of its own past 2^31 (batch, head), or rows that add up to it."""
    shape = (2, 2, 300, D)
    strides = {
        "batch": (2**31 + 64, 300 * D, D, 1),
        "head": (300 * D, 2**31 + 64, D, 1),
        "row": (300 * D, 150 * D, 2**31 // 256, 1),
    }[dimension]
    memory = torch.empty(2**31 * 300 // 256 + 2**20, device="cuda", dtype=BF16)
    views = []
    for start in (0, 2**17, 2**18):
        view = memory.as_strided(shape, strides, start)
        view.copy_(randn(*shape))
        views.append(view)
    leaves = [t.requires_grad_() for t in views]
    compact = [t.detach().contiguous().requires_grad_() for t in views]
    with skipping_refusals(Target(backend, BF16)):
        out = gdpa.attention(*leaves, "silu", causal=True, backend=backend)
    want = gdpa.attention(*compact, "silu", causal=True, backend=backend)
    close(out, want)
    do = randn(*shape)
    for got, grad in zip(torch.autograd.grad(out, leaves, do), torch.autograd.grad(want, compact, do), strict=True):
        close(got, grad)
