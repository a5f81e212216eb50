"""The quick pass of the backward (see the package's docstring)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from gdpa.backends.hopper import config, launch
from gdpa.backends.hopper.binding import function_of, left_to_triton, scales
from gdpa.backends.hopper.config import Config
from gdpa.backends.hopper.quick.known import RECORD_BYTES, Memory, Pass, finder, memory, steps_of_sums
from gdpa.backends.hopper.quick.places import NOTHING, filling, visiting
from gdpa.backends.hopper.quick.room import ROOMS, RoomFor, heads_of_dq
from gdpa.backends.hopper.quick.terms import terms_pass
from gdpa.backends.hopper.scheduling.work import Listing, list_sizes
from gdpa.backends.hopper.wide_dq import ALIGN, repeated_rounding, rounding_grid
from gdpa.backends.triton.launching import addresses, nested, unwatched
from gdpa.backends.triton.tables import NOTHING_LEARNED, LearnedTables
from gdpa.problem import PLAIN, Divided, Problem

APART = 512  # bytes: parts of a buffer begin at multiples of them, as tensors of torch's allocator do


def backward_pass(problem: Problem, kind: Hashable, deterministic: bool, strides: tuple[int, ...]) -> Pass | None:
    """``strides``: those of the result's gradient, as the operator takes it."""
    if launch.is_empty(problem) or left_to_triton(problem, problem.learn, deterministic):
        return None
    plan = launch.backward_plan(problem, None, deterministic)
    if plan.mode == "none" or plan.long is not None:
        return None
    of_keys, listing = launch.backward_launch(problem, plan.config, plan.mode, deterministic, plan.listed)
    if listing is None and problem.packed_q:  # zeros are made by another launch
        return None
    key: Hashable = (kind, (strides, problem.dtype, True))  # see work.layout_of
    steps_of = steps_of_sums(problem)
    if problem.norm != PLAIN:
        key = (key, (True, True, nested(steps_of(problem.rows_q))))
    fill = filling(problem, kind, True, plan.config) if problem.placed else None
    make_lists = visiting(problem, True, plan.config)
    find = finder(problem, of_keys, listing, kind)
    if find is None:
        return None
    room = ROOMS[plan.mode](problem, plan.config, listing is None)
    rounded = rounding(problem, kind) if plan.mode == "add" else None
    prepare = counted(problem, plan.config, room) if listing is None else listed(problem, listing, room)
    terms_of = terms_pass(problem, strides) if problem.norm != PLAIN else None
    heads, most = problem.heads_k, launch.most_programs(problem)
    factor = scales(problem, function_of(problem).backward_factor)[1]
    room_of_params = sums_of_params(problem)

    def backward(
        rows_q: int, rows_k: int, q: int, k: int, v: int, operands: tuple[Any, ...], do: Tensor, dq: int,
        dk: int, dv: int, divided: Divided | None, dtables: Sequence[Tensor | None], dparams: Tensor | None,
    ) -> bool:  # fmt: skip
        """``operands``: the fields of Operands after q, k and v. dq, dk and dv are addresses, of tensors laid out as
        the caller's q, k and v; all other gradients are laid out as the operator's."""
        at, layout, filled, learn = do.data_ptr(), key, None, NOTHING_LEARNED
        cu_q, cu_k, params, used_q, used_k, tables, _ = operands
        if at & 15:
            return False
        if fill is not None:
            learn = LearnedTables.of(problem, dtables) if dtables else NOTHING_LEARNED
            filled = fill(tables, learn)
            if filled is None:
                return False
            layout = (key, *filled.layout)
        known = find(layout)
        to_round = None if rounded is None else rounded()
        if known is None or (to_round is None and rounded is not None):
            return False
        run, write, stream = known
        of_queries = None if cu_q is None else cu_q.data_ptr()
        terms: Any = ()
        if terms_of is not None:
            terms = terms_of(rows_q, rows_k, operands, do, divided)
        held, tiles, wide, flags, table = prepare(
            rows_q, rows_k, write, stream, cu_k, of_queries, used_k, used_q, dk, dv, dq
        )
        items = tiles * heads
        grid = (items if items < most else most, 1, 1)
        sums, at_params, at_sums = room_of_params(tiles, params)
        if terms_of is None and filled is None:
            run(
                grid, stream, at, q, k, v, dq, wide, dk, dv, table, of_queries, at_params, at_sums, flags, tiles,
                rows_q, rows_k,
            )  # fmt: skip
        else:
            lists, visits, stride = NOTHING
            if filled is not None:
                lists, visits, stride = make_lists(rows_k, rows_q, stream, tiles, table, of_queries, filled)
            run(
                grid, stream, at, q, k, v, dq, wide, dk, dv, table, of_queries, at_params, at_sums, flags,
                *addresses(terms), *(filled.tables if filled else ()), *visits, tiles, rows_q, rows_k,
                *(steps_of(rows_q) if terms else ()), *(filled.sizes if filled else ()), *stride,
            )  # fmt: skip
            held = (held, lists)
        if to_round is not None:
            to_round(rows_q, stream, wide, dq)
        if dtables:
            learn.add_to(dtables, factor)
        if sums is not None:
            torch.mul(sums.sum((0, 1)).T, factor, out=dparams)
        del held, terms  # not before the launches
        return True

    return backward


def sums_of_params(problem: Problem) -> Callable[[int, Any], tuple[Tensor | None, int | None, int | None]]:
    """A function of the number of tiles and of the params. It returns a buffer for each tile's part of the params'
    gradients (see launch.launch_backward), and the addresses of the params and of the buffer."""
    n_params, heads, device = problem.n_params, problem.heads_q, problem.device
    if n_params == 0:
        return lambda tiles, params: (None, None, None)

    def room(tiles: int, params: Tensor) -> tuple[Tensor, int, int]:
        sums = torch.zeros(tiles, config.CONSUMERS, heads, n_params, dtype=torch.float32, device=device)
        return sums, params.data_ptr(), sums.data_ptr()

    return room


def rounding(problem: Problem, kind: Hashable) -> Callable[[], Any]:
    """A function that returns the launch that rounds dq, or None if it is not known yet."""
    kernel, heads = repeated_rounding(problem, ALIGN), heads_of_dq(problem)

    def find() -> Any:
        where = unwatched(kernel.kernel)
        known = None if where is None else kernel.found.get((where[0], kind))
        if known is None:
            return None
        return lambda rows_q, stream, wide, dq: known.launch(rounding_grid(heads, rows_q), stream, wide, dq, rows_q)

    return find


def counted(problem: Problem, c: Config, room_for: RoomFor) -> Callable[..., tuple[Any, ...]]:
    """A function that prepares a launch whose tiles follow from the shape. It returns memory to hold until the launch,
    the number of tiles, and the addresses of the sums of dq, their flags, and the list (None)."""
    n, block, device = problem.n_seqs, c.block_n, problem.device

    def prepare(rows_q: int, rows_k: int, *others: Any) -> tuple[Any, ...]:
        of_sums, _, held, sums, flags = room_for(rows_q)
        if sums is None:
            room = memory(Memory, of_sums, device=device)
            held, sums = (held, room), room.data_ptr()
        return held, n * -(-rows_k // block), sums, flags, None

    return prepare


def listed(problem: Problem, listing: Listing, room_for: RoomFor) -> Callable[..., tuple[Any, ...]]:
    """The same for tiles in a list: that is made by one launch (see work.make_list), and shares a buffer with the sums
    and flags."""
    tiling, sizes, device = listing.tiling, list_sizes(problem, listing.tiling), problem.device
    zeros, zeros_other = tiling.zeros, tiling.zeros_other

    def prepare(
        rows_q: int, rows_k: int, write: Any, stream: int, cu_k: Any, of_queries: Any, used_k: Any, used_q: Any,
        to_k: int, to_v: int, to_q: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        tiles, programs, ends, ends_other = sizes(rows_k, rows_q)
        of_sums, of_flags, held, sums, flags = room_for(rows_q)
        behind_sums = apart(of_sums)
        before_list = behind_sums + apart(of_flags)
        room = memory(Memory, before_list + (1 + tiles) * RECORD_BYTES, device=device)
        at = room.data_ptr()
        table, zeroed = at + before_list, at + behind_sums if of_flags else None
        write(
            (programs, 1, 1), stream, table, None if cu_k is None else cu_k.data_ptr(), of_queries,
            None if used_k is None else used_k.data_ptr(), None if used_q is None else used_q.data_ptr(),
            to_k if zeros else None, to_v if zeros else None, to_q if zeros_other else None, zeroed, rows_k, rows_q,
            tiles, ends, ends_other,
        )  # fmt: skip
        return (held, room), tiles, at if sums is None else sums, zeroed if flags is None else flags, table

    return prepare


def apart(size: int) -> int:
    """``size`` in bytes, rounded up so that the next part of a buffer is aligned."""
    return -(-size // APART) * APART
