"""A call without its tensors, and its function with all derivatives, pair by pair.

Derivatives come from autograd on the Python function, so nothing here has seen gdpa's compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdpa.exactness.draw import Tensors
from gdpa.exactness.layout import Batch, Span, make_batch
from gdpa.testing.cases import Case

# In float16 a ds below 6e-5 loses digits. The factor scale * out_scale is ours to apply before or after its rounding:
# before, so that ds overflows later than in plain PyTorch, but not more than this of it.
LEAST_FACTOR = 2.0**-6
# How rows are divided: "sum", "abs", "softmax" (f is exp, whose row's maximum is subtracted), or not at all; several
# take turns over the query heads.
Norm = str | None | tuple[str | None, ...]


@dataclass(frozen=True)
class Formula:
    """A call without its tensors. ``f(s, *params)`` takes s (n, H, Lq, Lk) and params that broadcast with it.

    A function of positions names those that it takes by keyword in ``at``. Like those it is given the scores, params
    and positions of visible pairs only, all of shape (pairs,), and then the tables: ``f(s, *params, *tables, **at)``.
    """

    case: Case
    f: Callable[..., Tensor]
    scale: float
    out_scale: float = 1.0
    normalize: Norm = None
    at: tuple[str, ...] = ()
    visible: Callable[..., Tensor] | None = None  # a mask: (Positions, *its tables) -> bool, to be broadcast
    exponential: bool = False  # f is exp of something: row sums are returned as logarithms, as those of softmax are
    with_sums: bool = False  # row sums are returned, and compared

    @classmethod
    def of(
        cls, case: Case, f: Callable[..., Tensor], scale: float | None = None, out_scale: float = 1.0,
        normalize: Norm = None,
    ) -> Formula:  # fmt: skip
        return cls(case, f, 1 / math.sqrt(case.d) if scale is None else scale, out_scale, normalize)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.case.heads // (self.case.heads_k or self.case.heads)

    @property
    def norms(self) -> tuple[str | None, ...]:
        """One per query head."""
        turns = self.normalize if isinstance(self.normalize, tuple) else (self.normalize,)
        return tuple(turns[h % len(turns)] for h in range(self.case.heads))

    def heads(self, device: torch.device, *norms: str | None) -> Tensor:
        """(H, 1, 1): which heads are divided in one of these ways."""
        return torch.tensor([norm in norms for norm in self.norms], device=device)[:, None, None]

    def in_logarithms(self, device: torch.device) -> Tensor:
        """(H, 1, 1): the heads whose row sums are returned as logarithms."""
        return self.heads(device, "softmax", *(("sum", "abs") if self.exponential else ()))

    def batch(self, part: list[Span], x: Tensors) -> Batch:
        """The sequences of ``part``, and which of their pairs count."""
        batch = make_batch(self.case, part, x.do.device)
        return batch if self.visible is None else batch.masked(self.visible(batch.at, *x.mask_tables))

    def value(self, s: Tensor, params: Sequence[Tensor], tables: Sequence[Any], batch: Batch) -> Tensor:
        """f(s) in the shape and dtype of s, which f may write into; tensors that f makes are where s is, as they are in
        compiled code. Of a function of positions 0 for pairs that are not visible, which may have no value."""
        with nullcontext() if s.device.type == "cpu" else s.device:
            if not self.at:
                return self.f(s.clone(), *params).to(s.dtype).expand_as(s)
            keep = batch.keep.expand_as(s)
            at = {name: getattr(batch.at, name).expand_as(s)[keep] for name in self.at}
            p = self.f(s[keep], *(p.expand_as(s)[keep] for p in params), *tables, **at)
            return torch.zeros_like(s).masked_scatter(keep, p.to(s.dtype))

    def derivatives(self, s: Tensor, params: Sequence[Tensor], tables: Sequence[Tensor], batch: Batch) -> Derivatives:
        """f and its derivatives; params are (H,)."""
        given = [Recorded(t.to(s.dtype)) if t.is_floating_point() else t for t in tables]
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (s, *(p[:, None, None].expand_as(s) for p in params))]
            p = self.value(leaves[0], leaves[1:], given, batch)
            found = [(i, at, read) for i, t in enumerate(given) if isinstance(t, Recorded) for at, read in t.found]
            inputs = [*leaves, *(read for _, _, read in found)]
            grads = [torch.zeros_like(t) for t in inputs]
            if p.requires_grad:  # not piecewise constant
                grads = list(torch.autograd.grad(p.sum(), inputs, allow_unused=True, materialize_grads=True))
        n = len(leaves)
        reads = []
        for (i, at, _), grad in zip(found, grads[n:], strict=True):
            keep = batch.keep.expand_as(s)
            places = torch.zeros_like(s, dtype=torch.int64).masked_scatter(keep, at)
            reads.append(Read(i, places, torch.zeros_like(s).masked_scatter(keep, grad)))
        return Derivatives(p.detach(), grads[0], grads[1:n], reads)

    def boost(self, dtype: torch.dtype) -> float:
        """What the factor of ds is multiplied by before it is rounded to ``dtype``, and divided by afterwards."""
        factor = abs(self.scale * self.out_scale)
        if dtype != torch.float16 or factor == 0 or factor >= LEAST_FACTOR:
            return 1.0
        return 2.0 ** math.ceil(math.log2(LEAST_FACTOR / factor))


@dataclass(frozen=True)
class Read:
    """An entry that f reads of table number ``table`` for every pair: where it stands in the flat table, and the
    derivative of f by it; both (n, H, Lq, Lk), and 0 for pairs that are not visible."""

    table: int
    at: Tensor
    slope: Tensor


@dataclass(frozen=True)
class Derivatives:
    """f, df/ds, df/dparam and df/d(what is read of a table) for every pair, (n, H, Lq, Lk) each."""

    p: Tensor
    slope: Tensor
    by_params: list[Tensor]
    reads: list[Read]

    @property
    def all(self) -> list[Tensor]:
        return [self.p, self.slope, *self.by_params, *(read.slope for read in self.reads)]


class Recorded:
    """A table whose entries are leaves once they are read, so that autograd gives the derivative by each of them."""

    def __init__(self, table: Tensor) -> None:
        self.table = table.detach()
        self.found: list[tuple[Tensor, Tensor]] = []  # places in the flat table, entries

    def __getitem__(self, index: Any) -> Tensor:
        flat = torch.zeros((), dtype=torch.int64, device=self.table.device)
        for i, size in zip(index if isinstance(index, tuple) else (index,), self.table.shape, strict=True):
            flat = flat * size + torch.where(i < 0, i + size, i)
        entries = self.table.reshape(-1)[flat].requires_grad_()
        self.found.append((flat, entries))
        return entries
