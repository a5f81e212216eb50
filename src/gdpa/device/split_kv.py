"""Adds up the results of parts of the keys (split-KV, see backends/hopper/split_kv.py)."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "many"])
def add_parts_kernel(
    p_sums, p_out, stride_batch, stride_head, stride_row, heads, rows, many, parts, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out (B, H, L, D) = the sum of ``parts`` float32 tensors of its shape, which lie end to end, in their order.
    Columns of out are adjacent; its other strides are given. ``many`` = B * H * L rows, ROWS to a program."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    mask = (i < many)[:, None] & (column < D)[None, :]
    p = p_sums + i[:, None] * D + column[None, :]
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for _ in range(parts):
        total += tl.load(p, mask=mask, other=0.0)
        p += many.to(tl.int64) * D
    row, head, batch = i % rows, i // rows % heads, i // rows // heads
    start = batch * stride_batch + head * stride_head + row * stride_row
    tl.store(p_out + start[:, None] + column[None, :], total.to(p_out.dtype.element_ty), mask=mask)
