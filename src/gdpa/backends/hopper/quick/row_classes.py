"""Classes of numbers of rows, within which every decision about a call is the same.

Every batch of packed sequences has another number of rows, and deciding about each anew (tiles, parts, the mode of dq)
takes longer than the launches. But decisions only compare numbers of rows with bounds, so few classes of rows are
decided differently; the sizes that differ within a class are computed in a microsecond. Problems so large that the host
does not matter are not classified: there every number of rows is a class of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable
from functools import lru_cache

from gdpa.backends import tuning
from gdpa.backends.hopper import config, launch
from gdpa.backends.hopper.binding import MANY_ITEMS, RESIDENT_TILES
from gdpa.backends.hopper.config import Config
from gdpa.backends.hopper.scheduling.work import REMEMBERED
from gdpa.backends.hopper.split_kv import LEAST_KEYS
from gdpa.backends.triton.tables import SMALL_ROWS
from gdpa.problem import PLAIN, Problem

STEP = 64  # rows; blocks of all configurations are multiples of it
MOST_STEPS = config.MOST_STAGES * 128 // STEP  # of keys that shared memory may hold at once (see forward_items)
MANY_QUERIES = RESIDENT_TILES * MANY_ITEMS * STEP  # of all heads


def classes(problem: Problem) -> Callable[[int, int], Hashable]:
    """A function of rows_q and rows_k. Where it returns the same for two of them, the passes of ``problem`` with these
    rows differ in nothing but what they count themselves."""
    n = max(problem.n_seqs, 1)
    c = config.BACKWARD[config.width(problem)]  # a tuned one has the same blocks
    block_m, block_n = c.block_m, c.block_n
    of_q, of_k = n if problem.packed_q else 1, n if problem.packed_k else 1  # rows are of so many sequences
    many_heads = config.QUERIES_AT_ONCE // problem.heads_k + 1
    bounds_q = sorted(
        {1, config.rows_of_few_queries(problem), config.QUERIES_OF_THREE * of_q, many_heads * of_q}
    )  # of packed queries; others always have the same number of rows
    bounds_k = bounds_of_keys(problem, c, of_k)
    end_q, end_k = -(-MANY_QUERIES * of_q // (problem.heads_q * n)), 2 * LEAST_KEYS * of_k
    if problem.placed:
        end_q, end_k = min(end_q, SMALL_ROWS * of_q // n), min(end_k, SMALL_ROWS * of_k // n)
    summed = problem.norm != PLAIN

    @lru_cache(REMEMBERED)
    def class_of(rows_q: int, rows_k: int) -> Hashable:
        if rows_q >= end_q or rows_k >= end_k:
            return rows_q, rows_k
        enough = -(-(rows_q // of_q) // block_m) >= -(-(rows_k // of_k) // block_n)
        multiple = summed and rows_q & 15 == 0  # strides that Triton compiles other code for
        return bisect_right(bounds_q, rows_q), bisect_right(bounds_k, rows_k), enough, multiple

    return class_of


def bounds_of_keys(problem: Problem, c: Config, sequences: int) -> list[int]:
    """Numbers of rows of keys from which on something may be decided otherwise."""
    limit = launch.most_at_once(problem) * c.block_n
    steps = [STEP * i for i in range(MOST_STEPS + 1)]  # a hint bounds the longest sequence, and makes some meaningless
    means = (*config.KINDS_OF_FEW_KEYS, *tuning.KEY_CLASSES.values(), limit)
    of_means = [(most + 1) * sequences for most in means if most is not None]
    return sorted({*of_means, *(most + 1 for most in (limit, c.block_n, *steps))})
