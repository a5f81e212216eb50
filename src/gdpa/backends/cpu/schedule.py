"""Which sequences and heads are computed together, and in which blocks of queries and keys.

Packed sequences are sorted into buckets of similar lengths, each padded to its longest, so that thousands of short
sequences take a few batched products; a dense problem is one bucket of equal sequences and is read through views. A
bucket is cut into chunks of bounded memory, and a chunk is walked tile by tile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gdpa.backends.cpu.rows import DenseRows, RowAccess, SharedRows, UsedRows, packed_rows
from gdpa.masks.band import Band
from gdpa.problem import Operands, Problem, kept

# Measured on 2 Xeon cores with 2 MiB of L2 each, D = 64, fp32, forward + backward.
# A tile of one sequence and key head has at most SIDE x SIDE scores: 256 is 15 % slower at L = 4096, 1024 is no faster.
SIDE = 512
# Within a band smaller tiles waste less of the diagonal: causal L = 512 takes 39 ms with 128, 55 with 256, 73 with 512;
# at L = 4096, where the diagonal matters less, it is 308, 234 and 246 ms.
BANDED_SIDE = 256
SMALLEST_BANDED_SIDE = 128
# Scores of a tile over its sequences and heads, per thread: 4 MiB of fp32. An eighth of it is 1.4x slower (overhead per
# tile), half or twice as much makes no difference; on a busy machine fewer, larger steps lose less to other processes.
# The total is bounded, as about six such tensors are alive in backward.
SCORES_PER_THREAD = 1024 * 1024
MAX_SCORES = 4 * 1024 * 1024
# Elements of the rows of q, k and v in a chunk: what it gathers, and what its gradients add.
MAX_ROW_ELEMENTS = 2 * 1024 * 1024
# What another bucket costs, in scores computed in the same time: about 2 ms of calls at 6 to 12 ns per score.
BUCKET_COST = 250_000


@dataclass(frozen=True)
class Chunk:
    """Sequences and heads computed together, the queries and keys of each padded to the longest."""

    q: RowAccess
    k: RowAccess
    out: RowAccess
    heads_q: slice
    heads_k: slice
    n_seqs: int
    spans: Spans
    band: Offsets
    block_q: int
    block_k: int
    seqs: Tensor  # numbers of the sequences, (n_seqs,)

    @property
    def q_blocks(self) -> list[tuple[int, int]]:
        return _blocks(self.spans.max_q, self.block_q)

    @property
    def k_blocks(self) -> list[tuple[int, int]]:
        return _blocks(self.spans.max_k, self.block_k)

    def visible_blocks(self, q0: int, q1: int) -> Iterator[tuple[int, int, int]]:
        """(index, k0, k1) of the key blocks of which queries q0:q1 see any key."""
        for index, (k0, k1) in enumerate(self.k_blocks):
            tile = self._offsets(q0, q1, k0, k1)
            if tile.least <= self.band.greatest and tile.greatest >= self.band.least:
                yield index, k0, k1

    def keep(self, q0: int, q1: int, k0: int, k1: int) -> Tensor | None:
        """(n or 1, 1, rows, keys): -1 for visible pairs, 0 outside the band or past an end; None if all are visible."""
        tile, band, spans = self._offsets(q0, q1, k0, k1), self.band, self.spans
        cut_left, cut_right = tile.least < band.least, tile.greatest > band.greatest
        if not (cut_left or cut_right or q1 > spans.min_q or k1 > spans.min_k):
            return None
        dtype = spans.len_q.dtype
        i, j = torch.arange(q0, q1, dtype=dtype)[:, None], torch.arange(k0, k1, dtype=dtype)
        # A query sees the keys first <= j < end. Both are found per row, and a pair costs two vectorised operations
        # for each: the sign of a difference, shifted through the word, is -1 or 0.
        end = spans.len_k  # (n, 1, 1)
        if cut_right:
            end = torch.minimum(end, i + (spans.len_k - spans.len_q + (band.greatest + 1)))
        keep = _is_negative(j - torch.where(i < spans.len_q, end, 0))
        if cut_left:
            first = i + (spans.len_k - spans.len_q + band.least)
            keep &= _is_negative(first - 1 - j)
        return keep[:, None]

    def _offsets(self, q0: int, q1: int, k0: int, k1: int) -> Offsets:
        """Those of the pairs of a tile, over all sequences."""
        return Offsets(k0 - (q1 - 1) - self.spans.max_shift, (k1 - 1) - q0 - self.spans.min_shift)


@dataclass(frozen=True)
class Offsets:
    """An interval of offsets j - i - (Lk - Lq), both ends included."""

    least: int
    greatest: int

    @classmethod
    def of(cls, band: Band) -> Offsets:
        """Those of visible pairs."""
        return cls(-sys.maxsize if band.left is None else -band.left, sys.maxsize if band.right is None else band.right)


@dataclass(frozen=True)
class Spans:
    """The lengths of some sequences, and their extremes; ``shift`` is Lk - Lq, which aligns the band."""

    len_q: Tensor  # (n, 1, 1), or (1, 1, 1) if all are equal; integers as wide as the floats they will mask
    len_k: Tensor
    min_q: int
    max_q: int
    min_k: int
    max_k: int
    min_shift: int
    max_shift: int

    @classmethod
    def of(cls, len_q: Tensor, len_k: Tensor, dtype: torch.dtype) -> Spans:
        low, high = torch.stack([len_q, len_k, len_k - len_q]).aminmax(dim=1)
        (min_q, min_k, min_shift), (max_q, max_k, max_shift) = low.tolist(), high.tolist()
        n = 1 if min_q == max_q and min_k == max_k else len_q.numel()
        len_q, len_k = (t[:n].to(dtype).view(n, 1, 1) for t in (len_q, len_k))
        return cls(len_q, len_k, min_q, max_q, min_k, max_k, min_shift, max_shift)


def chunks(problem: Problem, x: Operands) -> Iterable[Chunk]:
    """Every sequence with every head, once. A sequence without queries or keys is part of a chunk without tiles."""
    if x.cu_q is x.cu_k is x.used_q is x.used_k is None:
        return _dense_chunks(problem, torch.get_num_threads())
    return _chunks(problem, x)


@kept
def _dense_chunks(problem: Problem, threads: int) -> tuple[Chunk, ...]:
    """Those of a problem whose lengths follow from its shape: a small call would spend half of its time on them. They
    depend on the number of ``threads`` (_chunk_shape)."""
    nothing = torch.empty(0)
    return tuple(_chunks(problem, Operands(nothing, nothing, nothing)))


def _chunks(problem: Problem, x: Operands) -> Iterator[Chunk]:
    len_q = _lengths(x.cu_q, x.used_q, problem.rows_q, problem.n_seqs)
    len_k = _lengths(x.cu_k, x.used_k, problem.rows_k, problem.n_seqs)
    dtype = torch.int64 if problem.dtype == torch.float64 else torch.int32
    band = Offsets.of(problem.band)
    for bucket in _buckets(len_q, len_k, problem.heads_q):
        max_q, max_k = int(len_q[bucket].max()), int(len_k[bucket].max())
        block_q, block_k = _block_shape(problem, max_q, max_k)
        n_seqs, n_heads = _chunk_shape(problem, block_q, block_k, max_k)
        for seqs in bucket.split(n_seqs):
            spans = Spans.of(len_q[seqs], len_k[seqs], dtype)
            out = _rows(x.cu_q, x.used_q, seqs, len_q)
            q = SharedRows(seqs.numel()) if problem.shared_q else out
            k = _rows(x.cu_k, x.used_k, seqs, len_k)
            for h0, h1 in _blocks(problem.heads_k, n_heads):
                heads_q = slice(h0 * problem.group, h1 * problem.group)
                yield Chunk(q, k, out, heads_q, slice(h0, h1), seqs.numel(), spans, band, block_q, block_k, seqs)


def _lengths(cu_seqlens: Tensor | None, used: Tensor | None, rows: int, n_seqs: int) -> Tensor:
    """(n_seqs,) int64."""
    if used is not None:
        return used.long()
    return torch.full((n_seqs,), rows) if cu_seqlens is None else cu_seqlens.long().diff()


def _rows(cu_seqlens: Tensor | None, used: Tensor | None, seqs: Tensor, lengths: Tensor) -> RowAccess:
    if cu_seqlens is not None:
        return packed_rows(cu_seqlens.long()[seqs], lengths[seqs])
    if used is not None:
        return UsedRows(seqs, lengths[seqs])
    first, n = int(seqs[0]), seqs.numel()
    is_run = torch.equal(seqs, torch.arange(first, first + n))
    return DenseRows(slice(first, first + n) if is_run else seqs)


def _buckets(len_q: Tensor, len_k: Tensor, heads: int) -> list[Tensor]:
    """The sequences in groups of similar lengths, each in ascending order of lengths.

    Lengths are rounded up to 2**a * (1 + b / steps), at most a 1/steps of padding, and equal ones share a bucket; or to
    the longest, and all share one. Of these the one is taken for which padding plus the overhead of the buckets costs
    least.
    """
    n = len_q.numel()
    if n == 0:
        return []
    if bool((len_q == len_q[0]).all() & (len_k == len_k[0]).all()):
        return [torch.arange(n)]
    order = len_q.argsort(stable=True)
    order = order[len_k[order].argsort(stable=True)]
    padded, needed = int(len_q.max()) * int(len_k.max()) * n, int((len_q * len_k).sum())
    if (padded - needed) * heads <= BUCKET_COST:  # no second bucket can pay
        return [torch.arange(n)]
    candidates = [(padded * heads + BUCKET_COST, torch.zeros(n, dtype=torch.int64), torch.tensor([n]))]
    for steps in (1, 2, 4, 8, 2**31):
        q, k = _round_up(len_q[order], steps), _round_up(len_k[order], steps)
        _, bucket, sizes = torch.unique(k * (q.max() + 1) + q, return_inverse=True, return_counts=True)
        candidates.append((int((q * k).sum()) * heads + sizes.numel() * BUCKET_COST, bucket, sizes))
    _, bucket, sizes = min(candidates, key=lambda candidate: candidate[0])
    return list(order[bucket.argsort(stable=True)].split(sizes.tolist()))


def _round_up(lengths: Tensor, steps: int) -> Tensor:
    octave = 2 ** (torch.frexp(lengths.double()).exponent.long() - 1).clamp(min=0)
    unit = (octave // steps).clamp(min=1)
    return (lengths + unit - 1) // unit * unit


def _block_shape(problem: Problem, max_q: int, max_k: int) -> tuple[int, int]:
    """Rows of a query block (per query head) and of a key block."""
    max_q, max_k = max(max_q, 1), max(max_k, 1)
    whole = problem.band.unbounded and problem.mask is None
    side = SIDE if whole else min(BANDED_SIDE, max(SMALLEST_BANDED_SIDE, max_k // 4))
    block_k = min(max_k, max(side, side**2 // (problem.group * max_q)))
    block_q = min(max_q, max(1, side**2 // (problem.group * block_k)))
    return _even(max_q, block_q), _even(max_k, block_k)


def _chunk_shape(problem: Problem, block_q: int, block_k: int, max_k: int) -> tuple[int, int]:
    """How many sequences and how many key heads make a chunk."""
    scores = min(MAX_SCORES, SCORES_PER_THREAD * torch.get_num_threads())
    row_elements = (problem.group * block_q + max_k) * (problem.head_dim + problem.head_dim_v)
    pairs = max(1, min(scores // (problem.group * block_q * block_k), MAX_ROW_ELEMENTS // row_elements))
    if pairs >= problem.heads_k:
        return pairs // problem.heads_k, problem.heads_k
    return 1, _even(problem.heads_k, pairs)


def _is_negative(t: Tensor) -> Tensor:
    """-1 (all bits set) where t < 0, else 0."""
    return t >> (torch.iinfo(t.dtype).bits - 1)


def _even(total: int, size: int) -> int:
    """The size of blocks if ``total`` is cut as evenly as possible into as few as blocks of ``size`` would be."""
    return -(-total // -(-total // size))


def _blocks(total: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, total)) for start in range(0, total, size)]
