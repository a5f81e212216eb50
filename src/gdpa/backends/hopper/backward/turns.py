"""Sums of dq in a fixed order, for tiles that do not all see the same queries or do not all run at once (mode "turns").

They are added up in a float32 buffer of all queries, as in mode "add", but tiles of keys take turns at every block
of queries: the last tile that sees it comes first, then the one before, and so on. A flag per block says how many have
been there. A tile begins at the first block that it sees:

    step      0   1   2   3        a window of two blocks: each tile of keys sees four
    tile 3    b6  b7  b8  b9
    tile 2    b4  b5  b6  b7       block 6: tile 3 first, then tile 2, two steps later
    tile 1    b2  b3  b4  b5
    tile 0    b0  b1  b2  b3

Without a band all begin at block 0, and each falls a step behind the one before, once: programs stay so far apart from
then on. The list has a sequence's tiles from the last to the first, and a program takes its items in the order of the
list, so a tile waits only for earlier ones: there is no deadlock, however many tiles there are. Tiles should see
equally many queries, or programs fall out of step: see config.dq_mode.
"""

from gdpa.backends.hopper.backward.flags import set_flag, wait_for
from gdpa.backends.hopper.backward.walk import find_tile, first_step, name_tile, next_step, query_range, row_of
from gdpa.backends.hopper.compat import gl, gluon, mbarrier
from gdpa.backends.hopper.scheduling.schedule import items_of
from gdpa.device.sequences import visible_keys, visible_queries

MANY = gl.constexpr(0x7FFFFFFF)


@gluon.jit
def turn_at(row, tile, tiles, len_q, len_k, band, T: gl.constexpr):
    """How many tiles have been at the block of queries from ``row`` on before this one; -1 if this one does not see it
    (it only passes by, see query_range) and adds zeros."""
    _, _, _, end_k = visible_keys(row, len_q, len_k, band, T.BLOCK_M, T.BLOCK_N)
    _, _, _, end_q = visible_queries(tile * T.BLOCK_N, len_q, len_k, band, T.BLOCK_M, T.BLOCK_N)
    last = gl.minimum(end_k // T.BLOCK_N, tiles) - 1  # bad offsets may have cut the list
    return gl.where(row < end_q, gl.maximum(last - tile, 0), -1)


@gluon.jit
def first_block(p_cu_q, b, start_q, rows_q, T: gl.constexpr):
    """The number of a sequence's first block of queries. (See tile_records_kernel: it needs no sum over lengths.)"""
    number = b * gl.cdiv(rows_q, T.BLOCK_M)
    if p_cu_q is not None:
        number = start_q // T.BLOCK_M + b
    return number


@gluon.jit
def flag_at(p_flags, begin, row, head, heads, T: gl.constexpr):
    """Of a block of queries and a head of theirs; ``begin``: see first_block."""
    return p_flags + (begin + row // T.BLOCK_M) * (heads * T.GROUP) + head


@gluon.jit
def take_turns(bars, work, n_items, band, p_flags, LETS_IN: gl.constexpr, T: gl.constexpr):
    """One of two warps. The one that LETS_IN tells the consumers when it is this tile's turn at a block; the other lets
    the next tile have its turn as soon as this one's part is in memory."""
    ready, free, done, published = bars
    p_table, p_cu_q, heads, rows_q, rows_k, _ = work
    count = items_of(gl.program_id(0), gl.num_programs(0), n_items, False)
    step = 0
    for n in range(count):
        item, b, row, start_k, len_k, start_q, len_q = find_tile(p_table, p_cu_q, n, count, heads, rows_k, rows_q, T)
        h, tile, tiles, number = name_tile(p_table, item, b, row, len_k, heads, n_items, T)
        first, blocks, full_lo, full_hi = query_range(tile * T.BLOCK_N, len_q, len_k, band, T)
        begin = first_block(p_cu_q, b, start_q, rows_q, T)
        at = first_step(h, tile, tiles, blocks, T)
        for i in range(blocks * T.GROUP):
            here = step & 1
            if LETS_IN:
                mbarrier.wait(published.index(here), ((step >> 1) & 1) ^ 1)  # that of two steps ago is over
            row = row_of(at, first, T)
            turn = turn_at(row, tile, tiles, len_q, len_k, band, T)
            if LETS_IN:
                if turn > 0:
                    wait_for(flag_at(p_flags, begin, row, at[0], heads, T), MANY, turn, MANY)
                mbarrier.arrive(ready.index(here), count=1)
            else:
                mbarrier.wait(done.index(here), (step >> 1) & 1)
                if turn >= 0:
                    set_flag(flag_at(p_flags, begin, row, at[0], heads, T), 1, True)
                mbarrier.arrive(published.index(here), count=1)
            at = next_step(at, tile, tiles, blocks, T)
            step += 1
