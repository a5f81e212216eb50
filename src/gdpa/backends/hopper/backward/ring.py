"""How the sums of dq go from one tile of keys to the next (mode "ring"; their order is that of walk.py).

The tiles of keys of a sequence pass the float32 sum of a block of queries on to each other: the first writes it, the
others add to it, the last adds it to its own part, rounds, and writes dq. So dq is exact and needs no pass over memory:
what is on its way stays in the L2 cache. A flag per block says how many tiles have been there. In deterministic mode
(T.ORDERED) they add in the order in which they come round, otherwise as they come.

Two warps take care of this, so that the warps that compute do not wait for memory: ``courier`` waits for the flag of
the block that is next, and fetches its sum if this tile is the last; ``publisher`` sets it when the sum is in memory.
All tiles of a sequence must run at the same time: the kernel is launched as a cooperative grid, and a program takes its
items in the order of the list.
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
from gdpa.backends.hopper.pipeline import ROWS, ragged
from gdpa.backends.hopper.scheduling.schedule import item_at, items_of


@gluon.jit
def begin_of(item, tile):
    """(program of the gang's first tile, its round of items)."""
    programs = gl.num_programs(0)
    return (item - tile) % programs, (item - tile) // programs


@gluon.jit
def place_of(begin, owner, sub, T: gl.constexpr):
    """Where the sum of a block is while it goes round: among the places of the program whose tile is there first. And
    that program's round of items."""
    program, turn = begin
    programs = gl.num_programs(0)
    program += owner
    wraps = program >= programs
    return gl.where(wraps, program - programs, program) * T.ROOM + sub, turn + gl.where(wraps, 1, 0)


@gluon.jit
def send_code(item, at, row, tile, tiles, len_q, len_k, band, T: gl.constexpr):
    """What a consumer must know of a step when it sends its dq: 4 * place + 2 * (is first) + (is last), or NO_TURN."""
    if T.DQ == "turns":
        _, code = turn_at(row, tile, tiles, len_q, len_k, band, T)
    elif T.DQ == "ring":
        owner, sub = owner_of(at)
        place, _ = place_of(begin_of(item, tile), owner, sub, T)
        rank = rank_of(at, owner, tile, tiles)
        code = place * 4 + gl.where(rank == 0, 2, 0) + gl.where(rank == tiles - 1, 1, 0)
    else:
        code = gl.to_tensor(0)
    return code


@gluon.jit
def flag_of(turn, rounds, rank):
    """What a flag says when ``rank`` tiles have been at a block: their number, 0 for none or all, and which block of
    all that pass by the same place that is: the owner's round of items, and the round of blocks within its item."""
    return ((turn & 0xFFFF) << 15) | ((rounds & 0xFF) << 7) | rank


@gluon.jit
def in_ring(place, wg, T: gl.constexpr):
    """Coordinates of a consumer's part of a place: at D 64 half of the rows, at D 128 half of the columns."""
    rows = gl.num_programs(0) * T.ROOM * T.BLOCK_M
    if T.D == 64:
        return ragged(0, rows, place * T.BLOCK_M + wg * ROWS, 0, 0)
    else:
        return ragged(0, rows, place * T.BLOCK_M, 0, wg * ROWS)


@gluon.jit
def courier(ring_desc, staged0, staged1, bars, items, work, T: gl.constexpr):
    """Tells the consumers when they may send a block's sum, and fetches it for the last."""
    if T.DQ == "turns":
        take_turns(ring_desc, staged0, staged1, bars, items, work, T)
    elif T.DQ == "ring":
        count = items_of(gl.program_id(0), gl.num_programs(0), work.n_items, False)
        step = 0
        fetched = 0
        begun = -1  # the place where this tile was first in the step before
        for n in range(count):
            item = item_at(gl.program_id(0), gl.num_programs(0), n, False)
            b, row, start_k, len_k, start_q, len_q = find_tile(work, item, item_after(n, item, T), T)
            h, tile, tiles, number = name_tile(work.p_table, item, b, row, len_k, work.heads, work.n_items, T)
            first, blocks, full_lo, full_hi = query_range(tile, tiles, len_q, len_k, work.band, T)
            begin = begin_of(item, tile)
            at = first_step(h, tile, tiles, blocks, T)
            for i in range(blocks * T.GROUP):
                here = step & 1
                mbarrier.wait(bars.published.index(here), ((step >> 1) & 1) ^ 1)  # that of two steps ago is over
                if tiles > 1:
                    owner, sub = owner_of(at)
                    rank = rank_of(at, owner, tile, tiles)
                    place, turn = place_of(begin, owner, sub, T)
                    if place == begun:  # its flag does not tell yet that a block has begun there
                        mbarrier.wait(bars.published.index(here ^ 1), ((step - 1) >> 1) & 1)
                    begun = gl.where(rank == 0, place, -1)
                    # Only its owner begins a block, when all are done with what was there before.
                    seen = gl.where(rank == 0, 0x7F, 0x7FFFFFFF)
                    low = gl.where(rank == 0, 0, flag_of(turn, at[2], rank))
                    spread = gl.to_tensor(0)
                    if not T.ORDERED:  # whoever comes between the first and the last
                        low = gl.where((rank > 0) & (rank < tiles - 1), flag_of(turn, at[2], 1), low)
                        spread = gl.where((rank > 0) & (rank < tiles - 1), 126, 0)
                    wait_for(work.p_flags + place, seen, low, spread)
                    if rank == tiles - 1:
                        mbarrier.wait(bars.free, fetched & 1)  # nothing else is in the consumers' buffers
                        fetched += 1
                        mbarrier.expect(bars.ready.index(here), 2 * ring_desc.block_type.nbytes)
                        tma_load(ring_desc, in_ring(place, 0, T), bars.ready.index(here), staged0)
                        tma_load(ring_desc, in_ring(place, 1, T), bars.ready.index(here), staged1)
                    else:
                        mbarrier.arrive(bars.ready.index(here), count=1)
                else:
                    begun = gl.to_tensor(-1)
                    mbarrier.arrive(bars.ready.index(here), count=1)
                at = next_step(at, tile, tiles, blocks, T)
                step += 1


@gluon.jit
def publisher(bars, items, work, T: gl.constexpr):
    """Lets the next tile have a block's sum as soon as this one's is in memory."""
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
            at = first_step(h, tile, tiles, blocks, T)
            for i in range(blocks * T.GROUP):
                here = step & 1
                owner, sub = owner_of(at)
                rank = rank_of(at, owner, tile, tiles)
                place, turn = place_of(begin, owner, sub, T)
                mbarrier.wait(bars.done.index(here), (step >> 1) & 1)
                if tiles > 1:
                    if (rank == 0) | (rank == tiles - 1):
                        set_flag(work.p_flags + place, flag_of(turn, at[2], gl.where(rank == 0, 1, 0)), False)
                    else:
                        set_flag(work.p_flags + place, 1, True)
                mbarrier.arrive(bars.published.index(here), count=1)
                at = next_step(at, tile, tiles, blocks, T)
                step += 1
