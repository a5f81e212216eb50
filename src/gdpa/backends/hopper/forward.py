"""Forward for any length: two or three warpgroups on neighbouring query tiles, one warp that feeds them.

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
a tile with one of T.PARTS parts of its keys, and what is written are sums in float32, added up afterwards (parts.py).
"""

from gdpa.backends.hopper.backward.steps import PAIRS, allocate_steps, tell
from gdpa.backends.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from gdpa.backends.hopper.pipeline import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_OF_3,
    PRODUCER_REGISTERS,
    ROWS,
    pass_turn,
    ragged,
    wait_turn,
)
from gdpa.backends.hopper.scheduling.schedule import find_item, item_at, items_of, list_length
from gdpa.backends.hopper.sums import add_block, divided, no_sums
from gdpa.backends.hopper.weights import block_at, columns_of, weights
from gdpa.device.sequences import visible_keys
from gdpa.device.visits import blocks_in, place_of, visited


@gluon.jit
def key_range(m0, len_q, len_k, band, part, place, work, T: gl.constexpr):
    """(first key, blocks, first and last key of the blocks that need no mask). At least one block, so that every tile
    is written: past the end it reads zeros, or is masked. With a mask the list at ``place`` says which blocks."""
    lo, full_lo, full_hi, hi = visible_keys(m0, len_q, len_k, band, T.BLOCK_M, T.BLOCK_N)
    blocks = (hi - lo) // T.BLOCK_N
    if T.PARTS > 1:
        most = gl.cdiv(blocks, T.PARTS)
        lo += part * most * T.BLOCK_N
        blocks = gl.minimum(blocks - part * most, most)
    if T.LISTED:
        blocks = blocks_in(work[5], place)  # not carried from find_tile: Triton 3.6 then takes the first tile's for all
    return lo, gl.maximum(blocks, 1), full_lo, full_hi


@gluon.jit
def head_and_part(h, heads, T: gl.constexpr):
    """Of an item's place among the heads: parts of the keys count as further heads."""
    if T.PARTS > 1:
        return h % heads, h // heads
    else:
        return h, 0


@gluon.jit
def find_tile(work, n, count, T: gl.constexpr):
    """This program's n-th item: see find_item; head, part of the keys, and with a mask which list of blocks is
    its own (see device/visits.py)."""
    p_table, p_cu_k, heads, rows_q, rows_k, visits, steps, n_items = work
    at, b, r0, start_q, len_q, start_k, len_k = find_item(
        p_table, p_cu_k, n, count, heads * T.PARTS, rows_q, rows_k, n_items, T.ITEM_ROWS, T.PAIRED
    )
    h, part = head_and_part(at, heads, T)
    place = 0
    if T.LISTED:
        item = item_at(gl.program_id(0), gl.num_programs(0), gl.maximum(gl.minimum(n, count - 1), 0))
        place = place_of(item // heads, h, heads, T.PER_HEAD)
    return h, b, r0, start_q, len_q, start_k, len_k, part, place


@gluon.jit
def tiles_of(r0, len_q, T: gl.constexpr):
    """Tiles of the item that begins at row r0."""
    if T.ITEM_ROWS == T.BLOCK_M:
        return 1
    else:
        return gl.cdiv(gl.minimum(len_q - r0, T.ITEM_ROWS), T.BLOCK_M)


@gluon.jit
def producer(descs, bufs, bars, work, batch_rows, n_items, band, T: gl.constexpr):
    """Loads queries and keys in the order the consumers use them; with a mask it tells them which keys those are."""
    q_desc, k_desc, v_desc = descs
    q_sm, k_sm, v_sm, o_sm = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    CONSUMERS: gl.constexpr = T.CONSUMERS
    count = items_of(gl.program_id(0), gl.num_programs(0), n_items)
    coming = find_tile(work, 0, count, T)
    block = 0
    tile = 0
    for n in range(count):
        h, b, r0, start_q, len_q, start_k, len_k, part, place = coming
        coming = find_tile(work, n + 1, count, T)
        first, blocks, full_lo, full_hi = key_range(r0, len_q, len_k, band, part, place, work, T)
        for t in range(tiles_of(r0, len_q, T)):
            for w in gl.static_range(CONSUMERS):
                slot = (tile & 1) * CONSUMERS + w
                mbarrier.wait(q_empty.index(slot), ((tile >> 1) & 1) ^ 1)
                mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
                at = ragged(start_q + b * batch_rows[0], len_q, r0 + t * T.BLOCK_M + w * ROWS, h, 0)
                tma_load(q_desc, at, q_full.index(slot), q_sm.index(slot))
            tile += 1
            if (t == 0) | (blocks > T.STAGES):
                for i in range(blocks):
                    slot = block % T.STAGES
                    phase = ((block // T.STAGES) & 1) ^ 1
                    row = first + i * T.BLOCK_N
                    if T.LISTED:
                        number, cut = visited(work[5], place, i)
                        row = number * T.BLOCK_N
                    mbarrier.wait(k_empty.index(slot), phase)
                    if T.LISTED:
                        tell(work[6], block, PAIRS, row, cut, 0, 0, T)
                    mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
                    at = ragged(start_k + b * batch_rows[1], len_k, row, h // T.GROUP, 0)
                    tma_load(k_desc, at, k_full.index(slot), k_sm.index(slot))
                    mbarrier.wait(v_empty.index(slot), phase)
                    mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
                    at = ragged(start_k + b * batch_rows[2], len_k, row, h // T.GROUP, 0)
                    tma_load(v_desc, at, v_full.index(slot), v_sm.index(slot))
                    block += 1


@gluon.jit
def skip(block, turn, blocks, done, q_empty, bars, WG: gl.constexpr, T: gl.constexpr):
    """Pass by the next ``blocks`` blocks of keys without computing: release each buffer (if ``done`` with it), pass on
    each turn."""
    q_full, _, k_full, k_empty, v_full, v_empty = bars
    for i in range(blocks):
        old = (block + i) % T.STAGES
        new = (block + i + 1) % T.STAGES
        phase = ((block + i + 1) // T.STAGES) & 1
        mbarrier.wait(k_full.index(new), phase)
        if T.PING_PONG:
            turn = wait_turn(turn, WG)
            turn = pass_turn(turn, (WG + 1) % T.CONSUMERS)
        mbarrier.arrive(k_empty.index(new), count=1, pred=done)
        mbarrier.arrive(q_empty, count=1, pred=i == blocks - 1)
        mbarrier.wait(v_full.index(new), phase)
        mbarrier.arrive(v_empty.index(old), count=1, pred=done)
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
def consumer(o_desc, bufs, bars, work, batch_rows, n_items, band, p_params, stride_params, row_sums, places, scale,
             out_scale, FORWARD: gl.constexpr, LOAD_PARAMS: gl.constexpr, SHIFT: gl.constexpr, KEEP: gl.constexpr,
             COLUMNS: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """64 queries of every tile: scores, function, weighted sum of values."""
    q_sm, k_sm, v_sm, o_sm = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    BLOCK_N: gl.constexpr = T.BLOCK_N  # a shape takes constexprs, not fields of one
    D: gl.constexpr = T.D
    DV: gl.constexpr = T.DV
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, k_width=2)
    dtype: gl.constexpr = q_sm.dtype
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)  # never read: use_acc=False
    o = gl.zeros([ROWS, DV], gl.float32, o_layout)
    count = items_of(gl.program_id(0), gl.num_programs(0), n_items)
    turn = 0
    if T.PING_PONG and WG == T.CONSUMERS - 1:
        turn = pass_turn(turn, 0)
    if count > 0:
        h, b, r0, start_q, len_q, start_k, len_k, part, own_list = find_tile(work, 0, count, T)
        coming = find_tile(work, 1, count, T)
        first, blocks, full_lo, full_hi = key_range(r0, len_q, len_k, band, part, own_list, work, T)
        tiles = tiles_of(r0, len_q, T)
        # The very first scores: nothing to overlap them with.
        mbarrier.wait(q_full.index(WG), 0)
        mbarrier.wait(k_full.index(0), 0)
        q = q_sm.index(WG).reshape([ROWS, D])
        s = warpgroup_mma(q, k_sm.index(0).reshape([BLOCK_N, D]).permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(0), count=1, pred=(tiles == 1) | (blocks > T.STAGES))
        mbarrier.arrive(q_empty.index(WG), count=1, pred=blocks == 1)
        params = LOAD_PARAMS(p_params, stride_params, h)
        tables, numbers = places
        spot = (b, h, start_q, start_k, tables, numbers)
        j0, cut = block_at(work[6], 0, first, full_lo, full_hi, T)
        columns = columns_of(spot, r0, j0, len_q, len_k, s_layout, COLUMNS, WG, T)
        p = weights(s, params, spot, columns, r0, j0, cut, len_q, len_k, band, scale, FORWARD, SHIFT, KEEP, WG, T)
        if T.NORM != "none":
            total, largest = no_sums(ROWS, gl.SliceLayout(1, s_layout))
            p, total, largest, unused = add_block(p, total, largest, True, T)
        p = gl.convert_layout(p.to(dtype), p_layout)
        mbarrier.wait(v_full.index(0), 0)
        block = 0  # blocks of keys that were used up
        tile = 0
        for n in range(count):
            h1, b1, r1, start_q1, len_q1, start_k1, len_k1, part1, own_list1 = coming
            coming = find_tile(work, n + 2, count, T)
            first1, blocks1, full_lo1, full_hi1 = key_range(r1, len_q1, len_k1, band, part1, own_list1, work, T)
            tiles1 = tiles_of(r1, len_q1, T)
            for t in range(tiles):
                m0 = r0 + t * T.BLOCK_M
                final = t == tiles - 1  # the next tile is another item's
                done = final | (blocks > T.STAGES)  # with these keys: the next tile loads its own
                active = m0 + WG * ROWS < len_q
                idle = 0
                if WG > 0:
                    if not active:  # the sequence ends before these queries: leave the tensor cores to the other
                        idle = blocks - 1
                        q_slot = (tile & 1) * T.CONSUMERS + WG
                        turn = skip(block, turn, idle, done, q_empty.index(q_slot), bars, WG, T)
                for i in range(idle, blocks):
                    last = i == blocks - 1
                    moves = last & final
                    more = (i < blocks - 1) | (t < tiles - 1) | (n < count - 1)
                    old = (block + i) % T.STAGES
                    ahead = gl.where(last, gl.where(done, block + blocks, block), block + i + 1)
                    new = ahead % T.STAGES
                    phase = (ahead // T.STAGES) & 1
                    new_tile = tile + last.to(gl.int32)
                    q_slot = (new_tile & 1) * T.CONSUMERS + WG
                    mbarrier.wait(q_full.index(q_slot), (new_tile >> 1) & 1, pred=more)
                    mbarrier.wait(k_full.index(new), phase, pred=more)
                    if T.PING_PONG:
                        turn = wait_turn(turn, WG)
                    q = q_sm.index(q_slot).reshape([ROWS, D])
                    k = k_sm.index(new).reshape([BLOCK_N, D])
                    v = v_sm.index(old).reshape([BLOCK_N, DV])
                    s_next = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
                    o_next = warpgroup_mma(p, v, o, use_acc=i > 0, is_async=True)
                    if T.PING_PONG:
                        turn = pass_turn(turn, (WG + 1) % T.CONSUMERS)
                    params = LOAD_PARAMS(p_params, stride_params, gl.where(moves, h1, h))
                    spot = (
                        gl.where(moves, b1, b), gl.where(moves, h1, h), gl.where(moves, start_q1, start_q),
                        gl.where(moves, start_k1, start_k), tables, numbers,
                    )  # fmt: skip
                    next_m0 = gl.where(last, gl.where(final, r1, m0 + T.BLOCK_M), m0)
                    next_j0 = gl.where(last, gl.where(final, first1, first), first + (i + 1) * BLOCK_N)
                    full = gl.where(moves, full_lo1, full_lo), gl.where(moves, full_hi1, full_hi)
                    lengths = gl.where(moves, len_q1, len_q), gl.where(moves, len_k1, len_k)
                    j0, cut = block_at(work[6], ahead, next_j0, full[0], full[1], T)
                    columns = columns_of(spot, next_m0, j0, lengths[0], lengths[1], s_layout, COLUMNS, WG, T)
                    s = warpgroup_mma_wait(1, deps=(s_next,))
                    next_blocks = gl.where(final, blocks1, blocks)
                    next_done = gl.where(final, tiles1 == 1, t == tiles - 2) | (next_blocks > T.STAGES)
                    k_done = gl.where(last, next_done, done)
                    q_done = gl.where(last, next_blocks == 1, i == blocks - 2)
                    mbarrier.arrive(k_empty.index(new), count=1, pred=k_done)
                    mbarrier.arrive(q_empty.index(q_slot), count=1, pred=q_done)
                    w = weights(
                        s, params, spot, columns, next_m0, j0, cut, lengths[0], lengths[1], band, scale, FORWARD, SHIFT,
                        KEEP, WG, T,
                    )  # fmt: skip
                    if T.NORM != "none":
                        old_total, old_largest = total, largest
                        w, total, largest, shrink = add_block(w, total, largest, last, T)
                    # The branch of this wait keeps the function in front of it; without one the assembler moves most of
                    # it behind the wait for o, and nothing overlaps.
                    mbarrier.wait(v_full.index(new), phase, pred=more)
                    o, kept = warpgroup_mma_wait(0, deps=(o_next, p))
                    p = gl.convert_layout(w.to(dtype), p_layout)  # after the wait: old and new p share registers
                    mbarrier.arrive(v_empty.index(old), count=1, pred=done)
                    if T.NORM == "exp":
                        if not last:
                            o = o * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
                    if last & active:
                        start = start_q + b * batch_rows[3]
                        if T.PARTS > 1:
                            start += part * batch_rows[4]
                        row = m0 + WG * ROWS
                        if T.NORM == "none":
                            result = o * out_scale
                        else:
                            p_sums, step_batch, step_head, p_sink = row_sums
                            place = b.to(gl.int64) * step_batch + h.to(gl.int64) * step_head + start_q + row
                            sums = (old_total, old_largest)
                            result = divided(o, sums, out_scale, p_sums, place, len_q - row, p_sink, h, T)
                        store_out(o_desc, o_sm.index(WG), result, ragged(start, len_q, row, h, 0), T)
                tile += 1
                block += gl.where(done, blocks, 0)
            h, b, r0, part = h1, b1, r1, part1
            start_q, len_q, start_k, len_k = start_q1, len_q1, start_k1, len_k1
            first, blocks, full_lo, full_hi, tiles = first1, blocks1, full_lo1, full_hi1, tiles1
        tma_store_wait(0)


@gluon.jit(do_not_specialize=["batch_rows", "n_tiles", "rows_q", "rows_k"])  # they change from batch to batch
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, p_table, p_cu_k, p_params, stride_params, row_sums, places, visits, batch_rows,
    n_tiles, heads, rows_q, rows_k, band, scale, out_scale, FORWARD: gl.constexpr, LOAD_PARAMS: gl.constexpr,
    SHIFT: gl.constexpr, KEEP: gl.constexpr, COLUMNS: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """``row_sums``: where they go, their strides between batch entries and heads, and the sinks; None without sums.
    ``places``: tables and numbers of a placed function or of a mask (device/places.py), or two None. ``visits``: the
    blocks that a mask, KEEP, leaves (device/visits.py), or None. COLUMNS: looks up what belongs to a block's keys
    (weights.columns_of), or None."""
    CONSUMERS: gl.constexpr = T.CONSUMERS
    Q_SLOTS: gl.constexpr = 2 * CONSUMERS
    STAGES: gl.constexpr = T.STAGES
    q_sm = gl.allocate_shared_memory(q_desc.dtype, [Q_SLOTS] + q_desc.block_type.shape, q_desc.layout)
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
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc)
    bufs = (q_sm, k_sm, v_sm, o_sm)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    steps = q_full  # of any type: nothing reads it
    if T.LISTED:
        steps = allocate_steps(T)
    n_items = list_length(p_table, n_tiles) * heads * T.PARTS
    work = (p_table, p_cu_k, heads, rows_q, rows_k, visits, steps, n_items)
    # Triton takes a JIT function in an argument tuple only if the tuple is written here.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (o_desc, bufs, bars, work, batch_rows, n_items, band, p_params, stride_params, row_sums,
                            places, scale, out_scale, FORWARD, LOAD_PARAMS, SHIFT, KEEP, COLUMNS, 0, T)),
                (consumer, (o_desc, bufs, bars, work, batch_rows, n_items, band, p_params, stride_params, row_sums,
                            places, scale, out_scale, FORWARD, LOAD_PARAMS, SHIFT, KEEP, COLUMNS, 1, T)),
                (producer, (descs, bufs, bars, work, batch_rows, n_items, band, T)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (o_desc, bufs, bars, work, batch_rows, n_items, band, p_params, stride_params, row_sums,
                            places, scale, out_scale, FORWARD, LOAD_PARAMS, SHIFT, KEEP, COLUMNS, 0, T)),
                (consumer, (o_desc, bufs, bars, work, batch_rows, n_items, band, p_params, stride_params, row_sums,
                            places, scale, out_scale, FORWARD, LOAD_PARAMS, SHIFT, KEEP, COLUMNS, 1, T)),
                (consumer, (o_desc, bufs, bars, work, batch_rows, n_items, band, p_params, stride_params, row_sums,
                            places, scale, out_scale, FORWARD, LOAD_PARAMS, SHIFT, KEEP, COLUMNS, 2, T)),
                (producer, (descs, bufs, bars, work, batch_rows, n_items, band, T)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_OF_3, CONSUMER_REGISTERS_OF_3, PRODUCER_REGISTERS],
        )  # fmt: skip
