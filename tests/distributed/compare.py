"""What the checks share: meshes, DTensors made whole, and one training step compared between modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import gdpa.nn as gnn
from nn import cases

LAYERS = [name for name in cases.LAYERS if name not in ("gating", "masknet")]
LEARNING_RATE = 1e-3
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@cache
def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def whole(t: Tensor) -> Tensor:
    return t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()


def close(actual: Tensor | None, expected: Tensor | None, what: str, tolerance: float | None = None) -> None:
    if actual is None or expected is None:
        assert actual is expected, f"{what}: one is None"
        return
    limit = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(whole(actual), whole(expected), atol=limit, rtol=limit, msg=lambda m: f"{what}: {m}")


def loss(y: Any) -> Tensor:
    """One in which every output counts differently."""
    rows = cases.rows(y)
    weights = torch.linspace(-1, 1, rows.numel(), dtype=rows.dtype).view_as(rows)
    return (rows * weights).mean() + rows.square().mean()


def sequences(form: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Callable[[Tensor], Any], int]:
    """Values that take a gradient, what makes a batch of them, and the number of sequences."""
    if form == "dense":
        drawn = torch.randn(3, 7, cases.C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return drawn.to(dtype).requires_grad_(), lambda x: x, 3
    cu = gnn.Jagged.from_lengths(cases.values(), torch.tensor(cases.LENGTHS)).cu_seqlens
    longest = max(cases.LENGTHS) if form == "bounded" else None
    make = lambda x: gnn.Jagged(x, cu, longest)
    if form == "nested":
        make = lambda x: gnn.Jagged(x, cu).to_nested()
    return cases.values(dtype=dtype), make, len(cases.LENGTHS)


def same_step(name: str, mine: nn.Module, one: nn.Module, form: str, dtype: torch.dtype = torch.float64) -> None:
    """Outputs, and gradients of inputs and parameters, of two modules that should be one."""
    results = []
    for module in (mine, one):
        values, make, n = sequences(form, dtype)
        context = cases.context(name, n, dtype) if name in cases.LAYERS else ()
        y = module(make(values), *context)
        loss(y).backward()
        results.append((cases.rows(y), [values.grad, *(c.grad for c in context)]))
    (y, grads), (y_one, grads_one) = results
    assert not isinstance(y, DTensor)
    close(y, y_one, f"{name}, {form}: output")
    for i, (g, g_one) in enumerate(zip(grads, grads_one, strict=True)):
        close(g, g_one, f"{name}, {form}: gradient of input {i}")
    same_parameters(name, mine, one, gradients=True)


def same_parameters(name: str, mine: nn.Module, one: nn.Module, *, gradients: bool = False) -> None:
    for (n, p), (n_one, p_one) in zip(mine.named_parameters(), one.named_parameters(), strict=True):
        assert n == n_one
        assert p.shape == p_one.shape
        close(p, p_one, f"{name}: {n}")
        if gradients:
            close(p.grad, p_one.grad, f"{name}: gradient of {n}")


def same_losses(name: str, losses: list[float], one: list[float], dtype: torch.dtype) -> None:
    for step, (a, b) in enumerate(zip(losses, one, strict=True)):
        assert abs(a - b) <= TOLERANCE[dtype] * max(1.0, abs(b)), f"{name}, step {step}: {a}, not {b}"


def untouched(name: str, dtype: torch.dtype) -> nn.Module:
    """A layer as it starts: the stirred ones of the other checks do not train well."""
    torch.manual_seed(0)
    return cases.LAYERS[name].make(dtype=dtype)


def train(module: nn.Module, batches: Sequence[Any]) -> list[float]:
    """The losses of one step for each of ``batches``."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(module(*batch))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses
