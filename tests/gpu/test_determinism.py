"""Under torch.use_deterministic_algorithms(True) fifty runs give the same bits; without, all but dq's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gdpa
from gdpa.testing.cases import Case, Inputs, call, dense, make_inputs
from support import on_each_gpu_backend

pytestmark = pytest.mark.gpu

REPEATS = 50
SWISH = gdpa.activation(lambda s, b: s * torch.sigmoid(b * s))  # finite at 0: Hopper adds up its gradients itself
CASES = [
    dense("dense", 2, 700, 900, heads=4, d=64),
    dense("as-many-queries-as-keys", 2, 1000, 1000, heads=4, d=128),
    dense("gqa", 8, 1000, 900, heads=4, heads_k=2, d=64),
    dense("one-tile-of-keys", 3, 700, 120, heads=4, d=128),
    dense("two-tiles-of-keys", 3, 700, 256, heads=4, heads_k=2, d=128),
    dense("three-tiles-of-keys", 3, 700, 257, heads=4, d=128),
    dense("gqa-causal", 2, 900, 900, heads=4, heads_k=1, d=64, causal=True),
    dense("causal-many-tiles", 8, 1000, 1000, heads=4, d=128, causal=True),
    dense("window", 8, 900, 1000, heads=4, heads_k=2, d=128, window=(200, 70)),
    dense("longer-than-a-ring", 1, 8300, 8300, heads=2, d=128),
    Case(
        "jagged-causal",
        (100, 0, 900, 1400) * 6,
        (100, 0, 900, 1400) * 6,
        heads=2,
        d=64,
        packed_q=True,
        packed_k=True,
        causal=True,
    ),
    dense("shared", 16, 200, 900, heads=2, d=64, shared=True),
    Case("packed", (100, 0, 900, 40), (10, 30, 900, 600), heads=2, d=64, packed_q=True, packed_k=True),
    Case("jagged", (100, 0, 900, 1400) * 6, (100, 0, 900, 1400) * 6, heads=2, d=128, packed_q=True, packed_k=True),
    Case("more-queries", (3000, 0, 900, 40) * 3, (700, 30, 900, 600) * 3, heads=2, d=64, packed_q=True, packed_k=True),
    Case("shared-packed-keys", (200,) * 4, (10, 30, 900, 600), heads=2, d=64, packed_k=True, shared=True),
]


FUNCTIONS = pytest.mark.parametrize("activation", ["gelu", SWISH, ["gelu", "relu"]], ids=["name", "params", "per-head"])


def differing(case: Case, activation: object, backend: str) -> dict[str, bool]:
    """Which results of fifty runs differ in some bit from those of the first."""
    if isinstance(activation, list):
        activation = activation * (case.heads // 2)
    params = (torch.full((case.heads,), 1.5, device="cuda", requires_grad=True),) if activation is SWISH else ()
    x: Inputs = make_inputs(case, torch.bfloat16, "cuda")
    if case.len_q == case.len_k:  # the same offsets, as where queries and keys are of the same sequences
        x = replace(x, cu_k=x.cu_q)

    def step() -> list[torch.Tensor]:
        out = call(case, x, activation, params=params, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, (*x.leaves, *params), do)]

    do = torch.randn_like(call(case, x, activation, params=params, backend=backend))
    first = step()
    found = torch.zeros(len(first), dtype=torch.bool, device="cuda")
    for _ in range(REPEATS):
        noise = torch.randn(1024, 1024, device="cuda")  # other work in flight, and other blocks of the allocator
        pairs = zip(first, step(), strict=True)
        found |= torch.stack([(a.view(torch.int8) != b.view(torch.int8)).any() for a, b in pairs])
        del noise
    return dict(zip(("out", "dq", "dk", "dv", "dparam"), found.tolist(), strict=False))


@on_each_gpu_backend
@FUNCTIONS
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bit_equal(case: Case, activation: object, backend: str) -> None:
    torch.use_deterministic_algorithms(True)
    assert not any(differing(case, activation, backend).values())


@on_each_gpu_backend
@FUNCTIONS
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_dq_depends_on_the_order_of_additions(case: Case, activation: object, backend: str) -> None:
    found = differing(case, activation, backend)
    found.pop("dq")
    assert not any(found.values()), found
