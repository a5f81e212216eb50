"""The quick pass of the backward (see the package's docstring)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

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
    if plan.mode != "ring" or plan.long is not None:
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
    prepare = counted(problem, plan.config) if listing is None else listed(problem, plan.config, listing)
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


def counted(problem: Problem, c: Config) -> Callable[..., tuple[Any, ...]]:
    """What the main kernel needs where tiles can be counted: memory to hold, the number of tiles, the addresses of the
    ring, its flags and the list."""
    n, block, places = problem.n_seqs, c.block_n, launch.ring_places(problem, c)
    rows, columns, device = c.block_m, config.width(problem), problem.device

    def prepare(rows_q: int, rows_k: int, *others: Any) -> tuple[Any, ...]:
        held = wide, flags = launch.ring(places, rows, columns, device, zeros=True)
        return held, n * -(-rows_k // block), wide.data_ptr(), flags.data_ptr(), None

    return prepare


def listed(problem: Problem, c: Config, listing: Listing) -> Callable[..., tuple[Any, ...]]:
    """Likewise where they are in a list, which is made with all else (see work.make_list): all in one buffer."""
    tiling, sizes = listing.tiling, list_sizes(problem, listing.tiling)
    zeros, zeros_other, places = tiling.zeros, tiling.zeros_other, launch.ring_places(problem, c)
    rows, columns, device = c.block_m, config.width(problem), problem.device
    behind_ring = apart(places * rows * columns * 4)
    before_list = behind_ring + apart(places * 4)
    nothing = None if places else launch.no_ring(rows, columns, device)

    def prepare(
        rows_q: int, rows_k: int, write: Any, stream: int, cu_k: Any, of_queries: Any, used_k: Any, used_q: Any,
        to_k: int, to_v: int, to_q: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        tiles, programs, ends, ends_other = sizes(rows_k, rows_q)
        held = memory(Memory, before_list + (1 + tiles) * RECORD_BYTES, device=device)
        wide = held.data_ptr()
        table, flags = wide + before_list, wide + behind_ring
        write(
            (programs, 1, 1), stream, table, None if cu_k is None else cu_k.data_ptr(), of_queries,
            None if used_k is None else used_k.data_ptr(), None if used_q is None else used_q.data_ptr(),
            to_k if zeros else None, to_v if zeros else None, to_q if zeros_other else None, flags if places else None,
            rows_k, rows_q, tiles, ends, ends_other,
        )  # fmt: skip
        if nothing is not None:
            wide, flags = nothing[0].data_ptr(), nothing[1].data_ptr()
        return held, tiles, wide, flags, table

    return prepare


def apart(size: int) -> int:
    """Bytes that a part of a buffer takes."""
    return -(-size // APART) * APART
