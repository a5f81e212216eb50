"""What a program of the forward works on: items, each one or several tiles of queries of one head.

An item is found in one of three ways: in the list of tiles (or by counting, for dense tensors), at a place that follows
from the program's number (``dealt_item``); the same among the offsets, without a list (T.SCANS); or by taking whichever
item is next on the list, with an atomic addition (T.TAKES, ``taken_item``).
"""

from gdpa.backends.hopper.compat import gl, gluon
from gdpa.backends.hopper.forward.bundles import Item, Located
from gdpa.backends.hopper.scheduling.scanning import tile_among
from gdpa.backends.hopper.scheduling.schedule import find_item, item_at, locate_item
from gdpa.backends.hopper.scheduling.taking import hand_on, number_of
from gdpa.device.sequences import visible_keys
from gdpa.device.visits import blocks_in, list_of


@gluon.jit
def key_range(item, work, T: gl.constexpr):
    """(first key, blocks, start and end of the keys whose blocks need no mask) of a Located item. At least one block,
    so that every tile is written: past the end it reads zeros, or is masked. With a mask its list has the blocks."""
    lo, full_lo, full_hi, hi = visible_keys(item.r0, item.len_q, item.len_k, work.band, T.BLOCK_M, T.BLOCK_N)
    blocks = (hi - lo) // T.BLOCK_N
    if T.PARTS > 1:
        most = gl.cdiv(blocks, T.PARTS)
        lo += item.part * most * T.BLOCK_N
        blocks = gl.minimum(blocks - item.part * most, most)
    if T.LISTED:
        # Not carried from dealt_item: Triton 3.6 then takes the first tile's for all.
        blocks = blocks_in(work.visits, item.own_list)
    return lo, gl.maximum(blocks, 1), full_lo, full_hi


@gluon.jit
def head_and_part(h, heads, T: gl.constexpr):
    """(head, part of the keys) of an item: in the list, parts are numbered as further heads."""
    if T.PARTS > 1:
        return h % heads, h // heads
    else:
        return h, 0


@gluon.jit
def dealt_item(work, n, count, T: gl.constexpr, WARPS: gl.constexpr = 4):
    """This program's n-th item, Located (items of masks are always taken: there is no list of blocks here). Called by
    ``WARPS`` warps (4: a consumer)."""
    heads, rows_q, rows_k, n_items = work.heads, work.rows_q, work.rows_k, work.n_items
    if T.SCANS:
        item = item_at(gl.program_id(0), gl.num_programs(0), gl.minimum(n, count - 1))
        b, r0, start_q, len_q, start_k, len_k = tile_among(
            work.p_table, work.p_cu_k, item // heads, n_items // heads, rows_q, rows_k, T.BLOCK_M, WARPS
        )
        return Located(item % heads, b, r0, start_q, len_q, start_k, len_k, 0, 0)
    else:
        at, b, r0, start_q, len_q, start_k, len_k = find_item(
            work.p_table, work.p_cu_k, n, count, heads * T.PARTS, rows_q, rows_k, n_items, T.ITEM_ROWS, T.PAIRED
        )
        h, part = head_and_part(at, heads, T)
        return Located(h, b, r0, start_q, len_q, start_k, len_k, part, 0)


@gluon.jit
def taken_item(work, item, T: gl.constexpr):
    """The item of this number, Located; the last one if there are fewer. For items that were taken one by one
    (scheduling/taking.py)."""
    heads = work.heads
    item = gl.maximum(gl.minimum(item, work.n_items - 1), 0)
    h, b, r0, start_q, len_q, start_k, len_k = locate_item(
        work.p_table, work.p_cu_k, item, heads, work.rows_q, work.rows_k, T.ITEM_ROWS
    )
    own_list = list_of(item // heads, h, heads, T.PER_HEAD)
    return Located(h, b, r0, start_q, len_q, start_k, len_k, 0, own_list)


@gluon.jit
def take_first(work, T: gl.constexpr):
    """Hand this program's first item to its consumers: the one of the program's own number, which nobody else takes."""
    item = gl.program_id(0)
    hand_on(work.taken, 0, taken_item(work, item, T), item < work.n_items, T)


@gluon.jit
def take_next(work, asked, n, T: gl.constexpr):
    """Hand this program's n-th item to its consumers. ``asked``: the answer to ``ask_for``."""
    item = gl.num_programs(0) + number_of(asked)
    hand_on(work.taken, n, taken_item(work, item, T), item < work.n_items, T)


@gluon.jit
def tiles_of(item, T: gl.constexpr):
    """How many tiles a Located item has."""
    if T.ITEM_ROWS == T.BLOCK_M:
        return 1
    else:
        return gl.cdiv(gl.minimum(item.len_q - item.r0, T.ITEM_ROWS), T.BLOCK_M)


@gluon.jit
def with_keys(located, work, T: gl.constexpr):
    """The Item: a Located one with its blocks of keys (see key_range) and the number of its tiles."""
    h, b, r0, start_q, len_q, start_k, len_k, part, own_list = located
    first, blocks, full_lo, full_hi = key_range(located, work, T)
    tiles = tiles_of(located, T)
    return Item(h, b, r0, start_q, len_q, start_k, len_k, part, first, blocks, full_lo, full_hi, tiles)
