"""The portable kernels where they change on large GPUs: float32 of long sequences, heads of more than 128 columns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gdpa
from functions.library import BY_NAME
from gdpa.backends.triton import config, launch
from gdpa.functions.activation import resolve_one
from gdpa.masks.band import Band
from gdpa.problem import Operands, make_problem
from gdpa.testing.cases import Case, dense
from support import Target, bf16, check, f16

pytestmark = pytest.mark.hopper

FUNCTIONS = {"silu": F.silu, "gelu": F.gelu}


def run(x: list[Tensor], do: Tensor, activation: str, window: tuple[int, int] | None, ours: bool) -> list[Tensor]:
    """The output and the gradients of x, by gdpa or by the formula."""
    x = [t.clone().requires_grad_() for t in x]
    if ours:
        out = gdpa.attention(*x, activation, window=window, backend="triton")
    else:
        p = FUNCTIONS[activation](x[0] @ x[1].mT * x[0].shape[-1] ** -0.5)
        out = (p if window is None else p.tril(window[1]).triu(-window[0])) @ x[2]
    return [out.detach(), *torch.autograd.grad(out, x, do)]


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("d", [40, 64, 128])
@pytest.mark.parametrize(
    ("rows", "window"),
    [(100, None), (320, None), (512, None), (2100, None), (640, (640, 0)), (1024, (15, 0)), (2048, (300, 300))],
)
def test_float32_is_as_exact_as_pytorch(rows: int, window: tuple[int, int] | None, d: int, activation: str) -> None:
    torch.manual_seed(rows + d)
    for mean in (-3.0, 0.0, 3.0):
        q, k, v, do = (torch.randn(2, 2, rows, d, device="cuda") for _ in range(4))
        shift = (abs(mean) * d**-0.5) ** 0.5
        x = [q + shift, k + (shift if mean > 0 else -shift), v + 0.5]
        exact = run([t.double() for t in x], do.double(), activation, window, ours=False)
        found = (run(x, do, activation, window, ours) for ours in (True, False))
        for mine, plain, true in zip(*found, exact, strict=True):
            errors = [float((t.double() - true).norm() / true.norm()) for t in (mine, plain)]
            assert errors[0] <= 1.25 * errors[1] + 2**-24, (mean, errors)


def test_float32_of_long_sequences_uses_tensor_cores() -> None:
    for rows, want in ((100, ("ieee", 16)), (320, ("tf32x3", 32)), (512, ("tf32x3", 0))):
        q = torch.empty(1, 1, rows, 64, device="cuda")
        problem = make_problem(Operands(q, q, q), (resolve_one("silu", 0),), 0.1, 1.0, Band())
        c = launch.pick(problem, config.forward_config)
        assert (c.products, c.part) == want


@pytest.mark.parametrize("target", [Target("triton", bf16), Target("triton", f16)], ids=repr)
@pytest.mark.parametrize("d", [136, 192, 256])
def test_wide_heads(d: int, target: Target) -> None:
    """dq has a kernel of its own, whatever the lengths are."""
    f, packed = BY_NAME["gelu_tanh"], {"packed_q": True, "packed_k": True}
    for case in (
        dense("wide", 2, 200, 300, heads=2, d=d),
        dense("wide", 2, 70, 40, heads=4, heads_k=2, d=d, causal=True),
        Case("wide", (5, 0, 64, 130, 3), (300, 9, 0, 65, 1), heads=2, d=d, window=(90, 9), **packed),
        Case("wide", (64, 64, 64), (400, 1, 0), packed_k=True, shared=True, heads=2, d=d),
        dense("keys", 2, 70, 150, heads=2, d=d, dv=16),
        dense("values", 2, 70, 150, heads=2, d=24, dv=d),
    ):
        check(case, target, f.fn, "gelu_tanh")
