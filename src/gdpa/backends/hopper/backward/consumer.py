"""What each of the two warpgroups that compute does in the backward: see kernel.py."""

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
from gdpa.backends.hopper.backward.out import all_written, buffer_for, dq_out, dq_product, free_buffer, send, share_ds
from gdpa.backends.hopper.backward.steps import PAIRS, PARAMS, TILE, told
from gdpa.backends.hopper.compat import gl, gluon, mbarrier, tma_store_wait, warpgroup_mma, warpgroup_mma_wait
from gdpa.backends.hopper.pipeline import ROWS, pass_turn, ragged, wait_turn
from gdpa.backends.hopper.scheduling.schedule import items_of
from gdpa.backends.hopper.sums import DELTA, ROW, divided_by_row, terms_of, through_sums
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
def dp_product(v, do, v_full, do_full, n, stage, phase, zero):
    """v do^T, running: of the n-th tile's v and what stage ``stage`` holds."""
    mbarrier.wait(v_full, n & 1)
    mbarrier.wait(do_full.index(stage), phase)
    return warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def steps_of_tile(q_full, steps, step, T: gl.constexpr):
    """How many steps the tile takes that begins with step ``step``; 0 if there is none."""
    mbarrier.wait(q_full.index(step % T.STAGES), (step // T.STAGES) & 1)
    n_steps, _, _, _ = told(steps, step, TILE, T)
    return n_steps


@gluon.jit
def tile_of_keys(
    n, n_steps, step, turn, dk, dv, sums, outputs, shared, band, heads, p_params, stride_params, p_dparams, places,
    scale, out_scale, BACKWARD: gl.constexpr, LOAD_PARAMS: gl.constexpr, SHIFT: gl.constexpr, LEARN: gl.constexpr,
    KEEP: gl.constexpr, COLUMNS: gl.constexpr, WG: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """A consumer's 64 keys of the program's n-th tile, over all queries that see them. Returns what goes on to the next
    tile: the number of steps so far, turns, registers for dk and dv, sums for params."""
    dq_descs, dk_desc, dv_desc = outputs
    bufs, bars, ring_bars, steps, terms_sm = shared
    q_sm, k_sm, v_sm, do_sm, ds_sm, out_sm = bufs
    q_full, q_empty, do_full, k_full, k_empty, v_full, v_empty, ds_full, ds_empty = bars
    ready, free, done, published = ring_bars
    BLOCK_M: gl.constexpr = T.BLOCK_M  # a shape takes constexprs, not fields of one
    BLOCK_N: gl.constexpr = T.BLOCK_N
    D: gl.constexpr = T.D
    dtype: gl.constexpr = q_sm.dtype
    s_layout: gl.constexpr = scores_layout(T)
    a_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout(T), 2)
    zero_s = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    zero_dq = gl.zeros([ROWS, ROWS], gl.float32, dq_layout())
    dq_buffers = (buffer_for(out_sm, dq_descs[0], WG), buffer_for(out_sm, dq_descs[1], WG))
    dkv_buffer = buffer_for(out_sm, dk_desc, WG)
    v_half = v_sm.reshape([BLOCK_N, D]).slice(WG * ROWS, ROWS, dim=0)
    before_rounding, ds_scale = ds_factors(scale * out_scale, T.PRESCALED)
    slot = n & 1
    k = k_sm.index(slot).reshape([BLOCK_N, D])
    mbarrier.wait(k_full.index(slot), (n >> 1) & 1)
    for i in range(n_steps):
        stage = step % T.STAGES
        phase = (step // T.STAGES) & 1
        before = (step & 1) ^ 1
        q = q_sm.index(stage).reshape([BLOCK_M, D])
        do = do_sm.index(stage).reshape([BLOCK_M, D])
        mbarrier.wait(q_full.index(stage), phase)
        hq, last_of_head, number, _ = told(steps, step, PARAMS, T)  # the compiler drops it where there are none
        params = LOAD_PARAMS(p_params, stride_params, hq)
        s = warpgroup_mma(k.slice(WG * ROWS, ROWS, dim=0), q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
        if T.IN_TURN:
            free_buffer(steps, step, free, T)
        if T.N_PARAMS > 0:
            dp = dp_product(v_half, do, v_full, do_full, n, stage, phase, zero_s)
            s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        else:
            columns = columns_of(steps, step, places, s_layout, COLUMNS, WG, T)
            s = warpgroup_mma_wait(0, deps=(s,))
        if T.PING_PONG:
            turn = wait_turn(turn, WG)
        cut, rows_left, keys_left, len_k = told(steps, step, PAIRS, T)
        pairs = (cut != 0, rows_left, keys_left, len_k, band, steps, step, places)
        if not T.SCALE_FOLDED:
            s = s * scale
        if T.SHIFTED:
            s = shifted(s, params, pairs, columns, SHIFT, WG, T)
        if T.N_PARAMS > 0:
            p, ds, sums = with_params(s, dp, sums, params, pairs, before_rounding, dtype, BACKWARD, KEEP, WG, T)
        else:
            if T.PLACED:
                p, slope = placed(s, params, pairs, columns, BACKWARD, WG, T)
            else:
                p, slope = BACKWARD(s, params)
            if T.NORM != "none":
                p, slope = divided_by_row(p, slope, terms_of(terms_sm, stage, ROW, s_layout), T)
            p, slope = both_masked(p.to(dtype), slope, pairs, KEEP, WG, T)
            # Only now: with dp's accumulator in flight there would be no registers left to interleave the function
            # of several scores, and it would take three times as long.
            dp = dp_product(v_half, do, v_full, do_full, n, stage, phase, zero_s)
        p = gl.convert_layout(p, a_layout)
        dv = warpgroup_mma(p, do, dv, use_acc=i > 0, is_async=True)
        if T.IN_TURN:
            step = all_written(step)  # what was sent in the step before
            mbarrier.arrive(done.index(step & 1), count=1, pred=step > 1)
        if T.PING_PONG:
            turn = pass_turn(turn, 1 - WG)
        if T.N_PARAMS == 0:
            dp = warpgroup_mma_wait(1, deps=(dp,))
        if i == n_steps - 1:
            mbarrier.arrive(v_empty, count=1)
        if T.NORM != "none":
            dp = through_sums(dp, terms_of(terms_sm, stage, DELTA, s_layout), slope, T)
        if T.N_PARAMS == 0:
            ds = times_slope(dp, slope, pairs, T)
            learn(ds, pairs, columns, LEARN, WG, T)
            if T.PRESCALED:
                ds = ds * before_rounding
            ds = ds.to(dtype)
        sums = settle_params(p_dparams, sums, last_of_head != 0, number, heads, hq, s_layout, WG, T)
        old_slot = slot ^ (i == 0).to(gl.int32)
        if T.DQ == "none":
            dk = warpgroup_mma(gl.convert_layout(ds, a_layout), q, dk, use_acc=i > 0, is_async=True)
        else:
            share_ds(ds, ds_sm, ds_full, ds_empty, step, WG)
            # dq of the step before, which may be the last one of another tile of keys
            mbarrier.wait(ds_full.index(before), ((step - 1) >> 1) & 1, pred=step > 0)
            dq = dq_product(k_sm.index(old_slot), ds_sm.index(before), zero_dq, WG, T)
            ds = gl.convert_layout(ds, a_layout)
            dk = warpgroup_mma(ds, q, dk, use_acc=i > 0, is_async=True)
            dq = warpgroup_mma_wait(1, deps=(dq,))
            mbarrier.arrive(ds_empty.index(before), count=1, pred=step > 0)
            if step > 0:
                dq_out(dq_descs, dq_buffers, dq, steps, step - 1, ready, ds_scale, WG, T)
        if (i == 0) & (n > 0):
            mbarrier.arrive(k_empty.index(old_slot), count=1)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        mbarrier.arrive(q_empty.index(stage), count=1)
        step += 1
    _, _, keys_left, _ = told(steps, step - 1, PAIRS, T)
    _, end_dk, end_dv, h = told(steps, step - 1, TILE, T)
    send(dv_desc, dkv_buffer, dv * out_scale, ragged(end_dv, 0, WG * ROWS - keys_left, h, 0))
    send(dk_desc, dkv_buffer, dk * ds_scale, ragged(end_dk, 0, WG * ROWS - keys_left, h, 0))
    return step, turn, dk, dv, sums


@gluon.jit
def last_dq(n, step, dq_descs, shared, scale, out_scale, WG: gl.constexpr, T: gl.constexpr):
    """The dq of a program's very last step; ``n``: tiles that it had."""
    bufs, bars, ring_bars, steps, _ = shared
    q_sm, k_sm, v_sm, do_sm, ds_sm, out_sm = bufs
    q_full, q_empty, do_full, k_full, k_empty, v_full, v_empty, ds_full, ds_empty = bars
    ready, free, done, published = ring_bars
    zero_dq = gl.zeros([ROWS, ROWS], gl.float32, dq_layout())
    dq_buffers = (buffer_for(out_sm, dq_descs[0], WG), buffer_for(out_sm, dq_descs[1], WG))
    _, ds_scale = ds_factors(scale * out_scale, T.PRESCALED)
    if T.IN_TURN:
        free_buffer(steps, step, free, T)
        step = all_written(step)
        mbarrier.arrive(done.index(step & 1), count=1, pred=step > 1)
    before = (step - 1) & 1
    mbarrier.wait(ds_full.index(before), ((step - 1) >> 1) & 1)
    dq = dq_product(k_sm.index((n - 1) & 1), ds_sm.index(before), zero_dq, WG, T)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    dq_out(dq_descs, dq_buffers, dq, steps, step - 1, ready, ds_scale, WG, T)
    if T.IN_TURN:
        step = all_written(step)
        mbarrier.arrive(done.index(before), count=1)


@gluon.jit
def consumer(
    dq_descs, dk_desc, dv_desc, bufs, bars, ring_bars, steps, terms_sm, heads, n_items, band, p_params, stride_params,
    p_dparams, places, scale, out_scale, BACKWARD: gl.constexpr, LOAD_PARAMS: gl.constexpr, SHIFT: gl.constexpr,
    LEARN: gl.constexpr, KEEP: gl.constexpr, COLUMNS: gl.constexpr, WG: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """64 keys of every tile."""
    D: gl.constexpr = T.D
    outputs = (dq_descs, dk_desc, dv_desc)
    shared = (bufs, bars, ring_bars, steps, terms_sm)
    q_full = bars[0]
    turn = 0
    if T.PING_PONG and WG == 1:
        turn = pass_turn(turn, 0)
    step = 0
    dk = gl.zeros([ROWS, D], gl.float32, sums_layout(T))
    dv = gl.zeros([ROWS, D], gl.float32, sums_layout(T))
    sums = no_params(scores_layout(T), T)
    if T.TAKES:
        n = 0
        n_steps = steps_of_tile(q_full, steps, step, T)
        while n_steps > 0:
            step, turn, dk, dv, sums = tile_of_keys(
                n, n_steps, step, turn, dk, dv, sums, outputs, shared, band, heads, p_params, stride_params, p_dparams,
                places, scale, out_scale, BACKWARD, LOAD_PARAMS, SHIFT, LEARN, KEEP, COLUMNS, WG, T,
            )  # fmt: skip
            n += 1
            n_steps = steps_of_tile(q_full, steps, step, T)
    else:  # a loop whose end is known has more registers to offer: 2 % at D 64
        n = items_of(gl.program_id(0), gl.num_programs(0), n_items, not T.IN_TURN)
        for i in range(n):
            n_steps = steps_of_tile(q_full, steps, step, T)
            step, turn, dk, dv, sums = tile_of_keys(
                i, n_steps, step, turn, dk, dv, sums, outputs, shared, band, heads, p_params, stride_params, p_dparams,
                places, scale, out_scale, BACKWARD, LOAD_PARAMS, SHIFT, LEARN, KEEP, COLUMNS, WG, T,
            )  # fmt: skip
    if T.DQ != "none" and step > 0:
        last_dq(n, step, dq_descs, shared, scale, out_scale, WG, T)
    tma_store_wait(0)
