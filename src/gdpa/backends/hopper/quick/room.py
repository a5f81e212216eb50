"""Buffers for sums of dq in the quick pass of the backward, for each mode of launch.backward_plan (see dq_buffers)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gdpa.backends.hopper import config, launch
from gdpa.backends.hopper.config import Config
from gdpa.backends.hopper.wide_dq import zero_room
from gdpa.problem import Problem


class Room(NamedTuple):
    """What sums of dq need for one number of queries: sizes for the buffer that the pass allocates for all of a launch,
    or the addresses of what has been allocated (and zeroed, if it must be) by itself."""

    of_sums: int = 0  # bytes of sums
    of_flags: int = 0  # bytes of flags, which the launch of the list sets to zero
    held: Any = None  # memory of what lies elsewhere, to be held until the launch,
    sums: int | None = None  # and addresses there
    flags: int | None = None


RoomFor = Callable[[int], Room]  # by rows_q; ``counted`` below: there is no list whose launch could zero flags


def ring(problem: Problem, c: Config, counted: bool) -> RoomFor:
    """Mode "ring": slots, with a flag for each."""
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
    """Mode "turns": sums of all queries, without gaps (see wide_dq.empty_sums); a counter of items, and a flag for each
    block."""
    n, heads, packed, device, block = problem.n_seqs, problem.heads_q, problem.packed_q, problem.device, c.block_m
    of_row = heads_of_dq(problem) * problem.head_dim * 4

    def room(rows_q: int) -> Room:
        blocks = rows_q // block + n if packed else n * -(-rows_q // block)  # most_tiles, without a call
        return _with_flags(rows_q * of_row, 1 + blocks * heads, device)

    return room


def added_up(problem: Problem, c: Config, counted: bool) -> RoomFor:
    """Mode "add": sums of all queries, zero, without gaps, and a counter of items."""
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
    """How many (batch entry, head) pairs dq has; queries that all sequences share are one batch entry."""
    return problem.heads_q if problem.shared_q else problem.out_batch * problem.heads_q
