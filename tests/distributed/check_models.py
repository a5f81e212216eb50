"""Data parallelism of torch's own, DDP and fully_shard, over a module of gdpa.nn layers: as one process on all data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gdpa.distributed as gd
import gdpa.nn as gnn
from distributed.compare import close, mesh
from nn import cases
from support import FULL


class Model(nn.Module):
    """A sequence and a context to a number: each kind of layer once."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.pool = gnn.PMA(16, 4, 2, cases.f.leaky, params=(0.1,), norm=True, dtype=dtype)
        self.pffn = gnn.PFFN(16, 4, 5, 2, 16, ["gelu", "silu", "relu", "gelu"], dtype=dtype)
        self.attend = gnn.SelfAttention(
            16, 4, "silu", causal=True, num_kv_heads=4, qk_norm=True, rotary=100.0, out_scale=0.2, dtype=dtype
        )
        self.summary = gnn.HierarchicalSeedPooling(16, 4, 4, 2, 2, dtype=dtype)
        self.head = gnn.MLP([32, 8, 1], dtype=dtype)

    def forward(self, x: gnn.Jagged) -> Tensor:
        x = self.attend(self.pffn(x, self.pool(x)))
        return self.head(self.summary(x).flatten(1)).squeeze(-1)


def made(dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Model(dtype)


@cache
def data(world: int, step: int, dtype: torch.dtype) -> list[tuple[gnn.Jagged, Tensor]]:
    """A batch for each rank: sequences, and what to predict."""
    drawn = torch.Generator().manual_seed(step)
    found = []
    for rank in range(world):
        lengths = torch.tensor([(3 * step + rank) % 5, 4, 0, 1 + rank])
        values = torch.randn(int(lengths.sum()), 16, generator=drawn).to(dtype)
        target = torch.randint(0, 2, (4,), generator=drawn).to(dtype)
        found.append((gnn.Jagged.from_lengths(values, lengths), target))
    return found


def error(model: nn.Module, x: gnn.Jagged, target: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(x), target)


def optimizer_of(model: nn.Module, dtype: torch.dtype) -> torch.optim.Optimizer:
    """In float32 Adam would make steps of the signs of rounding errors, where a gradient is zero."""
    kind = torch.optim.Adam if dtype == torch.float64 else torch.optim.SGD
    return kind(model.parameters(), lr=0.02)


@cache
def one_process(world: int, dtype: torch.dtype, steps: int, ranks: int) -> list[list[Tensor]]:
    """The losses of each step on the data of each of the first ``ranks`` ranks, of steps along their mean: rank 0 finds
    them and tells the others."""
    losses: list[Any] = [None] * steps
    model = made(dtype)
    optimizer = optimizer_of(model, dtype)
    for step in range(steps) if dist.get_rank() == 0 else ():
        optimizer.zero_grad()
        each = [error(model, *batch) for batch in data(world, step, dtype)[:ranks]]
        (sum(each) / ranks).backward()
        optimizer.step()
        losses[step] = [value.detach() for value in each]
    dist.broadcast_object_list(losses)
    return losses


def trains_as_one(world: int, wrap: Callable[[nn.Module], nn.Module], *, own_data: bool) -> None:
    """The losses of ``wrap(model)``, each rank on its own data or all on the same, are those of one process."""
    place = dist.get_rank() if own_data else 0
    runs = [(torch.float64, 3), (torch.float32, 20 if FULL else 4)]
    for dtype, steps in runs if FULL or world == 2 else runs[:1]:
        model = wrap(made(dtype))
        optimizer = optimizer_of(model, dtype)
        losses = []
        for step in range(steps):
            optimizer.zero_grad()
            value = error(model, *data(world, step, dtype)[place])
            value.backward()
            optimizer.step()
            losses.append(value.detach())
        expected = [each[place] for each in one_process(world, dtype, steps, world if own_data else 1)]
        close(torch.stack(losses), torch.stack(expected), f"losses in {dtype}")


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    for layer in (model.pool, model.pffn, model.attend, model.summary):
        fully_shard(layer, mesh=mesh(dist.get_world_size()))
    return fully_shard(model, mesh=mesh(dist.get_world_size()))


def check_ddp(world: int) -> None:
    trains_as_one(world, ddp, own_data=True)


def check_fully_shard(world: int) -> None:
    trains_as_one(world, fsdp, own_data=True)


def check_parallelize(world: int) -> None:
    trains_as_one(world, lambda model: gd.parallelize(model, mesh(world)), own_data=False)


def check_context_parallel(world: int) -> None:
    trains_as_one(world, lambda model: gd.context_parallel(model, mesh(world)), own_data=False)
