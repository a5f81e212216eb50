"""Communication with gradients, in pairs: what one does forward the other does backward.

    shared    identity          <->  sum over ranks      summed
    part      this rank's part  <->  all ranks' parts    gathered

The convention is that of tensor parallelism: outside of a parallel layer all ranks hold the same values, and so the
same gradients; inside, each holds its part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gdpa.compat import functional_collectives as functional


def shared(x: Tensor, group: ProcessGroup) -> Tensor:
    """x, the same on all ranks, where each goes on to use it for its part: its gradients are summed."""
    return x if group.size() == 1 else _Shared.apply(x, group)


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' x. All go on with the same values, so that the gradient is theirs as it is."""
    return x if group.size() == 1 else _Summed.apply(x, group)


def largest(x: Tensor, group: ProcessGroup) -> Tensor:
    """The largest of the ranks' x, element by element. Without a gradient."""
    return x if group.size() == 1 else _waited(functional.all_reduce(x.contiguous(), "max", group))


def part(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's part of x, which is the same on all ranks; ranks divide its size in ``dim``."""
    return x if group.size() == 1 else _Part.apply(x, dim, group)


def gathered(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The ranks' x, which have one shape, end to end in ``dim``. All go on with the same values."""
    return x if group.size() == 1 else _Gathered.apply(x, dim, group)


# Functional ones: dist.all_reduce and its like write in place, and compiled by torch 2.11 inside an autograd.Function
# they lose gradients without a word.
def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    return _waited(functional.all_reduce(x.contiguous(), "sum", group))


# Its name from torch 2.13 on, which warns of the old one.
_gather_first = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The ranks' x end to end in ``dim``. Without a gradient."""
    if group.size() == 1:
        return x
    whole = _waited(_gather_first(x.contiguous(), 0, group))
    return torch.cat(whole.chunk(group.size()), dim)


def all_to_all(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """Rows of all ranks, ``received`` from each, where this one gives ``sent`` of x to each. Without a gradient."""
    return _waited(functional.all_to_all_single(x, received, sent, group))


def _waited(x: Tensor) -> Tensor:
    """A plain tensor; outside of a compiled graph the functions above return one that waits when it is used."""
    return x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x


def _own(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    size = x.shape[dim] // group.size()
    # A copy even of a contiguous part: torch 2.11 drops the gradient of a view that a compiled Function returns.
    return x.narrow(dim, dist.get_rank(group) * size, size).clone(memory_format=torch.contiguous_format)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_reduce(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _own(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_gather(grad, ctx.dim, ctx.group), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _own(grad, ctx.dim, ctx.group), None, None
