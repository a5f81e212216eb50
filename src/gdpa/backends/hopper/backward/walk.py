"""The order in which a program of the backward walks over tiles of keys and, for each, over blocks of queries.

A *gang* is all tiles of keys of one sequence and head. They are neighbours in the list, so that programs work on them
at the same time. With mode "ring", every tile of a gang begins at another block of queries and they all go round, so
that a block's dq passes from tile to tile, in the same order every time, and no two tiles want it at once:

    step      0   1   2   3   4   5   6   7        4 tiles, 8 blocks, a share of 2 blocks for each tile, its owner
    tile 0    b0  b1  b2  b3  b4  b5  b6  b7       block 0: tile 0 first, then 3, 2 and 1, 2 steps after each other
    tile 1    b2  b3  b4  b5  b6  b7  b0  b1
    tile 2    b4  b5  b6  b7  b0  b1  b2  b3
    tile 3    b6  b7  b0  b1  b2  b3  b4  b5

A round goes over all blocks of a query head, or over as many as the ring has slots for (T.ROOM for each tile of the
gang). That holds with a band, too: what a tile does not see is masked.
"""

from collections import namedtuple

from gdpa.backends.hopper.compat import gl, gluon
from gdpa.backends.hopper.pipeline import ROWS, ragged
from gdpa.device.sequences import RECORD, seq_span, visible_queries

# Where a tile's walk over blocks of queries is. In the current round: the query ``head``, steps ``taken``, ``rounds``
# before it, its ``start`` (the first block), and its plan (see plan_round): ``size`` in blocks, the ``share`` of each
# tile, ``inverse`` (to divide by the share), and the block at which this tile must ``begin``, counted from ``start``.
Cursor = namedtuple("Cursor", "head taken rounds start size share inverse begin")


@gluon.jit
def find_tile(work, item, near, T: gl.constexpr):
    """(sequence, first row, start and length of the sequence's keys, start and length of its queries) of an item. The
    row is that of some tile of the sequence: see name_tile. ``near``: the item whose record is needed next."""
    if work.p_table is None:
        tiles = gl.cdiv(work.rows_k, T.BLOCK_N)
        b = item // (tiles * work.heads)
        row = 0
        start_k, len_k = seq_span(None, b, work.rows_k)
        start_q, len_q = seq_span(work.p_cu_q, b, work.rows_q)
    else:
        p_record = work.p_table + (1 + item // work.heads).to(gl.int64) * RECORD
        # Volatile: a consumer reads it again at the end of its tile, rather than hold it in registers until then.
        b = gl.load(p_record, volatile=True)
        row = gl.load(p_record + 1, volatile=True)
        start_k = gl.load(p_record + 2, volatile=True)
        len_k = gl.load(p_record + 3, volatile=True)
        start_q = gl.load(p_record + 4, volatile=True)
        len_q = gl.load(p_record + 5, volatile=True)
        # Reading the next one would take long, and holding it until then would cost registers: only let it be near.
        prefetch(work.p_table + (1 + gl.minimum(near, work.n_items - 1) // work.heads).to(gl.int64) * RECORD)
    return (b, row, start_k, len_k, start_q, len_q)


@gluon.jit
def prefetch(p):
    """Have the L1 cache fetch what p points to."""
    TEXT: gl.constexpr = "prefetch.global.L1 [$1]; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(TEXT, "=r,l", [p], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def name_tile(p_table, item, b, row, len_k, heads, n_items, T: gl.constexpr):
    """(head, which tile of its gang, how many tiles the gang has, number of the tile among all tiles of one head) of an
    item that find_tile found. Items are numbered with tiles innermost, then heads, then sequences; by turns, with heads
    innermost. A sequence without keys still has one tile."""
    tiles = gl.maximum(gl.cdiv(len_k, T.BLOCK_N), 1)
    if p_table is None:
        first = b * tiles
    else:
        first = item // heads - row // T.BLOCK_N
        tiles = gl.minimum(tiles, n_items // heads - first)  # bad offsets may have asked for more than fits the list
    place = item - first * heads
    if T.DQ == "turns":  # see turns.py
        tile = place // heads
        h = place - tile * heads
        tile = tiles - 1 - tile
    else:
        h = place // tiles
        tile = place - h * tiles
    return h, tile, tiles, first + tile


@gluon.jit
def query_range(tile, tiles, len_q, len_k, band, T: gl.constexpr):
    """(first query, blocks, start and end of the queries whose blocks need no mask) of a tile. At least one block, so
    that every tile is written: past the end it reads zeros."""
    n0 = tile * T.BLOCK_N
    lo, full_lo, full_hi, hi = visible_queries(n0, len_q, len_k, band, T.BLOCK_M, T.BLOCK_N)
    if not T.FINITE_AT_ZERO:
        if n0 + T.BLOCK_N > len_k:  # keys past the end are in every block, so none is free of masks
            full_lo = hi
            full_hi = hi
    if T.DQ == "ring" and (band.left is not None or band.right is not None):  # a ring has the same blocks for all tiles
        lo = lo * 0
        hi = gl.cdiv(len_q, T.BLOCK_M) * T.BLOCK_M
    if T.DQ == "turns":  # queries that see nothing have a gradient, too: those before the others and those after them
        lo = gl.where(tile == 0, 0, lo)
        hi = gl.where(tile == tiles - 1, gl.cdiv(len_q, T.BLOCK_M) * T.BLOCK_M, hi)
    return lo, gl.maximum((hi - lo) // T.BLOCK_M, 1), full_lo, full_hi


@gluon.jit
def plan_round(start, tile, tiles, blocks, T: gl.constexpr):
    """The plan of a round that starts at block ``start``: (size, share, inverse, begin), see Cursor."""
    size = blocks - start
    if T.DQ == "ring":
        size = gl.minimum(size, T.ROOM * tiles)
        share = gl.cdiv(size, tiles)
        begin = share * tile
        begin = gl.where(begin < size, begin, 0)
    elif T.DQ == "turns":  # all tiles walk forwards, those that see fewer blocks ahead of the others
        share = size
        begin = size * 0
    else:  # programs with other keys of the sequence begin at other blocks, or all would add to the same rows at once
        share = size
        begin = tile * (T.BLOCK_N // T.BLOCK_M) % size
    # x // share = (x * inverse) >> 20 for x * share < 2^20: a division would take 20 instructions at every step
    return size, share, gl.cdiv(1 << 20, share), begin


@gluon.jit
def first_step(h, tile, tiles, blocks, T: gl.constexpr):
    """The Cursor of a tile's first step."""
    head = h * T.GROUP
    size, share, inverse, begin = plan_round(0, tile, tiles, blocks, T)
    return Cursor(head, 0, 0, 0, size, share, inverse, begin)


@gluon.jit
def next_step(cursor, tile, tiles, blocks, T: gl.constexpr):
    """The Cursor one step on: in the same round, in the next one, or at the next query head."""
    head, taken, rounds, start, size, share, inverse, begin = cursor
    taken += 1
    if taken == size:
        taken = 0
        rounds += 1
        start += size
        head = gl.where(start == blocks, head + 1, head)
        start = gl.where(start == blocks, 0, start)
        size, share, inverse, begin = plan_round(start, tile, tiles, blocks, T)
    return Cursor(head, taken, rounds, start, size, share, inverse, begin)


@gluon.jit
def block_in_round(cursor):
    """The block of queries of a step, counted from the start of its round."""
    x = cursor.begin + cursor.taken
    return gl.where(x >= cursor.size, x - cursor.size, x)


@gluon.jit
def block_of(cursor):
    """The block of queries of a step, counted from the first one that the tile visits; with a mask, in its list."""
    return cursor.start + block_in_round(cursor)


@gluon.jit
def row_of(cursor, first, T: gl.constexpr):
    """The first query of a step; ``first``: that of the first block that the tile visits."""
    return first + block_of(cursor) * T.BLOCK_M


@gluon.jit
def part_of(end, row, head, wg, T: gl.constexpr):
    """Coordinates of a consumer's part of a block of dq, or of a float32 buffer like it; ``row`` is counted from the
    end of the sequence, ``end``."""
    if T.D == 64:
        return ragged(end, 0, row + wg * ROWS, head, 0)
    else:
        return ragged(end, 0, row, head, wg * ROWS)


@gluon.jit
def owner_of(cursor):
    """(the tile that is first at this step's block, which of its share of blocks that is)."""
    x = block_in_round(cursor)
    owner = x * cursor.inverse >> 20
    return owner, x - owner * cursor.share


@gluon.jit
def rank_of(cursor, owner, tile, tiles):
    """How many tiles visit this step's block before this one: they go round backwards from its owner. Where a round
    has fewer shares than tiles, those without one begin at block 0 right after tile 0."""
    owners = gl.cdiv(cursor.size, cursor.share)
    rank = gl.where(tile <= owner, owner - tile, owner + tiles - tile)
    return gl.where(tile < owners, rank, owner + 1 + tile - owners)
