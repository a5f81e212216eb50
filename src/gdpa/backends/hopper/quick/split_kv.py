"""The quick pass of a forward with keys in parts (see the package's docstring, and parts.py for the parts)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from gdpa.backends.hopper.launch import Forward
from gdpa.backends.hopper.quick.known import Memory, Pass, finder, memory
from gdpa.backends.hopper.split_kv import grid_of_addition, repeated_addition, with_parts
from gdpa.problem import Problem


def parts_pass(problem: Problem, plan: Forward, kind: Hashable) -> Pass | None:
    """Of queries that are not packed. A problem with so many keys has a class of rows of its own, so that nothing is
    counted here."""
    if problem.packed_q or problem.placed or plan.listing is not None:
        return None
    layout = with_parts(kind, plan.items.parts, problem.rows_q)
    adding = plan.launch._replace(kernel=repeated_addition(problem))
    find, find_addition = (finder(problem, launch, None, kind) for launch in (plan.launch, adding))
    assert find is not None
    assert find_addition is not None
    many = problem.out_batch * problem.heads_q * problem.rows_q
    n_bytes, device = 4 * plan.items.parts * many * problem.head_dim_v, problem.device
    tiles, grid, add_grid = plan.launch.tiles, (plan.launch.grid, 1, 1), grid_of_addition(many)

    def forward(
        rows_q: int, rows_k: int, q: int, k: int, v: int, out: Tensor, cu_q: Any, cu_k: Any, params: Any, used_q: Any,
        used_k: Any, sink: Any, sums: Any, tables: Any,
    ) -> bool:  # fmt: skip
        known, addition = find(layout), find_addition(layout)
        if known is None or addition is None:
            return False
        run, _, stream = known
        room = memory(Memory, n_bytes, device=device)
        to, of_keys = room.data_ptr(), None if cu_k is None else cu_k.data_ptr()
        at = None if params is None else params.data_ptr()
        run(grid, stream, q, k, v, to, None, of_keys, at, tiles, rows_q, rows_k)
        addition[0](add_grid, stream, to, out.data_ptr())
        return True

    return forward
