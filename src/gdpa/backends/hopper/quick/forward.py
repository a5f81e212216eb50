"""The quick pass of the forward (see the package's docstring)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from gdpa.backends.hopper import launch
from gdpa.backends.hopper.quick.known import RECORD_BYTES, Memory, Pass, finder, memory, steps_of_sums
from gdpa.backends.hopper.quick.places import NOTHING, filling, visiting
from gdpa.backends.hopper.quick.split_kv import parts_pass
from gdpa.backends.hopper.scheduling.work import list_sizes
from gdpa.backends.triton.launching import nested
from gdpa.problem import PLAIN, Problem


def forward_pass(problem: Problem, kind: Hashable) -> Pass | None:
    """``kind``: see Operands.kind."""
    plan = launch.forward_plan(problem, None, problem.norm != PLAIN)
    if plan is None:
        return None
    if plan.items.parts > 1:
        return parts_pass(problem, plan, kind)
    keys: dict[bool | None, Hashable] = dict.fromkeys((None, True, False), kind)  # by whether a sink is aligned
    steps_of = steps_of_sums(problem)
    if problem.norm != PLAIN:
        keys = {aligned: (kind, (True, aligned, nested(steps_of(problem.rows_q)))) for aligned in keys}
    fill = filling(problem, kind, False, plan.config) if problem.placed else None
    make_lists = visiting(problem, False, plan.config)
    find = finder(problem, plan.launch, plan.listing, kind)
    if find is None:
        return None
    n, heads, block, device = problem.n_seqs, problem.heads_q, plan.rows, problem.device
    most = launch.most_programs(problem)
    sizes = zeros = None
    scans = plan.items.scans
    if plan.listing is not None:
        sizes, zeros = list_sizes(problem, plan.listing.tiling), plan.listing.tiling.zeros

    def forward(
        rows_q: int, rows_k: int, q: int, k: int, v: int, out: Tensor, cu_q: Any, cu_k: Any, params: Any, used_q: Any,
        used_k: Any, sink: Any, sums: Any, tables: Any,
    ) -> bool:  # fmt: skip
        key, filled = keys[None if sink is None else sink.data_ptr() & 15 == 0], None
        if fill is not None:
            filled = fill(tables)
            if filled is None:
                return False
            key = (key, *filled.layout)
        known = find(key)
        if known is None:
            return False
        run, write, stream = known
        to, of_keys, table = out.data_ptr(), None if cu_k is None else cu_k.data_ptr(), None
        if scans:
            tiles, table = rows_q // block + n, cu_q.data_ptr()
        elif sizes is None:
            tiles = n * -(-rows_q // block)
        else:
            tiles, programs, ends, ends_other = sizes(rows_q, rows_k)
            room = memory(Memory, (1 + tiles) * RECORD_BYTES, device=device)
            table = room.data_ptr()
            write(
                (programs, 1, 1), stream, table, None if cu_q is None else cu_q.data_ptr(), of_keys,
                None if used_q is None else used_q.data_ptr(), None if used_k is None else used_k.data_ptr(),
                to if zeros else None, None, None, None, rows_q, rows_k, tiles, ends, ends_other,
            )  # fmt: skip
        items = tiles * heads
        grid = (items if items < most else most, 1, 1)
        at = None if params is None else params.data_ptr()
        if sums is None and filled is None:
            run(grid, stream, q, k, v, to, table, of_keys, at, tiles, rows_q, rows_k)
            return True
        summed: Any = () if sums is None else (sums.data_ptr(), None if sink is None else sink.data_ptr())
        lists, visits, stride = NOTHING
        if filled is not None:
            lists, visits, stride = make_lists(rows_q, rows_k, stream, tiles, table, of_keys, filled)
        run(
            grid, stream, q, k, v, to, table, of_keys, at, *summed, *(filled.tables if filled else ()), *visits, tiles,
            rows_q, rows_k, *(steps_of(rows_q) if summed else ()), *(filled.sizes if filled else ()), *stride,
        )  # fmt: skip
        del lists  # not before the launch
        return True

    return forward
