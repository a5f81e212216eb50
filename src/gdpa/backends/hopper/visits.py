"""Masks on Hopper: one launch per call lists, on the device, which blocks each tile visits (device/visits.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gdpa.backends.hopper.scheduling.sorting import OPTIONS
from gdpa.backends.triton import launch as portable
from gdpa.backends.triton.launching import Bound, bind, cdiv
from gdpa.backends.triton.tables import places
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
    problem: Problem, x: Operands, of_keys: bool, block_m: int, block_n: int, table: Tensor | None, tiles: int,
    band: BandBounds, finite_at_zero: bool,
) -> Visits | None:  # fmt: skip
    """The lists of the ``tiles`` tiles of one side, of which ``table`` is (scheduling/work.py). None without a mask."""
    if problem.mask is None:
        return None
    heads = problem.heads_q if per_head(problem) else 1
    stride = list_stride(problem, of_keys, block_m if of_keys else block_n)
    lists = torch.empty(tiles * heads * stride, dtype=torch.int16, device=x.q.device)  # no memory to compile only
    counts = torch.empty(tiles * heads + 1, dtype=torch.int32, device=x.q.device)
    visits = Visits(lists, counts, odd(stride))
    write = bound_visits(problem, ListedTile(of_keys, block_m, block_n, finite_at_zero))
    rows = (problem.rows_k, problem.rows_q) if of_keys else (problem.rows_q, problem.rows_k)
    write((tiles, heads), visits, table, x.cu_q if of_keys else x.cu_k, *rows, band, *places(problem, x))
    return visits


@kept_for_any_rows
def bound_visits(problem: Problem, tile: ListedTile) -> Bound:
    """The kernel that makes lists."""
    nodes = () if problem.mask is None else problem.mask.program.graph.nodes
    by_row = any(n.op == "lookup" for n in nodes)  # perhaps: then there is more to compute
    return bind(
        problem.of_any_rows, list_visits_kernel, CLASSIFY=portable.mask_code(problem)["CLASSIFY"], T=tile,
        num_warps=4 if by_row else 1, **OPTIONS,
    )  # fmt: skip
