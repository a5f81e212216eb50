"""Which keys each rank takes of those that all ranks hold.

None of this waits for a device: shapes depend only on shapes, and what depends on the lengths stays in offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup


def span(rows: int, group: ProcessGroup) -> tuple[int, int]:
    """Rows ``start:stop`` of this rank, of ``rows`` in all: contiguous, in the order of ranks, even to one row."""
    ranks, rank = group.size(), dist.get_rank(group)
    return rows * rank // ranks, rows * (rank + 1) // ranks


def offsets_in(cu: Tensor, start: int, stop: int) -> Tensor:
    """The offsets, from 0, of those parts of sequences that lie in rows ``start:stop``."""
    return cu.clamp(start, stop) - start


@dataclass(frozen=True)
class PackedPart:
    """Keys of this rank out of packed ones, with the offsets of both sides: there is a sequence more than before, with
    keys that are nobody's and no query."""

    cu_q: Tensor
    cu_k: Tensor
    max_k: int | None
    rows: Tensor | None  # of each key of this rank, the row that it was; None: all rows as they are
    first: Tensor | None  # of each sequence, the place of this rank's first key; None: sequences are whole
    real: Tensor | None  # which of them are keys: the others fill up to a size known without the lengths

    def take(self, t: Tensor) -> Tensor:
        """This rank's rows of k or v, (T, H, D)."""
        if self.rows is None or self.real is None:
            return t
        return torch.where(self.real[:, None, None], t.index_select(0, self.rows), 0.0)


def each_evenly(cu_q: Tensor, cu_k: Tensor, rows_k: int, max_k: int | None, group: ProcessGroup) -> PackedPart:
    """Every sequence's keys, divided among the ranks: even work whatever the lengths."""
    ranks, rank, n_seqs = group.size(), dist.get_rank(group), cu_k.shape[0] - 1
    cu, lengths = cu_k.long(), cu_k.long().diff()
    first = lengths * rank // ranks
    ends = F.pad((lengths * (rank + 1) // ranks - first).cumsum(0), (1, 0))
    most = min(rows_k, (rows_k + n_seqs * (ranks - 1)) // ranks)  # the sum of lengths / ranks, each rounded up
    row = torch.arange(most, device=cu.device)
    seq = (torch.searchsorted(ends, row, right=True) - 1).clamp(0, max(n_seqs - 1, 0))
    real = row < ends[-1]
    rows = torch.where(real, row - ends[seq] + cu[seq] + first[seq], 0)
    filled = min(most, 2 * n_seqs)  # at most: each rounding leaves less than one row, on either side
    bound = None if max_k is None else max(-(-max_k // ranks), filled)
    end = torch.full_like(cu_k[:1], most)
    return PackedPart(torch.cat([cu_q, cu_q[-1:]]), torch.cat([ends.to(cu_k.dtype), end]), bound, rows, first, real)


def whole_sequences(cu_q: Tensor, cu_k: Tensor, rows_k: int, group: ProcessGroup) -> PackedPart:
    """Neighbouring sequences with all their keys, about as many keys on each rank: exact under a band, which is laid by
    the lengths. No key is copied: offsets are clamped, and keys of other ranks' sequences meet no query."""
    start, stop = span(rows_k, group)
    low, high = (torch.where(cu_k >= row, cu_k, rows_k).amin() for row in (start, stop))  # the next end of a sequence
    zero, end = torch.zeros_like(cu_k[:1]), torch.full_like(cu_k[:1], rows_k)
    cu_k = torch.cat([zero, cu_k.clamp(low, high), end])
    return PackedPart(torch.cat([cu_q[:1], cu_q, cu_q[-1:]]), cu_k, None, None, None, None)
