"""Host side of the list of tiles: one launch that also zeroes unused rows and flags
(schedule.ordered_records_kernel)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdpa.backends.hopper.config import width
from gdpa.backends.hopper.scheduling.schedule import Listed, Zeros, ordered_records_kernel
from gdpa.backends.hopper.scheduling.sorting import EVERY, MANY_SEQUENCES, OPTIONS, sorted_records
from gdpa.backends.triton import arguments as portable
from gdpa.backends.triton.launching import Repeated, bind, cdiv
from gdpa.device.rows import Rows
from gdpa.device.sequences import RECORD
from gdpa.problem import Operands, Problem, kept_for_any_rows

REMEMBERED = 256  # numbers of rows; batches of a fixed capacity have one of them


class Launch(NamedTuple):
    """A launch, but for its tensors."""

    tiles: int  # of its side, at most
    grid: int  # programs
    numbers: tuple[int, ...]  # the integer arguments that change with the numbers of rows
    kernel: Repeated


def layout_of(kind: Hashable, tensors: tuple[Tensor | None, ...], others: int = 0) -> Hashable:
    """A key for everything about ``tensors`` but their addresses. Where a call has a ``kind`` (Operands.kind), that
    says it of all but the first ``others``."""
    if kind is not None and others == 0:
        return kind
    return (kind, *[_layout(t) for t in (tensors if kind is None else tensors[:others])])


def _layout(t: Tensor | None) -> Hashable:
    return None if t is None else (t.stride(), t.dtype, t.data_ptr() % 16 == 0)


def most_tiles(packed: bool, rows: int, n_seqs: int, block: int) -> int:
    """How many tiles one side may have, whatever the lengths are."""
    return rows // block + n_seqs if packed else n_seqs * cdiv(rows, block)


class Tiling(NamedTuple):
    """A kind of list: tiles of keys or of queries, of ``block`` rows, which visit blocks of ``other`` rows. And what
    its launch sets to zero: unused rows on this side (``zeros``) and on the other one, and so many flags."""

    of_keys: bool
    block: int
    other: int
    listed: Listed = EVERY
    zeros: bool = False
    zeros_other: bool = False
    flags: int = 0


class Listing(NamedTuple):
    """A list and the launch that makes it."""

    tiling: Tiling
    launch: Launch


def is_listed(problem: Problem, of_keys: bool) -> bool:
    """Whether tiles of this side need a list: otherwise they follow from the shape."""
    return (problem.packed_k if of_keys else problem.packed_q) or problem.used_q or problem.used_k


def make_list(
    problem: Problem, x: Operands, of: Listing, t: Tensor | None = None, u: Tensor | None = None,
    w: Tensor | None = None, flags: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Make the list, with its length in front. Zeroed, as far as the tiling says so: unused rows of ``t`` and ``u``,
    which have the rows of the list's side, and of ``w``, which has those of the other side; ``flags``. ``t`` may be an
    output in the caller's layout (see Operands.written)."""
    tiling, launch = of
    if not tiling.zeros:
        t, u = None, None
    if not tiling.zeros_other:
        w = None
    if not tiling.flags:
        flags = None
    table = torch.empty(1 + launch.tiles, RECORD.value, dtype=torch.int32, device=problem.device)
    offsets = sides(x, tiling.of_keys)
    if problem.n_seqs > MANY_SEQUENCES:
        rows, rows_other, tiles, *_ = launch.numbers
        block, other = tiling.block, tiling.other
        sorted_records(table, offsets, rows, rows_other, problem.n_seqs, tiles, block, other, tiling.listed)
        zero_by_themselves(problem, x, t, u, w, None if flags is None else flags[: tiling.flags])
        return table
    tensors = (table, *offsets, t, u, w, flags)
    launch.kernel(
        (launch.grid, 1, 1), layout_of(x.kind, tensors), tensors, launch.numbers,
        lambda: list_arguments(problem, x, tiling, launch, *tensors),
    )  # fmt: skip
    return table


def sides(x: Operands, of_keys: bool) -> tuple[Tensor | None, ...]:
    """Offsets of this side and of the other one, then used lengths."""
    return (x.cu_k, x.cu_q, x.used_k, x.used_q) if of_keys else (x.cu_q, x.cu_k, x.used_q, x.used_k)


def zero_by_themselves(
    problem: Problem, x: Operands, t: Tensor | None, u: Tensor | None, w: Tensor | None, flags: Tensor | None
) -> None:
    """The zeros that the launch of the list writes, by launches of their own, for lists that torch sorts."""
    if flags is not None:
        flags.zero_()
    if w is not None:
        portable.zero_unused_queries(problem, x, w)
    if t is not None and u is not None:
        portable.zero_unused_keys(problem, x, t, u)
    elif t is not None:
        portable.zero_unused_queries(problem, x, x.written(t))


def listing(problem: Problem, tiling: Tiling) -> Listing:
    """How the list of ``tiling`` is made, once for a problem."""
    rows, rows_other = (problem.rows_q, problem.rows_k)[:: -1 if tiling.of_keys else 1]
    tiles, grid, ends, ends_other = list_sizes(problem, tiling)(rows, rows_other)
    return Listing(
        tiling, Launch(tiles, grid, (rows, rows_other, tiles, ends, ends_other), repeated_list(problem, tiling))
    )


@kept_for_any_rows
def list_sizes(problem: Problem, tiling: Tiling) -> Callable[[int, int], tuple[int, int, int, int]]:
    """A function of the numbers of rows on the list's side and on the other one. It returns: tiles at most; programs;
    how many of these, per head, zero the rows behind the last sequence, on this side and on the other one."""
    n, of_keys, block = problem.n_seqs, tiling.of_keys, tiling.block
    sides = (problem.packed_k, problem.used_k), (problem.packed_q, problem.used_q)
    (packed, used), (packed_other, used_other) = sides if of_keys else sides[::-1]
    heads, heads_other = _heads(problem, of_keys)
    zeros, zeros_other = packed and tiling.zeros, packed_other and tiling.zeros_other
    of_slots = (heads if tiling.zeros and used else 0) + (heads_other if tiling.zeros_other and used_other else 0)
    always, most, step = n + n * of_slots, portable.SHARING_THE_END, portable.ZEROED_ROWS
    many = most * step

    @lru_cache(REMEMBERED)
    def sizes(rows: int, rows_other: int) -> tuple[int, int, int, int]:
        tiles = rows // block + n if packed else n * -(-rows // block)  # most_tiles, without a call
        ends = 0 if not zeros else -(-rows // step) if rows < many else most
        ends_other = 0 if not zeros_other else -(-rows_other // step) if rows_other < many else most
        return tiles, always + ends * heads + ends_other * heads_other, ends, ends_other

    return sizes


def _heads(problem: Problem, of_keys: bool) -> tuple[int, int]:
    """Of this side and of the other one."""
    return (problem.heads_k, problem.heads_q) if of_keys else (problem.heads_q, problem.heads_k)


@kept_for_any_rows
def repeated_list(problem: Problem, tiling: Tiling) -> Repeated:
    zeros = Zeros()
    if tiling.zeros or tiling.zeros_other:
        heads, heads_other = _heads(problem, tiling.of_keys)
        d, dv = problem.head_dim, problem.head_dim_v
        columns = (d, dv, d) if tiling.of_keys else (dv, dv, d)  # dk, dv and dq, or the output
        zeros = Zeros(heads, *columns[:2], heads_other, columns[2], width(problem), portable.ZEROED_ROWS)
    bound = bind(
        portable.BOUND, ordered_records_kernel, BLOCK=tiling.block, OTHER=tiling.other, CHUNK=1024, L=tiling.listed,
        Z=zeros, num_warps=4, **OPTIONS,
    )  # fmt: skip
    tensors = ("p_table", "p_cu", "p_cu_other", "p_used", "p_used_other", "t", "u", "w", "p_flags")
    return Repeated(bound, (*tensors, "rows", "rows_other", "most", "ends", "ends_other"))


def list_arguments(
    problem: Problem, x: Operands, tiling: Tiling, launch: Launch, table: Any, cu: Any, cu_other: Any, used: Any,
    used_other: Any, t: Any, u: Any, w: Any, flags: Any,
) -> tuple[Any, ...]:  # fmt: skip
    if t is not None and not tiling.of_keys:
        t = x.written(t)
    zeroed = rows_of(problem, t, tiling.of_keys), rows_of(problem, u, tiling.of_keys), rows_of(problem, w, False)
    rows, rows_other, tiles, ends, ends_other = launch.numbers
    numbers = (rows, rows_other, problem.n_seqs, tiles, tiling.flags, ends, ends_other)
    return (table, cu, cu_other, used, used_other, *zeroed, flags, *numbers)


def rows_of(problem: Problem, t: Tensor | None, of_keys: bool) -> Rows | None:
    """Rows of 16-bit numbers on Hopper begin at multiples of 16 bytes, Zeros.ALIGN of them."""
    if t is None:
        return None
    (rows,), align = portable.as_rows(problem, () if of_keys else (t,), (t,) if of_keys else ())
    assert align == Zeros().ALIGN, f"strides {t.stride()}, {t.dtype}"
    return rows
