"""Backward: scores are computed again, nothing is kept from the forward.

``backward_kernel`` holds a tile of keys and walks over the queries that see it: dk and dv stay in registers, dq is
added to a float32 buffer (or written, where one tile holds all keys). ``dq_kernel`` holds a tile of queries instead
and walks over keys; with it the whole backward has a fixed order of additions, at the price of computing s and dp a
second time.

    dp = out_scale * do v^T    ds = dp * f'(s) * scale    dv = out_scale * p^T do    dk = ds^T q    dq = ds k

The factor ``scale * out_scale`` of ds is applied to the finished dk and dq, which is cheaper; only in float16, where
a ds without it could overflow, to ds itself (PRESCALED).
"""

import triton
import triton.language as tl

from gdpa.device.sequences import (
    in_band,
    load_rows,
    locate_tile,
    row_pointers,
    seq_span,
    store_rows,
    visible_keys,
    visible_queries,
)


@triton.jit
def value_and_gradients(
    s, dp, keep, sums, params, BACKWARD: tl.constexpr, N_PARAMS: tl.constexpr, MASKED: tl.constexpr
):
    """p, ds (without scale) and the running sums of dp * df/dparam, all zero where ``keep`` is not."""
    if N_PARAMS == 0:
        p, slope = BACKWARD(s, params)
        ds = dp * slope
    else:
        results = BACKWARD(s, params)
        p = results[0]
        ds = dp * results[1]
        for n in tl.static_range(N_PARAMS):
            dparam = dp * results[2 + n]
            if MASKED:
                dparam = tl.where(keep, dparam, 0.0)
            sums += tl.where(tl.arange(0, sums.shape[0]) == n, tl.sum(dparam), 0.0)
    if MASKED:
        p = tl.where(keep, p, 0.0)
        ds = tl.where(keep, ds, 0.0)
    return p, ds, sums


@triton.jit
def query_block(
    dk, dv, sums, k, v, p_q, p_do, p_dq, i0, j, len_q, len_k, stride_q, stride_do, stride_dq, cols, cols_v, left, right,
    scale, ds_scale, params, BACKWARD: tl.constexpr, N_PARAMS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, DQ: tl.constexpr, CHECK: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the queries [i0, i0 + BLOCK_M) to dk and dv (still without their factors), and their dq to the buffer."""
    m = tl.arange(0, BLOCK_M)
    row = tl.cast(i0, tl.int64)
    q = load_rows(p_q + row * stride_q, m, len_q - i0, stride_q, cols, D, BLOCK_D, CHECK)  # (BLOCK_M, BLOCK_D)
    do = load_rows(p_do + row * stride_do, m, len_q - i0, stride_do, cols_v, DV, BLOCK_DV, CHECK)
    s = tl.dot(k, q.T, input_precision=PRECISION) * scale  # (BLOCK_N, BLOCK_M): transposed, as dk and dv need it
    dp = tl.dot(v, do.T, input_precision=PRECISION)
    keep = in_band((i0 + m)[None, :], j[:, None], len_q, len_k, left, right) if MASKED else True
    p, ds, sums = value_and_gradients(s, dp, keep, sums, params, BACKWARD, N_PARAMS, MASKED)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    PRESCALED: tl.constexpr = q.dtype == tl.float16
    if PRESCALED:
        ds = ds * ds_scale
    ds = ds.to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    if DQ != "none":
        dq = tl.dot(ds.T, k, input_precision=PRECISION)
        if not PRESCALED:
            dq = dq * ds_scale
        p_rows = row_pointers(p_dq + row * stride_dq, m, stride_dq, cols)
        inside = (m < len_q - i0)[:, None] & (cols < D)[None, :]
        if DQ == "add":
            tl.atomic_add(p_rows, dq, mask=inside, sem="relaxed")
        else:
            tl.store(p_rows, dq.to(p_dq.dtype.element_ty), mask=inside)
    return dk, dv, sums


@triton.jit
def backward_kernel(
    p_q, p_k, p_v, p_do, p_dq, p_dk, p_dv, p_dparams, p_cu_q, p_cu_k, p_seq, p_params,
    strides_q, strides_k, strides_v, strides_do, strides_dq, strides_dk, strides_dv, strides_dparams, stride_params,
    rows_q, rows_k, n_seqs, left, right, scale, out_scale,
    BACKWARD: tl.constexpr, LOAD_PARAMS: tl.constexpr, N_PARAMS: tl.constexpr, FINITE_AT_ZERO: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, DQ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv and the partial sums of dparams of one tile of keys. DQ: "add", "store", or "none" (dq_kernel's work)."""
    hk = tl.program_id(1)
    tile = tl.program_id(0)
    b, start_k, len_k, n0 = locate_tile(p_seq, p_cu_k, tile, rows_k, n_seqs, BLOCK_N)
    if n0 >= len_k:
        return
    start_q, len_q = seq_span(p_cu_q, b, rows_q)
    b = b.to(tl.int64)
    head = hk.to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    cols_v = tl.arange(0, BLOCK_DV)
    p_k += b * strides_k[0] + head * strides_k[1] + (start_k + n0) * strides_k[2]
    p_v += b * strides_v[0] + head * strides_v[1] + (start_k + n0) * strides_v[2]
    k = load_rows(p_k, n, len_k - n0, strides_k[2], cols, D, BLOCK_D, True)
    v = load_rows(p_v, n, len_k - n0, strides_v[2], cols_v, DV, BLOCK_DV, True)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    ds_scale = scale * out_scale
    lo, full_lo, full_hi, hi = visible_queries(n0, len_q, len_k, left, right, BLOCK_M, BLOCK_N)
    BANDED: tl.constexpr = (left is not None) or (right is not None)
    EDGE_MASKED: tl.constexpr = BANDED or not FINITE_AT_ZERO
    if not FINITE_AT_ZERO:
        if n0 + BLOCK_N > len_k:  # keys past the end are in every block, so none is free of masks
            full_lo = hi
            full_hi = hi
    for g in tl.range(0, GROUP):
        hq = tl.cast(hk * GROUP + g, tl.int64)
        p_qh = p_q + b * strides_q[0] + hq * strides_q[1] + start_q * strides_q[2]
        p_doh = p_do + b * strides_do[0] + hq * strides_do[1] + start_q * strides_do[2]
        p_dqh = p_dq + b * strides_dq[0] + hq * strides_dq[1] + start_q * strides_dq[2]
        params = LOAD_PARAMS(p_params, stride_params, hq)
        sums = tl.zeros((BLOCK_P,), tl.float32)
        if EDGE_MASKED:
            for i0 in tl.range(lo, full_lo, BLOCK_M):
                dk, dv, sums = query_block(
                    dk, dv, sums, k, v, p_qh, p_doh, p_dqh, i0, n0 + n, len_q, len_k, strides_q[2], strides_do[2],
                    strides_dq[2], cols, cols_v, left, right, scale, ds_scale, params, BACKWARD, N_PARAMS, D, DV, BLOCK_D,
                    BLOCK_DV, BLOCK_M, DQ, True, True, PRECISION,
                )  # fmt: skip
        for i0 in tl.range(full_lo, full_hi, BLOCK_M):
            dk, dv, sums = query_block(
                dk, dv, sums, k, v, p_qh, p_doh, p_dqh, i0, n0 + n, len_q, len_k, strides_q[2], strides_do[2],
                strides_dq[2], cols, cols_v, left, right, scale, ds_scale, params, BACKWARD, N_PARAMS, D, DV, BLOCK_D,
                BLOCK_DV, BLOCK_M, DQ, False, False, PRECISION,
            )  # fmt: skip
        for i0 in tl.range(full_hi, hi, BLOCK_M):
            dk, dv, sums = query_block(
                dk, dv, sums, k, v, p_qh, p_doh, p_dqh, i0, n0 + n, len_q, len_k, strides_q[2], strides_do[2],
                strides_dq[2], cols, cols_v, left, right, scale, ds_scale, params, BACKWARD, N_PARAMS, D, DV, BLOCK_D,
                BLOCK_DV, BLOCK_M, DQ, True, EDGE_MASKED, PRECISION,
            )  # fmt: skip
        if N_PARAMS > 0:
            index = tl.arange(0, BLOCK_P)
            p_sums = p_dparams + tile.to(tl.int64) * strides_dparams[0] + hq * strides_dparams[1] + index
            tl.store(p_sums, sums * out_scale, mask=index < N_PARAMS)
    p_dk += b * strides_dk[0] + head * strides_dk[1] + (start_k + n0) * strides_dk[2]
    p_dv += b * strides_dv[0] + head * strides_dv[1] + (start_k + n0) * strides_dv[2]
    if p_q.dtype.element_ty != tl.float16:
        dk = dk * ds_scale
    store_rows(p_dk, dk, n, len_k - n0, strides_dk[2], cols, D)
    store_rows(p_dv, dv * out_scale, n, len_k - n0, strides_dv[2], cols_v, DV)


@triton.jit
def dq_key_block(
    dq, q, do, p_k, p_v, j0, i, len_q, len_k, stride_k, stride_v, cols, cols_v, left, right, scale, ds_scale, params,
    BACKWARD: tl.constexpr, N_PARAMS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq + ds k for keys [j0, j0 + BLOCK_N)."""
    n = tl.arange(0, BLOCK_N)
    row = tl.cast(j0, tl.int64)
    k = load_rows(p_k + row * stride_k, n, len_k - j0, stride_k, cols, D, BLOCK_D, CHECK)
    v = load_rows(p_v + row * stride_v, n, len_k - j0, stride_v, cols_v, DV, BLOCK_DV, CHECK)
    s = tl.dot(q, k.T, input_precision=PRECISION) * scale
    dp = tl.dot(do, v.T, input_precision=PRECISION)
    ds = dp * BACKWARD(s, params)[1]
    if MASKED:
        ds = tl.where(in_band(i[:, None], (j0 + n)[None, :], len_q, len_k, left, right), ds, 0.0)
    if k.dtype == tl.float16:
        ds = ds * ds_scale
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def dq_kernel(
    p_q, p_k, p_v, p_do, p_dq, p_cu_q, p_cu_k, p_seq, p_params, strides_q, strides_k, strides_v, strides_do, strides_dq,
    stride_params, rows_q, rows_k, n_seqs, left, right, scale, out_scale,
    BACKWARD: tl.constexpr, LOAD_PARAMS: tl.constexpr, N_PARAMS: tl.constexpr, FINITE_AT_ZERO: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, in a fixed order of additions."""
    h = tl.program_id(1)
    b, start_q, len_q, m0 = locate_tile(p_seq, p_cu_q, tl.program_id(0), rows_q, n_seqs, BLOCK_M)
    if m0 >= len_q:
        return
    start_k, len_k = seq_span(p_cu_k, b, rows_k)
    b = b.to(tl.int64)
    hq = h.to(tl.int64)
    hk = (h // GROUP).to(tl.int64)
    p_q += b * strides_q[0] + hq * strides_q[1] + (start_q + m0) * strides_q[2]
    p_do += b * strides_do[0] + hq * strides_do[1] + (start_q + m0) * strides_do[2]
    p_dq += b * strides_dq[0] + hq * strides_dq[1] + (start_q + m0) * strides_dq[2]
    p_k += b * strides_k[0] + hk * strides_k[1] + start_k * strides_k[2]
    p_v += b * strides_v[0] + hk * strides_v[1] + start_k * strides_v[2]
    m = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    cols_v = tl.arange(0, BLOCK_DV)
    q = load_rows(p_q, m, len_q - m0, strides_q[2], cols, D, BLOCK_D, True)
    do = load_rows(p_do, m, len_q - m0, strides_do[2], cols_v, DV, BLOCK_DV, True)
    params = LOAD_PARAMS(p_params, stride_params, h)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    ds_scale = scale * out_scale
    lo, full_lo, full_hi, hi = visible_keys(m0, len_q, len_k, left, right, BLOCK_M, BLOCK_N)
    BANDED: tl.constexpr = (left is not None) or (right is not None)
    if left is not None:
        for j0 in tl.range(lo, full_lo, BLOCK_N):
            dq = dq_key_block(
                dq, q, do, p_k, p_v, j0, m0 + m, len_q, len_k, strides_k[2], strides_v[2], cols, cols_v, left, right,
                scale, ds_scale, params, BACKWARD, N_PARAMS, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, True, PRECISION,
            )  # fmt: skip
    for j0 in tl.range(full_lo, full_hi, BLOCK_N):
        dq = dq_key_block(
            dq, q, do, p_k, p_v, j0, m0 + m, len_q, len_k, strides_k[2], strides_v[2], cols, cols_v, left, right,
            scale, ds_scale, params, BACKWARD, N_PARAMS, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, False, False, PRECISION,
        )  # fmt: skip
    for j0 in tl.range(full_hi, hi, BLOCK_N):
        dq = dq_key_block(
            dq, q, do, p_k, p_v, j0, m0 + m, len_q, len_k, strides_k[2], strides_v[2], cols, cols_v, left, right,
            scale, ds_scale, params, BACKWARD, N_PARAMS, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True,
            BANDED or not FINITE_AT_ZERO, PRECISION,
        )  # fmt: skip
    if p_q.dtype.element_ty != tl.float16:
        dq = dq * ds_scale
    store_rows(p_dq, dq, m, len_q - m0, strides_dq[2], cols, D)
