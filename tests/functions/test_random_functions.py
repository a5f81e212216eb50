"""Functions nobody would write: random expressions, value and derivatives against float64 autograd."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functions.evaluation import EPS, by_autograd, by_graph, worst
from gdpa.functions.activation import from_function
from support import FULL, INTERPRET

# Bounded in value and slope, so that long chains of them stay tame.
UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.atan, F.softsign, torch.relu, torch.abs, F.gelu, F.silu,
    F.softplus, F.elu, F.hardtanh, F.hardswish, F.logsigmoid, torch.erf, torch.neg, torch.asinh,
    lambda x: x.clamp(-2, 1.5), lambda x: torch.exp(-x.abs()), lambda x: torch.log1p(x * x), lambda x: x * 0.5,
    lambda x: x / 3, lambda x: 2 - x, lambda x: x + 0, lambda x: x * 1, lambda x: -(x * -1.5),
    lambda x: x.double().to(x.dtype),
    lambda x: torch.where(x > 0.3, x, -0.5 * x), lambda x: torch.where(x < 0, 0.5, 2.0) * x, lambda x: (x > 0.1) * x,
    lambda x: x.detach() * 0.5 + x, lambda x: torch.sqrt(x * x + 1), lambda x: 1 / (x * x + 2),
    lambda x: (x * 0.25) ** 3, lambda x: x.int() * 0.1 + x,
    lambda x: torch.where(~(x > 1), x, x * 2), lambda x: x.mul(3).mul(0.5).neg().mul(-1),
    lambda x: torch.pow(x.abs() + 1, 0.75), lambda x: torch.where((x > 0) & (x < 1) | (x > 2), 1.0, 0.0) + x * 0.1,
    lambda x: x.clone().mul_(0.5).add_(1), lambda x: torch.zeros_like(x) + x, lambda x: x - x.floor().detach(),
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda x, y: x / (y * y + 1),
    lambda x, y: torch.where(x > y, x, y * 0.5), lambda x, y: torch.lerp(x, y, 0.3),
    lambda x, y: torch.atan2(x, y * y + 1),
    lambda x, y: torch.addcmul(x, y, y, value=0.1), lambda x, y: torch.add(x, y, alpha=-2), torch.logaddexp,
]  # fmt: skip


def random_function(seed: int) -> tuple[Callable[..., Tensor], tuple[float, ...]]:
    """A straight-line program: each step takes some of the values so far."""
    rng = random.Random(seed)
    params = tuple(rng.uniform(-1.5, 1.5) for _ in range(rng.choice([0, 0, 1, 2])))
    steps = []
    for size in range(1 + len(params), 9):
        if rng.random() < 0.6:
            steps.append((rng.choice(UNARY), (rng.randrange(size),)))
        else:
            steps.append((rng.choice(BINARY), (rng.randrange(size), rng.randrange(size))))

    def fn(*values: Tensor) -> Tensor:
        values = list(values)
        for op, indices in steps:
            values.append(op(*(values[i] for i in indices)))
        return torch.tanh(values[-1] * 0.25) + 0.05 * values[-2] + 0.01 * values[0]

    return fn, params


SCORES = torch.randn(400, generator=torch.Generator().manual_seed(2)) * 2.5


@pytest.mark.parametrize("seed", range(100 if FULL else 20))
def test_graph_matches_autograd(seed):
    fn, params = random_function(seed)
    exact = by_autograd(fn, SCORES.double(), params)
    error = worst(by_graph(from_function(fn, len(params)), SCORES.double(), params), exact)
    assert error.max() < 1e-6, f"p, ds, dparams differ by {error.tolist()}"


@pytest.mark.parametrize("seed", range(100 if FULL or not INTERPRET else 15))
@pytest.mark.triton
def test_emitted_code_matches_autograd(seed):
    from device.elementwise import joint

    fn, params = random_function(seed)
    exact = by_autograd(fn, SCORES.double(), params)
    plain = worst(by_autograd(fn, SCORES, params), exact)
    error = worst(joint(from_function(fn, len(params)), SCORES, params).double()[1:], exact)
    assert (error <= (3 * plain).clamp_min(16 * EPS)).all(), f"{error.tolist()} against {plain.tolist()}"
