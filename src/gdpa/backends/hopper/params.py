"""Functions of positions that have params: the kernels take these as one more table (see functions/places/params.py).

Their backward has no registers for gradients of params beside positions, but adds up the gradients of tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gdpa.functions.places.params import with_params_looked_up
from gdpa.problem import Operands, Problem, kept_with_rows


@kept_with_rows
def looked_up(problem: Problem) -> Problem | None:
    """The problem without params, None if it has none that are better looked up."""
    if problem.n_params == 0 or len(problem.activations) > 1:
        return None
    if problem.first_head or problem.head_step != 1:
        return None  # the table has these heads only, and they would ask for others
    # With the gradients of params those of all tables are added up.
    if not problem.learn and any(t.differentiable for t in problem.activation.tables):
        return None
    found = with_params_looked_up(problem.activation)
    return None if found is None else replace(problem, activations=(found,), learn=True)


def operands_of(problem: Problem, x: Operands) -> Operands:
    """``x`` of ``problem``, whose params are looked up."""
    other = object.__new__(type(x))
    other.__dict__.update(x.__dict__, params=None, tables=tables_of(problem, x.tables, x.params))
    return other


def tables_of(problem: Problem, tables: Sequence[Tensor], params: Any) -> list[Tensor]:
    """The function's own, the params, and those of the mask."""
    own = problem.n_tables
    return [*tables[:own], params.contiguous(), *tables[own:]]


def gradients_of(problem: Problem, dtables: Sequence[Tensor | None], dparams: Tensor) -> list[Tensor | None]:
    """Where gradients of the tables are added to: those of the function's own, then the params."""
    return [*(dtables or [None] * problem.n_tables), dparams.zero_()]


Pass = Callable[..., bool]


def forward_pass(problem: Problem, run: Pass) -> Pass:
    """A quick pass of ``problem`` by ``run``, that of the problem without params."""

    def forward(rows_q: int, rows_k: int, *given: Any) -> bool:
        *first, params, used_q, used_k, sink, sums, tables = given
        return run(rows_q, rows_k, *first, None, used_q, used_k, sink, sums, tables_of(problem, tables, params))

    return forward


def backward_pass(problem: Problem, run: Pass) -> Pass:
    """The same of the backward."""

    def backward(rows_q: int, rows_k: int, *given: Any) -> bool:
        *first, operands, do, dq, dk, dv, divided, dtables, dparams = given
        cu_q, cu_k, params, used_q, used_k, tables, sink = operands
        operands = (cu_q, cu_k, None, used_q, used_k, tables_of(problem, tables, params), sink)
        into = gradients_of(problem, dtables, dparams)
        return run(rows_q, rows_k, *first, operands, do, dq, dk, dv, divided, into, None)

    return backward
