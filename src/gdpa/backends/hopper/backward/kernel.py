"""Backward: five products in one pass over the queries, scores computed again, nothing kept from the forward.

    dp = out_scale * do v^T    ds = dp * f'(s) * scale    dv = out_scale * p^T do    dk = ds^T q    dq = ds k

A program holds 128 keys, each of its two consumers 64 of them, and walks over the queries that see them. Scores are
kept transposed (keys x queries), so that p and ds are register operands of dv and dk. Only dq needs ds of all 128 keys:
each consumer writes its half of ds to shared memory, and one step later, when the other half is surely there, computes
its part of dq from it. So the consumers need not meet within a step, and one's products run beside the other's function
(at D 128 they take turns at it: PING_PONG). The producer finds out which queries a step has and where its dq belongs,
and tells the consumers (steps.py), which have no registers for that. dq leaves by TMA: to the sums that go from tile to
tile (ring.py), or, where a band or very long sequences do not allow that, to a float32 buffer in which it is added up,
in a fixed order if need be (turns.py).

    consumer, step i:   S_i | function of S_i | dP_i  dV | ds_i to shared memory | dQ_(i-1)  dK | dq_(i-1) on its way
    with params:        S_i  dP_i | function and ds_i, half by half | dV | and so on
"""

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
from gdpa.backends.hopper.backward.ring import courier, publisher, send_code
from gdpa.backends.hopper.backward.steps import DQ, PAIRS, PARAMS, SPOT, TILE, allocate_steps, tell, told
from gdpa.backends.hopper.backward.walk import (
    find_tile,
    first_step,
    name_tile,
    next_step,
    query_range,
    row_of,
    step_in_list,
)
from gdpa.backends.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from gdpa.backends.hopper.pipeline import (
    BACKWARD_CONSUMERS,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    ROWS,
    pass_turn,
    ragged,
    wait_turn,
)
from gdpa.backends.hopper.scheduling.schedule import items_of, list_length
from gdpa.backends.hopper.sums import DELTA, ROW, allocate_terms, bring_terms, divided_by_row, terms_of, through_sums
from gdpa.device.rounding import ds_factors
from gdpa.device.visits import blocks_in, place_of, visited


@gluon.jit
def producer(descs, bufs, bars, steps, terms_sm, terms, work, batch_rows, n_items, band, T: gl.constexpr):
    """Loads keys, values and the queries with their gradients, in the order the consumers use them."""
    q_desc, k_desc, v_desc, do_desc = descs
    q_sm, k_sm, v_sm, do_sm, ds_sm, out_sm = bufs
    q_full, q_empty, do_full, k_full, k_empty, v_full, v_empty, ds_full, ds_empty = bars
    p_table, p_cu_q, heads, rows_q, rows_k, visits = work
    count = items_of(gl.program_id(0), gl.num_programs(0), n_items, not T.IN_TURN)
    step = 0
    for n in range(count):
        item, b, row, start_k, len_k, start_q, len_q = find_tile(p_table, p_cu_q, n, count, heads, rows_k, rows_q, T)
        h, tile, tiles, number = name_tile(p_table, item, b, row, len_k, heads, n_items, T)
        n0 = tile * T.BLOCK_N
        first, blocks, full_lo, full_hi = query_range(n0, len_q, len_k, band, T)
        if T.LISTED:
            mine = place_of(number, h, heads, T.PER_HEAD)
            blocks = blocks_in(visits, mine)
        at = first_step(h, tile, tiles, blocks, T)
        slot = n & 1
        mbarrier.wait(k_empty.index(slot), ((n >> 1) & 1) ^ 1)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma_load(k_desc, ragged(start_k + b * batch_rows[1], len_k, n0, h, 0), k_full.index(slot), k_sm.index(slot))
        for i in range(blocks * T.GROUP):
            hq = at[0]
            row = row_of(at, first, T)
            if T.LISTED:
                block, cut = visited(visits, mine, step_in_list(at))
                row = block * T.BLOCK_M
            code = send_code(item, at, tile, tiles, T)
            at = next_step(at, tile, tiles, blocks, T)
            stage = step % T.STAGES
            phase = (step // T.STAGES) & 1
            mbarrier.wait(q_empty.index(stage), phase ^ 1)
            tell(steps, step, DQ, start_q + b * batch_rows[4] + len_q, row - len_q, hq, code, T)
            end_k = start_k + len_k
            tell(steps, step, TILE, blocks * T.GROUP, end_k + b * batch_rows[5], end_k + b * batch_rows[6], h, T)
            if not T.LISTED:
                cut = ((row < full_lo) | (row >= full_hi)).to(gl.int32)  # what comes of pairs outside is thrown away
            tell(steps, step, PAIRS, cut, len_q - row, len_k - n0, len_k if T.PLACED or T.SHIFTED or T.LISTED else 0, T)
            if T.PLACED or T.SHIFTED or T.LISTED:
                tell(steps, step, SPOT, b, len_q, start_q, start_k, T)
            if T.N_PARAMS > 0:
                tell(steps, step, PARAMS, hq, (i % blocks == blocks - 1).to(gl.int32), number, 0, T)
            bring_terms(terms_sm, terms, stage, b, hq, start_q, row, len_q, T)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
            place = ragged(start_q + b * batch_rows[0], len_q, row, hq, 0)
            tma_load(q_desc, place, q_full.index(stage), q_sm.index(stage))
            if i == 0:
                mbarrier.wait(v_empty, (n & 1) ^ 1)
                mbarrier.expect(v_full, v_desc.block_type.nbytes)
                tma_load(v_desc, ragged(start_k + b * batch_rows[2], len_k, n0, h, 0), v_full, v_sm)
            mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
            place = ragged(start_q + b * batch_rows[3], len_q, row, hq, 0)
            tma_load(do_desc, place, do_full.index(stage), do_sm.index(stage))
            step += 1


@gluon.jit
def dp_product(v, do, v_full, do_full, n, stage, phase, zero):
    """v do^T, running: of the n-th tile's v and what stage ``stage`` holds."""
    mbarrier.wait(v_full, n & 1)
    mbarrier.wait(do_full.index(stage), phase)
    return warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def consumer(
    dq_descs, dk_desc, dv_desc, bufs, bars, ring_bars, steps, terms_sm, heads, n_items, band, p_params, stride_params,
    p_dparams, places, scale, out_scale, BACKWARD: gl.constexpr, LOAD_PARAMS: gl.constexpr, SHIFT: gl.constexpr,
    LEARN: gl.constexpr, KEEP: gl.constexpr, COLUMNS: gl.constexpr, WG: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """64 keys of every tile."""
    q_sm, k_sm, v_sm, do_sm, ds_sm, out_sm = bufs
    q_full, q_empty, do_full, k_full, k_empty, v_full, v_empty, ds_full, ds_empty = bars
    ready, free, done, published = ring_bars
    BLOCK_M: gl.constexpr = T.BLOCK_M  # a shape takes constexprs, not fields of one
    BLOCK_N: gl.constexpr = T.BLOCK_N
    D: gl.constexpr = T.D
    dtype: gl.constexpr = q_sm.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    zero_s = gl.zeros([ROWS, BLOCK_M], gl.float32, s_layout)
    zero_dq = gl.zeros([ROWS, ROWS], gl.float32, dq_layout)
    dk = gl.zeros([ROWS, D], gl.float32, acc_layout)
    dv = gl.zeros([ROWS, D], gl.float32, acc_layout)
    dq_buffers = (buffer_for(out_sm, dq_descs[0], WG), buffer_for(out_sm, dq_descs[1], WG))
    dkv_buffer = buffer_for(out_sm, dk_desc, WG)
    sums = no_params(s_layout, T)
    v_half = v_sm.reshape([BLOCK_N, D]).slice(WG * ROWS, ROWS, dim=0)
    before_rounding, ds_scale = ds_factors(scale * out_scale, T.PRESCALED)
    count = items_of(gl.program_id(0), gl.num_programs(0), n_items, not T.IN_TURN)
    turn = 0
    if T.PING_PONG and WG == 1:
        turn = pass_turn(turn, 0)
    step = 0
    for n in range(count):
        slot = n & 1
        k = k_sm.index(slot).reshape([BLOCK_N, D])
        mbarrier.wait(k_full.index(slot), (n >> 1) & 1)
        mbarrier.wait(q_full.index(step % T.STAGES), (step // T.STAGES) & 1)
        n_steps, _, _, _ = told(steps, step, TILE, T)
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
            if T.DQ == "ring":
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
    # The dq of the very last step.
    if T.DQ != "none" and step > 0:
        if T.DQ == "ring":
            free_buffer(steps, step, free, T)
        if T.IN_TURN:
            step = all_written(step)
            mbarrier.arrive(done.index(step & 1), count=1, pred=step > 1)
        before = (step - 1) & 1
        mbarrier.wait(ds_full.index(before), ((step - 1) >> 1) & 1)
        dq = dq_product(k_sm.index((count - 1) & 1), ds_sm.index(before), zero_dq, WG, T)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        dq_out(dq_descs, dq_buffers, dq, steps, step - 1, ready, ds_scale, WG, T)
        if T.IN_TURN:
            step = all_written(step)
            mbarrier.arrive(done.index(before), count=1)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["batch_rows", "n_tiles", "rows_q", "rows_k"])  # they change from batch to batch
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, ring_desc, dk_desc, dv_desc, p_table, p_cu_q, p_params, stride_params,
    p_dparams, terms, places, visits, p_flags, batch_rows, n_tiles, heads, rows_q, rows_k, band, scale, out_scale,
    BACKWARD: gl.constexpr, LOAD_PARAMS: gl.constexpr, SHIFT: gl.constexpr, LEARN: gl.constexpr, KEEP: gl.constexpr,
    COLUMNS: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """``ring_desc``: float32, where sums of dq go round, or all of dq is added up. ``terms``: delta and the other term
    of every row, and their strides between batch entries and heads (see sums.py); None without row sums. ``places``,
    ``visits``, KEEP and COLUMNS: see forward_kernel."""
    STAGES: gl.constexpr = T.STAGES
    BLOCK_M: gl.constexpr = T.BLOCK_M
    BLOCK_N: gl.constexpr = T.BLOCK_N
    dtype: gl.constexpr = q_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    q_sm = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_sm = gl.allocate_shared_memory(dtype, [STAGES] + do_desc.block_type.shape, do_desc.layout)
    k_sm = gl.allocate_shared_memory(dtype, [2] + k_desc.block_type.shape, k_desc.layout)
    v_sm = gl.allocate_shared_memory(dtype, v_desc.block_type.shape, v_desc.layout)
    ds_sm = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], ds_layout)
    out_sm = gl.allocate_shared_memory(gl.float32, [2] + ring_desc.block_type.shape, ring_desc.layout)
    steps = allocate_steps(T)
    terms_sm = allocate_terms(T)
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    v_full = gl.allocate_shared_memory(gl.int64, [1], layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [1], layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    free = gl.allocate_shared_memory(gl.int64, [1], layout)
    done = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    published = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=BACKWARD_CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=BACKWARD_CONSUMERS)
        mbarrier.init(ds_full.index(i), count=BACKWARD_CONSUMERS)
        mbarrier.init(ds_empty.index(i), count=BACKWARD_CONSUMERS)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(done.index(i), count=BACKWARD_CONSUMERS)
        mbarrier.init(published.index(i), count=1)
    mbarrier.init(free, count=BACKWARD_CONSUMERS)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=BACKWARD_CONSUMERS)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc, do_desc)
    dq_descs = (dq_desc, ring_desc)
    bufs = (q_sm, k_sm, v_sm, do_sm, ds_sm, out_sm)
    bars = (q_full, q_empty, do_full, k_full, k_empty, v_full, v_empty, ds_full, ds_empty)
    ring_bars = (ready, free, done, published)
    work = (p_table, p_cu_q, heads, rows_q, rows_k, visits)
    n_items = list_length(p_table, n_tiles) * heads
    # Triton takes a JIT function in an argument tuple only if the tuple is written here.
    gl.warp_specialize(
        [
            (consumer, (dq_descs, dk_desc, dv_desc, bufs, bars, ring_bars, steps, terms_sm, heads, n_items, band,
                        p_params, stride_params, p_dparams, places, scale, out_scale, BACKWARD, LOAD_PARAMS, SHIFT,
                        LEARN, KEEP, COLUMNS, 0, T)),
            (consumer, (dq_descs, dk_desc, dv_desc, bufs, bars, ring_bars, steps, terms_sm, heads, n_items, band,
                        p_params, stride_params, p_dparams, places, scale, out_scale, BACKWARD, LOAD_PARAMS, SHIFT,
                        LEARN, KEEP, COLUMNS, 1, T)),
            (producer, (descs, bufs, bars, steps, terms_sm, terms, work, batch_rows, n_items, band, T)),
            (courier, (ring_desc, out_sm.index(0), out_sm.index(1), ring_bars, work, n_items, band, p_flags, T)),
            (publisher, (ring_bars, work, n_items, band, p_flags, T)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
