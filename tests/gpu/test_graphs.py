"""CUDA graphs: captured once, replayed on other data and other offsets of the same total."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa.testing.cases import Case, Inputs, call, dense, make_inputs, offsets
from support import on_each_gpu_backend

pytestmark = pytest.mark.gpu

SWISH = gdpa.activation(lambda s, b: s * torch.sigmoid(b * s))  # finite at 0: Hopper adds up its gradients itself
DQ = 1  # its place among a step's results
CASES = [
    dense("dense", 2, 200, 300, heads=4, heads_k=2, d=64),
    dense("shared", 3, 40, 300, heads=2, d=64, shared=True),
    Case("packed", (100, 0, 260, 40), (10, 30, 300, 60), heads=2, d=64, packed_q=True, packed_k=True),
    Case("packed-causal", (100, 1, 259), (100, 1, 259), heads=2, d=64, packed_q=True, packed_k=True, causal=True),
    Case("packed-dense-keys", (100, 0, 260, 40), (70,) * 4, heads=2, d=64, packed_q=True),
    Case("shared-packed-keys", (30,) * 4, (10, 30, 300, 60), heads=2, d=64, packed_k=True, shared=True),
]


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles the kernels
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def other_lengths(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """As many sequences and rows, cut elsewhere."""
    return (*lengths[1:], lengths[0])


def changed(case: Case) -> Case:
    """The same shapes with other offsets."""
    len_q = other_lengths(case.len_q) if case.packed_q else case.len_q
    len_k = other_lengths(case.len_k) if case.packed_k else case.len_k
    return Case(**{**vars(case), "len_q": len_q, "len_k": len_k})


@on_each_gpu_backend
@pytest.mark.parametrize("bounded", [False, True], ids=["", "max_seqlen"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replay_with_changed_offsets(case: Case, deterministic: bool, bounded: bool, backend: str) -> None:
    if bounded and not case.varlen:
        pytest.skip("a dense call has no max_seqlen")
    torch.use_deterministic_algorithms(deterministic)
    bounds = {"max_seqlen_q": 300, "max_seqlen_k": 300} if bounded else {}
    x = make_inputs(case, torch.bfloat16, "cuda")
    a = torch.full((case.heads,), 1.5, device="cuda", requires_grad=True)
    do = torch.randn_like(call(case, x, "silu", backend=backend))

    def step(x: Inputs = x) -> tuple[Tensor, ...]:
        out = call(case, x, SWISH, params=(a,), backend=backend, **bounds)
        return (out, *torch.autograd.grad(out, (*x.leaves, a), do))

    graph, results = capture(step)
    for seed, now in enumerate((case, changed(case), case), start=1):
        new = make_inputs(now, torch.bfloat16, "cuda", seed)
        with torch.no_grad():
            for static, fresh in zip(x.leaves, new.leaves, strict=True):
                static.copy_(fresh)
            for static, lengths in ((x.cu_q, now.len_q), (x.cu_k, now.len_k)):
                if static is not None:
                    static.copy_(offsets(lengths, "cuda"))
            for t in results:
                t.fill_(float("nan"))
        graph.replay()
        for i, (got, want) in enumerate(zip(results, step(new), strict=True)):
            # dq is added up in any order, by hopper in 16 bits: it may differ by a few roundings of its partial sums.
            roundings = 4 * 2**-9 * float(want.abs().max()) if i == DQ and not deterministic else 0.0
            torch.testing.assert_close(got, want, rtol=0.0, atol=roundings)


@on_each_gpu_backend
def test_nested_tensors_are_captured(backend: str) -> None:
    cu = offsets((100, 0, 260, 40), "cuda", torch.int64)
    rows = torch.randn(400, 2, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> Tensor:
        x = torch.nested.nested_tensor_from_jagged(rows, cu).transpose(1, 2)
        return gdpa.attention(x, x, x, "silu", backend=backend).transpose(1, 2).values()

    graph, out = capture(step)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, step())


@on_each_gpu_backend
def test_a_batch_of_fixed_capacity(backend: str) -> None:
    """Captured with room for more rows than there are; each replay has other lengths, and other numbers of them."""
    room = torch.randn(600, 3, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu, used = offsets((100, 0, 260, 40), "cuda"), torch.tensor([100, 0, 260, 40], device="cuda")

    def step(qkv: Tensor = room) -> tuple[Tensor, Tensor]:
        out = gdpa.attention_varlen_qkvpacked(qkv, cu, "silu", seqused=used, backend=backend)
        return out, *torch.autograd.grad(out, qkv, torch.ones_like(out))

    graph, results = capture(step)
    for slots, lengths in (
        ((150,) * 4, (7, 150, 0, 129)),
        ((0, 10, 500, 90), (0, 10, 400, 0)),
        ((1, 1, 1, 1), (1,) * 4),
    ):
        cu.copy_(offsets(slots, "cuda"))
        used.copy_(torch.tensor(lengths))
        for t in results:
            t.fill_(float("nan"))
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            torch.testing.assert_close(got, want, rtol=0.0, atol=4 * 2**-9 * float(want.abs().max()))
            for start, length, slot in zip(cu.tolist(), lengths, slots, strict=False):
                assert not got[start + length : start + slot].any()
            assert not got[sum(slots) :].any()
