"""The quick pass of the backward (see the package's docstring)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdpa.backends.hopper import config, launch
from gdpa.backends.hopper.config import Config
from gdpa.backends.hopper.quick.known import RECORD_BYTES, Memory, Pass, finder, memory, steps_of_sums
from gdpa.backends.hopper.quick.terms import terms_pass
from gdpa.backends.hopper.scheduling.work import Listing, list_sizes
from gdpa.backends.triton.launching import addresses, nested
from gdpa.backends.triton.tables import fixed_places
from gdpa.problem import PLAIN, Divided, Problem

APART = 512  # bytes: parts of a buffer begin at multiples of them, as tensors of torch's allocator do


def backward_pass(problem: Problem, kind: Hashable, deterministic: bool, strides: tuple[int, ...]) -> Pass | None:
    """``strides``: those of the result's gradient, as the operator takes it."""
    if problem.n_params or launch.has_tables(problem) or launch.is_empty(problem):
        return None
    plan = launch.backward_plan(problem, None, deterministic)
    if plan.mode not in launch.IN_TURN or plan.long is not None:
        return None
    of_keys, listing = launch.backward_launch(problem, plan.config, plan.mode, deterministic, plan.listed)
    if listing is None and problem.packed_q:  # zeros are made by another launch
        return None
    key: Hashable = (kind, (strides, problem.dtype, True))  # see work.layout_of
    steps_of = steps_of_sums(problem)
    if problem.norm != PLAIN:
        key = (key, (True, True, nested(steps_of(problem.rows_q))))
    if problem.placed:
        key = (key, fixed_places(problem))
    find = finder(problem, of_keys, listing, kind)
    if find is None:
        return None
    room = by_turns(problem, plan.config) if plan.mode == "turns" else ring(problem, plan.config, listing is None)
    prepare = counted(problem, plan.config, room) if listing is None else listed(problem, listing, room)
    terms_of = terms_pass(problem, strides) if problem.norm != PLAIN else None
    heads, most = problem.heads_k, launch.most_programs(problem)

    def backward(
        rows_q: int, rows_k: int, q: int, k: int, v: int, operands: tuple[Any, ...], do: Tensor, dq: int,
        dk: int, dv: int, divided: Divided | None,
    ) -> bool:  # fmt: skip
        """``operands``: those of Operands but for q, k and v. The gradients may lie as the caller has them, ``divided``
        is as the operator has it."""
        at = do.data_ptr()
        known = None if at & 15 else find(key)
        if known is None:
            return False
        run, write, stream = known
        cu_q, cu_k, _, used_q, used_k, _, _ = operands
        of_queries = None if cu_q is None else cu_q.data_ptr()
        terms: Any = ()
        if terms_of is not None:
            terms = terms_of(rows_q, rows_k, operands, do, divided)
        held, tiles, wide, flags, table = prepare(
            rows_q, rows_k, write, stream, cu_k, of_queries, used_k, used_q, dk, dv, dq
        )
        items = tiles * heads
        grid = (items if items < most else most, 1, 1)
        if terms_of is None:
            run(
                grid, stream, at, q, k, v, dq, wide, dk, dv, table, of_queries, None, None, flags, tiles, rows_q, rows_k
            )  # fmt: skip
        else:
            run(
                grid, stream, at, q, k, v, dq, wide, dk, dv, table, of_queries, None, None, flags, *addresses(terms),
                tiles, rows_q, rows_k, *steps_of(rows_q),
            )  # fmt: skip
        del held, terms  # not before the launch
        return True

    return backward


class Room(NamedTuple):
    """For sums of dq: a function of rows_q that returns the bytes of the sums and of flags behind them, which the
    launch of the list sets to zero, or a tensor of flags that are zero."""

    sizes: Callable[[int], tuple[int, int, Tensor | None]]
    nothing: tuple[Tensor, Tensor] | None = None  # what stands for sums and flags if there are none


def ring(problem: Problem, c: Config, zeros: bool) -> Room:
    """Blocks on their way in a ring, with a flag for each."""
    places, rows, columns, device = launch.ring_places(problem, c), c.block_m, config.width(problem), problem.device
    if places == 0:
        return Room(lambda rows_q: (0, 0, None), launch.no_ring(rows, columns, device))
    of_sums, of_flags = places * rows * columns * 4, places * 4
    if not zeros:
        return Room(lambda rows_q: (of_sums, of_flags, None))
    return Room(lambda rows_q: (of_sums, 0, torch.zeros(places, dtype=torch.int32, device=device)))


def by_turns(problem: Problem, c: Config) -> Room:
    """All of them, without gaps (see wide_dq.empty_sums), and a flag for each block; the first counts items."""
    n, heads, packed, device, block = problem.n_seqs, problem.heads_q, problem.packed_q, problem.device, c.block_m
    of_row = problem.out_batch * heads * problem.head_dim * 4

    def sizes(rows_q: int) -> tuple[int, int, Tensor | None]:
        blocks = rows_q // block + n if packed else n * -(-rows_q // block)  # most_tiles, without a call
        return rows_q * of_row, 0, torch.zeros(1 + blocks * heads, dtype=torch.int32, device=device)

    return Room(sizes)


def counted(problem: Problem, c: Config, room: Room) -> Callable[..., tuple[Any, ...]]:
    """What the main kernel needs where tiles can be counted: memory to hold, the number of tiles, the addresses of the
    sums, their flags and the list."""
    n, block, device = problem.n_seqs, c.block_n, problem.device

    def prepare(rows_q: int, rows_k: int, *others: Any) -> tuple[Any, ...]:
        tiles = n * -(-rows_k // block)
        if room.nothing is not None:
            return None, tiles, room.nothing[0].data_ptr(), room.nothing[1].data_ptr(), None
        of_sums, _, flags = room.sizes(rows_q)
        assert flags is not None  # there is no other launch that could set them to zero
        held = memory(Memory, of_sums, device=device)
        return (held, flags), tiles, held.data_ptr(), flags.data_ptr(), None

    return prepare


def listed(problem: Problem, listing: Listing, room: Room) -> Callable[..., tuple[Any, ...]]:
    """Likewise where they are in a list, which is made with all else (see work.make_list): all in one buffer."""
    tiling, sizes, device = listing.tiling, list_sizes(problem, listing.tiling), problem.device
    zeros, zeros_other = tiling.zeros, tiling.zeros_other

    def prepare(
        rows_q: int, rows_k: int, write: Any, stream: int, cu_k: Any, of_queries: Any, used_k: Any, used_q: Any,
        to_k: int, to_v: int, to_q: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        tiles, programs, ends, ends_other = sizes(rows_k, rows_q)
        of_sums, of_flags, zero_flags = room.sizes(rows_q)
        behind_sums = apart(of_sums)
        before_list = behind_sums + apart(of_flags)
        held = memory(Memory, before_list + (1 + tiles) * RECORD_BYTES, device=device)
        wide = held.data_ptr()
        table, flags = wide + before_list, wide + behind_sums
        write(
            (programs, 1, 1), stream, table, None if cu_k is None else cu_k.data_ptr(), of_queries,
            None if used_k is None else used_k.data_ptr(), None if used_q is None else used_q.data_ptr(),
            to_k if zeros else None, to_v if zeros else None, to_q if zeros_other else None,
            flags if of_flags else None, rows_k, rows_q, tiles, ends, ends_other,
        )  # fmt: skip
        if room.nothing is not None:
            wide, flags = room.nothing[0].data_ptr(), room.nothing[1].data_ptr()
        elif zero_flags is not None:
            flags = zero_flags.data_ptr()
        return (held, zero_flags), tiles, wide, flags, table

    return prepare


def apart(size: int) -> int:
    """Bytes that a part of a buffer takes."""
    return -(-size // APART) * APART
