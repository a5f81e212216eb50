"""Backward: scores are computed again, nothing is kept from the forward (but row sums, if there are any: row_sums.py).

``backward_kernel`` holds a tile of keys and walks over the queries that see it: dk and dv stay in registers, dq is
added to a float32 buffer (or written, where one tile holds all keys). ``dq_kernel`` holds a tile of queries instead and
walks over keys; with it the whole backward has a fixed order of additions, at the price of computing s and dp a second
time. Where most sequences have only one tile of keys, ``backward_kernel`` writes the dq of those and
``other_dq_kernel`` that of the others. Each kernel sees from the lengths which is which, whatever bounds the host was
given.

    dp = out_scale * do v^T    ds = dp * f'(s) * scale    dv = out_scale * p^T do    dk = ds^T q    dq = ds k

The factor ``scale * out_scale`` of ds is applied to the finished dk and dq, which is cheaper; only in float16, where
a ds without it could overflow, to ds itself (LEAST_FACTOR), unless it is tiny (``ds_factors``).
"""

from collections import namedtuple

import triton
import triton.language as tl

from gdpa.backends.triton.row_sums import load_terms, through_sums
from gdpa.backends.triton.walk import walk
from gdpa.device.places import positions, with_mask
from gdpa.device.products import load_block, rows_product
from gdpa.device.rounding import ds_factors
from gdpa.device.rows import add_rows, row_stride, rows_source, store_rows, zero_rows
from gdpa.device.sequences import RECORD, Bounds, in_band, locate_tile, visible_keys, visible_queries

# Of scores, and of ds before it is rounded and after its products (see ds_factors).
Factors = namedtuple("Factors", "scale before after")

# What the function takes beside the scores; what LEARN takes, if it is there; terms of rows (see row_sums.py), or None.
Inputs = namedtuple("Inputs", "params spot learning terms")


@triton.jit
def value_and_gradients(s, dp, keep, sums, params, learning, delta, row, CODE: tl.constexpr, MASKED: tl.constexpr):
    """p, ds (without its factor) and the running sums of dp * df/dparam, all zero where ``keep`` is not. LEARN, if it
    is there, adds dp * df/dentry to the gradients of tables, for each of N_LEARNED lookups. With row sums (NORM), p is
    divided by them and dp is that of the function's value."""
    N_PARAMS: tl.constexpr = CODE.N_PARAMS
    if N_PARAMS + CODE.N_LEARNED == 0:
        p, slope = CODE.BACKWARD(s, params)
        if CODE.NORM != "none":
            p, dp = through_sums(p, dp, delta, row, CODE)
        ds = dp * slope
    else:
        results = CODE.BACKWARD(s, params)
        p = results[0]
        if CODE.NORM != "none":
            p, dp = through_sums(p, dp, delta, row, CODE)
        ds = dp * results[1]
        for n in tl.static_range(N_PARAMS):
            dparam = dp * results[2 + n]
            if MASKED:
                dparam = tl.where(keep, dparam, 0.0)
            sums += tl.where(tl.arange(0, sums.shape[0]) == n, tl.sum(dparam), 0.0)
        if CODE.LEARN is not None:
            CODE.LEARN(dp, results, keep, params, learning, CODE.COPIES, 1, MASKED)
    if MASKED:
        p = tl.where(keep, p, 0.0)
        ds = tl.where(keep, ds, 0.0)
    return p, ds, sums


@triton.jit
def query_block(gradients, i0, args, CODE: tl.constexpr, MASKED: tl.constexpr, T: tl.constexpr):
    """Add the queries [i0, i0 + BLOCK_M) to the ``gradients``, dk and dv (still without their factors) and sums for
    params; and their dq to the buffer, or store it for the first rows of its source."""
    dk, dv, sums = gradients
    k, v, sources, j, bounds, factors, inputs = args
    q_source, do_source, dq_source = sources
    len_q, len_k, band = bounds
    params, spot = inputs.params, inputs.spot
    q = load_block(q_source, i0, T.D, T.BLOCK_M, T.BLOCK_D, MASKED, T.TMA)
    do = load_block(do_source, i0, T.DV, T.BLOCK_M, T.BLOCK_DV, MASKED, T.TMA)
    # (BLOCK_N, BLOCK_M): transposed, as dk and dv need it
    s = rows_product(k, q, T.D, T.BLOCK_N, T.BLOCK_M, T.BLOCK_D, T) * factors.scale
    dp = rows_product(v, do, T.DV, T.BLOCK_N, T.BLOCK_M, T.BLOCK_DV, T)
    i = i0 + tl.arange(0, T.BLOCK_M)
    keep = True
    if MASKED:
        keep = in_band(i[None, :], j[:, None], len_q, len_k, band)
        keep = with_mask(keep, spot, i[None, :], j[:, None], len_q, len_k, CODE.KEEP)
    if T.PLACED:
        params = (params, positions(spot, i[None, :], j[:, None], len_q, len_k), spot, None)
    delta = None
    row = None
    if CODE.NORM != "none":
        delta, row = load_terms(inputs.terms, spot[0], spot[1], spot[2], i, len_q)
        delta = delta[None, :]
        row = row[None, :]
    p, ds, sums = value_and_gradients(s, dp, keep, sums, params, inputs.learning, delta, row, CODE, MASKED)
    dv = tl.dot(p.to(do.tile.dtype), do.tile, dv, input_precision=T.PRECISION)
    if T.LEAST_FACTOR > 0:
        ds = ds * factors.before
    ds = ds.to(q.tile.dtype)
    dk = tl.dot(ds, q.tile, dk, input_precision=T.PRECISION)
    if CODE.DQ != "none":
        dq = tl.dot(ds.T, k.tile, input_precision=T.PRECISION) * factors.after
        if CODE.DQ == "add":
            add_rows(dq_source, dq, i0, T.D, T.BLOCK_M, T.BLOCK_D, T.TMA)
        else:
            store_rows(dq_source, dq, i0, T.D, T.BLOCK_M, T.BLOCK_D, T.TMA)
    return dk, dv, sums


@triton.jit(do_not_specialize=["rows_q", "rows_k"])  # they change from batch to batch
def backward_kernel(
    q_rows, k_rows, v_rows, do_rows, dq_rows, dk_rows, dv_rows, p_dparams, strides_dparams, p_cu_q, p_records, p_params,
    stride_params, rows_q, rows_k, band, scale, out_scale, tables, numbers, terms,
    CODE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """dk, dv and the partial sums of dparams of one tile of keys. CODE.DQ: "add", "store", "short" (stored for
    sequences whose keys are one tile; the rest is other_dq_kernel's work), or "none" (dq_kernel's work)."""
    tile = tl.program_id(0)
    hk = tl.program_id(1)
    b, n0, start_k, len_k, start_q, len_q = locate_tile(p_records, p_cu_q, tile, rows_k, rows_q, T.BLOCK_N)
    if n0 >= len_k:
        return
    head = hk.to(tl.int64)
    stride_q, stride_do = row_stride(q_rows, T.ALIGN, T.WIDE), row_stride(do_rows, T.ALIGN, T.WIDE)
    stride_dq = row_stride(dq_rows, T.ALIGN, T.WIDE)
    stride_k, stride_v = row_stride(k_rows, T.ALIGN, T.WIDE), row_stride(v_rows, T.ALIGN, T.WIDE)
    stride_dk, stride_dv = row_stride(dk_rows, T.ALIGN, T.WIDE), row_stride(dv_rows, T.ALIGN, T.WIDE)
    k_source = rows_source(k_rows, stride_k, b, head, start_k, len_k, T.D, T.BLOCK_N, T.BLOCK_D, T)
    v_source = rows_source(v_rows, stride_v, b, head, start_k, len_k, T.DV, T.BLOCK_N, T.BLOCK_DV, T)
    k = load_block(k_source, n0, T.D, T.BLOCK_N, T.BLOCK_D, True, T.TMA)
    v = load_block(v_source, n0, T.DV, T.BLOCK_N, T.BLOCK_DV, True, T.TMA)
    dk = zero_rows(T.BLOCK_N, T.BLOCK_D)
    dv = zero_rows(T.BLOCK_N, T.BLOCK_DV)
    j = n0 + tl.arange(0, T.BLOCK_N)
    before, after = ds_factors(scale * out_scale, T.LEAST_FACTOR)
    len_dq = len_q
    if CODE.DQ == "short":
        len_dq = tl.where(len_k <= T.BLOCK_N, len_q, 0)
    lo, full_lo, full_hi, hi = visible_queries(n0, len_q, len_k, band, T.BLOCK_M, T.BLOCK_N)
    if n0 + T.BLOCK_N > len_k:  # keys past the end are in every block, so none is free of masks
        full_lo = lo
        full_hi = lo
    edges = (lo, full_lo, full_hi, hi)
    BLOCK_P: tl.constexpr = CODE.BLOCK_P
    bounds = Bounds(len_q, len_k, band)
    factors = Factors(scale, before, after)
    for g in tl.range(0, T.GROUP):
        hq = tl.cast(hk * T.GROUP + g, tl.int64)
        q_source = rows_source(q_rows, stride_q, b, hq, start_q, len_q, T.D, T.BLOCK_M, T.BLOCK_D, T)
        do_source = rows_source(do_rows, stride_do, b, hq, start_q, len_q, T.DV, T.BLOCK_M, T.BLOCK_DV, T)
        dq_source = rows_source(dq_rows, stride_dq, b, hq, start_q, len_dq, T.D, T.BLOCK_M, T.BLOCK_D, T)
        params = CODE.LOAD_PARAMS(p_params, stride_params, hq)
        sums = tl.zeros((BLOCK_P,), tl.float32)
        spot = (b, hq, start_q, start_k, tables, numbers)
        learning = None
        if CODE.LEARN is not None:
            learning = (tables.gradients, tile + hk, out_scale)
        sources = (q_source, do_source, dq_source)
        inputs = Inputs(params, spot, learning, terms)
        args = (k, v, sources, j, bounds, factors, inputs)
        dk, dv, sums = walk(
            (dk, dv, sums), edges, n0, len_q, len_k, spot, args, query_block, CODE, False, T.BANDED, T
        )  # fmt: skip
        if CODE.N_PARAMS > 0:
            index = tl.arange(0, BLOCK_P)
            p_sums = p_dparams + tile.to(tl.int64) * strides_dparams[0] + hq * strides_dparams[1] + index
            tl.store(p_sums, sums * out_scale, mask=index < CODE.N_PARAMS)
    dk_source = rows_source(dk_rows, stride_dk, b, head, start_k, len_k, T.D, T.BLOCK_N, T.BLOCK_D, T)
    dv_source = rows_source(dv_rows, stride_dv, b, head, start_k, len_k, T.DV, T.BLOCK_N, T.BLOCK_DV, T)
    store_rows(dk_source, dk * after, n0, T.D, T.BLOCK_N, T.BLOCK_D, T.TMA)
    store_rows(dv_source, dv * out_scale, n0, T.DV, T.BLOCK_N, T.BLOCK_DV, T.TMA)


@triton.jit
def dq_key_block(dq, j0, args, CODE: tl.constexpr, MASKED: tl.constexpr, T: tl.constexpr):
    """dq + ds k for keys [j0, j0 + BLOCK_N). The terms in ``inputs`` are those of the queries."""
    q, do, k_source, v_source, i, bounds, factors, inputs = args
    len_q, len_k, band = bounds
    params, spot = inputs.params, inputs.spot
    k = load_block(k_source, j0, T.D, T.BLOCK_N, T.BLOCK_D, MASKED, T.TMA)
    v = load_block(v_source, j0, T.DV, T.BLOCK_N, T.BLOCK_DV, MASKED, T.TMA)
    s = rows_product(q, k, T.D, T.BLOCK_M, T.BLOCK_N, T.BLOCK_D, T) * factors.scale
    dp = rows_product(do, v, T.DV, T.BLOCK_M, T.BLOCK_N, T.BLOCK_DV, T)
    if T.PLACED:
        j = j0 + tl.arange(0, T.BLOCK_N)
        params = (params, positions(spot, i[:, None], j[None, :], len_q, len_k), spot, None)
    if CODE.NORM == "none":
        ds = dp * CODE.BACKWARD(s, params)[1]
    else:
        results = CODE.BACKWARD(s, params)
        delta, row = inputs.terms
        _, de = through_sums(results[0], dp, delta[:, None], row[:, None], CODE)
        ds = de * results[1]
    if MASKED:
        j = j0 + tl.arange(0, T.BLOCK_N)
        keep = in_band(i[:, None], j[None, :], len_q, len_k, band)
        ds = tl.where(with_mask(keep, spot, i[:, None], j[None, :], len_q, len_k, CODE.KEEP), ds, 0.0)
    if T.LEAST_FACTOR > 0:
        ds = ds * factors.before
    return tl.dot(ds.to(k.tile.dtype), k.tile, dq, input_precision=T.PRECISION)


@triton.jit
def dq_tile(tile, h, rows, where, band, scales, given, CODE: tl.constexpr, SHORT: tl.constexpr, T: tl.constexpr):
    """dq of one tile of queries of head ``h``, unless backward_kernel has stored it: of those with 1 to SHORT keys.
    ``rows``: all tensors; ``where``: what the tile is found by; ``given``: what the function takes beside scores."""
    q_rows, k_rows, v_rows, do_rows, dq_rows = rows
    p_cu_k, p_records, rows_q, rows_k = where
    scale, out_scale = scales
    p_params, stride_params, tables, numbers, terms = given
    b, m0, start_q, len_q, start_k, len_k = locate_tile(p_records, p_cu_k, tile, rows_q, rows_k, T.BLOCK_M)
    if (m0 < len_q) & ((len_k == 0) | (len_k > SHORT)):
        hq = h.to(tl.int64)
        hk = (h // T.GROUP).to(tl.int64)
        stride_q, stride_do = row_stride(q_rows, T.ALIGN, T.WIDE), row_stride(do_rows, T.ALIGN, T.WIDE)
        stride_dq = row_stride(dq_rows, T.ALIGN, T.WIDE)
        stride_k, stride_v = row_stride(k_rows, T.ALIGN, T.WIDE), row_stride(v_rows, T.ALIGN, T.WIDE)
        q_source = rows_source(q_rows, stride_q, b, hq, start_q, len_q, T.D, T.BLOCK_M, T.BLOCK_D, T)
        do_source = rows_source(do_rows, stride_do, b, hq, start_q, len_q, T.DV, T.BLOCK_M, T.BLOCK_DV, T)
        k_source = rows_source(k_rows, stride_k, b, hk, start_k, len_k, T.D, T.BLOCK_N, T.BLOCK_D, T)
        v_source = rows_source(v_rows, stride_v, b, hk, start_k, len_k, T.DV, T.BLOCK_N, T.BLOCK_DV, T)
        q = load_block(q_source, m0, T.D, T.BLOCK_M, T.BLOCK_D, True, T.TMA)
        do = load_block(do_source, m0, T.DV, T.BLOCK_M, T.BLOCK_DV, True, T.TMA)
        params = CODE.LOAD_PARAMS(p_params, stride_params, h)
        dq = zero_rows(T.BLOCK_M, T.BLOCK_D)
        i = m0 + tl.arange(0, T.BLOCK_M)
        before, after = ds_factors(scale * out_scale, T.LEAST_FACTOR)
        own_terms = None
        if CODE.NORM != "none":
            own_terms = load_terms(terms, b, hq, start_q, i, len_q)
        edges = visible_keys(m0, len_q, len_k, band, T.BLOCK_M, T.BLOCK_N)
        spot = (b, h, start_q, start_k, tables, numbers)
        bounds = Bounds(len_q, len_k, band)
        inputs = Inputs(params, spot, None, own_terms)
        args = (q, do, k_source, v_source, i, bounds, Factors(scale, before, after), inputs)
        dq = walk(dq, edges, m0, len_q, len_k, spot, args, dq_key_block, CODE, True, band.left is not None, T)
        dq_source = rows_source(dq_rows, stride_dq, b, hq, start_q, len_q, T.D, T.BLOCK_M, T.BLOCK_D, T)
        store_rows(dq_source, dq * after, m0, T.D, T.BLOCK_M, T.BLOCK_D, T.TMA)


@triton.jit(do_not_specialize=["rows_q", "rows_k"])  # they change from batch to batch
def dq_kernel(
    q_rows, k_rows, v_rows, do_rows, dq_rows, p_cu_k, p_records, p_params, stride_params, rows_q, rows_k, band, scale,
    out_scale, tables, numbers, terms, CODE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, in a fixed order of additions."""
    rows = (q_rows, k_rows, v_rows, do_rows, dq_rows)
    where = (p_cu_k, p_records, rows_q, rows_k)
    given = (p_params, stride_params, tables, numbers, terms)
    dq_tile(tl.program_id(0), tl.program_id(1), rows, where, band, (scale, out_scale), given, CODE, 0, T)


@triton.jit(do_not_specialize=["rows_q", "rows_k", "n_tiles"])
def other_dq_kernel(
    q_rows, k_rows, v_rows, do_rows, dq_rows, p_cu_k, p_records, p_params, stride_params, rows_q, rows_k, band, scale,
    out_scale, tables, numbers, terms, n_tiles, CODE: tl.constexpr, SHORT: tl.constexpr, GLANCE: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """dq of the sequences that backward_kernel leaves out with DQ = "short", or that are too long for Hopper's: few, or
    none. A program looks at GLANCE tiles at once, which are far apart: those of a long sequence are many programs'."""
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles = first + tl.arange(0, GLANCE) * programs
    inside = tiles < n_tiles
    p_record = p_records + tiles.to(tl.int64) * RECORD
    row = tl.load(p_record + 1, mask=inside, other=0)
    len_q = tl.load(p_record + 3, mask=inside, other=0)
    len_k = tl.load(p_record + 5, mask=inside, other=0)
    left = (row < len_q) & ((len_k == 0) | (len_k > SHORT))
    if tl.sum(left.to(tl.int32)) > 0:
        rows = (q_rows, k_rows, v_rows, do_rows, dq_rows)
        where = (p_cu_k, p_records, rows_q, rows_k)
        given = (p_params, stride_params, tables, numbers, terms)
        for i in range(0, tl.minimum(GLANCE, tl.cdiv(n_tiles - first, programs))):
            tile = first + i * programs
            dq_tile(tile, tl.program_id(1), rows, where, band, (scale, out_scale), given, CODE, SHORT, T)
