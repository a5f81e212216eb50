"""How a consumer of the forward goes from one block of keys to the next, also across tiles and items: where the next
block is, and which buffers the producer may fill again.

The loop runs one block ahead: while the product p v of one block runs, the scores of the next are queued. So "the
current block" below is the i-th of a tile, whose weights are known, and "the next one" is the one whose scores come.
"""

from gdpa.backends.hopper.compat import gl, gluon, mbarrier, tma_store_wait
from gdpa.backends.hopper.forward.bundles import Coming, Pairs, Tile
from gdpa.backends.hopper.forward.weights import block_at
from gdpa.backends.hopper.pipeline import ROWS, pass_turn, wait_turn


@gluon.jit
def tile_of(item, t, block, number, wg, T: gl.constexpr):
    """The ``t``-th tile of an item, see Tile. ``block`` and ``number``: how many blocks and tiles were used up
    before."""
    m0 = item.r0 + t * T.BLOCK_M
    final = t == item.tiles - 1
    done = final | (item.blocks > T.STAGES)
    active = m0 + wg * ROWS < item.len_q
    return Tile(t, m0, final, done, active, block, number, buffer_of(block, T))


@gluon.jit
def buffer_of(block, T: gl.constexpr):
    """(buffer, phase of its barriers) of a block of keys, by its number among all that the program has loaded."""
    return block % T.STAGES, (block // T.STAGES) & 1


@gluon.jit
def next_buffer(at, T: gl.constexpr):
    """The same for the block after ``at``, by counting: the divisions take a consumer 30 clocks, and nothing
    overlaps."""
    wraps = at[0] == T.STAGES - 1
    return gl.where(wraps, 0, at[0] + 1), gl.where(wraps, at[1] ^ 1, at[1])


@gluon.jit
def block_after(i, at, item, tile, more_items, wg, T: gl.constexpr):
    """What comes after the i-th block of a tile, which is in the buffer ``at``; see Coming."""
    last = i == item.blocks - 1
    moves = last & tile.final
    more = (i < item.blocks - 1) | (tile.t < item.tiles - 1) | more_items
    block = gl.where(last, gl.where(tile.done, tile.block + item.blocks, tile.block), tile.block + i + 1)
    slot, phase = next_buffer(at, T)
    back = last & (not tile.done)  # the next tile begins with the same keys
    slot, phase = gl.where(back, tile.first[0], slot), gl.where(back, tile.first[1], phase)
    number = tile.number + last.to(gl.int32)
    return Coming(last, moves, more, block, slot, phase, number, slot_of_queries(number, wg, T))


@gluon.jit
def slot_of_queries(number, wg, T: gl.constexpr):
    """The buffer of this consumer's queries of a tile, by its number among all that the program has loaded."""
    return (number & 1) * T.CONSUMERS + wg


@gluon.jit
def wait_for(coming, bars, T: gl.constexpr):
    """Wait until the next block's keys are in shared memory, and, if it begins a tile, the tile's queries."""
    if coming.last:  # waiting for what is there already takes 100 clocks, too
        mbarrier.wait(bars.q_full.index(coming.q_slot), (coming.number >> 1) & 1, pred=coming.more)
    mbarrier.wait(bars.k_full.index(coming.slot), coming.phase, pred=coming.more)


@gluon.jit
def whereabouts(i, coming, item, following, tile, work, T: gl.constexpr):
    """((sequence, head, the sequence's first query and key), Pairs, whether the block is cut) of the block after the
    i-th one."""
    moves = coming.moves
    sequence = (
        gl.where(moves, following.b, item.b), gl.where(moves, following.h, item.h),
        gl.where(moves, following.start_q, item.start_q), gl.where(moves, following.start_k, item.start_k),
    )  # fmt: skip
    m0 = gl.where(coming.last, gl.where(tile.final, following.r0, tile.m0 + T.BLOCK_M), tile.m0)
    first = gl.where(tile.final, following.first, item.first)
    j0 = gl.where(coming.last, first, item.first + (i + 1) * T.BLOCK_N)
    full = gl.where(moves, following.full_lo, item.full_lo), gl.where(moves, following.full_hi, item.full_hi)
    lengths = gl.where(moves, following.len_q, item.len_q), gl.where(moves, following.len_k, item.len_k)
    j0, cut = block_at(work.steps, coming.block, j0, full[0], full[1], T)
    return sequence, Pairs(m0, j0, lengths[0], lengths[1]), cut


@gluon.jit
def release_scores(i, coming, item, following, tile, pairs, bars, wg, T: gl.constexpr):
    """Once the next block's scores are computed, let the producer have its keys, unless another tile of the item needs
    them, and its queries, if this was their last block (and no results take their place: see give_back)."""
    next_blocks = gl.where(tile.final, following.blocks, item.blocks)
    next_final = gl.where(tile.final, following.tiles == 1, tile.t == item.tiles - 2)
    k_done = gl.where(coming.last, next_final | (next_blocks > T.STAGES), tile.done)
    q_done = gl.where(coming.last, next_blocks == 1, i == item.blocks - 2)
    if T.OUT_IN_Q:
        q_done = coming.last & q_done & (pairs.m0 + wg * ROWS >= pairs.len_q)
    mbarrier.arrive(bars.k_empty.index(coming.slot), count=1, pred=k_done)
    mbarrier.arrive(bars.q_empty.index(coming.q_slot), count=1, pred=q_done)


@gluon.jit
def give_back(owed, bars):
    """Let the producer have the buffer of queries from which results were written, if it is ``owed`` one, once they are
    read; returns what is owed then, none."""
    if owed >= 0:
        tma_store_wait(0)
        mbarrier.arrive(bars.q_empty.index(owed), count=1)
    return -1


@gluon.jit
def skip(tile, turn, blocks, bars, wg, T: gl.constexpr):
    """Go past the first ``blocks`` blocks of a tile without computing anything: release each buffer (if the tile is
    done with it) and pass each turn on."""
    q_empty = bars.q_empty.index(slot_of_queries(tile.number, wg, T))
    for i in range(blocks):
        old = (tile.block + i) % T.STAGES
        new = (tile.block + i + 1) % T.STAGES
        phase = ((tile.block + i + 1) // T.STAGES) & 1
        mbarrier.wait(bars.k_full.index(new), phase)
        if T.PING_PONG:
            turn = wait_turn(turn, wg)
            turn = pass_turn(turn, (wg + 1) % T.CONSUMERS)
        mbarrier.arrive(bars.k_empty.index(new), count=1, pred=tile.done)
        mbarrier.arrive(q_empty, count=1, pred=i == blocks - 1)
        mbarrier.wait(bars.v_full.index(new), phase)
        mbarrier.arrive(bars.v_empty.index(old), count=1, pred=tile.done)
    return turn
