"""Which blocks of the other side a tile visits under a mask: lists of 16-bit numbers, made by one launch for a call.

An entry is the number of a block in its sequence; the sign bit says that the mask (or the band, or the sequence's end)
cuts the block. Kernels that walk over a list never load what is invisible, and mask nothing that is wholly visible.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdpa.device.places import CHUNK, block_kinds, even
from gdpa.device.sequences import RECORD, locate_tile, visible_keys, visible_queries

CUT = tl.constexpr(-(2**15))


class Visits(NamedTuple):
    """Kernel argument: lists (tiles, heads or 1, stride), their lengths (tiles, heads or 1) and behind these how many
    items have been taken (see hopper/scheduling/taking.py), and the stride."""

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
def place_of(tile, h, heads, PER_HEAD: tl.constexpr):
    """Which list is that of a tile for head ``h``."""
    if PER_HEAD:
        return tile * heads + h
    else:
        return tile


@triton.jit
def blocks_in(visits, place):
    return tl.load(visits.counts + place)


@triton.jit
def visited(visits, place, i):
    """(number of the i-th block of a list, whether it is cut)."""
    entry = tl.load(visits.lists + place.to(tl.int64) * even(visits.stride) + i).to(tl.int32)
    return entry & 0x7FFF, (entry < 0).to(tl.int32)


@triton.jit(do_not_specialize=["rows", "rows_other"])
def list_visits_kernel(
    visits, p_table, p_cu_other, rows, rows_other, band, tables, numbers, CLASSIFY: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """One program per tile and list. A tile that sees nothing visits its first block all the same, cut: what it writes
    are zeros."""
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
    place = tile * tl.num_programs(1) + h
    p_list = visits.lists + place.to(tl.int64) * stride
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
    tl.store(visits.counts + place, tl.maximum(count, 1))
