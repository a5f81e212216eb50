"""How the sum of dq goes from one tile of keys to the next (mode "ring"; the order is that of walk.py).

The tiles of keys of a sequence pass the float32 sum of a block of queries on to each other, in a *slot*: the first one
(the block's owner) stores its part there, the others add theirs, and the last one fetches the sum, adds its own part,
rounds, and writes dq. So dq is rounded once, and no pass over memory is needed: slots stay in the L2 cache. A flag per
slot says how many tiles have added their part, and for which block. In deterministic mode (T.ORDERED) they add in the
order in which they come round; otherwise in any order between the first and the last.

Two warps take care of this, so that consumers never wait for memory: the ``courier`` waits for the flag of the next
step's slot, and fetches the sum if this tile is the last one there; the ``publisher`` sets the flag when the part that
consumers have sent is in memory. All tiles of a sequence must run at the same time: the kernel is launched as a
cooperative grid, and a program does its items in the order of the list.
"""

from gdpa.backends.hopper.backward.flags import set_flag, wait_for
from gdpa.backends.hopper.backward.items import item_after
from gdpa.backends.hopper.backward.turns import pass_on, take_turns, turn_at
from gdpa.backends.hopper.backward.walk import (
    find_tile,
    first_step,
    name_tile,
    next_step,
    owner_of,
    query_range,
    rank_of,
)
from gdpa.backends.hopper.compat import gl, gluon, mbarrier, tma_load
from gdpa.backends.hopper.messages import IS_FIRST, IS_LAST, SLOT
from gdpa.backends.hopper.pipeline import ROWS, ragged
from gdpa.backends.hopper.scheduling.schedule import item_at, items_of


@gluon.jit
def begin_of(item, tile):
    """(program that has the gang's first tile, which of its items that is). Items are dealt out one by one."""
    programs = gl.num_programs(0)
    return (item - tile) % programs, (item - tile) // programs


@gluon.jit
def slot_of(begin, owner, sub, T: gl.constexpr):
    """(slot that holds the sum of a block while it goes round, which of its owner's items the owning tile is). Every
    program has T.ROOM slots, for the blocks at which its own tile is the first, the owner. ``begin``: see begin_of."""
    program, nth_item = begin
    programs = gl.num_programs(0)
    program += owner
    wraps = program >= programs
    return gl.where(wraps, program - programs, program) * T.ROOM + sub, nth_item + gl.where(wraps, 1, 0)


@gluon.jit
def send_code(item, cursor, row, tile, tiles, len_q, len_k, band, T: gl.constexpr):
    """What a consumer must know when it sends the dq of a step: see messages.py."""
    if T.DQ == "turns":
        _, code = turn_at(row, tile, tiles, len_q, len_k, band, T)
    elif T.DQ == "ring":
        owner, sub = owner_of(cursor)
        slot, _ = slot_of(begin_of(item, tile), owner, sub, T)
        rank = rank_of(cursor, owner, tile, tiles)
        code = slot * SLOT + gl.where(rank == 0, IS_FIRST, 0) + gl.where(rank == tiles - 1, IS_LAST, 0)
    else:
        code = gl.to_tensor(0)
    return code


@gluon.jit
def flag_of(nth_item, rounds, rank):
    """The value of a slot's flag when ``rank`` tiles have added their part of a block; 0 for none or all of them. So
    that one block cannot be taken for another that uses the same slot, it also holds which of its owner's items the
    block belongs to, and how many rounds that item has done before."""
    return ((nth_item & 0xFFFF) << 15) | ((rounds & 0xFF) << 7) | rank


@gluon.jit
def in_ring(slot, wg, T: gl.constexpr):
    """Coordinates of a consumer's part of a slot: at D 64 half of the rows, at D 128 half of the columns."""
    rows = gl.num_programs(0) * T.ROOM * T.BLOCK_M
    if T.D == 64:
        return ragged(0, rows, slot * T.BLOCK_M + wg * ROWS, 0, 0)
    else:
        return ragged(0, rows, slot * T.BLOCK_M, 0, wg * ROWS)


@gluon.jit
def courier(ring_desc, staged0, staged1, bars, items, work, T: gl.constexpr):
    """One warp: lets the consumers send the dq of a step, when other tiles have sent theirs, and fetches the sum for
    the last one."""
    if T.DQ == "turns":
        take_turns(ring_desc, staged0, staged1, bars, items, work, T)
    elif T.DQ == "ring":
        count = items_of(gl.program_id(0), gl.num_programs(0), work.n_items, False)
        step = 0
        fetched = 0
        begun = -1  # the slot of the step before, if this tile was the first there
        for n in range(count):
            item = item_at(gl.program_id(0), gl.num_programs(0), n, False)
            b, row, start_k, len_k, start_q, len_q = find_tile(work, item, item_after(n, item, T), T)
            h, tile, tiles, number = name_tile(work.p_table, item, b, row, len_k, work.heads, work.n_items, T)
            first, blocks, full_lo, full_hi = query_range(tile, tiles, len_q, len_k, work.band, T)
            begin = begin_of(item, tile)
            cursor = first_step(h, tile, tiles, blocks, T)
            for i in range(blocks * T.GROUP):
                here = step & 1
                mbarrier.wait(bars.published.index(here), ((step >> 1) & 1) ^ 1)  # done with step - 2
                if tiles > 1:
                    owner, sub = owner_of(cursor)
                    rank = rank_of(cursor, owner, tile, tiles)
                    slot, nth_item = slot_of(begin, owner, sub, T)
                    if slot == begun:  # the publisher may not have set its flag yet
                        mbarrier.wait(bars.published.index(here ^ 1), ((step - 1) >> 1) & 1)
                    begun = gl.where(rank == 0, slot, -1)
                    # The first one waits for an empty slot (whatever block was there before), others for their block.
                    seen = gl.where(rank == 0, 0x7F, 0x7FFFFFFF)
                    low = gl.where(rank == 0, 0, flag_of(nth_item, cursor.rounds, rank))
                    spread = gl.to_tensor(0)
                    if not T.ORDERED:  # whoever comes between the first and the last
                        low = gl.where((rank > 0) & (rank < tiles - 1), flag_of(nth_item, cursor.rounds, 1), low)
                        spread = gl.where((rank > 0) & (rank < tiles - 1), 126, 0)
                    wait_for(work.p_flags + slot, seen, low, spread)
                    if rank == tiles - 1:
                        mbarrier.wait(bars.free, fetched & 1)  # nothing else is in the consumers' buffers
                        fetched += 1
                        mbarrier.expect(bars.ready.index(here), 2 * ring_desc.block_type.nbytes)
                        tma_load(ring_desc, in_ring(slot, 0, T), bars.ready.index(here), staged0)
                        tma_load(ring_desc, in_ring(slot, 1, T), bars.ready.index(here), staged1)
                    else:
                        mbarrier.arrive(bars.ready.index(here), count=1)
                else:
                    begun = gl.to_tensor(-1)
                    mbarrier.arrive(bars.ready.index(here), count=1)
                cursor = next_step(cursor, tile, tiles, blocks, T)
                step += 1


@gluon.jit
def publisher(bars, items, work, T: gl.constexpr):
    """Another warp: sets the flag of a step's slot for the next tile, as soon as this tile's part is in memory."""
    if T.DQ == "turns":
        pass_on(bars, items, work, T)
    elif T.DQ == "ring":
        count = items_of(gl.program_id(0), gl.num_programs(0), work.n_items, False)
        step = 0
        for n in range(count):
            item = item_at(gl.program_id(0), gl.num_programs(0), n, False)
            b, row, start_k, len_k, start_q, len_q = find_tile(work, item, item_after(n, item, T), T)
            h, tile, tiles, number = name_tile(work.p_table, item, b, row, len_k, work.heads, work.n_items, T)
            first, blocks, full_lo, full_hi = query_range(tile, tiles, len_q, len_k, work.band, T)
            begin = begin_of(item, tile)
            cursor = first_step(h, tile, tiles, blocks, T)
            for i in range(blocks * T.GROUP):
                here = step & 1
                owner, sub = owner_of(cursor)
                rank = rank_of(cursor, owner, tile, tiles)
                slot, nth_item = slot_of(begin, owner, sub, T)
                mbarrier.wait(bars.done.index(here), (step >> 1) & 1)
                if tiles > 1:
                    if (rank == 0) | (rank == tiles - 1):
                        set_flag(
                            work.p_flags + slot, flag_of(nth_item, cursor.rounds, gl.where(rank == 0, 1, 0)), False
                        )
                    else:
                        set_flag(work.p_flags + slot, 1, True)
                mbarrier.arrive(bars.published.index(here), count=1)
                cursor = next_step(cursor, tile, tiles, blocks, T)
                step += 1
