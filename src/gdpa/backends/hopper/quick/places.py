"""What quick passes fill in for functions and masks of positions: tables, their sizes, and lists of visited blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gdpa.backends.hopper.config import Config
from gdpa.backends.hopper.launch import kind_of_lists
from gdpa.backends.hopper.quick.known import Memory, memory
from gdpa.backends.hopper.visits import list_bytes, per_head, repeated_visits, visits_layout
from gdpa.backends.triton.launching import addresses, unwatched
from gdpa.backends.triton.tables import NOTHING_LEARNED, LearnedTables, fixed_places, names_in_places, values_in_places
from gdpa.problem import Problem


class Filled(NamedTuple):
    """What the tables of one call give to its launches."""

    layout: tuple[Hashable, ...]  # the part of a launch's key that follows from them
    tables: list[int | None]  # addresses, those of gradients behind them
    sizes: list[int]
    write: Callable[..., Any] | None  # the launch that makes the lists of a mask, if there is one


Visited = tuple[Any, tuple[int, ...], tuple[int, ...]]  # memory to hold, addresses and integers of Visits
NOTHING: Visited = (None, (), ())


def filling(problem: Problem, kind: Hashable, of_keys: bool, c: Config) -> Callable[..., Filled | None]:
    """A function of the call's tables, and of their gradients where these are wanted; it returns None if a launch is
    not known yet. ``kind``: see Operands.kind."""
    fixed = fixed_places(problem)
    repeated = None if problem.mask is None else repeated_visits(problem, kind_of_lists(problem, of_keys, c))

    def fill(tables: Sequence[Tensor], learn: LearnedTables = NOTHING_LEARNED) -> Filled | None:
        given, sizes, table_layout = values_in_places(tables)
        write = None
        if repeated is not None:
            where = unwatched(repeated.kernel)
            layout = visits_layout(kind, problem, table_layout)
            known = None if where is None else repeated.found.get((where[0], layout))
            if known is None:
                return None
            write = known.launch
        if learn.gradients:
            given, sizes, table_layout = values_in_places(tables, learn)
        return Filled((fixed, table_layout), addresses(given), sizes, write)

    return fill


def visiting(problem: Problem, of_keys: bool, c: Config) -> Callable[..., Visited]:
    """A function that makes the lists of a call's mask (nothing without one), and returns what kernels take as
    Visits."""
    block, device = c.block_m if of_keys else c.block_n, problem.device
    heads = problem.heads_q if per_head(problem) else 1
    names = names_in_places(problem, "", "")
    n_tables, n_sizes = len(names[0]), len(names[1])
    packed, hint = (problem.packed_q, problem.max_q) if of_keys else (problem.packed_k, problem.max_k)
    longest = hint if packed and hint is not None else None

    def make_lists(
        rows: int, rows_other: int, stream: int, tiles: int, table: int | None, cu_other: int | None, filled: Filled
    ) -> Visited:
        if filled.write is None:
            return NOTHING
        most = rows_other if longest is None or rows_other < longest else longest
        stride = max(-(-most // block), 1)  # as list_stride has it: a hint may be 0
        of_lists, of_counts = list_bytes(tiles * heads, stride)
        room = memory(Memory, of_lists + of_counts, device=device)
        lists = room.data_ptr()
        visits, numbers = (lists, lists + of_lists), (2 * stride + 3,)  # odd(stride)
        filled.write(
            (tiles, heads, 1), stream, *visits, table, cu_other, *filled.tables[:n_tables], *numbers, rows, rows_other,
            *filled.sizes[:n_sizes],
        )  # fmt: skip
        return room, visits, numbers

    return make_lists
