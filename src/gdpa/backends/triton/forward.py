"""Forward: one program per tile of queries, one pass over the keys it sees.

    acc = sum over key blocks of f(scale * q k^T) v,    out = out_scale * acc

There is no running maximum and no rescaling: the function is applied and the block is done. The kernel is the same for
dense and packed tensors (``seq_span`` decides), for every function (FORWARD) and every band.
"""

import triton
import triton.language as tl

from gdpa.device.sequences import in_band, load_rows, locate_tile, seq_span, store_rows, visible_keys


@triton.jit
def key_block(
    acc, q, p_k, p_v, j0, i, len_q, len_k, stride_k, stride_v, cols, cols_v, left, right, scale, params,
    FORWARD: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, CHECK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + f(scale * q k^T) v for keys [j0, j0 + BLOCK_N). CHECK: the block may pass the end of the sequence.
    MASKED: pairs outside the band or past the end are zeroed after f."""
    n = tl.arange(0, BLOCK_N)
    p_k = p_k + tl.cast(j0, tl.int64) * stride_k
    p_v = p_v + tl.cast(j0, tl.int64) * stride_v
    k = load_rows(p_k, n, len_k - j0, stride_k, cols, D, BLOCK_D, CHECK)  # (BLOCK_N, BLOCK_D)
    s = tl.dot(q, k.T, input_precision=PRECISION) * scale  # (BLOCK_M, BLOCK_N)
    p = FORWARD(s, params)
    if MASKED:
        p = tl.where(in_band(i[:, None], (j0 + n)[None, :], len_q, len_k, left, right), p, 0.0)
    v = load_rows(p_v, n, len_k - j0, stride_v, cols_v, DV, BLOCK_DV, CHECK)  # (BLOCK_N, BLOCK_DV)
    return tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)


@triton.jit
def forward_kernel(
    p_q, p_k, p_v, p_out, p_cu_q, p_cu_k, p_seq, p_params, strides_q, strides_k, strides_v, strides_out,
    stride_params, rows_q, rows_k, n_seqs, left, right, scale, out_scale,
    FORWARD: tl.constexpr, LOAD_PARAMS: tl.constexpr, FINITE_AT_ZERO: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    b, start_q, len_q, m0 = locate_tile(p_seq, p_cu_q, tl.program_id(0), rows_q, n_seqs, BLOCK_M)
    if m0 >= len_q:
        return
    start_k, len_k = seq_span(p_cu_k, b, rows_k)
    b = b.to(tl.int64)
    p_q += b * strides_q[0] + h.to(tl.int64) * strides_q[1] + (start_q + m0) * strides_q[2]
    p_k += b * strides_k[0] + (h // GROUP).to(tl.int64) * strides_k[1] + start_k * strides_k[2]
    p_v += b * strides_v[0] + (h // GROUP).to(tl.int64) * strides_v[1] + start_k * strides_v[2]
    p_out += b * strides_out[0] + h.to(tl.int64) * strides_out[1] + (start_q + m0) * strides_out[2]

    m = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    cols_v = tl.arange(0, BLOCK_DV)
    q = load_rows(p_q, m, len_q - m0, strides_q[2], cols, D, BLOCK_D, True)
    params = LOAD_PARAMS(p_params, stride_params, h)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    i = m0 + m
    lo, full_lo, full_hi, hi = visible_keys(m0, len_q, len_k, left, right, BLOCK_M, BLOCK_N)
    if left is not None:
        for j0 in tl.range(lo, full_lo, BLOCK_N):
            acc = key_block(
                acc, q, p_k, p_v, j0, i, len_q, len_k, strides_k[2], strides_v[2], cols, cols_v, left, right, scale,
                params, FORWARD, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, True, PRECISION,
            )  # fmt: skip
    for j0 in tl.range(full_lo, full_hi, BLOCK_N):
        acc = key_block(
            acc, q, p_k, p_v, j0, i, len_q, len_k, strides_k[2], strides_v[2], cols, cols_v, left, right, scale,
            params, FORWARD, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, False, False, PRECISION,
        )  # fmt: skip
    # Past the end of the keys f(0) meets rows of v that were read as zero: no mask, unless f(0) is inf or NaN.
    BANDED: tl.constexpr = (left is not None) or (right is not None)
    for j0 in tl.range(full_hi, hi, BLOCK_N):
        acc = key_block(
            acc, q, p_k, p_v, j0, i, len_q, len_k, strides_k[2], strides_v[2], cols, cols_v, left, right, scale,
            params, FORWARD, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, True, BANDED or not FINITE_AT_ZERO, PRECISION,
        )  # fmt: skip
    store_rows(p_out, acc * out_scale, m, len_q - m0, strides_out[2], cols_v, DV)
