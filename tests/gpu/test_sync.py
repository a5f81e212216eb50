"""Neither pass waits for the device or copies from it; looking at offsets (GDPA_CHECK=1) does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import gdpa
from gdpa.testing.cases import Case, call, dense, make_inputs
from support import on_each_gpu_backend

pytestmark = pytest.mark.gpu

SWISH = gdpa.activation(lambda s, b: s * torch.sigmoid(b * s))  # finite at 0: Hopper adds up its gradients itself
CASES = [
    dense("dense", 2, 200, 300, heads=4, heads_k=2, d=64),
    dense("causal-window", 2, 300, 300, heads=4, d=64, causal=True, window=(50, None)),
    dense("shared", 3, 40, 300, heads=2, d=64, shared=True),
    Case("packed", (100, 0, 260, 40), (10, 30, 300, 60), heads=2, d=64, packed_q=True, packed_k=True),
    Case("packed-dense-keys", (100, 0, 260, 40), (70,) * 4, heads=2, d=64, packed_q=True),
    Case("shared-packed-keys", (30,) * 4, (10, 30, 300, 60), heads=2, d=64, packed_k=True, shared=True),
]
FUNCTIONS: dict[str, dict[str, Any]] = {
    "name": {"activation": "gelu"},
    "lambda": {"activation": lambda s: torch.nn.functional.softplus(s) ** 2},
    "params": {"activation": SWISH},
    "per-head": {"activation": ["gelu", "relu"]},
}


@contextmanager
def no_syncs() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_mode_notices_a_sync() -> None:
    x = torch.ones(3, device="cuda")
    with no_syncs(), pytest.raises(RuntimeError, match="synchronizing"):
        x.sum().item()


@on_each_gpu_backend
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("bounded", [False, True], ids=["", "max_seqlen"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_syncs(case: Case, function: dict[str, Any], bounded: bool, deterministic: bool, backend: str) -> None:
    if bounded and not case.varlen:
        pytest.skip("a dense call has no max_seqlen")
    torch.use_deterministic_algorithms(deterministic)
    kwargs: dict[str, Any] = {"max_seqlen_q": 300, "max_seqlen_k": 300} if bounded else {}
    kwargs |= {**function, "backend": backend}
    if isinstance(kwargs["activation"], list):
        kwargs["activation"] = kwargs["activation"] * (case.heads // 2)
    if kwargs["activation"] is SWISH:
        kwargs["params"] = (torch.full((case.heads,), 1.5, device="cuda", requires_grad=True),)
    warm, x = (make_inputs(case, torch.bfloat16, "cuda", seed) for seed in range(2))
    call(case, warm, **kwargs).sum().backward()
    with no_syncs():
        call(case, x, **kwargs).sum().backward()
    assert x.q.grad.isfinite().all()


@on_each_gpu_backend
def test_nested_tensors(backend: str) -> None:
    cu = torch.tensor([0, 100, 100, 400], device="cuda")
    rows = torch.randn(400, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        x = torch.nested.nested_tensor_from_jagged(rows, cu).transpose(1, 2)
        gdpa.attention(x, x, x, "silu", backend=backend).transpose(1, 2).values().sum().backward()

    step()
    with no_syncs():
        step()


def test_gdpa_check_does_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[3]
    x = make_inputs(case, torch.bfloat16, "cuda")
    call(case, x, "gelu")
    monkeypatch.setenv("GDPA_CHECK", "1")
    with no_syncs(), pytest.raises(RuntimeError, match="synchronizing"):
        call(case, x, "gelu")
