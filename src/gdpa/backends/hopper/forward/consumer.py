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
from gdpa.backends.hopper.forward.bias import queue_bias
from gdpa.backends.hopper.forward.blocks import (
    block_after,
    buffer_of,
    give_back,
    release_scores,
    skip,
    slot_of_queries,
    tile_of,
    wait_for,
    whereabouts,
)
from gdpa.backends.hopper.forward.bundles import Pairs
from gdpa.backends.hopper.forward.columns import handed_out, look_up, pass_round
from gdpa.backends.hopper.forward.items import dealt_item, with_keys
from gdpa.backends.hopper.forward.weights import block_at, weights
from gdpa.backends.hopper.pipeline import ROWS, number_of_consumer, pass_turn, ragged, wait_turn
from gdpa.backends.hopper.row_sums import add_block, divided, no_sums
from gdpa.backends.hopper.scheduling.scanning import first_unused_row
from gdpa.backends.hopper.scheduling.schedule import items_of
from gdpa.backends.hopper.scheduling.taking import receive


@gluon.constexpr_function
def scores_layout(T):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.BLOCK_N, 16])


@gluon.constexpr_function
def out_layout(T):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.DV, 16])


@gluon.jit
def store_out(o_desc, staged, o, at, T: gl.constexpr):
    """Write a finished tile through shared memory by TMA, without waiting for it."""
    DV: gl.constexpr = T.DV
    tma_store_wait(0)
    staged.reshape([ROWS, DV]).store(o.to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, at, staged)


@gluon.jit
def write_tile(o, sums, item, tile, o_desc, bufs, work, inputs, wg, T: gl.constexpr):
    """Write this consumer's 64 rows of a finished tile, divided by their row ``sums`` if there are any."""
    start = item.start_q + item.b * work.batch_rows.out
    if T.PARTS > 1:
        start += item.part * work.batch_rows.part
    row = tile.m0 + wg * ROWS
    place = wg
    if T.OUT_IN_Q:
        place = slot_of_queries(tile.number, wg, T)
    staged = bufs.o.index(place)
    if T.NORM == "none":
        result = o * inputs.out_scale
    else:
        p_sums, step_batch, step_head, p_sink = inputs.row_sums
        at = item.b.to(gl.int64) * step_batch + item.h.to(gl.int64) * step_head + item.start_q + row
        result = divided(o, sums, inputs.out_scale, p_sums, at, item.len_q - row, p_sink, item.h, T)
    store_out(o_desc, staged, result, ragged(start, item.len_q, row, item.h, 0), T)


@gluon.jit
def zero_unused(o_desc, staged, work, T: gl.constexpr):
    """Write this program's share of the zeros in rows of no sequence, where no list's kernel does (T.SCANS)."""
    DV: gl.constexpr = T.DV
    heads, rows = work.heads, work.rows_q
    end = first_unused_row(work.p_table, work.n_items // heads, rows, T.BLOCK_M)
    for i in range(gl.program_id(0), heads * gl.cdiv(rows - end, ROWS), gl.num_programs(0)):
        nothing = gl.zeros([ROWS, DV], gl.float32, out_layout(T))
        store_out(o_desc, staged, nothing, ragged(end, rows - end, i // heads * ROWS, i % heads, 0), T)


@gluon.jit
def item_of_queries(item, following, more_items, state, o_desc, bufs, bars, work, inputs, CODE: gl.constexpr,
                    wg, T: gl.constexpr):  # fmt: skip
    """All tiles of an item. It begins with the weights of the item's first block, and ends with those of the first
    block of the ``following`` item, if there are ``more_items``. Takes and returns the ``state`` that is carried from
    item to item: the token of the turns, the blocks of keys and the tiles of queries used up so far, the accumulator o,
    the weights p of the next block, its row sums, and the buffer of queries that it owes the producer."""
    turn, block, number, o, p, sums, owed = state
    BLOCK_N: gl.constexpr = T.BLOCK_N  # a shape takes constexprs, not fields of one
    D: gl.constexpr = T.D
    DV: gl.constexpr = T.DV
    s_layout: gl.constexpr = scores_layout(T)
    o_layout: gl.constexpr = out_layout(T)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, k_width=2)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)  # never read: use_acc=False
    for t in range(item.tiles):
        tile = tile_of(item, t, block, number, wg, T)
        idle = 0
        if wg > 0:
            if not tile.active:  # the sequence ends before these queries: leave the tensor cores to the other
                idle = item.blocks - 1
                turn = skip(tile, turn, idle, bars, wg, T)
        at = buffer_of(block + idle, T)
        for i in range(idle, item.blocks):
            if T.ALIKE:
                wg = number_of_consumer(i)  # here, or the compiler keeps registers for all that follows from it
            coming = block_after(i, at, item, tile, more_items, wg, T)
            # Before the products: behind them the function would wait for these.
            h = gl.where(coming.moves, following.h, item.h)
            params = CODE.LOAD_PARAMS(inputs.p_params, inputs.stride_params, h)
            if T.OUT_IN_Q:
                if (i > 0) | coming.last:  # not at once, but before the producer must have it
                    owed = give_back(owed, bars)
            wait_for(coming, bars, T)
            sequence, pairs, cut = whereabouts(i, coming, item, following, tile, work, T)
            b, h, start_q, start_k = sequence
            spot = (b, h, start_q, start_k, inputs.places[0], inputs.places[1])
            if T.COLUMNS > 0:
                found = look_up(spot, pairs, s_layout, CODE, wg, T)
            if T.PING_PONG:
                turn = wait_turn(turn, wg)
            q = bufs.q.index(coming.q_slot).reshape([ROWS, D])
            k = bufs.k.index(coming.slot).reshape([BLOCK_N, D])
            v = bufs.v.index(at[0]).reshape([BLOCK_N, DV])
            bias = nothing
            if T.BIAS_FACTOR != 0:
                bias = queue_bias(nothing, bufs.bias, coming.q_slot, coming.slot)
            s_next = warpgroup_mma(q, k.permute((1, 0)), bias, use_acc=T.BIAS_FACTOR != 0, is_async=True)
            if T.COLUMNS > 0:
                pass_round(found, bufs.columns, wg, T)
                columns = handed_out(found, bufs.columns, s_layout, wg, T)
            o_next = warpgroup_mma(p, v, o, use_acc=i > 0, is_async=True)
            if T.PING_PONG:
                turn = pass_turn(turn, (wg + 1) % T.CONSUMERS)
            if T.COLUMNS == 0:
                columns = look_up(spot, pairs, s_layout, CODE, wg, T)
            s = warpgroup_mma_wait(1, deps=(s_next,))
            release_scores(i, coming, item, following, tile, pairs, bars, wg, T)
            w = weights(s, params, spot, columns, pairs, cut, work.band, inputs.scale, CODE, wg, T)
            old_sums = sums
            if T.NORM != "none":
                w, total, largest, shrink = add_block(w, sums[0], sums[1], coming.last, T)
                sums = (total, largest)
            # The branch of this wait keeps the function in front of it; without one the assembler moves most of
            # it behind the wait for o, and nothing overlaps.
            mbarrier.wait(bars.v_full.index(coming.slot), coming.phase, pred=coming.more)
            o, kept = warpgroup_mma_wait(0, deps=(o_next, p))
            p = gl.convert_layout(w.to(bufs.q.dtype), p_layout)  # after the wait: old and new p share registers
            mbarrier.arrive(bars.v_empty.index(at[0]), count=1, pred=tile.done)
            at = (coming.slot, coming.phase)
            if T.NORM == "exp":
                if not coming.last:
                    o = o * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
            if coming.last & tile.active:
                write_tile(o, old_sums, item, tile, o_desc, bufs, work, inputs, wg, T)
                if T.OUT_IN_Q:
                    owed = slot_of_queries(tile.number, wg, T)
        number += 1
        block += gl.where(tile.done, item.blocks, 0)
    return turn, block, number, o, p, sums, owed


@gluon.jit
def first_weights(item, bufs, bars, work, inputs, CODE: gl.constexpr, wg, T: gl.constexpr):
    """(weights, row sums) of the program's very first block, which nothing overlaps with."""
    BLOCK_N: gl.constexpr = T.BLOCK_N
    D: gl.constexpr = T.D
    s_layout: gl.constexpr = scores_layout(T)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout(T), k_width=2)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    mbarrier.wait(bars.q_full.index(wg), 0)
    mbarrier.wait(bars.k_full.index(0), 0)
    q = bufs.q.index(wg).reshape([ROWS, D])
    k = bufs.k.index(0).reshape([BLOCK_N, D])
    bias = nothing
    if T.BIAS_FACTOR != 0:
        bias = queue_bias(nothing, bufs.bias, wg, 0)
    s = warpgroup_mma(q, k.permute((1, 0)), bias, use_acc=T.BIAS_FACTOR != 0, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(bars.k_empty.index(0), count=1, pred=(item.tiles == 1) | (item.blocks > T.STAGES))
    q_done = item.blocks == 1
    if T.OUT_IN_Q:
        q_done &= item.r0 + wg * ROWS >= item.len_q
    mbarrier.arrive(bars.q_empty.index(wg), count=1, pred=q_done)
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
            block = 0  # blocks of keys, and tiles, that were used up
            number = 0
            owed = -1  # no buffer
            n = 1
            while is_one:
                found, is_one = receive(work.taken, n, T)
                following = with_keys(found, work, T)
                state = (turn, block, number, o, p, sums, owed)
                turn, block, number, o, p, sums, owed = item_of_queries(
                    item, following, is_one, state, o_desc, bufs, bars, work, inputs, CODE, wg, T
                )
                item = following
                n += 1
            tma_store_wait(0)
    else:
        count = items_of(gl.program_id(0), gl.num_programs(0), work.n_items)
        if count > 0:
            item = with_keys(dealt_item(work, 0, count, T), work, T)
            coming = dealt_item(work, 1, count, T)
            p, sums = first_weights(item, bufs, bars, work, inputs, CODE, wg, T)
            block = 0  # blocks of keys, and tiles, that were used up
            number = 0
            owed = -1  # no buffer
            for n in range(count):
                following = with_keys(coming, work, T)
                coming = dealt_item(work, n + 2, count, T)
                state = (turn, block, number, o, p, sums, owed)
                turn, block, number, o, p, sums, owed = item_of_queries(
                    item, following, n < count - 1, state, o_desc, bufs, bars, work, inputs, CODE, wg, T
                )
                item = following
            if T.SCANS:
                zero_unused(o_desc, bufs.o.index(wg), work, T)
            tma_store_wait(0)
