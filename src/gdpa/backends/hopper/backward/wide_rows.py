"""Kernels for sums of dq in a float32 buffer of all rows: one rounds all of them; the other clears or rounds only the
rows of sequences that are too long for the ring (ring.py), of which there are few."""

import triton
import triton.language as tl

from gdpa.device.rows import inside, row_pointers, row_stride
from gdpa.device.sequences import seq_span

BLOCK = tl.constexpr(16)  # rows that a program takes at a time


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


@triton.jit(do_not_specialize=["rows_q", "rows_k"])
def long_rows_kernel(
    wide, dq, p_cu_q, p_cu_k, p_used_q, p_used_k, rows_q, rows_k, heads, factor, LIMIT: tl.constexpr, D: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Zeros in the queries of sequences with more than LIMIT keys, in ``wide``; or dq = factor * wide there. A program
    takes a slice of one sequence; of most there is nothing to do, which the host cannot know."""
    b = tl.program_id(0)
    _, len_k = seq_span(p_cu_k, b, rows_k, p_used_k)
    if len_k > LIMIT:
        start, len_q = seq_span(p_cu_q, b, rows_q, p_used_q)
        for h in range(0, heads):
            p_wide = wide.p + (b.to(tl.int64) * wide.batch + h * wide.head) * ALIGN
            for row in range(tl.program_id(1) * BLOCK, len_q, tl.num_programs(1) * BLOCK):
                mine = inside(row, len_q, D, BLOCK, COLUMNS)
                p_from = row_pointers(p_wide, start + row, wide.row * ALIGN, BLOCK, COLUMNS)
                if dq is None:
                    tl.store(p_from, tl.zeros((BLOCK, COLUMNS), tl.float32), mask=mine)
                else:
                    p_dq = dq.p + (b.to(tl.int64) * dq.batch + h * dq.head) * ALIGN
                    p_to = row_pointers(p_dq, start + row, dq.row * ALIGN, BLOCK, COLUMNS)
                    tl.store(p_to, tl.load(p_from, mask=mine, other=0.0) * factor, mask=mine)
