"""Backward: five products in one pass over the queries, scores computed again, nothing kept from the forward.

    dp = out_scale * do v^T    ds = dp * f'(s) * scale    dv = out_scale * p^T do    dk = ds^T q    dq = ds k

A program holds 128 keys, each of its two consumers 64 of them, and walks over the queries that see them. Scores are
kept transposed (keys x queries), so that p and ds are register operands of dv and dk. Only dq needs ds of all 128 keys:
each consumer writes its half of ds to shared memory, and one step later, when the other half is surely there, computes
its part of dq from it. So the consumers need not meet within a step: they compute their functions in turns, and one's
products run beside the other's function. dq leaves by TMA: written where one tile holds all keys, otherwise added in
memory. Where sequences are short and there are many of them, one program takes all tiles of a sequence's keys one after
the other: the first writes dq, the others add to it, and nothing needs to be zero before.

    consumer, step i:   S_i | function of S_i | dP_i  dV | ds_i to shared memory | dQ_(i-1)  dK | dq_(i-1) on its way
    with params:        S_i  dP_i | function and ds_i, half by half | dV | and so on
"""

from gdpa.backends.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from gdpa.backends.hopper.pipeline import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    pass_turn,
    ragged,
    visible_pairs,
    wait_turn,
)
from gdpa.backends.hopper.schedule import find_item, item_at, items_of, list_length
from gdpa.device.sequences import visible_queries

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # keys of a warpgroup; rows and columns of the part of dq that it computes


@gluon.jit
def query_range(n0, len_q, len_k, band, T: gl.constexpr):
    """(first query, blocks, first and last query of the blocks that need no mask). At least one block, so that every
    tile is written: past the end it reads zeros."""
    lo, full_lo, full_hi, hi = visible_queries(n0, len_q, len_k, band, T.BLOCK_M, T.BLOCK_N)
    if not T.FINITE_AT_ZERO:
        if n0 + T.BLOCK_N > len_k:  # keys past the end are in every block, so none is free of masks
            full_lo = hi
            full_hi = hi
    return lo, gl.maximum((hi - lo) // T.BLOCK_M, 1), full_lo, full_hi


@gluon.jit
def find_tile(p_table, p_cu_q, n, count, heads, rows_k, rows_q, T: gl.constexpr):
    """What find_item says of this program's n-th tile of keys: items have T.TILES of them."""
    ITEM_ROWS: gl.constexpr = T.BLOCK_N * T.TILES
    item = find_item(p_table, p_cu_q, n // T.TILES, count // T.TILES, heads, rows_k, rows_q, ITEM_ROWS)
    h, b, row, start_k, len_k, start_q, len_q = item
    return (h, b, row + n % T.TILES * T.BLOCK_N, start_k, len_k, start_q, len_q)


@gluon.jit
def walk_of(n0, blocks, T: gl.constexpr):
    """How the keys from n0 on walk over the blocks of queries. Programs with other keys of the same sequence run at the
    same time: each begins at another block (the result), or all would add to the same rows of dq at once. A program
    that takes all keys goes to and fro, since what came last is still in the cache: forwards (0) or backwards (1)."""
    if T.TILES == 1:
        return n0 // T.BLOCK_M % blocks
    else:
        return n0 // T.BLOCK_N % 2


@gluon.jit
def step_at(i, h, first, blocks, walk, T: gl.constexpr):
    """(query head, first query) of step i."""
    start = walk
    if T.TILES > 1:
        i = gl.where(walk == 1, blocks * T.GROUP - 1 - i, i)
        start = 0
    if T.GROUP == 1:
        head = h
        block = i + start
    else:
        head = h * T.GROUP + i // blocks
        block = i % blocks + start
    return head, first + gl.where(block < blocks, block, block - blocks) * T.BLOCK_M


@gluon.jit
def producer(descs, bufs, bars, work, batch_rows, n_items, band, T: gl.constexpr):
    """Loads keys, values and the queries with their gradients, in the order the consumers use them."""
    q_desc, k_desc, v_desc, do_desc = descs
    q_sm, k_sm, v_sm, do_sm, ds_sm, out_sm = bufs
    q_full, q_empty, do_full, k_full, k_empty, v_full, v_empty, ds_full, ds_empty = bars
    p_table, p_cu_q, heads, rows_q, rows_k = work
    count = items_of(gl.program_id(0), gl.num_programs(0), n_items) * T.TILES
    coming = find_tile(p_table, p_cu_q, 0, count, heads, rows_k, rows_q, T)
    step = 0
    for n in range(count):
        h, b, n0, start_k, len_k, start_q, len_q = coming
        coming = find_tile(p_table, p_cu_q, n + 1, count, heads, rows_k, rows_q, T)
        first, blocks, full_lo, full_hi = query_range(n0, len_q, len_k, band, T)
        walk = walk_of(n0, blocks, T)
        slot = n & 1
        mbarrier.wait(k_empty.index(slot), ((n >> 1) & 1) ^ 1)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma_load(k_desc, ragged(start_k + b * batch_rows[1], len_k, n0, h, 0), k_full.index(slot), k_sm.index(slot))
        for i in range(blocks * T.GROUP):
            hq, row = step_at(i, h, first, blocks, walk, T)
            stage = step % T.STAGES
            phase = (step // T.STAGES) & 1
            mbarrier.wait(q_empty.index(stage), phase ^ 1)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
            at = ragged(start_q + b * batch_rows[0], len_q, row, hq, 0)
            tma_load(q_desc, at, q_full.index(stage), q_sm.index(stage))
            if i == 0:
                mbarrier.wait(v_empty, (n & 1) ^ 1)
                mbarrier.expect(v_full, v_desc.block_type.nbytes)
                tma_load(v_desc, ragged(start_k + b * batch_rows[2], len_k, n0, h, 0), v_full, v_sm)
            mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
            at = ragged(start_q + b * batch_rows[3], len_q, row, hq, 0)
            tma_load(do_desc, at, do_full.index(stage), do_sm.index(stage))
            step += 1


@gluon.jit
def dq_product(k, ds, zero, WG: gl.constexpr, T: gl.constexpr):
    """This consumer's 64 x 64 part of ds k, running. At D 64 a step has 128 queries and the consumers share them; at
    D 128 it has 64, and they share the columns."""
    BLOCK_N: gl.constexpr = T.BLOCK_N
    D: gl.constexpr = T.D
    k = k.reshape([BLOCK_N, D])
    if T.D == 64:
        ds = ds.slice(WG * ROWS, ROWS, dim=1)
    else:
        k = k.slice(WG * ROWS, ROWS, dim=1)
    return warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def dq_out(dq_desc, staged, dq, start, length, row, head, n0, ds_scale, WG: gl.constexpr, T: gl.constexpr):
    """Send this consumer's part of dq, which the keys from n0 on give, on its way."""
    if T.SCALE_DQ:
        dq = dq * ds_scale
    if T.TILES > 1:
        all_written(row)  # above all what this is added to
    tma_store_wait(0)  # by the thread that sends; Triton lets the others, which are about to write, wait for it
    staged.reshape([ROWS, ROWS]).store(dq.to(dq_desc.dtype))
    fence_async_shared()
    if T.D == 64:
        at = ragged(start, length, row + WG * ROWS, head, 0)
    else:
        at = ragged(start, length, row, head, WG * ROWS)
    if T.DQ == "add":
        tma_add(dq_desc, at, staged)
    elif T.TILES == 1:
        tma_store(dq_desc, at, staged)
    elif n0 > 0:
        tma_add(dq_desc, at, staged)
    else:
        tma_store(dq_desc, at, staged)


@gluon.jit
def all_written(x):
    """Wait until all that this thread has sent is in memory, and not only read from its buffer (tma_store_wait)."""
    TEXT: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def staging(out_sm, desc, other, WG: gl.constexpr):
    """This consumer's buffer for tiles on their way out, in the form of ``desc``: all of it, or the first part where
    tiles of ``other`` are larger. (Triton 3.8 wants to see the whole buffer in the new form.)"""
    PARTS: gl.constexpr = other.block_type.nbytes // desc.block_type.nbytes
    if PARTS > 1:
        staged = reinterpret(out_sm.index(WG), desc.dtype, [PARTS] + desc.block_type.shape, desc.layout).index(0)
    else:
        staged = reinterpret(out_sm.index(WG), desc.dtype, desc.block_type.shape, desc.layout)
    return staged


@gluon.jit
def write(desc, at, staged, tile):
    """Store ``tile`` through shared memory, in the dtype of the target."""
    SHAPE: gl.constexpr = tile.type.shape
    tma_store_wait(0)
    staged.reshape(SHAPE).store(tile.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, at, staged)


@gluon.jit
def masked(x, cut, i0, n0, len_q, len_k, band, WG: gl.constexpr, T: gl.constexpr):
    """x (this consumer's 64 keys x BLOCK_M queries from i0 on), zero for pairs outside the band if that ``cut``s it."""
    if T.MASKED:
        if cut:
            layout: gl.constexpr = x.type.layout
            BLOCK_M: gl.constexpr = T.BLOCK_M
            j = n0 + WG * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            i = i0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
            x = gl.where(visible_pairs(i[None, :], j[:, None], len_q, len_k, band, T), x, 0.0).to(x.dtype)
    return x


@gluon.jit
def no_params(LAYOUT: gl.constexpr, T: gl.constexpr):
    """A sum for each param, one entry per key."""
    N: gl.constexpr = T.N_PARAMS
    sums = ()
    for n in gl.static_range(N):
        sums = sums + (gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT)),)
    return sums


@gluon.jit
def halves(x):
    """x (rows, n) as two of n / 2 columns. They are other registers; nothing moves."""
    M: gl.constexpr = x.type.shape[0]
    N: gl.constexpr = x.type.shape[1]
    return x.reshape([M, 2, N // 2]).permute((0, 2, 1)).split()


@gluon.jit
def joined(low, high, LAYOUT: gl.constexpr):
    """What ``halves`` took apart."""
    M: gl.constexpr = low.type.shape[0]
    N: gl.constexpr = low.type.shape[1]
    return gl.convert_layout(gl.join(low, high).permute((0, 2, 1)).reshape([M, 2 * N]), LAYOUT)


@gluon.jit
def with_params(s, dp, sums, params, cut, i0, n0, len_q, len_k, band, ds_scale, DTYPE: gl.constexpr,
                BACKWARD: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """p, ds and the sums for the params' gradients of one step. One half of the scores after the other: derivatives by
    params of all of them would not fit beside dk and dv."""
    LAYOUT: gl.constexpr = s.type.layout
    # One mask for all derivatives, since they are finite at 0 (config.holds_params): there a dp of 0 makes them 0.
    s = masked(s, cut, i0, n0, len_q, len_k, band, WG, T)
    dp = masked(dp, cut, i0, n0, len_q, len_k, band, WG, T)
    s0, s1 = halves(s)
    dp0, dp1 = halves(dp)
    p0, ds0, sums = half_with_params(s0, dp0, sums, params, ds_scale, DTYPE, BACKWARD, T)
    p1, ds1, sums = half_with_params(s1, dp1, sums, params, ds_scale, DTYPE, BACKWARD, T)
    p = masked(joined(p0, p1, LAYOUT), cut, i0, n0, len_q, len_k, band, WG, T)
    return p, joined(ds0, ds1, LAYOUT), sums


@gluon.jit
def half_with_params(s, dp, sums, params, ds_scale, DTYPE: gl.constexpr, BACKWARD: gl.constexpr, T: gl.constexpr):
    """p, ds (rounded) and the sums with the terms of these scores."""
    N: gl.constexpr = T.N_PARAMS
    results = BACKWARD(s, params)
    new = ()
    for n in gl.static_range(N):
        new = new + (sums[n] + gl.convert_layout(gl.sum(dp * results[2 + n], 1), sums[n].type.layout),)
    ds = dp * results[1]
    if T.PRESCALED:
        ds = ds * ds_scale
    return results[0], ds.to(DTYPE), new


@gluon.jit
def store_params(p_dparams, sums, T: gl.constexpr):
    """Write the sums, over keys as well."""
    N: gl.constexpr = T.N_PARAMS
    for n in gl.static_range(N):
        gl.store(p_dparams + n, gl.sum(sums[n], 0))


@gluon.jit
def settle_params(p_dparams, sums, last, n, heads, hq, LAYOUT: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    """Write the sums of the params' gradients after the ``last`` step of a query head."""
    if T.N_PARAMS > 0:
        if last:
            item = item_at(gl.program_id(0), gl.num_programs(0), n // T.TILES)
            tile = item // heads * T.TILES + n % T.TILES
            index = (tile * CONSUMERS + WG) * (heads * T.GROUP) + hq
            store_params(p_dparams + index.to(gl.int64) * T.N_PARAMS, sums, T)
            sums = no_params(LAYOUT, T)
    return sums


@gluon.jit
def share_ds(ds, ds_sm, ds_full, ds_empty, step, WG: gl.constexpr):
    """Put this consumer's half of ds where both find it in the next step."""
    here = step & 1
    mbarrier.wait(ds_empty.index(here), ((step >> 1) & 1) ^ 1)
    ds_sm.index(here).slice(WG * ROWS, ROWS, dim=0).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(here), count=1)


@gluon.jit
def consumer(
    dq_desc, dk_desc, dv_desc, bufs, bars, work, batch_rows, n_items, band, p_params, stride_params, p_dparams, scale,
    out_scale, BACKWARD: gl.constexpr, LOAD_PARAMS: gl.constexpr, WG: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """64 keys of every tile."""
    q_sm, k_sm, v_sm, do_sm, ds_sm, out_sm = bufs
    q_full, q_empty, do_full, k_full, k_empty, v_full, v_empty, ds_full, ds_empty = bars
    p_table, p_cu_q, heads, rows_q, rows_k = work
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
    dq_staged = staging(out_sm, dq_desc, dk_desc, WG)
    dkv_staged = staging(out_sm, dk_desc, dq_desc, WG)
    sums = no_params(s_layout, T)
    v_half = v_sm.reshape([BLOCK_N, D]).slice(WG * ROWS, ROWS, dim=0)
    ds_scale = scale * out_scale
    count = items_of(gl.program_id(0), gl.num_programs(0), n_items) * T.TILES
    coming = find_tile(p_table, p_cu_q, 0, count, heads, rows_k, rows_q, T)
    turn = 0
    if T.PING_PONG and WG == 1:
        turn = pass_turn(turn, 0)
    step = 0
    last_start = 0  # where the dq that is still to come belongs
    last_len = 0
    last_row = 0
    last_head = 0
    last_n0 = 0
    for n in range(count):
        h, b, n0, start_k, len_k, start_q, len_q = coming
        coming = find_tile(p_table, p_cu_q, n + 1, count, heads, rows_k, rows_q, T)
        first, blocks, full_lo, full_hi = query_range(n0, len_q, len_k, band, T)
        walk = walk_of(n0, blocks, T)
        slot = n & 1
        k = k_sm.index(slot).reshape([BLOCK_N, D])
        mbarrier.wait(k_full.index(slot), (n >> 1) & 1)
        for i in range(blocks * T.GROUP):
            hq, row = step_at(i, h, first, blocks, walk, T)
            stage = step % T.STAGES
            phase = (step // T.STAGES) & 1
            before = (step & 1) ^ 1
            q = q_sm.index(stage).reshape([BLOCK_M, D])
            do = do_sm.index(stage).reshape([BLOCK_M, D])
            params = LOAD_PARAMS(p_params, stride_params, hq)
            mbarrier.wait(q_full.index(stage), phase)
            s = warpgroup_mma(k.slice(WG * ROWS, ROWS, dim=0), q.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            if T.N_PARAMS > 0:
                mbarrier.wait(v_full, n & 1)
                mbarrier.wait(do_full.index(stage), phase)
                dp = warpgroup_mma(v_half, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
                s, dp = warpgroup_mma_wait(0, deps=(s, dp))
            else:
                s = warpgroup_mma_wait(0, deps=(s,))
            if T.PING_PONG:
                turn = wait_turn(turn, WG)
            cut = (row < full_lo) | (row >= full_hi)  # by the band: what comes of pairs outside is thrown away
            if not T.SCALE_FOLDED:
                s = s * scale
            if T.N_PARAMS > 0:
                p, ds, sums = with_params(
                    s, dp, sums, params, cut, row, n0, len_q, len_k, band, ds_scale, dtype, BACKWARD, WG, T
                )
            else:
                p, slope = BACKWARD(s, params)
                p = masked(p, cut, row, n0, len_q, len_k, band, WG, T)
                # Only now: with dp's accumulator in flight there would be no registers left to interleave the function
                # of several scores, and it would take three times as long.
                mbarrier.wait(v_full, n & 1)
                mbarrier.wait(do_full.index(stage), phase)
                dp = warpgroup_mma(v_half, do.permute((1, 0)), zero_s, use_acc=False, is_async=True)
            p = gl.convert_layout(p, a_layout)
            dv = warpgroup_mma(p, do, dv, use_acc=i > 0, is_async=True)
            if T.PING_PONG:
                turn = pass_turn(turn, 1 - WG)
            if T.N_PARAMS == 0:
                dp = warpgroup_mma_wait(1, deps=(dp,))
            if i == blocks * T.GROUP - 1:
                mbarrier.arrive(v_empty, count=1)
            if T.N_PARAMS == 0:
                ds = masked(dp * slope, cut, row, n0, len_q, len_k, band, WG, T)
                if T.PRESCALED:
                    ds = ds * ds_scale
                ds = ds.to(dtype)
            sums = settle_params(p_dparams, sums, i % blocks == blocks - 1, n, heads, hq, s_layout, WG, T)
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
                    dq_out(dq_desc, dq_staged, dq, last_start, last_len, last_row, last_head, last_n0, ds_scale, WG, T)
            if (i == 0) & (n > 0):
                mbarrier.arrive(k_empty.index(old_slot), count=1)
            last_start = start_q + b * batch_rows[4] + (n0 // BLOCK_N & 1) * batch_rows[7]
            last_len = len_q
            last_row = row
            last_head = hq
            last_n0 = n0
            dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
            mbarrier.arrive(q_empty.index(stage), count=1)
            step += 1
        at_k = ragged(start_k + b * batch_rows[5], len_k, n0 + WG * ROWS, h, 0)
        at_v = ragged(start_k + b * batch_rows[6], len_k, n0 + WG * ROWS, h, 0)
        if not T.PRESCALED:
            dk = dk * ds_scale
        write(dv_desc, at_v, dkv_staged, dv * out_scale)
        write(dk_desc, at_k, dkv_staged, dk)
    # The dq of the very last step.
    if T.DQ != "none" and step > 0:
        before = (step - 1) & 1
        mbarrier.wait(ds_full.index(before), ((step - 1) >> 1) & 1)
        dq = dq_product(k_sm.index((count - 1) & 1), ds_sm.index(before), zero_dq, WG, T)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        dq_out(dq_desc, dq_staged, dq, last_start, last_len, last_row, last_head, last_n0, ds_scale, WG, T)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["batch_rows", "n_tiles", "rows_q", "rows_k"])  # they change from batch to batch
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, p_table, p_cu_q, p_params, stride_params, p_dparams,
    batch_rows, n_tiles, heads, rows_q, rows_k, band, scale, out_scale, BACKWARD: gl.constexpr,
    LOAD_PARAMS: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
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
    if dq_desc.block_type.nbytes >= dk_desc.block_type.nbytes:  # room for the larger of the two
        out_sm = gl.allocate_shared_memory(dq_desc.dtype, [2] + dq_desc.block_type.shape, dq_desc.layout)
    else:
        out_sm = gl.allocate_shared_memory(dk_desc.dtype, [2] + dk_desc.block_type.shape, dk_desc.layout)
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
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(ds_full.index(i), count=CONSUMERS)
        mbarrier.init(ds_empty.index(i), count=CONSUMERS)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=CONSUMERS)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc, do_desc)
    bufs = (q_sm, k_sm, v_sm, do_sm, ds_sm, out_sm)
    bars = (q_full, q_empty, do_full, k_full, k_empty, v_full, v_empty, ds_full, ds_empty)
    work = (p_table, p_cu_q, heads, rows_q, rows_k)
    n_items = list_length(p_table, n_tiles) * heads
    # Triton takes a JIT function in an argument tuple only if the tuple is written here.
    gl.warp_specialize(
        [
            (consumer, (dq_desc, dk_desc, dv_desc, bufs, bars, work, batch_rows, n_items, band, p_params, stride_params,
                        p_dparams, scale, out_scale, BACKWARD, LOAD_PARAMS, 0, T)),
            (consumer, (dq_desc, dk_desc, dv_desc, bufs, bars, work, batch_rows, n_items, band, p_params, stride_params,
                        p_dparams, scale, out_scale, BACKWARD, LOAD_PARAMS, 1, T)),
            (producer, (descs, bufs, bars, work, batch_rows, n_items, band, T)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
