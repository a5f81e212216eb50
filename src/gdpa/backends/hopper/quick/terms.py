"""The quick pass that computes the two terms of every row for a backward with row sums, see portable.row_terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdpa.backends.hopper.quick.known import steps_of_sums
from gdpa.backends.triton import launch as portable
from gdpa.backends.triton.launching import unwatched
from gdpa.backends.triton.row_sums import RowTerms
from gdpa.device.rows import Rows
from gdpa.problem import Divided, Operands, Problem


def terms_pass(problem: Problem, strides: tuple[int, ...]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function that computes them. ``strides``: those of the result and of its gradient."""
    kernel, steps_of = portable.terms_kernel(problem, strides, strides, True), steps_of_sums(problem)
    batch, heads, device, block = problem.out_batch, problem.heads_q, problem.device, portable.ROWS_OF_TERMS
    like, steps = torch.empty(0), steps_of(problem.rows_q)
    code = portable.terms_code(Rows(like, *steps, 1), RowTerms(like, like, *steps), None, None, None)

    def terms(
        rows_q: int, rows_k: int, operands: tuple[Any, ...], do: Tensor, divided: Divided
    ) -> tuple[Tensor, Tensor]:
        out, sums = divided.out, divided.sums
        where = unwatched(kernel.kernel)
        known = None if where is None else kernel.found.get((where[0], code))
        usual = out.stride() == strides and sums.is_contiguous() and (out.data_ptr() | sums.data_ptr()) & 15 == 0
        if where is None or known is None or not usual or divided.dsink is not None or divided.dsums is not None:
            do, exactly = do.as_strided(out.shape, strides), problem.with_rows(rows_q, rows_k)
            return portable.row_terms(exactly, Operands(do, do, do, *operands), do, divided)[:2]
        delta = torch.empty(batch, heads, rows_q, dtype=torch.float32, device=device)
        row = torch.empty(batch, heads, rows_q, dtype=torch.float32, device=device)
        tensors = (do.data_ptr(), out.data_ptr(), sums.data_ptr(), None, delta.data_ptr(), row.data_ptr(), None, None)
        numbers, grid = (*steps_of(rows_q), *steps_of(rows_q), rows_q), (batch * -(-rows_q // block), heads, 1)
        known.launch(grid, where[1], *tensors, *numbers)
        return delta, row

    return terms
