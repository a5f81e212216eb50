"""Host side of dq as sums in a float32 buffer of all rows: the buffer of modes "add" and "turns", and its rounding."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from gdpa.backends.hopper import config
from gdpa.backends.hopper.backward.wide_rows import round_rows_kernel
from gdpa.backends.hopper.binding import folded_scale
from gdpa.backends.hopper.pipeline import batch_rows
from gdpa.backends.hopper.scheduling.work import layout_of
from gdpa.backends.triton import arguments as portable
from gdpa.backends.triton.arguments import BOUND
from gdpa.backends.triton.launching import Repeated, bind, cdiv
from gdpa.device.rounding import least_factor
from gdpa.problem import Operands, Problem, kept_for_any_rows


def empty_sums(dq: Tensor) -> Tensor:
    """In float32, with as many rows from one batch entry to the next as dq has: one number of a row does for both."""
    heads, columns = dq.shape[1], dq.shape[3]
    if dq.stride(1) == columns:  # heads innermost
        strides = (batch_rows(dq)[0] * heads * columns, columns, heads * columns, 1)
    else:
        strides = (batch_rows(dq)[0] * columns, dq.stride(1) // dq.stride(2) * columns, columns, 1)
    return torch.empty_strided(dq.shape, strides, dtype=torch.float32, device=dq.device)


COUNTER = 4  # numbers of 32 bits behind the sums: one of them counts items (see backward/items.py)
ALIGN = 4  # 16 bytes of these numbers


def zero_sums(dq: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of dq and a counter, zero, by one launch."""
    strides = torch.empty_like(dq, device="meta").stride()  # those of dq, but without gaps
    room = zero_room(dq.numel(), dq.device)
    return room.as_strided(dq.shape, strides), room[dq.numel() :].view(torch.int32)


def zero_room(numbers: int, device: torch.device) -> Tensor:
    """For so many sums and the counter behind them."""
    return torch.zeros(numbers + COUNTER, dtype=torch.float32, device=device)


def round_dq(problem: Problem, x: Operands, wide: Tensor, dq: Tensor, factor: float) -> None:
    """dq from its sums. In float16 part of the factor, or all of it, is in them (see ds_factors)."""
    least = least_factor(problem.dtype, folded_scale(problem))
    if least > 0:
        factor = min(abs(factor) / least, 1.0) if factor else 1.0
    launch_round_rows(problem, wide, dq, factor, x.kind)


ROWS = 32  # that a program rounds: up to 32 numbers for each of its threads


def launch_round_rows(problem: Problem, wide: Tensor, dq: Tensor, factor: float, kind: Hashable = None) -> None:
    """dq = factor * wide. (torch.mul takes 1.4 times as long as its bytes, 2.3 times where dq is part of a gradient of
    q, k and v together.) The factor follows from the problem, and all strides from ``kind``, see Operands."""
    batch, heads, n, _ = dq.shape
    rows, align = portable.as_rows(problem, (wide, dq), ())
    repeated_rounding(problem, align)(
        rounding_grid(batch * heads, n), layout_of(kind, (wide, dq)), (wide, dq), (n,),
        lambda: (*rows, n, heads, factor),
    )  # fmt: skip


def rounding_grid(heads: int, rows: int) -> tuple[int, int, int]:
    """``heads``: of all batch entries."""
    return heads * cdiv(rows, ROWS), 1, 1


@kept_for_any_rows
def repeated_rounding(problem: Problem, align: int) -> Repeated:
    d = problem.head_dim
    bound = bind(
        BOUND, round_rows_kernel, D=d, COLUMNS=config.padded(d), ALIGN=align, BLOCK_M=ROWS, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return Repeated(bound, ("wide", "dq", "rows"))
