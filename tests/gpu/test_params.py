"""Functions with params in Hopper's kernels, whose backward computes 8 scores of a thread at a time; and kernels that
were compiled for one function and are filled with another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gdpa.testing.cases import Case, dense
from support import Target, bf16, check, f16

pytestmark = pytest.mark.hopper

FUNCTIONS: dict[str, tuple[Any, int]] = {
    "not 0 at 0": (lambda s, a: torch.sigmoid(s - a), 1),
    "stretched": (lambda s, a: F.silu(a * s), 1),
    "stretched, by a vote": (lambda s, a: F.gelu(a * s, approximate="tanh"), 1),
    "sloped": (lambda s, a: torch.where(s > 0, s, a * s), 1),
    "constants and a gain": (lambda s, a: 3.0 * a * torch.tanh(0.7 * s), 1),
    "no block of PTX": (lambda s, a: F.softplus(a * s) / (a * a + 1), 1),
    "two": (lambda s, a, b: b * F.silu(a * s), 2),
}
PARAMS = (torch.tensor([0.4, -1.3, 0.0, 2.0]), torch.tensor(-0.6))  # per head, and one for all
CASES: list[Case] = [
    dense("ends inside of 16 queries", 2, 203, 203, heads=4, heads_k=2, d=64, causal=True),
    dense("many tiles", 1, 520, 700, heads=4, d=128),
    Case("packed", (130, 0, 9, 257), (190, 7, 65, 0), packed_q=True, packed_k=True, heads=4, heads_k=2, d=128),
    Case("causal", (1, 129, 0, 66), (65, 1, 3, 190), packed_q=True, packed_k=True, heads=4, d=64, causal=True),
    dense("a window", 1, 300, 300, heads=4, d=128, window=(70, 30)),
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name: str) -> None:
    fn, n = FUNCTIONS[name]
    for number, case in enumerate(CASES):
        check(case, Target("hopper", (bf16, f16)[number % 2]), fn, params=PARAMS[:n])


FILLED = """
import torch, gdpa
from gdpa.backends.triton.compiled import finding

filled, fill = [], finding._fill
finding._fill = lambda *args: filled.append(fill(*args)) or filled[-1]
q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
a = torch.tensor([0.3, -0.2, 1.0, 0.0], device="cuda", requires_grad=True)
for c in (0.0, 0.5, 1.0):
    f = lambda s, a: torch.where(s > c, s, a * s)
    found = []
    for backend, dtype in (("hopper", torch.bfloat16), ("reference", torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)] + [a]
        out = gdpa.attention(*leaves[:3], f, params=(leaves[3],), backend=backend)
        found.append([out, *torch.autograd.grad(out.float().sum(), leaves)])
    for got, want in zip(*found):
        assert (got.double() - want).norm() < 1e-2 * want.double().norm()
assert len([one for one in filled if one is not None]) >= 4, filled  # forward and backward, twice
"""


def test_a_kernel_filled_with_another_function(tmp_path: Path) -> None:
    env = {**os.environ, "GDPA_FUNCTIONS": str(tmp_path / "functions"), "TRITON_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run([sys.executable, "-c", FILLED], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
