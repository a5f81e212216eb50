"""Room for sums of dq in the quick pass of the backward, by what becomes of them (see launch.backward_plan)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gdpa.backends.hopper import config, launch
from gdpa.backends.hopper.config import Config
from gdpa.backends.hopper.wide_dq import zero_room
from gdpa.problem import Problem


class Room(NamedTuple):
    """For sums of dq, by rows_q: bytes of the sums, and of flags behind them that the launch of the list sets to zero.
    What lies elsewhere, and is zero if it must be, is ``held`` there, and has its address here."""

    of_sums: int = 0
    of_flags: int = 0
    held: Any = None
    sums: int | None = None
    flags: int | None = None


RoomFor = Callable[[int], Room]


def ring(problem: Problem, c: Config, counted: bool) -> RoomFor:
    """Blocks on their way in a ring, with a flag for each."""
    places, rows, columns, device = launch.ring_places(problem, c), c.block_m, config.width(problem), problem.device
    if places == 0:
        wide, flags = launch.no_ring(rows, columns, device)
        nothing = Room(0, 0, None, wide.data_ptr(), flags.data_ptr())
        return lambda rows_q: nothing
    of_sums = places * rows * columns * 4
    if counted:  # there is no list
        return lambda rows_q: _with_flags(of_sums, places, device)
    listed = Room(of_sums, places * 4)
    return lambda rows_q: listed


def by_turns(problem: Problem, c: Config, counted: bool) -> RoomFor:
    """All of them, without gaps (see wide_dq.empty_sums), and a flag for each block; the first counts items."""
    n, heads, packed, device, block = problem.n_seqs, problem.heads_q, problem.packed_q, problem.device, c.block_m
    of_row = heads_of_dq(problem) * problem.head_dim * 4

    def room(rows_q: int) -> Room:
        blocks = rows_q // block + n if packed else n * -(-rows_q // block)  # most_tiles, without a call
        return _with_flags(rows_q * of_row, 1 + blocks * heads, device)

    return room


def added_up(problem: Problem, c: Config, counted: bool) -> RoomFor:
    """All of them, without gaps, and a counter of items."""
    of_row, device = heads_of_dq(problem) * problem.head_dim, problem.device

    def room(rows_q: int) -> Room:
        held = zero_room(rows_q * of_row, device)
        at = held.data_ptr()
        return Room(0, 0, held, at, at + rows_q * of_row * 4)

    return room


ROOMS = {"ring": ring, "turns": by_turns, "add": added_up}


def _with_flags(of_sums: int, n: int, device: torch.device) -> Room:
    flags = torch.zeros(n, dtype=torch.int32, device=device)
    return Room(of_sums, 0, flags, None, flags.data_ptr())


def heads_of_dq(problem: Problem) -> int:
    """Of all its batch entries: queries that all sequences share have one."""
    return problem.heads_q if problem.shared_q else problem.out_batch * problem.heads_q
