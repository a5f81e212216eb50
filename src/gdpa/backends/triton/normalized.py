"""Forward with row sums: the kernel of forward.py, which also adds up what each row is divided by.

acc, d = sums over key blocks of p v and n(p),    out = out_scale * acc / (sink + d)
"""

import triton
import triton.language as tl

from gdpa.backends.triton.row_sums import add_block, finish, no_sums, nothing
from gdpa.backends.triton.walk import walk
from gdpa.device.places import positions, with_mask
from gdpa.device.products import load_block, rows_product
from gdpa.device.rows import load_rows, row_stride, rows_source, store_rows, zero_rows
from gdpa.device.sequences import Bounds, in_band, locate_tile, visible_keys


@triton.jit
def summed_block(sums, j0, args, CODE: tl.constexpr, MASKED: tl.constexpr, T: tl.constexpr):
    """The ``sums`` (acc, total, largest) with the keys [j0, j0 + BLOCK_N) (see key_block in forward.py)."""
    acc, total, largest = sums
    q, k_source, v_source, i, bounds, scale, params, spot = args
    len_q, len_k, band = bounds
    k = load_block(k_source, j0, T.D, T.BLOCK_N, T.BLOCK_D, MASKED, T.TMA)
    s = rows_product(q, k, T.D, T.BLOCK_M, T.BLOCK_N, T.BLOCK_D, T) * scale  # (BLOCK_M, BLOCK_N)
    j = j0 + tl.arange(0, T.BLOCK_N)
    if T.PLACED:
        e = CODE.FORWARD(s, (params, positions(spot, i[:, None], j[None, :], len_q, len_k), spot, None))
    else:
        e = CODE.FORWARD(s, params)
    keep = True
    if MASKED:
        keep = in_band(i[:, None], j[None, :], len_q, len_k, band)
        keep = with_mask(keep, spot, i[:, None], j[None, :], len_q, len_k, CODE.KEEP)
    p, acc, total, largest = add_block(e, keep, acc, total, largest, CODE, MASKED)
    v = load_rows(v_source, j0, T.DV, T.BLOCK_N, T.BLOCK_DV, MASKED, T.TMA)  # (BLOCK_N, BLOCK_DV)
    return tl.dot(p.to(v.dtype), v, acc, input_precision=T.PRECISION), total, largest


@triton.jit(do_not_specialize=["rows_q", "rows_k"])  # they change from batch to batch
def normalized_kernel(
    q_rows, k_rows, v_rows, out_rows, sums, p_sink, p_cu_k, p_records, p_params, stride_params, rows_q, rows_k, band,
    scale, out_scale, tables, numbers, CODE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    h = tl.program_id(1)
    b, m0, start_q, len_q, start_k, len_k = locate_tile(p_records, p_cu_k, tile, rows_q, rows_k, T.BLOCK_M)
    if m0 >= len_q:
        return
    hq = h.to(tl.int64)
    hk = (h // T.GROUP).to(tl.int64)
    stride_q, stride_out = row_stride(q_rows, T.ALIGN, T.WIDE), row_stride(out_rows, T.ALIGN, T.WIDE)
    stride_k, stride_v = row_stride(k_rows, T.ALIGN, T.WIDE), row_stride(v_rows, T.ALIGN, T.WIDE)
    q_source = rows_source(q_rows, stride_q, b, hq, start_q, len_q, T.D, T.BLOCK_M, T.BLOCK_D, T)
    k_source = rows_source(k_rows, stride_k, b, hk, start_k, len_k, T.D, T.BLOCK_N, T.BLOCK_D, T)
    v_source = rows_source(v_rows, stride_v, b, hk, start_k, len_k, T.DV, T.BLOCK_N, T.BLOCK_DV, T)

    q = load_block(q_source, m0, T.D, T.BLOCK_M, T.BLOCK_D, True, T.TMA)
    params = CODE.LOAD_PARAMS(p_params, stride_params, h)
    acc = zero_rows(T.BLOCK_M, T.BLOCK_DV)
    total, largest = no_sums(T.BLOCK_M)
    i = m0 + tl.arange(0, T.BLOCK_M)
    edges = visible_keys(m0, len_q, len_k, band, T.BLOCK_M, T.BLOCK_N)
    spot = (b, h, start_q, start_k, tables, numbers)
    args = (q, k_source, v_source, i, Bounds(len_q, len_k, band), scale, params, spot)
    sums_so_far = (acc, total, largest)
    acc, total, largest = walk(
        sums_so_far, edges, m0, len_q, len_k, spot, args, summed_block, CODE, True, band.left is not None, T
    )
    inverse, kept = finish(total, largest, p_sink, h, CODE)
    acc = tl.where(nothing(kept, CODE)[:, None], 0.0, acc * (inverse * out_scale)[:, None])
    tl.store(sums.p + b * sums.batch + hq * sums.head + start_q + i, kept, mask=i < len_q)
    out_source = rows_source(out_rows, stride_out, b, hq, start_q, len_q, T.DV, T.BLOCK_M, T.BLOCK_DV, T)
    store_rows(out_source, acc, m0, T.DV, T.BLOCK_M, T.BLOCK_DV, T.TMA)
