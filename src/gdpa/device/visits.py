"""Block-sparse lists: which blocks of keys a tile of queries visits under a mask, or the other way round in the
backward.

One launch per call makes the lists of all tiles on the device, from the mask's intervals
(functions/places/classify.py). An entry is a 16-bit number, that of a block within its sequence; its sign bit says that
the mask (or the band, or the end of the sequence) *cuts* the block, so that some of its pairs are visible and some are
not. Kernels that walk over a list never load a block without visible pairs, and compute no mask for one whose pairs are
all visible.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdpa.device.places import CHUNK, block_kinds, even
from gdpa.device.sequences import RECORD, locate_tile, visible_keys, visible_queries

CUT = tl.constexpr(-(2**15))


class Visits(NamedTuple):
    """Kernel argument: the lists (tiles, heads or 1, stride); how many blocks each of them has (tiles, heads or 1), and
    behind these a counter of items that programs have taken (hopper/scheduling/taking.py); and the stride."""

    lists: Any
    counts: Any
    stride: Any


class ListedTile(NamedTuple):
    """Compile-time shape of list_visits_kernel."""

    OF_KEYS: bool
    BLOCK_M: int
    BLOCK_N: int
    FINITE_AT_ZERO: bool  # see BackwardTile


@triton.jit
def list_of(tile, h, heads, PER_HEAD: tl.constexpr):
    """The number of the list that holds the blocks of a tile for head ``h``: each tile has one, or one for each
    head."""
    if PER_HEAD:
        return tile * heads + h
    else:
        return tile


@triton.jit
def blocks_in(visits, own_list):
    """How many blocks a list has."""
    return tl.load(visits.counts + own_list)


@triton.jit
def visited(visits, own_list, i):
    """(number of the i-th block of a list, whether the mask cuts it)."""
    entry = tl.load(visits.lists + own_list.to(tl.int64) * even(visits.stride) + i).to(tl.int32)
    return entry & 0x7FFF, (entry < 0).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "rows_other"])
def list_visits_kernel(
    visits, p_table, p_cu_other, rows, rows_other, band, tables, numbers, CLASSIFY: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Makes one list per program. A tile without any visible pair still visits its first block, as a cut one, so that
    zeros are written for it."""
    tile = tl.program_id(0)
    h = tl.program_id(1)
    if (tile == 0) & (h == 0):
        tl.store(visits.counts + tl.num_programs(0) * tl.num_programs(1), 0)
    p_records = p_table
    if p_table is not None:
        if tile >= tl.load(p_table):
            return
        p_records = p_table + RECORD
    if T.OF_KEYS:
        b, n0, start_k, len_k, start_q, len_q = locate_tile(p_records, p_cu_other, tile, rows, rows_other, T.BLOCK_N)
        fixed = n0
        lo, full_lo, full_hi, hi = visible_queries(n0, len_q, len_k, band, T.BLOCK_M, T.BLOCK_N)
        if not T.FINITE_AT_ZERO:
            if n0 + T.BLOCK_N > len_k:  # keys past the end are in every block, so all are cut
                full_lo = hi
                full_hi = hi
    else:
        b, fixed, start_q, len_q, start_k, len_k = locate_tile(p_records, p_cu_other, tile, rows, rows_other, T.BLOCK_M)
        lo, full_lo, full_hi, hi = visible_keys(fixed, len_q, len_k, band, T.BLOCK_M, T.BLOCK_N)
    BLOCK: tl.constexpr = T.BLOCK_M if T.OF_KEYS else T.BLOCK_N
    stride = even(visits.stride)
    tl.device_assert(hi <= stride * BLOCK, "gdpa: a sequence is longer than max_seqlen_q or max_seqlen_k says")
    own_list = tile * tl.num_programs(1) + h
    p_list = visits.lists + own_list.to(tl.int64) * stride
    spot = (b, h, start_q, start_k, tables, numbers)
    count = 0
    for c0 in tl.range(lo, hi, CHUNK * BLOCK):
        some, every = block_kinds(
            spot, c0, fixed, len_q, len_k, full_lo, full_hi, hi, CLASSIFY, not T.OF_KEYS, T.BLOCK_M, T.BLOCK_N
        )
        number = c0 // BLOCK + tl.arange(0, CHUNK)
        at = count + tl.cumsum(some.to(tl.int32)) - 1
        entry = tl.where(every, number, number + CUT).to(tl.int16)
        tl.store(p_list + at, entry, mask=some & (at < stride))
        count += tl.sum(some.to(tl.int32))
    if count == 0:
        tl.store(p_list, tl.full((), CUT, tl.int16))
    tl.store(visits.counts + own_list, tl.maximum(count, 1))
