"""Where the rows of some sequences lie in a (batch, H, T, D) tensor: read as (n, H, length, D), and written back.

``take`` gives a view where the layout allows one and otherwise one gathered copy, its padding zero. ``put`` writes
only rows that exist. So nothing of a sequence can leak into another through the padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class RowAccess(Protocol):
    """Rows ``start:stop`` of every sequence, for the heads in ``heads``."""

    def take(self, t: Tensor, heads: slice, start: int, stop: int) -> Tensor:
        """(n, heads, stop - start, D), of which rows past the end of a sequence are zero."""

    def put(self, t: Tensor, heads: slice, start: int, stop: int, values: Tensor) -> None:
        """Write ``values`` (n, heads, stop - start, D) in the dtype of ``t``."""


@dataclass(frozen=True)
class DenseRows:
    """One batch entry per sequence: ``batch`` is a slice, or the indices of sequences that were sorted by length."""

    batch: slice | Tensor

    def take(self, t: Tensor, heads: slice, start: int, stop: int) -> Tensor:
        rows = t[:, heads, start:stop]
        # index_select orders its result in memory as (n, H, rows, D), t[indices] as t is
        return rows[self.batch] if isinstance(self.batch, slice) else rows.index_select(0, self.batch)

    def put(self, t: Tensor, heads: slice, start: int, stop: int, values: Tensor) -> None:
        t[:, heads, start:stop][self.batch] = values.to(t.dtype)


@dataclass(frozen=True)
class UsedRows:
    """One batch entry per sequence of ``batch``, of which only the first ``lengths`` rows count."""

    batch: Tensor
    lengths: Tensor

    def take(self, t: Tensor, heads: slice, start: int, stop: int) -> Tensor:
        rows = t[:, heads, start:stop].index_select(0, self.batch)
        return rows.masked_fill_(self._unused(start, stop), 0)

    def put(self, t: Tensor, heads: slice, start: int, stop: int, values: Tensor) -> None:
        t[:, heads, start:stop][self.batch] = values.to(t.dtype).masked_fill(self._unused(start, stop), 0)

    def _unused(self, start: int, stop: int) -> Tensor:
        return (torch.arange(start, stop) >= self.lengths[:, None])[:, None, :, None]


@dataclass(frozen=True)
class SharedRows:
    """One batch entry that ``n`` sequences share; what they write is summed."""

    n: int

    def take(self, t: Tensor, heads: slice, start: int, stop: int) -> Tensor:
        return t[:, heads, start:stop].expand(self.n, -1, -1, -1)

    def put(self, t: Tensor, heads: slice, start: int, stop: int, values: Tensor) -> None:
        t[0, heads, start:stop] += values.sum(0)


@dataclass(frozen=True)
class PackedRun:
    """``n`` neighbouring sequences of the same ``length``, from row ``first`` of a packed tensor: always a view."""

    first: int
    n: int
    length: int

    def take(self, t: Tensor, heads: slice, start: int, stop: int) -> Tensor:
        return self._view(t, heads)[:, :, start:stop]

    def put(self, t: Tensor, heads: slice, start: int, stop: int, values: Tensor) -> None:
        self._view(t, heads)[:, :, start:stop] = values

    def _view(self, t: Tensor, heads: slice) -> Tensor:
        run = t[0, heads, self.first : self.first + self.n * self.length]
        return run.unflatten(1, (self.n, self.length)).transpose(0, 1)


@dataclass(frozen=True)
class Places:
    """Rows start:stop of sequences padded to a common length: where each is in the packed tensor (n, length), and the
    numbers of those that are there and of those that are padding, None if none are."""

    rows: Tensor
    real: Tensor
    padding: Tensor | None


@dataclass(frozen=True)
class PackedRows:
    """Sequences of ``lengths`` from rows ``starts`` of a packed tensor, padded to a common length."""

    starts: Tensor
    lengths: Tensor
    known: dict[tuple[int, int], Places] = field(default_factory=dict)  # the same for q, its gradient and the output

    def take(self, t: Tensor, heads: slice, start: int, stop: int) -> Tensor:
        places = self._places(start, stop)
        # Rows first: copying whole rows and transposing beats indexing (n, H, rows, D) directly by 1.4x.
        values = t[0, heads].transpose(0, 1).index_select(0, places.rows.flatten())
        if places.padding is not None:
            values.index_fill_(0, places.padding, 0)  # 0 * NaN is no way to remove a row
        return values.unflatten(0, places.rows.shape).transpose(1, 2)

    def put(self, t: Tensor, heads: slice, start: int, stop: int, values: Tensor) -> None:
        places = self._places(start, stop)
        target, values = t[0, heads].transpose(0, 1), values.transpose(1, 2).to(t.dtype)
        if places.padding is None:  # writes the transposed view as it is, 2x faster than through a selection
            target[places.rows] = values
        else:
            rows, real = places.rows.flatten(), places.real
            target.index_copy_(0, rows[real], values.flatten(0, 1).index_select(0, real))

    def _places(self, start: int, stop: int) -> Places:
        if (start, stop) not in self.known:
            position = torch.arange(start, stop)
            # Past its end a sequence repeats its last row, an empty one the row before it, if there is one.
            rows = (self.starts[:, None] + torch.minimum(position, self.lengths[:, None] - 1)).clamp_(min=0)
            exists = (position < self.lengths[:, None]).flatten()
            real, padding = exists.nonzero().flatten(), (~exists).nonzero().flatten()
            self.known[start, stop] = Places(rows, real, padding if len(padding) else None)
        return self.known[start, stop]


def packed_rows(starts: Tensor, lengths: Tensor) -> RowAccess:
    """The cheapest access to sequences of ``lengths`` at ``starts``."""
    first, n, length = int(starts[0]), starts.numel(), int(lengths[0])
    if bool((lengths == length).all()) and torch.equal(starts, first + length * torch.arange(n)):
        return PackedRun(first, n, length)
    return PackedRows(starts, lengths)


def zero_unused(t: Tensor, cu: Tensor | None, used: Tensor | None) -> None:
    """Zeros in the rows of t (batch, H, T, D) that belong to no sequence, and that ``put`` therefore never writes."""
    if cu is None:
        for b, length in enumerate([] if used is None else used.tolist()):
            t[b, :, length:].zero_()
        return
    starts = cu[:-1].long()
    ends = cu[1:].long() if used is None else starts + used
    begun = torch.zeros(t.shape[2] + 1, dtype=torch.int64)  # sequences begun less those ended, row by row
    begun.index_add_(0, starts, torch.ones_like(starts)).index_add_(0, ends, torch.full_like(ends, -1))
    unused = (begun.cumsum(0)[:-1] == 0).nonzero().flatten()
    if len(unused):
        t.index_fill_(2, unused, 0)
