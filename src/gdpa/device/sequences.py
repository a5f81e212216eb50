"""Where sequences, tiles and bands lie: the index arithmetic every attention kernel shares."""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl


class BandBounds(NamedTuple):
    """The visible band as a kernel argument: an int or None on each side (see gdpa.masks.band.Band)."""

    left: Any
    right: Any


# What bounds the visible pairs of a sequence: the numbers of its queries and keys, and the band (BandBounds).
Bounds = namedtuple("Bounds", "len_q len_k band")


@triton.jit
def seq_span(p_cu, b, rows, p_used=None):
    """(first row, length) of sequence b. Dense tensors have no offsets: every batch entry holds ``rows`` rows. With
    ``p_used`` only the first p_used[b] of a sequence's rows count.

    Offsets are clamped to the tensor, so that bad ones (which only GDPA_CHECK=1 reports) cannot reach outside it.
    """
    if p_cu is None:
        start = b * 0
        length = start + rows
    else:
        start = tl.minimum(tl.maximum(tl.load(p_cu + b), 0), rows).to(tl.int32)
        end = tl.minimum(tl.maximum(tl.load(p_cu + b + 1), 0), rows).to(tl.int32)
        length = tl.maximum(end - start, 0)
    if p_used is not None:
        length = tl.minimum(tl.maximum(tl.load(p_used + b), 0), length).to(tl.int32)
    return start, length


# A tile's record: its sequence, the tile's first row in it, and the sequence's first row and length on both sides.
# Kernels read it at once, instead of going from the tile's number to the sequence, and from there to the offsets. (8
# numbers of 32 bits, 6 of which are used.)
RECORD = tl.constexpr(8)


@triton.jit
def write_record(p_record, b, row, start, length, start_other, length_other, mask):
    """Write what locate_tile reads."""
    tl.store(p_record, b, mask=mask)
    tl.store(p_record + 1, row, mask=mask)
    tl.store(p_record + 2, start, mask=mask)
    tl.store(p_record + 3, length, mask=mask)
    tl.store(p_record + 4, start_other, mask=mask)
    tl.store(p_record + 5, length_other, mask=mask)


@triton.jit(do_not_specialize=["rows", "rows_other", "n_tiles"])
def tile_records_kernel(
    p_records, p_cu, p_cu_other, p_used, p_used_other, rows, rows_other, n_tiles, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the records of the tiles of one side. Sequence b of a packed side owns tiles start // BLOCK + b up to the
    next one's first: a numbering that needs no sum over tile counts, and leaves at most one empty tile per sequence."""
    b = tl.program_id(0)
    start, length = seq_span(p_cu, b, rows, p_used)
    start_other, length_other = seq_span(p_cu_other, b, rows_other, p_used_other)
    if p_cu is None:
        first = b * tl.cdiv(rows, BLOCK)
        count = tl.cdiv(length, BLOCK)
    else:
        first = start // BLOCK + b
        count = (start + length) // BLOCK - start // BLOCK + 1
    for i in range(0, count, CHUNK):
        tile = i + tl.arange(0, CHUNK)
        p_record = p_records + (first + tile).to(tl.int64) * RECORD
        mine = (tile < count) & (first + tile < n_tiles)
        write_record(p_record, b, tile * BLOCK, start, length, start_other, length_other, mine)


@triton.jit
def locate_tile(p_records, p_cu_other, tile, rows, rows_other, BLOCK: tl.constexpr):
    """(sequence, first row of the tile in it, the sequence's first row and length, both on the other side) of a tile.
    Without records this side is dense, and no used lengths are given."""
    if p_records is None:
        per_seq = tl.cdiv(rows, BLOCK)
        b = tile // per_seq
        row = (tile % per_seq) * BLOCK
        start, length = seq_span(None, b, rows)
        start_other, length_other = seq_span(p_cu_other, b, rows_other)
    else:
        p_record = p_records + tile.to(tl.int64) * RECORD
        b = tl.load(p_record)
        row = tl.load(p_record + 1)
        start = tl.load(p_record + 2)
        length = tl.load(p_record + 3)
        start_other = tl.load(p_record + 4)
        length_other = tl.load(p_record + 5)
    return (b.to(tl.int64), row, start.to(tl.int64), length, start_other.to(tl.int64), length_other)


WIDEST = tl.constexpr(2**30)  # a band so wide hides nothing, and can be added to positions without overflow


@triton.jit
def visible_blocks(first, len_rows, len_cols, before, after, ROWS: tl.constexpr, COLS: tl.constexpr):
    """(lo, full_lo, full_hi, hi), multiples of COLS: rows [first, first + ROWS) see columns of blocks in [lo, hi), and
    every one of them sees all columns in [full_lo, full_hi), whose blocks need no mask. Row i sees column j iff
    -before <= j - i - (len_cols - len_rows) <= after."""
    shift = len_cols - len_rows
    last = first + ROWS - 1
    lo = 0
    full_lo = 0
    end = len_cols
    full_end = len_cols
    if before is not None:
        before = tl.minimum(before, WIDEST)
        lo = tl.maximum(first + shift - before, 0) // COLS * COLS
        full_lo = tl.cdiv(tl.maximum(last + shift - before, 0), COLS) * COLS
    if after is not None:
        after = tl.minimum(after, WIDEST)
        end = tl.minimum(end, last + shift + after + 1)
        full_end = tl.minimum(full_end, first + shift + after + 1)
    hi = tl.cdiv(tl.maximum(end, 0), COLS) * COLS
    full_lo = tl.minimum(full_lo, hi)
    full_hi = tl.maximum(tl.maximum(full_end, 0) // COLS * COLS, full_lo)
    return tl.minimum(lo, full_lo), full_lo, full_hi, hi


@triton.jit
def visible_keys(m0, len_q, len_k, band, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The visible_blocks of keys for the tile of queries [m0, m0 + BLOCK_M)."""
    return visible_blocks(m0, len_q, len_k, band.left, band.right, BLOCK_M, BLOCK_N)


@triton.jit
def visible_queries(n0, len_q, len_k, band, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The visible_blocks of queries for the tile of keys [n0, n0 + BLOCK_N): the same band, its sides exchanged."""
    return visible_blocks(n0, len_k, len_q, band.right, band.left, BLOCK_N, BLOCK_M)


@triton.jit
def within(distance, band):
    """Whether -left <= distance <= right. Both sides at once: what is below becomes a huge unsigned number."""
    if band.right is None:  # one return at the end: the compiler also reads what stands behind an early one
        inside = distance >= -band.left
    elif band.left is None:
        inside = distance <= band.right
    else:
        left = tl.minimum(band.left, WIDEST)
        inside = (distance + left).to(tl.uint32) <= left + tl.minimum(band.right, WIDEST)
    return inside


@triton.jit
def in_band(i, j, len_q, len_k, band):
    """Whether rows ``i`` see keys ``j`` (broadcast against each other); past-the-end keys and rows are never seen."""
    keep = (i < len_q) & (j < len_k)
    if band.left is not None or band.right is not None:
        keep = keep & within(j - i - (len_k - len_q), band)
    return keep
