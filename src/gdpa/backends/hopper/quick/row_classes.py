"""Numbers of rows for which everything is decided alike.

Batches of packed sequences have other numbers of rows every time, and decisions (tiles, parts, the way of dq) take
longer than the launches. But they only compare rows with bounds, so that a few classes of rows share them: what differs
inside of a class is counted in a microsecond (see quick.py). Where a bound is not looked at here, since a problem of that
size does not wait for the host, the rows are a class of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from gdpa.backends import tuning
from gdpa.backends.hopper import config, launch
from gdpa.backends.hopper.binding import MANY_ITEMS, RESIDENT_TILES
from gdpa.backends.hopper.parts import LEAST_KEYS
from gdpa.backends.triton.tables import SMALL_ROWS
from gdpa.problem import PLAIN, Problem

STEP = 64  # rows; blocks of all configurations are multiples of it
MOST_STEPS = config.MOST_STAGES * 128 // STEP  # of keys that shared memory may hold at once (see forward_items)
MANY_QUERIES = RESIDENT_TILES * MANY_ITEMS * STEP  # of all heads


def classes(problem: Problem) -> Callable[[int, int], Hashable]:
    """A function of rows_q and rows_k. Where it returns the same for two of them, the passes of ``problem`` with these
    rows differ in nothing but what quick.py counts."""
    n, heads = max(problem.n_seqs, 1), problem.heads_q
    packed_q, packed_k = problem.packed_q, problem.packed_k
    c = config.BACKWARD[config.width(problem)]  # a tuned one has the same blocks
    block_m, block_n = c.block_m, c.block_n
    limit = launch.most_at_once(problem) * block_n
    hint = problem.max_k if packed_k else None
    summed, placed, class_of_keys = problem.norm != PLAIN, problem.placed, tuning.key_class

    def class_of(rows_q: int, rows_k: int) -> Hashable:
        mean_q, all_q = (rows_q // n, rows_q) if packed_q else (rows_q, rows_q * n)
        mean_k = rows_k // n if packed_k else rows_k
        if mean_k >= 2 * LEAST_KEYS or all_q * heads >= MANY_QUERIES or not rows_q or not rows_k:
            return rows_q, rows_k
        if placed and max(rows_q, rows_k) * n > SMALL_ROWS:
            return rows_q, rows_k
        longest = rows_k if hint is None or hint > rows_k else hint
        return (
            class_of_keys(mean_k), mean_q >= config.QUERIES_OF_THREE, min(-(-longest // STEP), MOST_STEPS + 1),
            longest > limit, -(-mean_q // block_m) >= -(-mean_k // block_n), rows_k <= block_n,
            summed and rows_q & 15 == 0,
        )  # fmt: skip

    return class_of
