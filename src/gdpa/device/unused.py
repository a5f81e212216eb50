"""Zeros for rows that belong to no sequence, which no other kernel writes."""

import triton
import triton.language as tl

from gdpa.device.rows import inside, row_pointers
from gdpa.device.sequences import seq_span


@triton.jit
def zero_span(t, b, h, first, last, lane, lanes, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
              ALIGN: tl.constexpr):  # fmt: skip
    """Zero every ``lanes``-th block of the rows [first, last) of one head, from the ``lane``-th on."""
    p_head = t.p + (b * t.batch + h * t.head) * ALIGN
    zeros = tl.zeros((BLOCK, BLOCK_D), t.p.dtype.element_ty)
    for row in range(first + lane * BLOCK, last, lanes * BLOCK):
        p_tile = row_pointers(p_head, row, t.row * ALIGN, BLOCK, BLOCK_D)
        tl.store(p_tile, zeros, mask=inside(row, last, D, BLOCK, BLOCK_D))


@triton.jit
def zero_unused_rows(
    t, u, p_cu, p_used, rows, n_seqs, n_slots, program, programs, h, D: tl.constexpr, DU: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DU: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The share that ``program`` of ``programs`` has in head ``h``; see zero_unused_kernel."""
    if program < n_slots:
        b = program.to(tl.int64)
        start, length = seq_span(p_cu, program, rows, p_used)
        _, slot = seq_span(p_cu, program, rows)
        first = start + length
        last = start + slot
        lane = 0
        lanes = 1
    else:
        b = program.to(tl.int64) * 0
        first = program * 0 + rows
        if p_cu is not None:
            first = tl.minimum(tl.maximum(tl.load(p_cu + n_seqs), 0), rows).to(tl.int32)
        last = program * 0 + rows
        lane = program - n_slots
        lanes = programs - n_slots
    zero_span(t, b, h, first, last, lane, lanes, D, BLOCK_D, BLOCK, ALIGN)
    if u is not None:
        zero_span(u, b, h, first, last, lane, lanes, DU, BLOCK_DU, BLOCK, ALIGN)


@triton.jit(do_not_specialize=["rows", "n_seqs", "n_slots"])
def zero_unused_kernel(
    t, u, p_cu, p_used, rows, n_seqs, n_slots, D: tl.constexpr, DU: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DU: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Zeros in ``t``, and in ``u`` if it is given, of one side. The first ``n_slots`` programs (all sequences, if they
    have used lengths) take what each leaves of its rows, the others share the rows behind the last sequence. Where
    there is nothing to do, which the host cannot know, a program is done after two loads."""
    program, programs, h = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    zero_unused_rows(
        t, u, p_cu, p_used, rows, n_seqs, n_slots, program, programs, h, D, DU, BLOCK_D, BLOCK_DU, BLOCK, ALIGN
    )
