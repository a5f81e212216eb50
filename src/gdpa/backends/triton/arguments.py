"""Host side: tensors, tiles of rows and the compile-time shape as kernel arguments; zeros in rows of no sequence."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdpa.backends.triton import config
from gdpa.backends.triton.config import Config, padded
from gdpa.backends.triton.launching import bind, cdiv
from gdpa.backends.triton.tile import Tile
from gdpa.device.rounding import least_factor
from gdpa.device.rows import Rows
from gdpa.device.sequences import RECORD, tile_records_kernel
from gdpa.device.unused import zero_unused_kernel
from gdpa.problem import Operands, Problem, kept_for_any_rows

BOUND: dict[Hashable, Any] = {}  # kernels that no function is part of


@dataclass(frozen=True)
class Tiles:
    """Tiles of one side: how many, and for a packed side their records (see device/sequences.py)."""

    count: int
    records: Tensor | None


def make_tiles(
    cu: Tensor | None, cu_other: Tensor | None, rows: int, rows_other: int, n_seqs: int, block: int,
    used: Tensor | None = None, used_other: Tensor | None = None, listed: bool = False,
) -> Tiles:  # fmt: skip
    """Dense: ceil(rows / block) tiles per sequence. Packed, with used lengths, or ``listed``: a table made on the
    device, without a sync."""
    count = n_seqs * cdiv(rows, block) if cu is None else rows // block + n_seqs
    given = [t for t in (cu, used, used_other, cu_other if listed else None) if t is not None]
    if not given:
        return Tiles(count, None)
    device = given[0].device
    records = torch.zeros(count, RECORD.value, dtype=torch.int32, device=device)  # an unwritten tile is empty
    if n_seqs:
        # There is no fusion here, but Triton 3.9 warns of a default that will change.
        write = bind(BOUND, tile_records_kernel, BLOCK=block, CHUNK=128, num_warps=1, enable_fp_fusion=True)
        write((n_seqs,), records, cu, cu_other, used, used_other, rows, rows_other, count)
    return Tiles(count, records)


def query_tiles(problem: Problem, x: Operands, block: int, listed: bool = False) -> Tiles:
    return make_tiles(x.cu_q, x.cu_k, problem.rows_q, problem.rows_k, problem.n_seqs, block, x.used_q, x.used_k, listed)


def key_tiles(problem: Problem, x: Operands, block: int) -> Tiles:
    return make_tiles(x.cu_k, x.cu_q, problem.rows_k, problem.rows_q, problem.n_seqs, block, x.used_k, x.used_q)


def zero_unused_queries(problem: Problem, x: Operands, t: Tensor) -> None:
    """Zeros in the rows of ``t``, shaped like the output or dq, that belong to no sequence."""
    if problem.packed_q:
        (rows,), align = as_rows(problem, (t,), ())
        zero_unused(problem, x.cu_q, x.used_q, problem.rows_q, rows, None, (t,), align)


def zero_unused_keys(problem: Problem, x: Operands, dk: Tensor, dv: Tensor) -> None:
    if problem.varying_k:
        (gk, gv), align = as_rows(problem, (), (dk, dv))
        zero_unused(problem, x.cu_k, x.used_k, problem.rows_k, gk, gv, (dk, dv), align)


ZEROED_ROWS = 16  # that a program writes at a time
SHARING_THE_END = 64  # programs per head, for the rows behind the last sequence


def zero_unused(
    problem: Problem, cu: Tensor | None, used: Tensor | None, rows: int, t: Rows, u: Rows | None,
    tensors: tuple[Tensor, ...], align: int,
) -> None:  # fmt: skip
    if problem.n_seqs == 0:
        for zeroed in tensors:
            zeroed.zero_()
        return
    n_slots = 0 if used is None else problem.n_seqs
    at_the_end = 0 if cu is None else min(SHARING_THE_END, cdiv(rows, ZEROED_ROWS))
    if n_slots + at_the_end == 0 or rows == 0:
        return
    columns = [z.shape[3] for z in (tensors[0], tensors[-1])]
    zero = bind(
        BOUND, zero_unused_kernel, D=columns[0], DU=columns[1], BLOCK_D=padded(columns[0]),
        BLOCK_DU=padded(columns[1]), BLOCK=ZEROED_ROWS, ALIGN=align, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    zero((n_slots + at_the_end, tensors[0].shape[1]), t, u, cu, used, rows, problem.n_seqs, n_slots)


def as_rows(
    problem: Problem, on_q: tuple[Tensor, ...], on_k: tuple[Tensor, ...], aligned: bool = True
) -> tuple[list[Rows], int]:
    """Kernel arguments for tensors shaped like q (on_q) and like k or v (on_k), in that order, and their ALIGN;
    ``aligned`` is what tensors without memory do not tell.

    A packed side, and queries shared by all sequences, have one batch entry, hence batch stride 0.
    """
    align = alignment(*on_q, *on_k) if aligned else 1
    packed = [problem.packed_q] * len(on_q) + [problem.packed_k] * len(on_k)
    rows = []
    for t, is_packed in zip((*on_q, *on_k), packed, strict=True):
        batch = 0 if is_packed or t.shape[0] == 1 else t.stride(0)
        rows.append(Rows(t, batch // align, t.stride(1) // align, t.stride(2) // align))
    return rows, align


def laid_out(
    problem: Problem, c: Config, on_q: tuple[Tensor, ...], on_k: tuple[Tensor, ...]
) -> tuple[list[Rows], Tile]:  # fmt: skip
    """The same, and the compile-time shape: found again by the strides."""
    tensors = (*on_q, *on_k)
    kinds, addresses = [], 0
    for t in tensors:
        addresses |= t.data_ptr()
        kinds.append((t.stride(), t.shape[0] == 1, t.dtype))
    steps, tile = layout_of(problem, c, len(on_q), tuple(kinds), addresses & 15 == 0)
    return [Rows(t, *step) for t, step in zip(tensors, steps, strict=True)], tile


@kept_for_any_rows
def layout_of(
    problem: Problem, c: Config, n_q: int, kinds: tuple[Any, ...], aligned: bool
) -> tuple[list[tuple[int, int, int]], Tile]:
    """Of ``n_q`` tensors shaped like q and others shaped like k: what follows them in Rows, and the tile."""
    like = []
    for strides, one, dtype in kinds:
        shape = (1 if one else 2, problem.heads_q, 1, problem.head_dim)
        like.append(torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
    rows, align = as_rows(problem, tuple(like[:n_q]), tuple(like[n_q:]), aligned)
    return [(t.batch, t.head, t.row) for t in rows], make_tile(problem, c, rows, align)


def is_wide(c: Config, rows: list[Rows], align: int) -> bool:
    """Whether offsets within a tile need 64 bits: with 128 rows, from row strides of 2^24 elements on."""
    return max(c.block_m, c.block_n) * align * max(t.row for t in rows) >= 2**31


def make_tile(problem: Problem, c: Config, rows: list[Rows], align: int) -> Tile:
    """The compile-time shape. Tensor descriptors need rows aligned to 16 bytes; others are read through pointers."""
    least = config.LEAST_UNALIGNED if align == 1 and problem.dtype != torch.float32 else 16
    return Tile(
        GROUP=problem.group, D=problem.head_dim, DV=problem.head_dim_v, BLOCK_D=padded(problem.head_dim, least),
        BLOCK_DV=padded(problem.head_dim_v, least), BLOCK_M=c.block_m, BLOCK_N=c.block_n, ALIGN=align,
        WIDE=is_wide(c, rows, align), TMA=c.tma and align > 1, PRECISION=c.products, PART=c.part,
        BANDED=not problem.band.unbounded, PLACED=problem.activation.placed is not None,
        LEAST_FACTOR=least_factor(problem.dtype),
    )  # fmt: skip


def alignment(*tensors: Tensor) -> int:
    """16 bytes in elements if every row of every tensor starts at a multiple of them, otherwise 1."""
    widest = 1
    for t in tensors:
        size = t.element_size()
        batch, head, row, _ = t.stride()
        if t.data_ptr() % 16 or (batch | head | row) * size % 16:
            return 1
        widest = max(widest, size)
    return 16 // widest
