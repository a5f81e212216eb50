"""Calls of a kind that was there before, with the same numbers of rows: only addresses are filled in.

The ordinary way (launch.py) decides what to launch and makes the launches known (see launching.Repeated). Here they are
looked up and made, and nothing else: on a problem so small that the host decides, the way through a dozen functions
takes longer than the launches. A pass is a function that tells whether it is done: whatever is unusual, or not known
yet, is left to the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from gdpa.backends.hopper import config, launch
from gdpa.backends.hopper.scheduling.sorting import MANY_SEQUENCES
from gdpa.backends.hopper.scheduling.work import Launch, Listing
from gdpa.backends.triton import launch as portable
from gdpa.backends.triton.launching import cdiv, nested, unwatched
from gdpa.backends.triton.sums import RowTerms
from gdpa.backends.triton.tables import fixed_places
from gdpa.device.rows import Rows
from gdpa.device.sequences import RECORD
from gdpa.problem import PLAIN, Divided, Operands, Problem

Pass = Callable[..., bool]


def forward_pass(problem: Problem, kind: Hashable) -> Pass | None:
    """``kind``: see Operands.kind."""
    plan = launch.forward_plan(problem, None, problem.norm != PLAIN)
    if plan is None or not plan.repeats:
        return None
    grid, numbers = (plan.launch.grid, 1, 1), plan.launch.numbers
    keys: dict[bool | None, Hashable] = dict.fromkeys((None, True, False), kind)  # by whether a sink is aligned
    if problem.norm != PLAIN:
        steps = sums_steps(problem)
        keys = {aligned: (kind, (True, aligned, nested(steps))) for aligned in keys}
        numbers = (*numbers, *steps)
    if problem.placed:
        keys = {aligned: (key, fixed_places(problem)) for aligned, key in keys.items()}
    find, make_list = finder(problem, plan.launch, plan.listing, kind), list_maker(problem, plan.listing)
    if find is None:
        return None

    def forward(
        starts: tuple[Any, ...], out: Tensor, cu_q: Any, cu_k: Any, params: Any, used_q: Any, used_k: Any, sink: Any,
        sums: Any,
    ) -> bool:  # fmt: skip
        known = find(keys[None if sink is None else sink.data_ptr() & 15 == 0])
        if known is None:
            return False
        run, write, stream = known
        table = None
        if write is not None:
            table = make_list(write, stream, cu_q, cu_k, used_q, used_k, out, None, None, None)
        tensors = (*starts, out, table, cu_k, params)
        run(grid, stream, tensors if sums is None else (*tensors, sums, sink), numbers)
        return True

    return forward


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
    grid, numbers = (of_keys.grid, 1, 1), of_keys.numbers
    if problem.norm != PLAIN:
        steps = sums_steps(problem)
        key, numbers = (key, (True, True, nested(steps))), (*numbers, *steps)
    if problem.placed:
        key = (key, fixed_places(problem))
    places, rows, columns = launch.ring_places(problem, plan.config), plan.config.block_m, config.width(problem)
    find, make_list = finder(problem, of_keys, listing, kind), list_maker(problem, listing)
    terms_of = terms_pass(problem, strides) if problem.norm != PLAIN else None
    zeros, device = listing is None, problem.device  # otherwise the launch of the list makes them
    if find is None:
        return None

    def backward(
        starts: tuple[Any, ...], operands: tuple[Any, ...], do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
        divided: Divided | None,
    ) -> bool:  # fmt: skip
        """``operands``: those of Operands but for q, k and v. The gradients may lie as the caller has them, ``divided``
        is as the operator has it."""
        known = None if do.data_ptr() & 15 else find(key)
        if known is None:
            return False
        run, write, stream = known
        cu_q, cu_k, _, used_q, used_k, _, _ = operands
        table = None
        terms: tuple[Any, ...] = ()
        if terms_of is not None:
            terms = terms_of(operands, do, divided)
        wide, flags = launch.ring(places, rows, columns, device, zeros)
        if write is not None:
            table = make_list(write, stream, cu_k, cu_q, used_k, used_q, dk, dv, dq, flags)
        run(grid, stream, (do, *starts, dq, wide, dk, dv, table, cu_q, None, None, flags, *terms), numbers)
        return True

    return backward


def terms_pass(problem: Problem, strides: tuple[int, ...]) -> Callable[..., tuple[Any, ...]]:
    """The two terms of every row, see portable.row_terms."""
    kernel = portable.terms_kernel(problem, strides, strides, True)
    shape, (batch, head) = (problem.out_batch, problem.heads_q, problem.rows_q), sums_steps(problem)
    grid = (problem.out_batch * cdiv(problem.rows_q, portable.ROWS_OF_TERMS), problem.heads_q, 1)
    numbers, device = (batch, head, batch, head, problem.rows_q), problem.device
    like = torch.empty(0)
    code = portable.terms_code(Rows(like, batch, head, 1), RowTerms(like, like, batch, head), None, None, None)

    def terms(operands: tuple[Any, ...], do: Tensor, divided: Divided) -> tuple[Any, ...]:
        out, sums = divided.out, divided.sums
        where = unwatched(kernel.kernel)
        known = None if where is None else kernel.found.get((where[0], code))
        usual = out.stride() == strides and sums.is_contiguous() and (out.data_ptr() | sums.data_ptr()) & 15 == 0
        if where is None or known is None or not usual or divided.dsink is not None or divided.dsums is not None:
            do = do.as_strided(out.shape, strides)
            return portable.row_terms(problem, Operands(do, do, do, *operands), do, divided)[:2]
        delta = torch.empty(shape, dtype=torch.float32, device=device)
        row = torch.empty(shape, dtype=torch.float32, device=device)
        known.launch(grid, where[1], (do, out, sums, None, delta, row, None, None), numbers)
        return delta, row

    return terms


def sums_steps(problem: Problem) -> tuple[int, int]:
    """From one batch entry to the next, and from one head to the next, in row sums and what is made of them."""
    return 0 if problem.out_batch == 1 else problem.heads_q * problem.rows_q, problem.rows_q


def finder(problem: Problem, main: Launch, listing: Listing | None, kind: Hashable) -> Callable[..., Any] | None:
    """A function of the layout by which the main kernel's launch is known. It returns that launch, the one that makes
    the list (None if there is none), and the stream; or None if one of them is not known here."""
    if listing is not None and problem.n_seqs > MANY_SEQUENCES:
        return None
    index, kernel, found = problem.device.index, main.kernel.kernel, main.kernel.found
    lists = None if listing is None else listing.launch.kernel.found

    def find(layout: Hashable) -> tuple[Any, Any, int] | None:
        where = unwatched(kernel)
        if where is None:
            return None
        device, stream = where
        run = found.get((device, layout))
        if run is None or (device != index and index is not None):  # None: a test is running on the CPU
            return None
        if lists is None:
            return run.launch, None, stream
        write = lists.get((device, kind))
        return None if write is None else (run.launch, write.launch, stream)

    return find


def list_maker(problem: Problem, listing: Listing | None) -> Callable[..., Any]:
    """What work.make_list does with a known launch. The list of a forward is of queries, that of a backward of keys."""
    if listing is None:
        return lambda *args: None
    tiling, launch = listing
    device, entries, numbers = problem.device, RECORD.value, launch.numbers
    rows, grid = 1 + launch.tiles, (launch.grid, 1, 1)

    def make(
        write: Any, stream: int, cu: Any, cu_other: Any, used: Any, used_other: Any, t: Any, u: Any, w: Any, flags: Any
    ) -> Tensor:
        table = torch.empty(rows, entries, dtype=torch.int32, device=device)
        if not tiling.zeros:
            t = u = None
        if not tiling.zeros_other:
            w = None
        if not tiling.flags:
            flags = None
        write(grid, stream, (table, cu, cu_other, used, used_other, t, u, w, flags), numbers)
        return table

    return make
