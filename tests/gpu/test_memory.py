"""Peak memory: the forward allocates its output, the backward its gradients and at most one float32 dq.

Hopper's kernels need no float32 dq where its sums go from tile to tile: without a band.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gdpa.testing.cases import Case, Inputs, call, dense, make_inputs
from support import on_each_gpu_backend

pytestmark = pytest.mark.gpu

CASES = [
    dense("dense", 8, 2048, 2048, heads=8, d=64),
    dense("gqa-causal", 8, 2048, 2048, heads=8, heads_k=2, d=64, causal=True),
    dense("short-keys", 64, 2048, 64, heads=8, d=64),
    dense("two-tiles-of-keys", 16, 2048, 256, heads=8, d=128),
    Case("packed", (1024, 0, 4096, 17) * 4, (1000, 31, 4096, 1) * 4, heads=8, d=64, packed_q=True, packed_k=True),
    Case("packed-dense-keys", (1024, 0, 4096, 17) * 4, (200,) * 16, heads=8, d=64, packed_q=True),
]
RING = 20 * 2**20  # sums that are on their way in Hopper's backward, with its flags
SLACK = 2**20  # tables of a few words per tile, and the allocator's rounding


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes allocated at the highest point of ``run``, beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def settled() -> int:
    """Bytes allocated once autograd's thread has let go of the last backward, which it does when the next begins."""
    x = torch.zeros(1, device="cuda", requires_grad=True)
    torch.autograd.grad(x.exp(), x)
    return torch.cuda.memory_allocated()


def warm(case: Case, backend: str) -> tuple[Inputs, Tensor]:
    x = make_inputs(case, torch.bfloat16, "cuda")
    out = call(case, x, "silu", backend=backend)
    do = torch.randn_like(out)
    torch.autograd.grad(out, x.leaves, do)
    gc.collect()  # what earlier tests left in cycles must not be freed while memory is counted
    return x, do


@on_each_gpu_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forward(case: Case, backend: str) -> None:
    x, do = warm(case, backend)
    assert peak_of(lambda: call(case, x, "silu", backend=backend)) <= size(do) + SLACK


@on_each_gpu_backend
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backward(case: Case, deterministic: bool, backend: str) -> None:
    x, do = warm(case, backend)
    torch.use_deterministic_algorithms(deterministic)
    out = call(case, x, "silu", backend=backend)
    torch.autograd.grad(out, x.leaves, do, retain_graph=True)  # compiles what this mode needs
    wide = not deterministic and not (backend == "hopper" and not case.causal)
    allowed = size(*x.leaves) + SLACK + (4 * x.q.numel() if wide else 0) + (RING if backend == "hopper" else 0)
    assert peak_of(lambda: torch.autograd.grad(out, x.leaves, do, retain_graph=True)) <= allowed


@on_each_gpu_backend
@pytest.mark.parametrize("case", CASES[3:], ids=lambda case: case.name)
def test_a_forward_and_backward_keep_nothing(case: Case, backend: str) -> None:
    x, do = warm(case, backend)
    before = settled()
    torch.autograd.grad(call(case, x, "silu", backend=backend), x.leaves, do)
    assert abs(settled() - before) <= 4096
