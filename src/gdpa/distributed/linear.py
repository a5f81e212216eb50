"""Linear layers whose outputs or inputs are heads, of which each rank computes its own.

Weights keep their names and their full shape as DTensors in contiguous shards, so that checkpoints, optimizers and
``full_tensor()`` see what they saw before. The rows of a fused projection that belong to a rank's heads are not
contiguous (q, k and v lie one after another), so forward trades rows between ranks first: one all-to-all of a rank's
share of the weight, and the way back for its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gdpa.distributed.collectives import all_to_all, gathered, shared, summed


@dataclass(frozen=True)
class Trade:
    """From this rank's contiguous rows to those of its heads: the order in which to send rows, and how many go to and
    come from each rank."""

    order: Tensor
    sent: list[int]
    received: list[int]

    @staticmethod
    def of(segments: Sequence[int], mesh: DeviceMesh) -> Trade | None:
        """Of rows that are ``segments`` one after another, of each of which a rank needs its share. None if there is
        one segment: then contiguous shards are the shares."""
        ranks, rank = mesh.size(), mesh.get_local_rank()
        if len(segments) == 1 or ranks == 1:
            return None
        widths = torch.tensor(segments).repeat_interleave(ranks) // ranks
        needed_by = torch.arange(ranks).repeat(len(segments)).repeat_interleave(widths)  # which rank needs a row
        held = needed_by.chunk(ranks)
        received = [int((rows == rank).sum()) for rows in held]
        sent = held[rank].bincount(minlength=ranks).tolist()
        return Trade(held[rank].argsort(stable=True).to(mesh.device_type), sent, received)


class _Traded(torch.autograd.Function):
    """Rows in ascending order before and after, so that what comes from lower ranks comes first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trade: Trade, group: ProcessGroup) -> Tensor:
        ctx.trade, ctx.group = trade, group
        return all_to_all(x.index_select(0, trade.order.to(x.device)), trade.received, trade.sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        trade = ctx.trade
        back = all_to_all(grad.contiguous(), trade.sent, trade.received, ctx.group)
        return torch.empty_like(back).index_copy_(0, trade.order.to(back.device), back), None, None


def sharded(p: Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """The parameter, the same on all ranks, as a DTensor sharded in ``dim``."""
    part = distribute_tensor(p.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(part, requires_grad=p.requires_grad)


def local(p: Tensor) -> Tensor:
    """This rank's shard of a parameter."""
    return p.to_local() if isinstance(p, DTensor) else p


class HeadsOut(nn.Linear):
    """A linear layer whose outputs are heads. x (..., in), the same on all ranks -> (..., the outputs of this rank's
    heads), or all of them if ``gather``.

    ``key_mesh``: the mesh over whose ranks the rows of x are divided, by context parallelism.
    """

    head_mesh: DeviceMesh | None = None
    key_mesh: DeviceMesh | None = None
    trade: Trade | None = None
    gather = False

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._mine(self.weight), None if self.bias is None else self._mine(self.bias)
        if self.head_mesh is None:
            return F.linear(x, weight, bias)
        group = self.head_mesh.get_group()
        y = F.linear(shared(x, group), weight, bias)
        return gathered(y, -1, group) if self.gather else y

    def _mine(self, p: Tensor) -> Tensor:
        mine = local(p)
        if self.trade is not None and self.head_mesh is not None:
            mine = _Traded.apply(mine, self.trade, self.head_mesh.get_group())
        return mine if self.key_mesh is None else shared(mine, self.key_mesh.get_group())

    def extra_repr(self) -> str:
        return super().extra_repr() + _over(self.head_mesh, "heads") + _over(self.key_mesh, "keys")


class HeadsIn(nn.Linear):
    """A linear layer whose inputs are heads. x (..., the features of this rank's heads) -> (..., out), the same on all
    ranks."""

    head_mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        y = summed(F.linear(x, local(self.weight)), self.head_mesh.get_group())
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return super().extra_repr() + _over(self.head_mesh, "heads")


class SharedRMSNorm(nn.RMSNorm):
    """An RMSNorm of each head, whose weight all heads share: its gradient is the sum of the ranks'."""

    head_mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else shared(self.weight, self.head_mesh.get_group())
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def heads_out(linear: nn.Linear, mesh: DeviceMesh, segments: Sequence[int], *, gather: bool = False) -> None:
    """Make ``linear`` a HeadsOut in place; its rows are ``segments``, each of which holds all heads."""
    assert sum(segments) == linear.out_features
    linear.weight = sharded(linear.weight, mesh, 0)
    if linear.bias is not None:
        linear.bias = sharded(linear.bias, mesh, 0)
    if not isinstance(linear, HeadsOut):
        linear.__class__ = HeadsOut  # as fully_shard does: parents, hooks and names stay as they are
    assert isinstance(linear, HeadsOut)
    linear.head_mesh, linear.trade, linear.gather = mesh, Trade.of(segments, mesh), gather


def keys_out(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Make ``linear`` in place one that each rank of ``mesh`` applies to its part of the rows."""
    if not isinstance(linear, HeadsOut):
        linear.__class__ = HeadsOut
    assert isinstance(linear, HeadsOut)
    linear.key_mesh = mesh


def heads_in(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Make ``linear`` a HeadsIn in place."""
    linear.weight = sharded(linear.weight, mesh, 1)
    linear.__class__ = HeadsIn
    assert isinstance(linear, HeadsIn)
    linear.head_mesh = mesh


def shared_norm(norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
    """Make ``norm`` a SharedRMSNorm in place."""
    norm.__class__ = SharedRMSNorm
    assert isinstance(norm, SharedRMSNorm)
    norm.head_mesh = mesh


def _over(mesh: DeviceMesh | None, what: str) -> str:
    return "" if mesh is None else f", {what} over {mesh.size()} ranks"
