"""What a program of the forward works on: tiles of queries of one head, with the blocks of keys that they see."""

from gdpa.backends.hopper.compat import gl, gluon
from gdpa.backends.hopper.forward.bundles import Item
from gdpa.backends.hopper.scheduling.scanning import tile_among
from gdpa.backends.hopper.scheduling.schedule import find_item, item_at, locate_item
from gdpa.backends.hopper.scheduling.taking import hand_on, number_of
from gdpa.device.sequences import visible_keys
from gdpa.device.visits import blocks_in, place_of


@gluon.jit
def key_range(m0, len_q, len_k, part, place, work, T: gl.constexpr):
    """(first key, blocks, first and last key of the blocks that need no mask). At least one block, so that every tile
    is written: past the end it reads zeros, or is masked. With a mask the list at ``place`` says which blocks."""
    lo, full_lo, full_hi, hi = visible_keys(m0, len_q, len_k, work.band, T.BLOCK_M, T.BLOCK_N)
    blocks = (hi - lo) // T.BLOCK_N
    if T.PARTS > 1:
        most = gl.cdiv(blocks, T.PARTS)
        lo += part * most * T.BLOCK_N
        blocks = gl.minimum(blocks - part * most, most)
    if T.LISTED:
        # Not carried from find_tile: Triton 3.6 then takes the first tile's for all.
        blocks = blocks_in(work.visits, place)
    return lo, gl.maximum(blocks, 1), full_lo, full_hi


@gluon.jit
def head_and_part(h, heads, T: gl.constexpr):
    """Of an item's place among the heads: parts of the keys count as further heads."""
    if T.PARTS > 1:
        return h % heads, h // heads
    else:
        return h, 0


@gluon.jit
def find_tile(work, n, count, T: gl.constexpr, WARPS: gl.constexpr = 4):
    """This program's n-th item: see find_item; head, part of the keys, and 0 for what only items of masks have. By
    ``WARPS`` warps, those of a consumer unless said."""
    heads, rows_q, rows_k, n_items = work.heads, work.rows_q, work.rows_k, work.n_items
    if T.SCANS:
        item = item_at(gl.program_id(0), gl.num_programs(0), gl.minimum(n, count - 1))
        b, r0, start_q, len_q, start_k, len_k = tile_among(
            work.p_table, work.p_cu_k, item // heads, n_items // heads, rows_q, rows_k, T.BLOCK_M, WARPS
        )
        return item % heads, b, r0, start_q, len_q, start_k, len_k, 0, 0
    else:
        at, b, r0, start_q, len_q, start_k, len_k = find_item(
            work.p_table, work.p_cu_k, n, count, heads * T.PARTS, rows_q, rows_k, n_items, T.ITEM_ROWS, T.PAIRED
        )
        h, part = head_and_part(at, heads, T)
        return h, b, r0, start_q, len_q, start_k, len_k, part, 0


@gluon.jit
def tile_taken(work, item, T: gl.constexpr):
    """What find_tile returns, of an item that was taken (see scheduling/taking.py) or, if there are no more, the last
    one; and with a mask which list of blocks is its own (see device/visits.py)."""
    heads = work.heads
    item = gl.maximum(gl.minimum(item, work.n_items - 1), 0)
    h, b, r0, start_q, len_q, start_k, len_k = locate_item(
        work.p_table, work.p_cu_k, item, heads, work.rows_q, work.rows_k, T.ITEM_ROWS
    )
    return h, b, r0, start_q, len_q, start_k, len_k, 0, place_of(item // heads, h, heads, T.PER_HEAD)


@gluon.jit
def take_first(work, T: gl.constexpr):
    """By the producer: nobody else takes the first one."""
    item = gl.program_id(0)
    hand_on(work.taken, 0, tile_taken(work, item, T), item < work.n_items, T)


@gluon.jit
def take_next(work, asked, n, T: gl.constexpr):
    """By the producer: let everybody know its n-th item, which it has ``asked`` for."""
    item = gl.num_programs(0) + number_of(asked)
    hand_on(work.taken, n, tile_taken(work, item, T), item < work.n_items, T)


@gluon.jit
def tiles_of(r0, len_q, T: gl.constexpr):
    """Tiles of the item that begins at row r0."""
    if T.ITEM_ROWS == T.BLOCK_M:
        return 1
    else:
        return gl.cdiv(gl.minimum(len_q - r0, T.ITEM_ROWS), T.BLOCK_M)


@gluon.jit
def with_keys(found, work, T: gl.constexpr):
    """The Item that find_tile found, with its blocks of keys (see key_range) and the number of its tiles."""
    h, b, r0, start_q, len_q, start_k, len_k, part, place = found
    first, blocks, full_lo, full_hi = key_range(r0, len_q, len_k, part, place, work, T)
    tiles = tiles_of(r0, len_q, T)
    return Item(h, b, r0, start_q, len_q, start_k, len_k, part, first, blocks, full_lo, full_hi, tiles)
