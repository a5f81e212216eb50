"""Query heads that share a key head as further queries of it, where a head has few queries of its own.

A tile has 128 queries of one head, and loads all keys of that head. One query in each of eight heads that share a key
head (as where sequences are continued) would load the same keys eight times, for tiles that are nearly empty. As eight
queries of one head they load them once. What a pair gives may not depend on its head or query for that.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gdpa.backends.hopper.config import WARPGROUP_ROWS
from gdpa.problem import Operands, Problem, is_regular, kept

# Bytes that are not loaded again: 60 us. Less is not worth the host's time, since such calls have no quick pass.
WORTH = 2**28


@kept
def folded_problem(problem: Problem) -> Problem | None:
    """None if heads are better left alone."""
    few = problem.group > 1 and problem.rows_q <= WARPGROUP_ROWS
    dense = not (problem.packed_q or problem.packed_k or problem.used_q)
    alike = problem.band.unbounded and not problem.placed and problem.n_params == 0
    rows = problem.n_seqs * problem.heads_k * problem.rows_k
    loaded = rows * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    if not (few and dense and alike) or loaded * (problem.group - 1) < WORTH:
        return None
    return replace(problem, heads_q=problem.heads_k, rows_q=problem.rows_q * problem.group)


def fold(
    problem: Problem, x: Operands, out: Tensor, sums: Tensor | None
) -> tuple[Problem, Operands, Tensor, Tensor | None]:
    """The same call with fewer heads, or as it is."""
    folded = folded_problem(problem)
    if folded is None or x.sink is not None:
        return problem, x, out, sums
    views = [fold_heads(t, problem.group) for t in (x.q, x.written(out), sums if sums is None else sums[..., None])]
    q, o, folded_sums = views
    if q is None or o is None or (sums is not None and folded_sums is None) or not (is_regular(q) and is_regular(o)):
        return problem, x, out, sums
    x = Operands(q, x.k, x.v, used_k=x.used_k)
    return folded, x, o, None if folded_sums is None else folded_sums[..., 0]


def fold_heads(t: Tensor | None, group: int) -> Tensor | None:
    """(B, H, L, D) as (B, H / group, group * L, D), if that is a view."""
    if t is None:
        return None
    batch, heads, rows, d = t.shape
    of_batch, of_head, of_row, of_column = t.stride()
    if rows > 1 and of_head != rows * of_row:
        return None
    steps = (of_batch, group * of_head, of_row if rows > 1 else of_head, of_column)
    return t.as_strided((batch, heads // group, group * rows, d), steps)
