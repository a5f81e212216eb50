"""Query heads that share a key head as further queries of it, where a head has few queries of its own.

A tile has 128 queries of one head, and loads all keys of that head. In decoding, one query in each of eight heads that
share a key head would load the same keys eight times, for tiles that are nearly empty. As eight queries of one head
they load them once. This needs a function and a mask that depend neither on the head nor on the query.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gdpa.backends.hopper.config import WARPGROUP_ROWS
from gdpa.masks.band import Band
from gdpa.problem import Operands, Problem, is_regular, kept

# Bytes that are not loaded again, 60 us at 4.5 TB/s. Less is not worth the host's time: such calls have no quick pass.
# (64 x 32 heads of one query, 4 heads of 4096 keys: 134 us instead of 537.)
WORTH = 2**28


@kept
def folded_problem(problem: Problem) -> Problem | None:
    """None if heads are better left alone."""
    few = problem.group > 1 and problem.rows_q <= WARPGROUP_ROWS
    dense = not (problem.packed_q or problem.packed_k or problem.used_q)
    alike = sees_everything(problem) and not problem.placed and problem.n_params == 0
    rows = problem.n_seqs * problem.heads_k * problem.rows_k
    loaded = rows * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    if not (few and dense and alike) or loaded * (problem.group - 1) < WORTH:
        return None
    return replace(problem, heads_q=problem.heads_k, rows_q=problem.rows_q * problem.group, band=Band())


def sees_everything(problem: Problem) -> bool:
    """Whether all queries see all keys. Queries are aligned to the end of the keys, so the only one does if causal."""
    last = problem.rows_q == 1 and problem.band.right is not None and problem.band.right >= 0
    return problem.band.left is None and (problem.band.right is None or last)


def fold(
    problem: Problem, x: Operands, out: Tensor, sums: Tensor | None
) -> tuple[Problem, Operands, Tensor, Tensor | None]:
    """The same call with fewer heads, or as it is."""
    folded = folded_problem(problem)
    if folded is None or x.sink is not None:
        return problem, x, out, sums
    q, o = (fold_heads(t, problem.group) for t in (x.q, x.written(out)))
    if q is None or o is None or not (is_regular(q) and is_regular(o)):
        return problem, x, out, sums
    if sums is not None:
        if not sums.is_contiguous():  # sums of some heads; kernels write those of a head side by side
            return problem, x, out, sums
        sums = sums.view(sums.shape[0], problem.heads_k, -1)
    x = Operands(q, x.k, x.v, used_k=x.used_k)
    return folded, x, o, sums


def fold_heads(t: Tensor, group: int) -> Tensor | None:
    """(B, H, L, D) as (B, H / group, group * L, D), if that is a view."""
    batch, heads, rows, d = t.shape
    of_batch, of_head, of_row, of_column = t.stride()
    if rows > 1 and of_head != rows * of_row:
        return None
    steps = (of_batch, group * of_head, of_row if rows > 1 else of_head, of_column)
    return t.as_strided((batch, heads // group, group * rows, d), steps)
