"""Sums of dq for tiles of keys that do not all see the same queries, or do not all run at once (mode "turns").

Tiles of keys take turns at every block of queries, in a float32 buffer of all queries: the last tile that sees the
block stores its part there, the others, from the last to the first, add theirs, and the first tile fetches the sum,
adds its own part, rounds, and writes dq. So dq is rounded once, its order of additions is fixed, and no pass over
memory is needed. A flag per block says how many tiles have had their turn. A tile begins at the first block that it
sees:

    step      0   1   2   3        a window of two blocks: each tile of keys sees four
    tile 3    b6  b7  b8  b9
    tile 2    b4  b5  b6  b7       block 6: tile 3 first, then tile 2, two steps later
    tile 1    b2  b3  b4  b5
    tile 0    b0  b1  b2  b3

The list has a sequence's tiles from the last to the first, and programs take items from it one by one, whoever is free
(items.py). So a tile waits only for tiles that began before it: there is no deadlock, however many tiles there are, and
hardly a wait, since those reach every block earlier, however many blocks each of them sees. (Had every program a fixed
share of the list, tiles would begin in any order: causal attention ran at half of its speed.) Without a band all begin
at block 0, and each falls a step behind the one before, once: programs stay so far apart from then on.
"""

from gdpa.backends.hopper.backward.flags import set_flag, wait_for
from gdpa.backends.hopper.backward.items import item_after, receive
from gdpa.backends.hopper.backward.walk import find_tile, first_step, name_tile, next_step, part_of, query_range, row_of
from gdpa.backends.hopper.compat import gl, gluon, mbarrier, tma_load
from gdpa.backends.hopper.messages import IS_FIRST, IS_LAST, NO_TURN
from gdpa.device.sequences import visible_keys

ANY_BITS = gl.constexpr(0x7FFFFFFF)


@gluon.jit
def turn_at(row, tile, tiles, len_q, len_k, band, T: gl.constexpr):
    """(a tile's turn at the block of queries from ``row`` on: how many tiles come before it, and its send code, see
    messages.py). A tile that does not see the block has no turn: it only passes by (see query_range). Where no tile
    sees it, one has a turn all the same, and writes zeros."""
    begin_k, _, _, end_k = visible_keys(row, len_q, len_k, band, T.BLOCK_M, T.BLOCK_N)
    last = gl.maximum(gl.minimum(end_k // T.BLOCK_N, tiles) - 1, 0)  # bad offsets may have cut the list
    first = gl.minimum(begin_k // T.BLOCK_N, last)
    code = gl.where(tile == last, IS_FIRST, 0) + gl.where(tile == first, IS_LAST, 0)
    return last - tile, gl.where((row < len_q) & (tile >= first) & (tile <= last), code, NO_TURN)


@gluon.jit
def first_block(p_cu_q, b, start_q, rows_q, T: gl.constexpr):
    """The number of a sequence's first block of queries. (See tile_records_kernel: it needs no sum over lengths.)"""
    number = b * gl.cdiv(rows_q, T.BLOCK_M)
    if p_cu_q is not None:
        number = start_q // T.BLOCK_M + b
    return number


@gluon.jit
def flag_at(p_flags, begin, row, head, heads, T: gl.constexpr):
    """The flag of a block of queries of one head; ``begin``: see first_block. In front of all flags is the counter of
    items taken."""
    return p_flags + 1 + (begin + row // T.BLOCK_M) * (heads * T.GROUP) + head


@gluon.jit
def take_turns(wide_desc, staged0, staged1, bars, items, work, T: gl.constexpr):
    """The courier (see ring.py): waits for this tile's turn at a block, and fetches the sum if it is the last turn."""
    step = 0
    fetched = 0
    n = 0
    item = receive(items, n)
    while item < work.n_items:
        b, row, start_k, len_k, start_q, len_q = find_tile(work, item, item_after(n, item, T), T)
        h, tile, tiles, number = name_tile(work.p_table, item, b, row, len_k, work.heads, work.n_items, T)
        first, blocks, full_lo, full_hi = query_range(tile, tiles, len_q, len_k, work.band, T)
        begin = first_block(work.p_cu_q, b, start_q, work.rows_q, T)
        end = start_q + b * work.batch_rows.dq + len_q
        cursor = first_step(h, tile, tiles, blocks, T)
        for i in range(blocks * T.GROUP):
            here = step & 1
            row = row_of(cursor, first, T)
            turn, code = turn_at(row, tile, tiles, len_q, len_k, work.band, T)
            mbarrier.wait(bars.published.index(here), ((step >> 1) & 1) ^ 1)  # done with step - 2
            if (code & IS_FIRST) == 0:
                if code != NO_TURN:
                    wait_for(flag_at(work.p_flags, begin, row, cursor.head, work.heads, T), ANY_BITS, turn, ANY_BITS)
            if (code & (IS_FIRST | IS_LAST)) == IS_LAST:
                mbarrier.wait(bars.free, fetched & 1)  # nothing else is in the consumers' buffers
                fetched += 1
                mbarrier.expect(bars.ready.index(here), 2 * wide_desc.block_type.nbytes)
                tma_load(wide_desc, part_of(end, row - len_q, cursor.head, 0, T), bars.ready.index(here), staged0)
                tma_load(wide_desc, part_of(end, row - len_q, cursor.head, 1, T), bars.ready.index(here), staged1)
            else:
                mbarrier.arrive(bars.ready.index(here), count=1)
            cursor = next_step(cursor, tile, tiles, blocks, T)
            step += 1
        n += 1
        item = receive(items, n)


@gluon.jit
def pass_on(bars, items, work, T: gl.constexpr):
    """The publisher: lets the next tile have its turn as soon as this tile's part is in memory."""
    step = 0
    n = 0
    item = receive(items, n)
    while item < work.n_items:
        b, row, start_k, len_k, start_q, len_q = find_tile(work, item, item_after(n, item, T), T)
        h, tile, tiles, number = name_tile(work.p_table, item, b, row, len_k, work.heads, work.n_items, T)
        first, blocks, full_lo, full_hi = query_range(tile, tiles, len_q, len_k, work.band, T)
        begin = first_block(work.p_cu_q, b, start_q, work.rows_q, T)
        cursor = first_step(h, tile, tiles, blocks, T)
        for i in range(blocks * T.GROUP):
            here = step & 1
            row = row_of(cursor, first, T)
            turn, code = turn_at(row, tile, tiles, len_q, len_k, work.band, T)
            mbarrier.wait(bars.done.index(here), (step >> 1) & 1)
            if code < NO_TURN:
                set_flag(flag_at(work.p_flags, begin, row, cursor.head, work.heads, T), 1, True)
            mbarrier.arrive(bars.published.index(here), count=1)
            cursor = next_step(cursor, tile, tiles, blocks, T)
            step += 1
        n += 1
        item = receive(items, n)
