"""Rotary positions and norms on a GPU: against float64, in place in compiled layers, the same every time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import gdpa.nn as gnn
from gdpa import rowwise
from gdpa.rowwise import rotary

pytestmark = pytest.mark.gpu
ROWS, C = 5001, 512


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rotary(dtype: torch.dtype) -> None:
    x = torch.randn(ROWS, 12, 128, device="cuda").to(dtype)
    positions = torch.randint(1_700_000_000, (ROWS,), device="cuda")
    y = torch.ops.gdpa.rotary(x, positions, 8, 1e4, False)
    assert apart(y[:, :8], rotary.formula(x[:, :8].double(), positions, 1e4)) < torch.finfo(dtype).eps
    assert torch.equal(y[:, 8:], x[:, 8:])
    torch.ops.gdpa.rotary_(x, positions, 8, 1e4, False)
    assert torch.equal(x, y)


def test_norms() -> None:
    x, dz, beside = (torch.randn(ROWS, C, device="cuda") for _ in range(3))
    narrow, weight = dz.bfloat16(), torch.randn(C, device="cuda")
    exact, exact_w = x.double().requires_grad_(), weight.double().requires_grad_()
    F.layer_norm(exact, (C,), exact_w, None, 1e-5).backward(narrow.double())
    dx, dw, db = found = torch.ops.gdpa.norm_backward(narrow, x, weight, beside, 1e-5, True)
    assert exact.grad is not None
    assert exact_w.grad is not None
    assert apart(dx, exact.grad + beside) < 1e-6
    assert apart(dw, exact_w.grad) < 1e-6
    assert apart(db, narrow.double().sum(0)) < 1e-6
    again = torch.ops.gdpa.norm_backward(narrow, x, weight, beside, 1e-5, True)
    assert all(map(torch.equal, found, again))


def test_compiled_attention_turns_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "where", "on")
    layer = gnn.SelfAttention(128, 2, rotary=1e4).cuda()
    x = gnn.Jagged.from_lengths(torch.randn(300, 128, device="cuda"), torch.tensor([100, 0, 200], device="cuda"))

    def run(f: object) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return f(x).values.float()  # type: ignore[operator]

    want = run(layer)
    with torch.profiler.profile() as profile:
        got = run(torch.compile(layer, fullgraph=True))
        got.sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert "gdpa::rotary_" in names
    assert apart(got, want.double()) < 0.01
