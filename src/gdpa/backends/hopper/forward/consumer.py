"""The warpgroups of the forward that compute."""

from gdpa.backends.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from gdpa.backends.hopper.forward.bundles import Pairs
from gdpa.backends.hopper.forward.columns import handed_out, look_up, pass_round
from gdpa.backends.hopper.forward.items import find_tile, with_keys
from gdpa.backends.hopper.forward.weights import block_at, weights
from gdpa.backends.hopper.pipeline import ROWS, number_of_consumer, pass_turn, ragged, wait_turn
from gdpa.backends.hopper.scheduling.scanning import first_unused_row
from gdpa.backends.hopper.scheduling.schedule import items_of
from gdpa.backends.hopper.scheduling.taking import receive
from gdpa.backends.hopper.sums import add_block, divided, no_sums


@gluon.constexpr_function
def scores_layout(T):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.BLOCK_N, 16])


@gluon.constexpr_function
def out_layout(T):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.DV, 16])


@gluon.jit
def skip(block, turn, blocks, done, q_empty, bars, wg, T: gl.constexpr):
    """Pass by the next ``blocks`` blocks of keys without computing: release each buffer (if ``done`` with it), pass on
    each turn."""
    for i in range(blocks):
        old = (block + i) % T.STAGES
        new = (block + i + 1) % T.STAGES
        phase = ((block + i + 1) // T.STAGES) & 1
        mbarrier.wait(bars.k_full.index(new), phase)
        if T.PING_PONG:
            turn = wait_turn(turn, wg)
            turn = pass_turn(turn, (wg + 1) % T.CONSUMERS)
        mbarrier.arrive(bars.k_empty.index(new), count=1, pred=done)
        mbarrier.arrive(q_empty, count=1, pred=i == blocks - 1)
        mbarrier.wait(bars.v_full.index(new), phase)
        mbarrier.arrive(bars.v_empty.index(old), count=1, pred=done)
    return turn


@gluon.jit
def store_out(o_desc, staged, o, at, T: gl.constexpr):
    """Send a finished tile on its way."""
    DV: gl.constexpr = T.DV
    tma_store_wait(0)
    staged.reshape([ROWS, DV]).store(o.to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, at, staged)


@gluon.jit
def zero_unused(o_desc, staged, work, T: gl.constexpr):
    """This program's share of zeros in rows of no sequence."""
    DV: gl.constexpr = T.DV
    heads, rows = work.heads, work.rows_q
    end = first_unused_row(work.p_table, work.n_items // heads, rows, T.BLOCK_M)
    for i in range(gl.program_id(0), heads * gl.cdiv(rows - end, ROWS), gl.num_programs(0)):
        nothing = gl.zeros([ROWS, DV], gl.float32, out_layout(T))
        store_out(o_desc, staged, nothing, ragged(end, rows - end, i // heads * ROWS, i % heads, 0), T)


@gluon.jit
def buffer_of(block, T: gl.constexpr):
    """The buffer of a block of keys, by its number among all that were loaded, and the phase of its barriers."""
    return block % T.STAGES, (block // T.STAGES) & 1


@gluon.jit
def next_buffer(slot, phase, T: gl.constexpr):
    """The next block's. By counting: to divide takes a consumer 30 clocks in which nothing else goes on."""
    wraps = slot == T.STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def item_of_queries(item, following, more_items, state, o_desc, bufs, bars, work, inputs, CODE: gl.constexpr,
                    wg, T: gl.constexpr):  # fmt: skip
    """All tiles of an item, from the weights of its first block to those of the first block of the ``following`` one,
    if there are ``more_items``. Takes and returns the ``state`` that goes on from item to item: whose turn it is, the
    blocks of keys and tiles of queries that were used up, registers for o, weights of the next block, row sums."""
    turn, block, tile, o, p, sums = state
    blocks, tiles = item.blocks, item.tiles
    BLOCK_N: gl.constexpr = T.BLOCK_N  # a shape takes constexprs, not fields of one
    D: gl.constexpr = T.D
    DV: gl.constexpr = T.DV
    s_layout: gl.constexpr = scores_layout(T)
    o_layout: gl.constexpr = out_layout(T)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, k_width=2)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)  # never read: use_acc=False
    for t in range(tiles):
        m0 = item.r0 + t * T.BLOCK_M
        final = t == tiles - 1  # the next tile is another item's
        done = final | (blocks > T.STAGES)  # with these keys: the next tile loads its own
        active = m0 + wg * ROWS < item.len_q
        idle = 0
        if wg > 0:
            if not active:  # the sequence ends before these queries: leave the tensor cores to the other
                idle = blocks - 1
                q_slot = (tile & 1) * T.CONSUMERS + wg
                turn = skip(block, turn, idle, done, bars.q_empty.index(q_slot), bars, wg, T)
        first_slot, first_phase = buffer_of(block, T)
        old, phase = buffer_of(block + idle, T)
        for i in range(idle, blocks):
            if T.ALIKE:
                wg = number_of_consumer(i)  # here, or the compiler keeps registers for all that follows from it
            last = i == blocks - 1
            moves = last & final
            more = (i < blocks - 1) | (t < tiles - 1) | more_items
            ahead = gl.where(last, gl.where(done, block + blocks, block), block + i + 1)
            new, new_phase = next_buffer(old, phase, T)
            back = last & (not done)  # the next tile begins with the same keys
            new, new_phase = gl.where(back, first_slot, new), gl.where(back, first_phase, new_phase)
            new_tile = tile + last.to(gl.int32)
            q_slot = (new_tile & 1) * T.CONSUMERS + wg
            # Before the products: behind them the function would wait for these.
            params = CODE.LOAD_PARAMS(inputs.p_params, inputs.stride_params, gl.where(moves, following.h, item.h))
            if last:  # to ask for what is there takes 100 clocks, too
                mbarrier.wait(bars.q_full.index(q_slot), (new_tile >> 1) & 1, pred=more)
            mbarrier.wait(bars.k_full.index(new), new_phase, pred=more)
            spot = (
                gl.where(moves, following.b, item.b), gl.where(moves, following.h, item.h),
                gl.where(moves, following.start_q, item.start_q), gl.where(moves, following.start_k, item.start_k),
                inputs.places[0], inputs.places[1],
            )  # fmt: skip
            next_m0 = gl.where(last, gl.where(final, following.r0, m0 + T.BLOCK_M), m0)
            next_j0 = gl.where(last, gl.where(final, following.first, item.first), item.first + (i + 1) * BLOCK_N)
            full = gl.where(moves, following.full_lo, item.full_lo), gl.where(moves, following.full_hi, item.full_hi)
            lengths = gl.where(moves, following.len_q, item.len_q), gl.where(moves, following.len_k, item.len_k)
            j0, cut = block_at(work.steps, ahead, next_j0, full[0], full[1], T)
            pairs = Pairs(next_m0, j0, lengths[0], lengths[1])
            if T.COLUMNS > 0:
                found = look_up(spot, pairs, s_layout, CODE, wg, T)
            if T.PING_PONG:
                turn = wait_turn(turn, wg)
            q = bufs.q.index(q_slot).reshape([ROWS, D])
            k = bufs.k.index(new).reshape([BLOCK_N, D])
            v = bufs.v.index(old).reshape([BLOCK_N, DV])
            s_next = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
            if T.COLUMNS > 0:
                pass_round(found, bufs.columns, wg, T)
                columns = handed_out(found, bufs.columns, s_layout, wg, T)
            o_next = warpgroup_mma(p, v, o, use_acc=i > 0, is_async=True)
            if T.PING_PONG:
                turn = pass_turn(turn, (wg + 1) % T.CONSUMERS)
            if T.COLUMNS == 0:
                columns = look_up(spot, pairs, s_layout, CODE, wg, T)
            s = warpgroup_mma_wait(1, deps=(s_next,))
            next_blocks = gl.where(final, following.blocks, blocks)
            next_done = gl.where(final, following.tiles == 1, t == tiles - 2) | (next_blocks > T.STAGES)
            k_done = gl.where(last, next_done, done)
            q_done = gl.where(last, next_blocks == 1, i == blocks - 2)
            mbarrier.arrive(bars.k_empty.index(new), count=1, pred=k_done)
            mbarrier.arrive(bars.q_empty.index(q_slot), count=1, pred=q_done)
            w = weights(s, params, spot, columns, pairs, cut, work.band, inputs.scale, CODE, wg, T)
            if T.NORM != "none":
                old_sums = sums
                w, total, largest, shrink = add_block(w, sums[0], sums[1], last, T)
                sums = (total, largest)
            # The branch of this wait keeps the function in front of it; without one the assembler moves most of
            # it behind the wait for o, and nothing overlaps.
            mbarrier.wait(bars.v_full.index(new), new_phase, pred=more)
            o, kept = warpgroup_mma_wait(0, deps=(o_next, p))
            p = gl.convert_layout(w.to(bufs.q.dtype), p_layout)  # after the wait: old and new p share registers
            mbarrier.arrive(bars.v_empty.index(old), count=1, pred=done)
            old, phase = new, new_phase
            if T.NORM == "exp":
                if not last:
                    o = o * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
            if last & active:
                start = item.start_q + item.b * work.batch_rows[3]
                if T.PARTS > 1:
                    start += item.part * work.batch_rows[4]
                row = m0 + wg * ROWS
                if T.NORM == "none":
                    result = o * inputs.out_scale
                else:
                    p_sums, step_batch, step_head, p_sink = inputs.row_sums
                    place = item.b.to(gl.int64) * step_batch + item.h.to(gl.int64) * step_head + item.start_q + row
                    result = divided(o, old_sums, inputs.out_scale, p_sums, place, item.len_q - row, p_sink, item.h, T)
                store_out(o_desc, bufs.o.index(wg), result, ragged(start, item.len_q, row, item.h, 0), T)
        tile += 1
        block += gl.where(done, blocks, 0)
    return turn, block, tile, o, p, sums


@gluon.jit
def first_weights(item, bufs, bars, work, inputs, CODE: gl.constexpr, wg, T: gl.constexpr):
    """(weights of the very first block, row sums of it): there is nothing to overlap them with."""
    BLOCK_N: gl.constexpr = T.BLOCK_N
    D: gl.constexpr = T.D
    s_layout: gl.constexpr = scores_layout(T)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout(T), k_width=2)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    mbarrier.wait(bars.q_full.index(wg), 0)
    mbarrier.wait(bars.k_full.index(0), 0)
    q = bufs.q.index(wg).reshape([ROWS, D])
    s = warpgroup_mma(q, bufs.k.index(0).reshape([BLOCK_N, D]).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(bars.k_empty.index(0), count=1, pred=(item.tiles == 1) | (item.blocks > T.STAGES))
    mbarrier.arrive(bars.q_empty.index(wg), count=1, pred=item.blocks == 1)
    params = CODE.LOAD_PARAMS(inputs.p_params, inputs.stride_params, item.h)
    spot = (item.b, item.h, item.start_q, item.start_k, inputs.places[0], inputs.places[1])
    j0, cut = block_at(work.steps, 0, item.first, item.full_lo, item.full_hi, T)
    pairs = Pairs(item.r0, j0, item.len_q, item.len_k)
    found = look_up(spot, pairs, s_layout, CODE, wg, T)
    pass_round(found, bufs.columns, wg, T)
    columns = handed_out(found, bufs.columns, s_layout, wg, T)
    p = weights(s, params, spot, columns, pairs, cut, work.band, inputs.scale, CODE, wg, T)
    sums = ()
    if T.NORM != "none":
        total, largest = no_sums(ROWS, gl.SliceLayout(1, s_layout))
        p, total, largest, unused = add_block(p, total, largest, True, T)
        sums = (total, largest)
    p = gl.convert_layout(p.to(bufs.q.dtype), p_layout)
    mbarrier.wait(bars.v_full.index(0), 0)
    return p, sums


@gluon.jit
def consumer(o_desc, bufs, bars, work, inputs, CODE: gl.constexpr, wg, T: gl.constexpr):
    """64 queries of every tile: scores, function, weighted sum of values. ``wg``: which ones; consumers that are ALIKE
    find it out (see compiled/sharing.py)."""
    if T.ALIKE:
        wg = number_of_consumer(0)
    DV: gl.constexpr = T.DV
    o = gl.zeros([ROWS, DV], gl.float32, out_layout(T))
    turn = 0
    if T.PING_PONG:
        if wg == T.CONSUMERS - 1:
            turn = pass_turn(turn, 0)
    if T.TAKES:
        found, is_one = receive(work.taken, 0, T)
        if is_one:
            item = with_keys(found, work, T)
            p, sums = first_weights(item, bufs, bars, work, inputs, CODE, wg, T)
            block = 0  # of keys, and tiles, that were used up
            tile = 0
            n = 1
            while is_one:
                found, is_one = receive(work.taken, n, T)
                following = with_keys(found, work, T)
                state = (turn, block, tile, o, p, sums)
                turn, block, tile, o, p, sums = item_of_queries(
                    item, following, is_one, state, o_desc, bufs, bars, work, inputs, CODE, wg, T
                )
                item = following
                n += 1
            tma_store_wait(0)
    else:
        count = items_of(gl.program_id(0), gl.num_programs(0), work.n_items)
        if count > 0:
            item = with_keys(find_tile(work, 0, count, T), work, T)
            coming = find_tile(work, 1, count, T)
            p, sums = first_weights(item, bufs, bars, work, inputs, CODE, wg, T)
            block = 0  # of keys, and tiles, that were used up
            tile = 0
            for n in range(count):
                following = with_keys(coming, work, T)
                coming = find_tile(work, n + 2, count, T)
                state = (turn, block, tile, o, p, sums)
                turn, block, tile, o, p, sums = item_of_queries(
                    item, following, n < count - 1, state, o_desc, bufs, bars, work, inputs, CODE, wg, T
                )
                item = following
            if T.SCANS:
                zero_unused(o_desc, bufs.o.index(wg), work, T)
            tma_store_wait(0)
