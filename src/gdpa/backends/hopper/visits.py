"""Masks on Hopper: one launch per call lists, on the device, which blocks each tile visits (device/visits.py)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from gdpa.backends.hopper.scheduling.sorting import OPTIONS
from gdpa.backends.hopper.scheduling.work import layout_of
from gdpa.backends.triton import launch as portable
from gdpa.backends.triton.launching import Repeated, bind, cdiv
from gdpa.backends.triton.tables import (
    NOTHING_LEARNED,
    LearnedTables,
    fixed_places,
    names_in_places,
    places,
    values_in_places,
)
from gdpa.device.places import odd
from gdpa.device.sequences import BandBounds
from gdpa.device.visits import ListedTile, Visits, list_visits_kernel
from gdpa.problem import Operands, Problem, kept_for_any_rows

MOST_BLOCKS = 2**15  # of a list
MOST_BYTES = 2**28  # of all lists of a call


def per_head(problem: Problem) -> bool:
    """Whether heads have lists of their own."""
    return problem.mask is not None and "h" in problem.mask.program.positions


def list_stride(problem: Problem, of_keys: bool, block: int) -> int:
    """Entries of a list at most."""
    return max(cdiv(problem.longest_queries if of_keys else problem.longest_keys, block), 1)


def why_not(problem: Problem, block: int, most_tiles: Callable[..., int]) -> str | None:
    """Why the blocks of this problem, of at least ``block`` rows on both sides, cannot be listed."""
    if per_head(problem) and problem.group > 1:
        return "it lists the blocks that a mask of the head leaves only if every query head has keys of its own"
    heads = problem.heads_q if per_head(problem) else 1
    for of_keys in (False, True):
        packed, rows = (problem.packed_k, problem.rows_k) if of_keys else (problem.packed_q, problem.rows_q)
        stride = list_stride(problem, of_keys, block)
        if stride > MOST_BLOCKS or 2 * stride * heads * most_tiles(packed, rows, problem.n_seqs, block) > MOST_BYTES:
            return "lists of the blocks that the mask leaves would be too long; max_seqlen_q and max_seqlen_k may help"
    return None


def list_visits(
    problem: Problem, x: Operands, tile: ListedTile, table: Tensor | None, tiles: int, band: BandBounds
) -> Visits | None:
    """The lists of the ``tiles`` tiles of one side, of which ``table`` is (scheduling/work.py). None without a mask."""
    if problem.mask is None:
        return None
    heads = problem.heads_q if per_head(problem) else 1
    stride = list_stride(problem, tile.OF_KEYS, tile.BLOCK_M if tile.OF_KEYS else tile.BLOCK_N)
    lists = torch.empty(tiles * heads * stride, dtype=torch.int16, device=x.q.device)  # no memory to compile only
    counts = torch.empty(tiles * heads + 1, dtype=torch.int32, device=x.q.device)
    visits, cu_other = Visits(lists, counts, odd(stride)), x.cu_q if tile.OF_KEYS else x.cu_k
    rows = (problem.rows_k, problem.rows_q) if tile.OF_KEYS else (problem.rows_q, problem.rows_k)
    tables, sizes, table_layout = values_in_places(x.tables)
    repeated_visits(problem, tile)(
        (tiles, heads, 1), visits_layout(layout_of(x.kind, (table, cu_other)), problem, table_layout),
        (lists, counts, table, cu_other, *tables), (visits.stride, *rows, *sizes),
        lambda: (visits, table, cu_other, *rows, band, *places(problem, x)),
    )  # fmt: skip
    return visits


def list_bytes(lists: int, stride: int) -> tuple[int, int]:
    """Of lists, rounded up to 16 bytes, and of their counts."""
    return -(-2 * lists * stride // 16) * 16, 4 * (lists + 1)


def visits_layout(kind: Hashable, problem: Problem, tables: Hashable) -> Hashable:
    """What stands for all arguments but those that ``repeated_visits`` names. ``tables``: see values_in_places."""
    return kind, fixed_places(problem), tables


@kept_for_any_rows
def repeated_visits(problem: Problem, tile: ListedTile) -> Repeated:
    """The kernel that makes lists."""
    nodes = () if problem.mask is None else problem.mask.program.graph.nodes
    by_row = any(n.op == "lookup" for n in nodes)  # perhaps: then there is more to compute
    bound = bind(
        problem.of_any_rows, list_visits_kernel, CLASSIFY=portable.mask_code(problem)["CLASSIFY"], T=tile,
        num_warps=4 if by_row else 1, **OPTIONS,
    )  # fmt: skip
    tables, sizes = names_in_places(problem, "tables", "numbers")
    tensors, numbers = ("visits.0", "visits.1", "p_table", "p_cu_other"), ("visits.2", "rows", "rows_other")
    return Repeated(bound, (*tensors, *tables, *numbers, *sizes))


# ---- launches that repeat (see launching.Repeated) -------------------------------------------------------------------
def names_of_places_and_visits(problem: Problem, learned: bool) -> tuple[list[str], list[str]]:
    """Of both kernels' arguments ``places`` and ``visits``, for Repeated: names of tensors, and of integers."""
    tensors, numbers = names_in_places(problem, "places.0", "places.1", learned)
    if problem.mask is None:
        return tensors, numbers
    return [*tensors, "visits.0", "visits.1"], [*numbers, "visits.2"]


def with_places(
    problem: Problem, x: Operands, tensors: tuple[Any, ...], numbers: tuple[int, ...], layout: Hashable,
    visits: Visits | None, learn: LearnedTables = NOTHING_LEARNED,
) -> tuple[tuple[Any, ...], tuple[int, ...], Hashable]:  # fmt: skip
    """With what changes in places and visits behind the others."""
    tables, sizes, table_layout = values_in_places(x.tables, learn)
    lists = () if visits is None else visits[:2]
    stride = () if visits is None else visits[2:]
    return (*tensors, *tables, *lists), (*numbers, *sizes, *stride), (layout, fixed_places(problem), table_layout)
