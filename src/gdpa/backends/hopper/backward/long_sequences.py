"""Rows of the few sequences that are too long for their sums of dq to go round (ring.py)."""

import triton
import triton.language as tl

from gdpa.device.rows import inside, row_pointers
from gdpa.device.sequences import seq_span

BLOCK = tl.constexpr(16)  # rows that a program takes at a time


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
