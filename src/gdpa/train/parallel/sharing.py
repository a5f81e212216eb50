"""One model on several ranks: by its batch (ddp, fsdp), its heads (tensor) or its keys (context).

ddp and fsdp average gradients over the ranks; the loss is scaled so that this average is the gradient of the mean over
the whole batch, whatever each rank holds of it.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gdpa.compat import ddp_leave_out, is_view
from gdpa.data import Batch
from gdpa.models.embedding import Tables
from gdpa.rowwise.gradients import RowGradients
from gdpa.train.config import Config
from gdpa.train.parallel.ranks import Ranks
from gdpa.train.run.rowwise import coalesced, tables_of

SMALLEST_BLOCK = 2**16  # parameters that are worth a gathering of their own


class Shared:
    """``module`` holds the parameters, ``call`` computes: they differ where a wrapper lies around the module."""

    def __init__(self, module: nn.Module, config: Config, ranks: Ranks, spare: Batch) -> None:
        self.module, self.ranks = module.to(ranks.device), ranks
        self.call: nn.Module = self.module
        self.apart: list[nn.Parameter] = []  # fsdp leaves these to us
        if ranks.parallel in ("tensor", "context"):
            _split(self.module, ranks)
        unused = ranks.parallel == "ddp" and _has_unused(self.module, spare.to(ranks.device))
        if config.compile:
            self.module.compile(dynamic=True)  # lengths differ from step to step
        self.tables = [tables for tables in tables_of(self.module) if tables.row_gradients]
        self.rows = [p for tables in self.tables for p in tables.parameters()]
        self.compiled = config.compile
        if ranks.parallel == "ddp":
            _leave_out(self.module, self.rows)
            self.call = DistributedDataParallel(self.module, find_unused_parameters=unused)
        elif ranks.parallel == "fsdp":
            self.apart = _fully_shard(self.module, ranks)

    @property
    def mixed(self) -> bool:
        """Whether some parameters are DTensors and others are not."""
        return len({isinstance(p, DTensor) for p in self.module.parameters()}) > 1

    def __call__(self, batch: Batch) -> Tensor:
        """The logits of a batch to learn from."""
        if self.compiled:
            for tables in self.tables:
                tables.expect(batch)
        logits: Tensor = self.call(batch)
        return logits

    def without_sync(self) -> AbstractContextManager[object]:
        """Inside, gradients are not exchanged yet: more parts of the batch follow."""
        return self.call.no_sync() if isinstance(self.call, DistributedDataParallel) else nullcontext()

    def finish_gradients(self) -> None:
        for p in self.apart:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= self.ranks.world
        if self.ranks.parallel == "ddp":
            for tables in self.tables:
                _make_sparse(tables)
            for p in self.rows:
                p.grad = _mean_of_rows(p, self.ranks.world)

    def gradient_norm(self, clip: float | None) -> float:
        """The norm over all parameters; gradients are scaled down to ``clip`` if theirs is larger."""
        held = [p for p in self.module.parameters() if p.grad is not None]
        if self.rows:
            return _clip(coalesced(held), [tables.gradients for tables in self.tables], clip)
        if self.ranks.parallel is not None:
            from gdpa.distributed import clip_grad_norm_  # also takes DTensors and plain tensors together

            return float(clip_grad_norm_(held, math.inf if clip is None else clip))
        if clip is None:
            return float(nn.utils.get_total_norm([p.grad for p in held if p.grad is not None]))
        return float(nn.utils.clip_grad_norm_(held, clip))


def _clip(gradients: list[Tensor], rows: list[RowGradients], clip: float | None) -> float:
    """torch.nn.utils.clip_grad_norm_ of gradients instead of parameters."""
    norm = nn.utils.get_total_norm([*gradients, *(found.norm for r in rows if (found := r.sums()) is not None)])
    if clip is not None:
        factor = (clip / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        for r in rows:
            r.clip = factor
    return float(norm)


def _make_sparse(tables: Tables) -> None:
    """What backward has left by row, as gradients of the tables that can be exchanged."""
    for i, p in enumerate(tables.parameters()):
        own = tables.gradients.sparse(i, p)
        p.grad = p.grad if own is None else own
    tables.clear_gradients()


def _leave_out(module: nn.Module, rows: list[nn.Parameter]) -> None:
    """Tells ddp of parameters that it must not exchange: it takes sparse gradients of nn.Embedding only."""
    names = [name for name, p in module.named_parameters() if any(p is row for row in rows)]
    if names:
        ddp_leave_out(module, names)


def _mean_of_rows(p: nn.Parameter, world: int) -> Tensor:
    """The sparse gradients of all ranks, each of which has read rows of its own, over their number."""
    assert p.grad is not None  # every rank takes part in every step
    own = p.grad.coalesce()
    n = own.values().shape[0]
    # Its name from torch 2.13 on, which warns of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    counts = p.new_empty(world, dtype=torch.int64)
    gather(counts, p.new_tensor([n], dtype=torch.int64))
    most = int(counts.max())
    rows, values = p.new_zeros(most, dtype=torch.int64), p.new_zeros(most, p.shape[1])
    rows[:n], values[:n] = own.indices()[0], own.values()
    all_rows, all_values = rows.new_empty(world * most), values.new_empty(world * most, p.shape[1])
    gather(all_rows, rows)
    gather(all_values, values)
    kept = (torch.arange(most, device=p.device) < counts[:, None]).flatten()
    return torch.sparse_coo_tensor(all_rows[kept][None], all_values[kept] / world, p.shape, check_invariants=False)


def _split(module: nn.Module, ranks: Ranks) -> None:
    from gdpa import distributed

    assert ranks.mesh is not None
    if ranks.parallel == "tensor":
        distributed.parallelize(module, ranks.mesh)
    else:
        distributed.context_parallel(module, ranks.mesh)


def _fully_shard(module: nn.Module, ranks: Ranks) -> list[nn.Parameter]:
    """Large entries of ModuleLists one by one, then the rest. Scalars, which FSDP2 refuses, stay whole: returned."""
    from torch.distributed.fsdp import fully_shard

    scalars = [p for p in module.parameters() if p.dim() == 0]
    ignored = set(scalars)
    for found in reversed(list(module.modules())):  # what is inside before what is around it
        if isinstance(found, nn.ModuleList):
            for block in found:
                if sum(p.numel() for p in block.parameters() if p not in ignored) >= SMALLEST_BLOCK:
                    fully_shard(block, mesh=ranks.mesh, ignored_params=ignored)
    module.register_forward_hook(_unview)
    fully_shard(module, mesh=ranks.mesh, ignored_params=ignored)
    return scalars


def _unview(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
    """FSDP2 warns of outputs that are views, since changing them in place would undo its hooks."""
    return logits.clone() if is_view(logits) else logits


def _has_unused(module: nn.Module, batch: Batch) -> bool:
    """Whether a parameter plays no part in the output, of which ddp must be told."""
    training = module.training
    module.eval()(batch).sum().backward()
    for tables in tables_of(module):
        _make_sparse(tables)
    unused = any(p.grad is None for p in module.parameters() if p.requires_grad)
    module.train(training).zero_grad(set_to_none=True)
    return unused
