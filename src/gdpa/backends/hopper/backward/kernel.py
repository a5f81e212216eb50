"""Backward: five products in one pass over the queries, scores computed again, nothing kept from the forward.

    dp = out_scale * do v^T    ds = dp * f'(s) * scale    dv = out_scale * p^T do    dk = ds^T q    dq = ds k

A program holds a tile of 128 keys, each of its two consumers 64 of them, and walks over the queries that see them in
steps of one block of queries. Scores are kept transposed (keys x queries), so that p and ds are register operands of dv
and dk. Only dq needs ds of all 128 keys: each consumer writes its half of ds to shared memory, and one step later, when
the other half has surely arrived, computes its part of dq from it. So the consumers need not meet within a step, and
one's products run while the other computes its function (at D 128 they take turns at that: PING_PONG).

Five partitions of warps run side by side: two consumers; the producer, which loads by TMA, and works out which queries
a step has and where its dq belongs (consumers have no registers for it, see messages.py); and two warps that wait for
other programs where tiles of keys sum up dq together (T.DQ): "ring", in slots that pass from tile to tile (ring.py), or
"turns", in a float32 buffer of all queries (turns.py). With "add", dq is added to such a buffer in any order.

    consumer, step i:   S_i | function of S_i | dP_i  dV | ds_i to shared memory | dQ_(i-1)  dK | dq_(i-1) on its way
    with params:        S_i  dP_i | function and ds_i, half by half | dV | and so on
"""

from gdpa.backends.hopper.backward.bundles import Barriers, BatchRows, Buffers, Inputs, Outputs, RingBarriers, Work
from gdpa.backends.hopper.backward.consumer import consumer
from gdpa.backends.hopper.backward.halves import load_keys
from gdpa.backends.hopper.backward.items import (
    allocate_items,
    first_item,
    hand_on,
    heads_at_once,
    item_after,
    next_item,
)
from gdpa.backends.hopper.backward.ring import courier, publisher, send_code
from gdpa.backends.hopper.backward.walk import (
    block_of,
    find_tile,
    first_step,
    name_tile,
    next_step,
    query_range,
    row_of,
)
from gdpa.backends.hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma_load
from gdpa.backends.hopper.messages import DQ, PAIRS, PARAMS, SPOT, TILE, allocate_steps, tell
from gdpa.backends.hopper.pipeline import BACKWARD_CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, ragged
from gdpa.backends.hopper.row_sums import allocate_terms, bring_terms
from gdpa.backends.hopper.scheduling.schedule import list_length
from gdpa.device.visits import blocks_in, list_of, visited


@gluon.jit
def producer(descs, bufs, bars, items, terms, work, some, T: gl.constexpr):
    """Loads keys, values, queries and their gradients do in the order the consumers use them. ``some``: how many heads
    have their turn first (see items.py)."""
    q_desc, k_desc, v_desc, do_desc = descs
    steps, heads, n_items, batch_rows = bufs.steps, work.heads, work.n_items, work.batch_rows
    step = 0
    n = 0
    item = first_item(work.p_flags, some, heads, n_items, T)
    while item < n_items:
        hand_on(items, n, item, T)
        b, row, start_k, len_k, start_q, len_q = find_tile(work, item, item_after(n, item, T), T)
        h, tile, tiles, number = name_tile(work.p_table, item, b, row, len_k, heads, n_items, T)
        n0 = tile * T.BLOCK_N
        first, blocks, full_lo, full_hi = query_range(tile, tiles, len_q, len_k, work.band, T)
        if T.LISTED:
            own_list = list_of(number, h, heads, T.PER_HEAD)
            blocks = blocks_in(work.visits, own_list)
        cursor = first_step(h, tile, tiles, blocks, T)
        slot = n & 1
        mbarrier.wait(bars.k_empty.index(slot), ((n >> 1) & 1) ^ 1)
        load_keys(k_desc, bars.k_full.index(slot), bufs.k, slot, start_k + b * batch_rows.k, len_k, n0, h, T)
        for i in range(blocks * T.GROUP):
            hq = cursor.head
            row = row_of(cursor, first, T)
            if T.LISTED:
                block, cut = visited(work.visits, own_list, block_of(cursor))
                row = block * T.BLOCK_M
            code = send_code(item, cursor, row, tile, tiles, len_q, len_k, work.band, T)
            cursor = next_step(cursor, tile, tiles, blocks, T)
            stage = step % T.STAGES
            phase = (step // T.STAGES) & 1
            mbarrier.wait(bars.q_empty.index(stage), phase ^ 1)
            tell(steps, step, DQ, start_q + b * batch_rows.dq + len_q, row - len_q, hq, code, T)
            end_k = start_k + len_k
            tell(steps, step, TILE, blocks * T.GROUP, end_k + b * batch_rows.dk, end_k + b * batch_rows.dv, h, T)
            if not T.LISTED:
                cut = ((row < full_lo) | (row >= full_hi)).to(gl.int32)  # what comes of pairs outside is thrown away
            tell(steps, step, PAIRS, cut, len_q - row, len_k - n0, len_k if T.PLACED or T.SHIFTED or T.LISTED else 0, T)
            if T.PLACED or T.SHIFTED or T.LISTED:
                tell(steps, step, SPOT, b, len_q, start_q, start_k, T)
            if T.N_PARAMS > 0:
                tell(steps, step, PARAMS, hq, (i % blocks == blocks - 1).to(gl.int32), number, 0, T)
            bring_terms(bufs.terms, terms, stage, b, hq, start_q, row, len_q, T)
            mbarrier.expect(bars.q_full.index(stage), q_desc.block_type.nbytes)
            place = ragged(start_q + b * batch_rows.q, len_q, row, hq, 0)
            tma_load(q_desc, place, bars.q_full.index(stage), bufs.q.index(stage))
            if i == 0:
                mbarrier.wait(bars.v_empty, (n & 1) ^ 1)
                load_keys(v_desc, bars.v_full, bufs.v, 0, start_k + b * batch_rows.v, len_k, n0, h, T)
            mbarrier.expect(bars.do_full.index(stage), do_desc.block_type.nbytes)
            place = ragged(start_q + b * batch_rows.do, len_q, row, hq, 0)
            tma_load(do_desc, place, bars.do_full.index(stage), bufs.do.index(stage))
            step += 1
        item = next_item(work.p_flags, n, item, some, heads, n_items, T)
        n += 1
    if T.TAKES:  # there are no more
        hand_on(items, n, item, T)
        stop_at(step, steps, bars, T)


@gluon.jit
def stop_at(step, steps, bars, T: gl.constexpr):
    """Tell the consumers that there are no more tiles: a message for step ``step`` of a tile without steps."""
    mbarrier.wait(bars.q_empty.index(step % T.STAGES), ((step // T.STAGES) & 1) ^ 1)
    tell(steps, step, TILE, 0, 0, 0, 0, T)
    mbarrier.arrive(bars.q_full.index(step % T.STAGES), count=1)


@gluon.jit(do_not_specialize=["batch_rows", "n_tiles", "rows_q", "rows_k"])  # they change from batch to batch
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, ring_desc, dk_desc, dv_desc, p_table, p_cu_q, p_params, stride_params,
    p_dparams, terms, places, visits, p_flags, batch_rows, n_tiles, heads, rows_q, rows_k, band, scale, out_scale,
    CODE: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """``terms``: delta and the other term of every row, and their strides between batch entries and heads (see
    row_sums.py); None without row sums. The others: see Work, Inputs and Outputs in bundles.py."""
    STAGES: gl.constexpr = T.STAGES
    BLOCK_M: gl.constexpr = T.BLOCK_M
    BLOCK_N: gl.constexpr = T.BLOCK_N
    dtype: gl.constexpr = q_desc.dtype
    TILES: gl.constexpr = 2 if T.ALIKE else 1  # buffers of a tile of keys: see halves.py
    TILE_ROWS: gl.constexpr = BLOCK_N // TILES
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_ROWS, BLOCK_M], dtype)
    q_sm = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_sm = gl.allocate_shared_memory(dtype, [STAGES] + do_desc.block_type.shape, do_desc.layout)
    k_sm = gl.allocate_shared_memory(dtype, [2 * TILES] + k_desc.block_type.shape, k_desc.layout)
    v_sm = gl.allocate_shared_memory(dtype, [TILES] + v_desc.block_type.shape, v_desc.layout)
    ds_sm = gl.allocate_shared_memory(dtype, [2 * TILES, TILE_ROWS, BLOCK_M], ds_layout)
    out_sm = gl.allocate_shared_memory(gl.float32, [2] + ring_desc.block_type.shape, ring_desc.layout)
    steps = allocate_steps(T)
    terms_sm = allocate_terms(T)
    items = allocate_items()
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
    outputs = Outputs(dq_desc, ring_desc, dk_desc, dv_desc)
    bufs = Buffers(q_sm, k_sm, v_sm, do_sm, ds_sm, out_sm, steps, terms_sm)
    bars = Barriers(q_full, q_empty, do_full, k_full, k_empty, v_full, v_empty, ds_full, ds_empty)
    ring_bars = RingBarriers(ready, free, done, published)
    n_items = list_length(p_table, n_tiles) * heads
    strides = BatchRows(
        batch_rows[0], batch_rows[1], batch_rows[2], batch_rows[3], batch_rows[4], batch_rows[5], batch_rows[6]
    )
    work = Work(p_table, p_cu_q, heads, rows_q, rows_k, visits, strides, n_items, band, p_flags)
    inputs = Inputs(p_params, stride_params, p_dparams, places, scale, out_scale)
    some = heads
    if T.SOME_HEADS:
        some = heads_at_once(heads, rows_q, rows_k, n_tiles, batch_rows[1] == 0, p_cu_q is not None, T)
    # Triton takes a compile-time argument in a tuple only if that is written where it is used.
    gl.warp_specialize(
        [
            (consumer, (outputs, bufs, bars, ring_bars, work, inputs, CODE, 0, T)),
            (consumer, (outputs, bufs, bars, ring_bars, work, inputs, CODE, 1, T)),
            (producer, (descs, bufs, bars, items, terms, work, some, T)),
            (courier, (ring_desc, out_sm.index(0), out_sm.index(1), ring_bars, items, work, T)),
            (publisher, (ring_bars, items, work, T)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
