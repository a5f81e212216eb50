"""Which tiles a program works on, and in which order. Everything that depends on lengths is computed on the device.

Programs are persistent: program p of P takes items p, 2P-1-p, 2P+p, 4P-1-p... of a list of tiles, heaviest first. Dealt
out in this zigzag, the programs' sums differ by less than one tile, without an atomic counter.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from gdpa.device.sequences import RECORD, locate_tile, seq_span, write_record
from gdpa.device.unused import zero_unused_rows

# In the record before a list, behind its length: how many items have been taken from it (see taking.py).
TAKEN = tl.constexpr(1)
# Tiles of a causal sequence that are dealt in pairs: of shorter ones a program has so many that pairs gain nothing.
FEWEST_PAIRED = tl.constexpr(8)


class Listed(NamedTuple):
    """Which sequences a list of tiles holds (see tiles_in_list)."""

    LEAST: int = 0  # tiles that a sequence has at least, 0 or 1
    LIMIT: int | None = None  # a sequence of more rows counts as long; None: none does
    LONG: bool | None = None  # True: only the long ones; False: only the others; None: all, and none may be long


@triton.jit
def tiles_in_list(length, BLOCK: tl.constexpr, L: tl.constexpr):
    """How many tiles a sequence of ``length`` rows has in a list of the kind ``L``, a Listed."""
    tiles = tl.maximum(tl.cdiv(length, BLOCK), L.LEAST)
    if L.LIMIT is not None:
        if L.LONG is None:
            tl.device_assert(length <= L.LIMIT, "gdpa: a sequence is longer than max_seqlen_k says")
        elif L.LONG:
            tiles = tl.where(length > L.LIMIT, tiles, 0)
        else:
            tiles = tl.where(length <= L.LIMIT, tiles, 0)
    return tiles


@triton.jit
def tiles_before(side, other, n_seqs, b, blocks, BLOCK: tl.constexpr, OTHER: tl.constexpr, CHUNK: tl.constexpr,
                 L: tl.constexpr):  # fmt: skip
    """(tiles of all sequences that come before b in the list, tiles in total). A counting sort in one pass: before b
    come the sequences whose tiles visit more than ``blocks`` blocks, and those with a lower number that visit as many.
    ``side`` and ``other``: offsets, rows and used lengths of the tiles' side and of the one that they walk over."""
    p_cu, rows, p_used = side
    p_cu_other, rows_other, p_used_other = other
    before = tl.zeros((CHUNK,), tl.int64)  # bad offsets could count more than 2^31
    total = tl.zeros((CHUNK,), tl.int64)
    for c in range(0, n_seqs, CHUNK):
        i = c + tl.arange(0, CHUNK)
        some = tl.minimum(i, n_seqs - 1)
        _, length = seq_span(p_cu, some, rows, p_used)
        tiles = tl.where(i < n_seqs, tiles_in_list(length, BLOCK, L), 0)
        first = i < b
        if p_cu_other is not None or p_used_other is not None:
            _, length_other = seq_span(p_cu_other, some, rows_other, p_used_other)
            weight = tl.cdiv(length_other, OTHER)
            first = (weight > blocks) | ((weight == blocks) & first)
        total += tiles
        before += tl.where(first, tiles, 0)
    return tl.sum(before), tl.sum(total)


class Zeros(NamedTuple):
    """Heads and columns of the tensors in which ordered_records_kernel zeroes unused rows: ``t`` and ``u`` have the
    rows of the list's side, ``w`` those of the other side."""

    HEADS: int = 1
    D: int = 8
    DU: int = 8
    HEADS_OTHER: int = 1
    DW: int = 8
    BLOCK_D: int = 64
    BLOCK: int = 16  # rows that a program writes at a time
    ALIGN: int = 8  # see device/rows.py


@triton.jit
def write_records(p_table, b, side, other, n_seqs, most, BLOCK: tl.constexpr, OTHER: tl.constexpr, CHUNK: tl.constexpr,
                  L: tl.constexpr):  # fmt: skip
    """Write the records of the tiles of sequence b at their places in the list."""
    p_cu, rows, p_used = side
    p_cu_other, rows_other, p_used_other = other
    start, length = seq_span(p_cu, b, rows, p_used)
    start_other, length_other = seq_span(p_cu_other, b, rows_other, p_used_other)
    first, total = tiles_before(side, other, n_seqs, b, tl.cdiv(length_other, OTHER), BLOCK, OTHER, CHUNK, L)
    if b == 0:
        tl.store(p_table, tl.minimum(total, most))
        tl.store(p_table + TAKEN, 0)
    count = tiles_in_list(length, BLOCK, L)
    for i in range(0, count, CHUNK):
        tile = i + tl.arange(0, CHUNK)
        p_record = p_table + (1 + first + tile).to(tl.int64) * RECORD
        mine = (tile < count) & (first + tile < most)
        write_record(p_record, b, tile * BLOCK, start, length, start_other, length_other, mine)


@triton.jit
def zero_side(t, u, side, n_seqs, ends, program, HEADS: tl.constexpr, D: tl.constexpr, DU: tl.constexpr,
              Z: tl.constexpr):  # fmt: skip
    """Zeros in the unused rows of one side, written by as many programs as that takes, from number 0 on. Returns the
    program's number among the rest, negative if it was one of these."""
    p_cu, rows, p_used = side
    n_slots = 0 * ends
    if p_used is not None:
        n_slots += n_seqs
    programs = n_slots + ends  # of a head
    if (program >= 0) & (program < programs * HEADS):
        h = (program // programs).to(tl.int64)
        zero_unused_rows(
            t, u, p_cu, p_used, rows, n_seqs, n_slots, program % programs, programs, h, D, DU, Z.BLOCK_D, Z.BLOCK_D,
            Z.BLOCK, Z.ALIGN,
        )  # fmt: skip
    return program - programs * HEADS


@triton.jit(do_not_specialize=["rows", "rows_other", "n_seqs", "most", "n_flags", "ends", "ends_other"])
def ordered_records_kernel(
    p_table, p_cu, p_cu_other, p_used, p_used_other, t, u, w, p_flags, rows, rows_other, n_seqs, most, n_flags, ends,
    ends_other, BLOCK: tl.constexpr, OTHER: tl.constexpr, CHUNK: tl.constexpr, L: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """All that a batch of packed sequences needs before its main kernel, in one launch.

    Program b < n_seqs writes the records (device/sequences.py) of sequence b's tiles at their places in the list, which
    holds at most ``most`` tiles (bad offsets could ask for more). In front of the list is one more record, with its
    length and a counter of items TAKEN, 0. These programs also zero ``n_flags`` flags. All other programs zero unused
    rows of ``t``, ``u`` and ``w`` (see Zeros): ``ends`` programs per head those behind the last sequence, and, where
    there are used lengths, one program per head and sequence those that it leaves of its slot."""
    program = tl.program_id(0)
    side, other = (p_cu, rows, p_used), (p_cu_other, rows_other, p_used_other)
    if program < n_seqs:
        write_records(p_table, program, side, other, n_seqs, most, BLOCK, OTHER, CHUNK, L)
        if p_flags is not None:
            for i in range(program * CHUNK, n_flags, n_seqs * CHUNK):
                flag = i + tl.arange(0, CHUNK)
                tl.store(p_flags + flag, 0, mask=flag < n_flags)
    else:
        left = program - n_seqs
        if t is not None:
            left = zero_side(t, u, side, n_seqs, ends, left, Z.HEADS, Z.D, Z.DU, Z)
        if w is not None:
            zero_side(w, None, other, n_seqs, ends_other, left, Z.HEADS_OTHER, Z.DW, Z.DW, Z)


@triton.jit(do_not_specialize=["rows", "rows_other", "n_seqs"])
def count_tiles_kernel(
    p_tiles, p_weights, p_cu, p_cu_other, p_used, p_used_other, rows, rows_other, n_seqs, BLOCK: tl.constexpr,
    OTHER: tl.constexpr, CHUNK: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """For each sequence, how many tiles it has, and how many blocks of the other side each of these visits."""
    b = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    known = tl.minimum(b, n_seqs - 1)
    _, length = seq_span(p_cu, known, rows, p_used)
    _, length_other = seq_span(p_cu_other, known, rows_other, p_used_other)
    tl.store(p_tiles + b, tiles_in_list(length, BLOCK, L), mask=b < n_seqs)
    tl.store(p_weights + b, tl.cdiv(length_other, OTHER), mask=b < n_seqs)


@triton.jit(do_not_specialize=["rows", "rows_other", "n_seqs", "most"])
def place_records_kernel(
    p_table, p_order, p_ends, p_cu, p_cu_other, p_used, p_used_other, rows, rows_other, n_seqs, most,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """The records of the tiles of sequence ``order[place]``, which end before tile ``ends[place]`` of the list; the
    table is that of ordered_records_kernel."""
    place = tl.program_id(0)
    b = tl.load(p_order + place).to(tl.int32)
    end = tl.load(p_ends + place)  # 64 bits: bad offsets could count more than 2^31 tiles
    start, length = seq_span(p_cu, b, rows, p_used)
    start_other, length_other = seq_span(p_cu_other, b, rows_other, p_used_other)
    count = tiles_in_list(length, BLOCK, L)
    first = end - count
    if place == n_seqs - 1:
        tl.store(p_table, tl.minimum(end, most).to(tl.int32))
        tl.store(p_table + TAKEN, 0)
    for i in range(0, count, CHUNK):
        tile = i + tl.arange(0, CHUNK)
        p_record = p_table + (1 + first + tile) * RECORD
        mine = (tile < count) & (first + tile < most)
        write_record(p_record, b, tile * BLOCK, start, length, start_other, length_other, mine)


@triton.jit
def list_length(p_table, n_tiles):
    """How many tiles one head has: with a list, what that says; otherwise ``n_tiles``."""
    if p_table is None:
        return n_tiles
    else:
        return tl.load(p_table)


@triton.jit
def items_of(program, n_programs, n_items, ZIGZAG: tl.constexpr = True):
    """How many items of the list belong to ``program``."""
    rounds = n_items // n_programs
    rest = n_items % n_programs
    return rounds + tl.where(_place(program, n_programs, rounds, ZIGZAG) < rest, 1, 0)


@triton.jit
def item_at(program, n_programs, n, ZIGZAG: tl.constexpr = True):
    """The n-th item of ``program``."""
    return n * n_programs + _place(program, n_programs, n, ZIGZAG)


@triton.jit
def _place(program, n_programs, n, ZIGZAG: tl.constexpr):
    """Where ``program`` stands in the n-th round of dealing."""
    if ZIGZAG:
        return tl.where(n % 2 == 0, program, n_programs - 1 - program)
    else:
        return program


@triton.jit
def paired(item, n_programs, n_items, heads, tiles):
    """The item at this place of another order, in which the two items that a program gets from one forward and one
    backward round are the t-th tile of a causal sequence and the t-th last: together always the same work. (In the
    usual order, heads innermost, then tiles, the busiest program has half as much again as the mean, for 16 sequences
    of 8192 rows.) ``tiles``: how many a sequence has, an even number."""
    window = 2 * n_programs
    begin = item // window * window
    place = item - begin
    size = tl.minimum(n_items - begin, window)
    pair = begin // 2 + tl.minimum(place, size - 1 - place)
    half = tiles // 2
    t = pair // heads % half
    tile = tl.where(2 * place < size, tiles - 1 - t, t)
    return (pair // heads // half * tiles + tile) * heads + pair % heads


@triton.jit
def find_item(p_table, p_cu_other, n, count, heads, rows, rows_other, n_items, BLOCK: tl.constexpr,
              PAIRED: tl.constexpr = False):  # fmt: skip
    """(head, sequence, first row of the tile, start and length of the sequence, both on the other side) of this
    program's n-th item, or of its last one. Heads are innermost: items that run at the same time then read the same
    rows.

    Reading a record takes about as long as a product of two tiles, so callers do it one item before they need it.
    """
    item = item_at(tl.program_id(0), tl.num_programs(0), tl.minimum(n, count - 1))
    item = tl.where(count > 0, item, 0)  # a program without items reads one all the same, and does not use it
    if PAIRED:
        tiles = tl.cdiv(rows, BLOCK)
        if tiles >= FEWEST_PAIRED and tiles % 2 == 0:
            item = paired(item, tl.num_programs(0), n_items, heads, tiles)
    return locate_item(p_table, p_cu_other, item, heads, rows, rows_other, BLOCK)


@triton.jit
def locate_item(p_table, p_cu_other, item, heads, rows, rows_other, BLOCK: tl.constexpr):
    """What find_item returns, for the item of this number."""
    p_records = p_table
    if p_table is not None:
        p_records = p_table + RECORD
    b, row, start, length, start_other, length_other = locate_tile(
        p_records, p_cu_other, item // heads, rows, rows_other, BLOCK
    )
    return (item % heads, b.to(tl.int32), row, start.to(tl.int32), length, start_other.to(tl.int32), length_other)
