"""Forward for any length: one to three warpgroups on neighbouring query tiles, one warp that feeds them.

    acc = sum over key blocks of f(scale * q k^T) v,    out = out_scale * acc

Each consumer holds 64 queries. Its loop never drains: while the tensor cores run ``o += p v`` of one key block, the
scores of the next one are already queued in front of it and the function is computed on them, also across the end of a
tile, where "the next one" is the first block of the next tile. Consumers take turns issuing (ping-pong), so one
computes its function while the other's products run.

    tensor cores   | S1 | P0 V0 | S2 | P1 V1 | ...
    consumer 0       f(S1).......f(S2).........
    producer       Q'  K2 V2  K3 V3 ...            (two or more blocks ahead, through a ring of buffers)

An item of work is one tile of queries. Where all keys of a sequence fit into the ring (short K/V) it is several tiles
of one head: the keys stay in shared memory, and only queries stream by. Where there are few tiles and many keys, it is
a tile with one of T.PARTS parts of its keys, and what is written are sums in float32 (split_kv.py adds them up).
"""

from gdpa.backends.hopper.compat import fence_async_shared, gl, gluon, mbarrier
from gdpa.backends.hopper.forward.bias import allocate_bias
from gdpa.backends.hopper.forward.bundles import Barriers, BatchRows, Buffers, Inputs, Work
from gdpa.backends.hopper.forward.columns import allocate_columns
from gdpa.backends.hopper.forward.consumer import consumer
from gdpa.backends.hopper.forward.producer import producer
from gdpa.backends.hopper.messages import allocate_steps
from gdpa.backends.hopper.pipeline import CONSUMER_REGISTERS, CONSUMER_REGISTERS_OF_3, PRODUCER_REGISTERS
from gdpa.backends.hopper.scheduling.schedule import TAKEN, list_length
from gdpa.backends.hopper.scheduling.taking import allocate_taken
from gdpa.device.visits import list_of


@gluon.jit(do_not_specialize=["batch_rows", "n_tiles", "rows_q", "rows_k"])  # they change from batch to batch
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, p_table, p_cu_k, p_params, stride_params, row_sums, places, visits, batch_rows,
    n_tiles, heads, rows_q, rows_k, band, scale, out_scale, CODE: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """What the arguments are: see Work and Inputs in bundles.py."""
    CONSUMERS: gl.constexpr = T.CONSUMERS
    Q_SLOTS: gl.constexpr = 2 * CONSUMERS
    STAGES: gl.constexpr = T.STAGES
    q_sm = gl.allocate_shared_memory(q_desc.dtype, [Q_SLOTS] + q_desc.block_type.shape, q_desc.layout)
    o_sm = q_sm
    if not T.OUT_IN_Q:
        o_sm = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS] + o_desc.block_type.shape, o_desc.layout)
    k_sm = gl.allocate_shared_memory(k_desc.dtype, [T.STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_sm = gl.allocate_shared_memory(v_desc.dtype, [T.STAGES] + v_desc.block_type.shape, v_desc.layout)
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], layout)
    v_full = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], layout)
    ARRIVALS: gl.constexpr = 1 if T.BIAS_FACTOR == 0 else 2  # a load, and what is written beside it
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(i), count=ARRIVALS)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=ARRIVALS)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    columns = q_full  # of any type: nothing reads it
    if T.COLUMNS:
        columns = allocate_columns(T)
    bias = ()
    if T.BIAS_FACTOR != 0:
        bias = allocate_bias(Q_SLOTS, T)
    bufs = Buffers(q_sm, k_sm, v_sm, o_sm, columns, bias)
    bars = Barriers(q_full, q_empty, k_full, k_empty, v_full, v_empty)
    steps = q_full  # of any type: nothing reads it
    if T.LISTED:
        steps = allocate_steps(T)
    n_items = (n_tiles if T.SCANS else list_length(p_table, n_tiles)) * heads * T.PARTS
    taken = ()
    p_count = None
    if T.TAKES:
        if T.LISTED:
            p_count = visits.counts + list_of(n_tiles, 0, heads, T.PER_HEAD)  # behind all lists
        else:
            p_count = p_table + TAKEN
        taken = allocate_taken(T)
    part_rows = None
    if T.PARTS > 1:
        part_rows = batch_rows[4]
    strides = BatchRows(batch_rows[0], batch_rows[1], batch_rows[2], batch_rows[3], part_rows)
    work = Work(p_table, p_cu_k, heads, rows_q, rows_k, visits, steps, n_items, taken, p_count, strides, band)
    inputs = Inputs(p_params, stride_params, row_sums, places, scale, out_scale)
    # Triton takes a compile-time argument in a tuple only if that is written where it is used.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consumer, (o_desc, bufs, bars, work, inputs, CODE, 0, T)),
                (producer, ((q_desc, k_desc, v_desc), bufs, bars, work, inputs, CODE, T)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (o_desc, bufs, bars, work, inputs, CODE, 0, T)),
                (consumer, (o_desc, bufs, bars, work, inputs, CODE, 1, T)),
                (producer, ((q_desc, k_desc, v_desc), bufs, bars, work, inputs, CODE, T)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (o_desc, bufs, bars, work, inputs, CODE, 0, T)),
                (consumer, (o_desc, bufs, bars, work, inputs, CODE, 1, T)),
                (consumer, (o_desc, bufs, bars, work, inputs, CODE, 2, T)),
                (producer, ((q_desc, k_desc, v_desc), bufs, bars, work, inputs, CODE, T)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_OF_3, CONSUMER_REGISTERS_OF_3, PRODUCER_REGISTERS],
        )
