"""The order in which a program of the backward walks over tiles of keys and, for each, over blocks of queries."""

from gdpa.backends.hopper.compat import gl, gluon
from gdpa.backends.hopper.schedule import find_item
from gdpa.device.sequences import visible_queries


@gluon.jit
def find_tile(p_table, p_cu_q, n, count, heads, rows_k, rows_q, T: gl.constexpr):
    """What find_item says of this program's n-th tile of keys: items have T.TILES of them."""
    ITEM_ROWS: gl.constexpr = T.BLOCK_N * T.TILES
    item = find_item(p_table, p_cu_q, n // T.TILES, count // T.TILES, heads, rows_k, rows_q, ITEM_ROWS)
    h, b, row, start_k, len_k, start_q, len_q = item
    return (h, b, row + n % T.TILES * T.BLOCK_N, start_k, len_k, start_q, len_q)


@gluon.jit
def query_range(n0, len_q, len_k, band, T: gl.constexpr):
    """(first query, blocks, first and last query of the blocks that need no mask). At least one block, so that every
    tile is written: past the end it reads zeros."""
    lo, full_lo, full_hi, hi = visible_queries(n0, len_q, len_k, band, T.BLOCK_M, T.BLOCK_N)
    if not T.FINITE_AT_ZERO:
        if n0 + T.BLOCK_N > len_k:  # keys past the end are in every block, so none is free of masks
            full_lo = hi
            full_hi = hi
    return lo, gl.maximum((hi - lo) // T.BLOCK_M, 1), full_lo, full_hi


@gluon.jit
def walk_of(n0, blocks, T: gl.constexpr):
    """How the keys from n0 on walk over the blocks of queries. Programs with other keys of the same sequence run at the
    same time: each begins at another block (the result), or all would add to the same rows of dq at once. A program
    that takes all keys goes to and fro, since what came last is still in the cache: forwards (0) or backwards (1)."""
    if T.TILES == 1:
        return n0 // T.BLOCK_M % blocks
    else:
        return n0 // T.BLOCK_N % 2


@gluon.jit
def step_at(i, h, first, blocks, walk, T: gl.constexpr):
    """(query head, first query) of step i."""
    start = walk
    if T.TILES > 1:
        i = gl.where(walk == 1, blocks * T.GROUP - 1 - i, i)
        start = 0
    if T.GROUP == 1:
        head = h
        block = i + start
    else:
        head = h * T.GROUP + i // blocks
        block = i % blocks + start
    return head, first + gl.where(block < blocks, block, block - blocks) * T.BLOCK_M
