"""Row sums in Hopper's kernels, where their tiles end: what every backend promises of them is in tests/rowsums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gdpa
from gdpa.backends.hopper import folding
from gdpa.testing.cases import Case, dense
from rowsums.formulas import FUNCTIONS, Normalised, check
from support import Target, bf16, f16

pytestmark = pytest.mark.hopper

BF16, F16 = Target("hopper", bf16), Target("hopper", f16)
both_dtypes = pytest.mark.parametrize("target", [BF16, F16], ids=repr)
# Those that these kernels take; with params the backward is the triton backend's. 1 + s + s^2 / 2 is 0 almost nowhere,
# silu's sums cancel, and a falling exponent has a negative factor.
SUMMED = [
    *FUNCTIONS,
    Normalised("silu of positive sums", F.silu, activation="silu", sink=30.0),
    Normalised("falling", lambda s: torch.exp(-0.5 * s), stable=True),
    Normalised("curved", lambda s: torch.exp(torch.tanh(s) * 3), sink=0.5, stable=True),
    Normalised("turned silu", lambda s: -2 * F.silu(s), "abs", sink=0.3),
]
BY_NAME = {f.name: f for f in SUMMED}
SOFTMAX, SILU, TANH = (BY_NAME[name] for name in ("softmax", "silu of positive sums", "tanh"))
CASES = {
    "dense": dense("dense", 2, 200, 300, heads=2, d=128),
    "narrow": dense("narrow", 2, 450, 130, heads=2, d=64),
    "one key": dense("one", 2, 70, 1, heads=2, d=64),
    "causal": dense("causal", 1, 300, 400, heads=2, d=128, causal=True),
    "blind rows": dense("blind", 1, 300, 200, heads=2, d=64, causal=True),
    "window": dense("window", 1, 300, 300, heads=2, d=128, window=(70, 30)),
    "grouped": dense("grouped", 2, 130, 200, heads=4, heads_k=2, d=128),
    "other width": dense("width", 1, 130, 200, heads=2, d=40, dv=72),
    "jagged": Case("jagged", (5, 0, 64, 130, 3), (300, 300, 0, 65, 1), packed_q=True, packed_k=True, heads=2, d=128),
    "jagged, narrow": Case("jagged", (400, 129), (128, 257), packed_q=True, packed_k=True, heads=2, d=64, causal=True),
    "few keys": Case("few", (70, 0, 5, 300) * 30, (50, 9, 0, 129) * 30, packed_q=True, packed_k=True, heads=2, d=128),
    "few keys, causal": Case(
        "few", (64, 3, 50, 90) * 30, (64, 0, 50, 100) * 30, packed_q=True, packed_k=True, heads=2, d=64, causal=True
    ),
    "few keys, dense": dense("few", 3, 200, 150, heads=2, d=128),
    "shared": Case("shared", (64, 64, 64), (400, 1, 0), packed_k=True, shared=True, heads=2, d=128),
}


@both_dtypes
@pytest.mark.parametrize("f", SUMMED, ids=repr)
def test_functions(f: Normalised, target: Target) -> None:
    for name in ("dense", "jagged"):
        check(CASES[name], target, f)


@both_dtypes
@pytest.mark.parametrize("f", [SOFTMAX, SILU, TANH], ids=repr)
@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, f: Normalised, target: Target) -> None:
    check(CASES[name], target, f, out_scale=0.5)


def test_few_queries_of_heads_that_share_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads become queries, and their sums stay theirs."""
    monkeypatch.setattr(folding, "WORTH", 0)
    for rows in (1, 20):
        for f in (SOFTMAX, SILU):  # the second has a sink, which heads do not share
            check(dense("few", 3, rows, 400, heads=8, heads_k=2, d=128), BF16, f)


@pytest.mark.parametrize("d", [64, 128])
def test_weights_of_0_have_no_sign(d: int) -> None:
    """Keys of zeros: tanh has a slope there, the absolute value of its result has none."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, n, d, device="cuda", dtype=torch.bfloat16) for n in (200, 300, 300, 200))
    k[:, :, ::3] = 0
    found = []
    for dtype, backend in ((torch.float64, "reference"), (torch.bfloat16, "hopper")):
        x = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = gdpa.attention(*x, torch.tanh, normalize="abs", backend=backend)
        found.append([t.double() for t in (out, *torch.autograd.grad(out, x, do.to(dtype)))])
    for exact, ours in zip(*found, strict=True):
        assert (ours - exact).square().mean().sqrt() < 0.01 * exact.square().mean().sqrt()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 256, 257])
def test_lengths(length: int) -> None:
    for other in (1, 64, 129, 255):
        check(dense("edge", 1, length, other, heads=2, d=64), BF16, SOFTMAX)


@pytest.mark.parametrize("level", [1e3, -1e3, 3e4])
def test_large_scores(level: float) -> None:
    """Around a large number, alike but for a few units, over several blocks: as exact as float32 is there."""
    torch.manual_seed(0)
    s = (level + 3 * torch.randn(300, 400, device="cuda")).to(torch.bfloat16)
    q = torch.zeros(1, 1, 300, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 400, 128, device="cuda", dtype=torch.bfloat16)
    q[..., 0] = 1
    k[..., 0] = s[0]
    v = torch.randn_like(k)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, lse = gdpa.attention(q, k, v, "softmax", scale=1.0, backend="hopper", return_weights_sum=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    weights = s[0].double().softmax(-1)
    torch.testing.assert_close(lse[0, 0].double(), s[0].double().logsumexp(-1).expand(300), atol=5e-3, rtol=1e-6)
    torch.testing.assert_close(out[0, 0].double(), (weights @ v[0, 0].double()).expand(300, 128), atol=2e-2, rtol=2e-2)
    assert all(bool(g.isfinite().all()) for g in grads)
    torch.testing.assert_close(grads[2][0, 0, :, 0].double(), 300 * weights, atol=2e-2, rtol=2e-2)


def test_growing_scores() -> None:
    """Every block has a larger maximum than all before: sums are rescaled each time."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 128, device="cuda", dtype=torch.bfloat16) for n in (200, 1000, 1000))
    k[..., 0] = torch.linspace(0, 400, 1000, device="cuda")
    q[..., 0] = 4
    ours = gdpa.attention(q, k, v, "softmax", backend="hopper")
    exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)))
    torch.testing.assert_close(ours.double(), exact, atol=2e-2, rtol=2e-2)


def test_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    q, k, v = (torch.randn(2, 2, 500, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def run(causal: bool) -> list[Tensor]:
        out = gdpa.attention(q, k, v, "softmax", causal=causal, backend="hopper")
        return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    for causal in (False, True):
        first = run(causal)
        assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(run(causal), first, strict=True))
