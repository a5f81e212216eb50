"""dq from its sums in a float32 buffer of all rows, where these were added up in any order (T.DQ "add")."""

import triton
import triton.language as tl

from gdpa.device.rows import inside, row_pointers, row_stride


@triton.jit(do_not_specialize=["rows"])
def round_rows_kernel(
    wide, dq, rows, heads, factor, D: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """dq = factor * wide, for tensors of ``rows`` rows per batch entry and head: a program has BLOCK_M of them. Heads
    are innermost: in tensors of tokens the rows of all heads are neighbours."""
    program = tl.program_id(0)
    h = (program % heads).to(tl.int64)
    blocks = tl.cdiv(rows, BLOCK_M)
    b = (program // heads // blocks).to(tl.int64)
    row = program // heads % blocks * BLOCK_M
    mine = inside(row, rows, D, BLOCK_M, COLUMNS)
    p_wide = wide.p + (b * wide.batch + h * wide.head) * ALIGN
    p_dq = dq.p + (b * dq.batch + h * dq.head) * ALIGN
    p_from = row_pointers(p_wide, row, row_stride(wide, ALIGN, True), BLOCK_M, COLUMNS)
    p_to = row_pointers(p_dq, row, row_stride(dq, ALIGN, True), BLOCK_M, COLUMNS)
    tl.store(p_to, tl.load(p_from, mask=mine) * factor, mask=mine)
