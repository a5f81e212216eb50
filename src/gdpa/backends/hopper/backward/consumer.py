"""What each of the backward's two consumers does: see kernel.py for the pipeline."""

from gdpa.backends.hopper.backward.bundles import Pairs
from gdpa.backends.hopper.backward.function import (
    both_masked,
    columns_of,
    learn,
    no_params,
    placed,
    settle_params,
    shifted,
    times_slope,
    with_params,
)
from gdpa.backends.hopper.backward.halves import dq_product, own_keys, share_ds
from gdpa.backends.hopper.backward.out import all_written, buffer_for, dq_out, free_buffer, send
from gdpa.backends.hopper.compat import gl, gluon, mbarrier, tma_store_wait, warpgroup_mma, warpgroup_mma_wait
from gdpa.backends.hopper.messages import PAIRS, PARAMS, TILE, told
from gdpa.backends.hopper.pipeline import ROWS, number_of_consumer, pass_turn, ragged, wait_turn
from gdpa.backends.hopper.row_sums import DELTA, ROW, divided_by_row, terms_of, through_sums
from gdpa.backends.hopper.scheduling.schedule import items_of
from gdpa.device.rounding import ds_factors


@gluon.constexpr_function
def scores_layout(T):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.BLOCK_M, 16])


@gluon.constexpr_function
def sums_layout(T):
    """Of dk and dv."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.D, 16])


@gluon.constexpr_function
def dq_layout():
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])


@gluon.jit
def dp_product(v, do, bars, n, stage, phase, zero):
    """v do^T, started and not waited for, of the n-th tile's v and the do in buffer ``stage``."""
    mbarrier.wait(bars.v_full, n & 1)
    mbarrier.wait(bars.do_full.index(stage), phase)
    return warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def steps_of_tile(q_full, steps, step, T: gl.constexpr):
    """How many steps the tile has that begins with step ``step``; 0 if there are no more tiles."""
    mbarrier.wait(q_full.index(step % T.STAGES), (step // T.STAGES) & 1)
    n_steps, _, _, _ = told(steps, step, TILE, T)
    return n_steps


@gluon.jit
def weights_and_slopes(s, params, pairs, columns, bufs, stage, CODE: gl.constexpr, wg, T: gl.constexpr):
    """(p rounded, f') of a step's scores, as both_masked leaves them."""
    if T.PLACED:
        p, slope = placed(s, params, pairs, columns, CODE, wg, T)
    else:
        p, slope = CODE.BACKWARD(s, params)
    if T.NORM != "none":
        p, slope = divided_by_row(p, slope, terms_of(bufs.terms, stage, ROW, scores_layout(T)), T)
    return both_masked(p.to(bufs.q.dtype), slope, pairs, CODE, wg, T)


@gluon.jit
def gradient_of_scores(dp, slope, pairs, columns, bufs, stage, factor, CODE: gl.constexpr, wg, T: gl.constexpr):
    """ds, rounded; in float16 times ``factor`` before that (see device/rounding.py). Gradients of tables are added."""
    if T.NORM != "none":
        dp = through_sums(dp, terms_of(bufs.terms, stage, DELTA, scores_layout(T)), slope, T)
    ds = times_slope(dp, slope, pairs.cut, T)
    learn(ds, pairs, columns, CODE, wg, T)
    if T.LEAST_FACTOR > 0:
        ds = ds * factor
    return ds.to(bufs.q.dtype)


@gluon.jit
def tile_of_keys(n, n_steps, state, outputs, bufs, bars, ring_bars, work, inputs, CODE: gl.constexpr, wg,
                 T: gl.constexpr):  # fmt: skip
    """A consumer's 64 keys of the program's n-th tile, over all queries that see them. Takes and returns the ``state``
    that is carried from tile to tile: the number of steps so far, the token of the turns, the accumulators dk and dv,
    and the sums for the params' gradients."""
    step, turn, dk, dv, sums = state
    steps, scale, places = bufs.steps, inputs.scale, inputs.places
    BLOCK_M: gl.constexpr = T.BLOCK_M  # a shape takes constexprs, not fields of one
    D: gl.constexpr = T.D
    s_layout: gl.constexpr = scores_layout(T)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout(T), 2)
    zero_s = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    zero_dq = gl.zeros([ROWS, ROWS], gl.float32, dq_layout())
    dq_buffers = (buffer_for(bufs.out, outputs.dq, wg), buffer_for(bufs.out, outputs.ring, wg))
    dkv_buffer = buffer_for(bufs.out, outputs.dk, wg)
    before_rounding, ds_scale = ds_factors(scale * inputs.out_scale, T.LEAST_FACTOR)
    slot = n & 1
    mbarrier.wait(bars.k_full.index(slot), (n >> 1) & 1)
    for i in range(n_steps):
        if T.ALIKE:
            wg = number_of_consumer(step)  # here, or the compiler keeps registers for all that follows from it
        stage = step % T.STAGES
        phase = (step // T.STAGES) & 1
        before = (step & 1) ^ 1
        q = bufs.q.index(stage).reshape([BLOCK_M, D])
        do = bufs.do.index(stage).reshape([BLOCK_M, D])
        mbarrier.wait(bars.q_full.index(stage), phase)
        hq, last_of_head, number, _ = told(steps, step, PARAMS, T)  # the compiler drops it where there are none
        params = CODE.LOAD_PARAMS(inputs.p_params, inputs.stride_params, hq)
        s = warpgroup_mma(own_keys(bufs.k, slot, wg, T), q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        if T.IN_TURN:
            free_buffer(steps, step, ring_bars.free, T)
        if T.N_PARAMS > 0:
            dp = dp_product(own_keys(bufs.v, 0, wg, T), do, bars, n, stage, phase, zero_s)
            s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        else:
            columns = columns_of(steps, step, places, s_layout, CODE, wg, T)
            s = warpgroup_mma_wait(0, deps=(s,))
        if T.PING_PONG:
            turn = wait_turn(turn, wg)
        cut, rows_left, keys_left, len_k = told(steps, step, PAIRS, T)
        pairs = Pairs(cut != 0, rows_left, keys_left, len_k, work.band, steps, step, places)
        if not T.SCALE_FOLDED:
            s = s * scale
        if T.SHIFTED:
            s = shifted(s, params, pairs, columns, CODE, wg, T)
        if T.N_PARAMS > 0:
            p, ds, sums = with_params(s, dp, sums, params, pairs, bufs, stage, before_rounding, CODE, wg, T)
        else:
            p, slope = weights_and_slopes(s, params, pairs, columns, bufs, stage, CODE, wg, T)
            # Only now: with dp's accumulator in flight there would be no registers left to interleave the function
            # of several scores, and it would take three times as long.
            dp = dp_product(own_keys(bufs.v, 0, wg, T), do, bars, n, stage, phase, zero_s)
        p = gl.convert_layout(p, a_layout)
        dv = warpgroup_mma(p, do, dv, use_acc=i > 0, is_async=True)
        if T.IN_TURN:
            step = all_written(step)  # what was sent in the step before
            mbarrier.arrive(ring_bars.done.index(step & 1), count=1, pred=step > 1)
        if T.PING_PONG:
            turn = pass_turn(turn, 1 - wg)
        if T.N_PARAMS == 0:
            dp = warpgroup_mma_wait(1, deps=(dp,))
        if i == n_steps - 1:
            mbarrier.arrive(bars.v_empty, count=1)
        if T.N_PARAMS == 0:
            ds = gradient_of_scores(dp, slope, pairs, columns, bufs, stage, before_rounding, CODE, wg, T)
        sums = settle_params(
            inputs.p_dparams, sums, params, last_of_head != 0, number, work.heads, hq, s_layout, CODE, wg, T
        )
        old_slot = slot ^ (i == 0).to(gl.int32)
        if T.DQ == "none":
            dk = warpgroup_mma(gl.convert_layout(ds, a_layout), q, dk, use_acc=i > 0, is_async=True)
        else:
            share_ds(ds, bufs, bars, step, wg, T)
            # dq of the step before, which may be the last one of another tile of keys
            mbarrier.wait(bars.ds_full.index(before), ((step - 1) >> 1) & 1, pred=step > 0)
            dq = dq_product(bufs, old_slot, before, zero_dq, wg, T)
            ds = gl.convert_layout(ds, a_layout)
            dk = warpgroup_mma(ds, q, dk, use_acc=i > 0, is_async=True)
            dq = warpgroup_mma_wait(1, deps=(dq,))
            mbarrier.arrive(bars.ds_empty.index(before), count=1, pred=step > 0)
            if step > 0:
                dq_out(outputs, dq_buffers, dq, steps, step - 1, ring_bars.ready, ds_scale, wg, T)
        if (i == 0) & (n > 0):
            mbarrier.arrive(bars.k_empty.index(old_slot), count=1)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        mbarrier.arrive(bars.q_empty.index(stage), count=1)
        step += 1
    _, _, keys_left, _ = told(steps, step - 1, PAIRS, T)
    _, end_dk, end_dv, h = told(steps, step - 1, TILE, T)
    send(outputs.dv, dkv_buffer, dv * inputs.out_scale, ragged(end_dv, 0, wg * ROWS - keys_left, h, 0))
    send(outputs.dk, dkv_buffer, dk * ds_scale, ragged(end_dk, 0, wg * ROWS - keys_left, h, 0))
    return step, turn, dk, dv, sums


@gluon.jit
def last_dq(n, step, outputs, bufs, bars, ring_bars, inputs, wg, T: gl.constexpr):
    """The dq of a program's very last step, which no further step computes; ``n``: how many tiles it had."""
    zero_dq = gl.zeros([ROWS, ROWS], gl.float32, dq_layout())
    dq_buffers = (buffer_for(bufs.out, outputs.dq, wg), buffer_for(bufs.out, outputs.ring, wg))
    _, ds_scale = ds_factors(inputs.scale * inputs.out_scale, T.LEAST_FACTOR)
    if T.IN_TURN:
        free_buffer(bufs.steps, step, ring_bars.free, T)
        step = all_written(step)
        mbarrier.arrive(ring_bars.done.index(step & 1), count=1, pred=step > 1)
    before = (step - 1) & 1
    mbarrier.wait(bars.ds_full.index(before), ((step - 1) >> 1) & 1)
    dq = dq_product(bufs, (n - 1) & 1, before, zero_dq, wg, T)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    dq_out(outputs, dq_buffers, dq, bufs.steps, step - 1, ring_bars.ready, ds_scale, wg, T)
    if T.IN_TURN:
        step = all_written(step)
        mbarrier.arrive(ring_bars.done.index(before), count=1)


@gluon.jit
def consumer(outputs, bufs, bars, ring_bars, work, inputs, CODE: gl.constexpr, wg, T: gl.constexpr):
    """64 keys of every tile of the program. ``wg``: which ones, 0 or 1; consumers that are ALIKE find it out."""
    if T.ALIKE:
        wg = number_of_consumer(0)
    D: gl.constexpr = T.D
    turn = 0
    if T.PING_PONG:
        if wg == 1:
            turn = pass_turn(turn, 0)
    step = 0
    dk = gl.zeros([ROWS, D], gl.float32, sums_layout(T))
    dv = gl.zeros([ROWS, D], gl.float32, sums_layout(T))
    sums = no_params(scores_layout(T), T)
    if T.TAKES:
        n = 0
        n_steps = steps_of_tile(bars.q_full, bufs.steps, step, T)
        while n_steps > 0:
            state = (step, turn, dk, dv, sums)
            step, turn, dk, dv, sums = tile_of_keys(
                n, n_steps, state, outputs, bufs, bars, ring_bars, work, inputs, CODE, wg, T
            )
            n += 1
            n_steps = steps_of_tile(bars.q_full, bufs.steps, step, T)
    else:  # a loop with a known end needs fewer registers: 2 % at D 64
        n = items_of(gl.program_id(0), gl.num_programs(0), work.n_items, not T.IN_TURN)
        for i in range(n):
            n_steps = steps_of_tile(bars.q_full, bufs.steps, step, T)
            state = (step, turn, dk, dv, sums)
            step, turn, dk, dv, sums = tile_of_keys(
                i, n_steps, state, outputs, bufs, bars, ring_bars, work, inputs, CODE, wg, T
            )
    if T.DQ != "none" and step > 0:
        last_dq(n, step, outputs, bufs, bars, ring_bars, inputs, wg, T)
    tma_store_wait(0)
