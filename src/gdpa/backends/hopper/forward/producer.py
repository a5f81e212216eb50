"""The warp of the forward that feeds the consumers."""

from gdpa.backends.hopper.compat import gl, gluon, mbarrier, tma_load
from gdpa.backends.hopper.forward.bias import write_bias
from gdpa.backends.hopper.forward.items import dealt_item, key_range, take_first, take_next, tiles_of
from gdpa.backends.hopper.messages import PAIRS, tell
from gdpa.backends.hopper.pipeline import ROWS, ragged
from gdpa.backends.hopper.scheduling.schedule import items_of
from gdpa.backends.hopper.scheduling.taking import ask_for, recall
from gdpa.device.visits import visited


@gluon.jit
def producer(descs, bufs, bars, work, inputs, CODE: gl.constexpr, T: gl.constexpr):
    """Loads queries, keys and values in the order the consumers use them; with a mask it tells them which keys those
    are."""
    block = 0
    tile = 0
    if T.TAKES:
        n = 0
        take_first(work, T)
        found, is_one = recall(work.taken, 0, 1, T)
        while is_one:
            block, tile = load_item(found, n, block, tile, descs, bufs, bars, work, inputs, CODE, T)
            n += 1
            found, is_one = recall(work.taken, n, 1, T)
    else:
        count = items_of(gl.program_id(0), gl.num_programs(0), work.n_items)
        coming = dealt_item(work, 0, count, T, 1)
        for n in range(count):
            found = coming
            coming = dealt_item(work, n + 1, count, T, 1)
            block, tile = load_item(found, n, block, tile, descs, bufs, bars, work, inputs, CODE, T)


@gluon.jit
def load_item(item, n, block, tile, descs, bufs, bars, work, inputs, CODE: gl.constexpr, T: gl.constexpr):
    """Load the n-th item, a Located one. ``block`` and ``tile``: how many blocks of keys and tiles of queries have been
    loaded before; returned with those of this item."""
    h, b, r0, start_q, len_q, start_k, len_k, part, own_list = item
    q_desc, k_desc, v_desc = descs
    batch_rows = work.batch_rows
    CONSUMERS: gl.constexpr = T.CONSUMERS
    if T.TAKES:
        asked = ask_for(work.p_count)  # for the next item: the answer comes while the loads of this one begin
    first, blocks, full_lo, full_hi = key_range(item, work, T)
    for t in range(tiles_of(item, T)):
        for w in gl.static_range(CONSUMERS):
            slot = (tile & 1) * CONSUMERS + w
            mbarrier.wait(bars.q_empty.index(slot), ((tile >> 1) & 1) ^ 1)
            mbarrier.expect(bars.q_full.index(slot), q_desc.block_type.nbytes)
            at = ragged(start_q + b * batch_rows.q, len_q, r0 + t * T.BLOCK_M + w * ROWS, h, 0)
            tma_load(q_desc, at, bars.q_full.index(slot), bufs.q.index(slot))
            if T.BIAS_FACTOR != 0:
                m0 = r0 + t * T.BLOCK_M
                full = bars.q_full.index(slot)
                write_bias(bufs.bias[0].index(slot), full, item, m0, m0 + w * ROWS, inputs, False, CODE, T)
        tile += 1
        if (t == 0) | (blocks > T.STAGES):
            for i in range(blocks):
                slot = block % T.STAGES
                phase = ((block // T.STAGES) & 1) ^ 1
                row = first + i * T.BLOCK_N
                if T.LISTED:
                    number, cut = visited(work.visits, own_list, i)
                    row = number * T.BLOCK_N
                mbarrier.wait(bars.k_empty.index(slot), phase)
                if T.LISTED:
                    tell(work.steps, block, PAIRS, row, cut, 0, 0, T)
                mbarrier.expect(bars.k_full.index(slot), k_desc.block_type.nbytes)
                at = ragged(start_k + b * batch_rows.k, len_k, row, h // T.GROUP, 0)
                tma_load(k_desc, at, bars.k_full.index(slot), bufs.k.index(slot))
                if T.BIAS_FACTOR != 0:
                    full = bars.k_full.index(slot)
                    write_bias(bufs.bias[1].index(slot), full, item, r0, row, inputs, True, CODE, T)
                mbarrier.wait(bars.v_empty.index(slot), phase)
                mbarrier.expect(bars.v_full.index(slot), v_desc.block_type.nbytes)
                at = ragged(start_k + b * batch_rows.v, len_k, row, h // T.GROUP, 0)
                tma_load(v_desc, at, bars.v_full.index(slot), bufs.v.index(slot))
                block += 1
                if T.TAKES:
                    if (t == 0) & (i == 0):
                        take_next(work, asked, n + 1, T)
    return block, tile
