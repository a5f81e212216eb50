"""Tile sizes and pipeline depths by measurement: each branch says what it was measured on (docs/kernels-log.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from gdpa.backends import tuning
from gdpa.backends.hopper import TARGET
from gdpa.backends.tuning import ShapeClass
from gdpa.functions.emit import emit
from gdpa.functions.traced import Shift
from gdpa.problem import PLAIN, Problem, kept, kept_for_any_rows

WARPGROUP_ROWS = 64
BIAS_COLUMNS = 16  # see forward/bias.py: the fewest that tensor cores sum over
WARPGROUP_THREADS = 128
CONSUMERS = 2  # of the backward; the forward has one per 64 queries of its tile
PROGRAMS_PER_SM = 1  # shared memory and registers are used up by one


@dataclass(frozen=True)
class Config:
    """Queries and keys of a tile, buffers for what is streamed, and whether the two consumers take turns: forward at
    issuing products, backward at computing the function."""

    block_m: int
    block_n: int
    stages: int
    ping_pong: bool = True


def padded(d: int) -> int:
    """Columns of a tile: those past the head dimension are zero in shared memory, and are not written back."""
    return 64 if d <= 64 else 128


def width(problem: Problem) -> int:
    return max(padded(problem.head_dim), padded(problem.head_dim_v))


# By the columns of a tile.
FORWARD = {64: Config(128, 128, stages=4), 128: Config(128, 128, stages=2)}
# Backward: with turns self 2048 runs at 480 TFLOP/s instead of 472, 8192 at 498 instead of 486, 512 at 443 instead of
# 432, causal 2048 at 408 instead of 400; D 64 at 337 instead of 344.
BACKWARD = {64: Config(128, 128, stages=2, ping_pong=False), 128: Config(64, 128, stages=2, ping_pong=True)}
# At D 64 three consumers have the registers they need, and more of the function runs beside products: self 2048 at 470
# TFLOP/s instead of 423, jagged 1024 at 408 instead of 362, self 512 at 461 instead of 437.
FORWARD_BY_THREE = Config(192, 128, stages=4)
QUERIES_OF_THREE = 384  # on average, from which on it is used: a last tile of 64 rows leaves two of them idle
# For functions that compute much for every pair besides lookups. A thread holds 64 scores of 128 keys, and each of them
# is code of its own: HSTU's two biases spilled 3 KB and had 32,000 instructions, with 64 keys 32 bytes and 16,000: 2.8
# ms instead of 3.8. (One table by position is slower by a tenth with 64 keys, functions without lookups by a fifth.)
# And for few keys, of which a block of 128 would be half empty: packed sequences of U[1, 50] rows take 0.73 of the time
# that blocks of 128 take (silu at D 128; causal 0.69), U[1, 100] 0.94, U[1, 200] 0.96, U[1, 256] 1.01; ones of 64 rows
# 0.97, of 128 1.03, of 192 0.93, of 256 1.03. At D 64 0.74, 0.93, 0.94 and, of 64 rows, 0.85. A function that votes on
# blocks of 128 keys (gelu_tanh) has only its longer code for 64: U[1, 200] 0.98, at D 64 1.10, U[1, 100] 0.95 and 0.99.
FORWARD_BY_64 = {64: Config(128, 64, stages=6), 128: Config(128, 64, stages=4)}
FEW_KEYS, FEW_KEYS_OF_A_VOTE = 104, 64  # on average
# Behind a mask blocks of 128 spill a little, and smaller ones leave more out: U[1, 200] 0.80 to 0.95, U[1, 400] 0.80 to
# 0.91 (targets at D 64 1.05), U[1, 600] 0.88 to 1.02 (1.10), U[1, 1024] 0.91 to 1.06 (1.12). gelu_tanh, which does not
# vote there: U[1, 600] 0.81 to 0.99, U[1, 1024] 0.84 to 1.01.
FEW_KEYS_BEHIND_A_MASK, FEW_KEYS_OF_A_VOTE_BEHIND_A_MASK = 320, 640
KINDS_OF_FEW_KEYS = (FEW_KEYS, FEW_KEYS_OF_A_VOTE, FEW_KEYS_BEHIND_A_MASK, FEW_KEYS_OF_A_VOTE_BEHIND_A_MASK)
# Where tiles of 64 queries, of one consumer each, all run at the same time (causal ones in two rounds: most of them see
# few keys), two consumers of one tile only leave processors idle: 1 x 4 x 2048 takes 20.5 us instead of 25.1 (silu),
# 23.4 instead of 29.9 (gelu_tanh) and of 30.2 (softmax), at D 64 16.9 instead of 26.3; causal, D 64: 8 x 4 x 256 6.1
# instead of 8.5, 1 x 12 x 1024 11.9 instead of 15.9; D 128: 4 x 4 x 1024 18.8 instead of 19.5. With twice as many tiles
# it is slower: 8 x 4 x 512 13.0 instead of 11.1.
AT_ONCE = 128  # tiles, each a program's
MOST_SCANNED = 128  # packed sequences of so few queries, whose tiles need no list (see scheduling/scanning.py)
MANY_OPERATIONS = 8  # on every pair: HSTU's logarithmic buckets have 10, a relative position 5


@kept
def forward_config(problem: Problem) -> Config:
    """What `gdpa tune` found best on this machine, otherwise the built-in default."""
    found = tuned(problem, "fwd")
    if has_few_queries(problem) or (found is not None and found.block_n > 64 and has_few_keys(problem)):
        found = None  # measured on more queries or keys than these, and without a mask
    return found or default(problem, "fwd")


@kept
def backward_config(problem: Problem) -> Config:
    return tuned(problem, "bwd") or default(problem, "bwd")


def default(problem: Problem, which: str) -> Config:
    if which == "bwd":
        return BACKWARD[width(problem)]
    many_queries = problem.mean_queries >= QUERIES_OF_THREE
    return _forward_default(problem, many_queries, has_few_keys(problem), has_few_queries(problem))


def has_few_queries(problem: Problem) -> bool:
    """Whether tiles of 64 queries all run at the same time, causal ones in two rounds."""
    if problem.packed_q:
        return problem.rows_q < rows_of_few_queries(problem)
    return problem.n_seqs * -(-problem.rows_q // WARPGROUP_ROWS) * problem.heads_q <= _at_once(problem)


def rows_of_few_queries(problem: Problem) -> int:
    """From how many rows on packed sequences may have more of these tiles."""
    return (_at_once(problem) // problem.heads_q - problem.n_seqs + 1) * WARPGROUP_ROWS


def _at_once(problem: Problem) -> int:
    rounds = 2 if _is_causal(problem) and problem.mask is None else 1
    return rounds * min(AT_ONCE, processors(problem.device))


@cache
def processors(device: torch.device) -> int:
    """As many as anybody asks for where there is no GPU to ask."""
    known = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).multi_processor_count if known else 2**20


def _is_causal(problem: Problem) -> bool:
    return problem.band.left is None and problem.band.right is not None


def has_few_keys(problem: Problem) -> bool:
    """Whether blocks of 64 keys compute so much less than blocks of 128 that they are faster."""
    if problem.mask is not None:
        return problem.mean_keys <= (FEW_KEYS_OF_A_VOTE_BEHIND_A_MASK if _votes(problem) else FEW_KEYS_BEHIND_A_MASK)
    if problem.packed_k:
        return problem.mean_keys <= (FEW_KEYS_OF_A_VOTE if _votes(problem) else FEW_KEYS)
    return problem.rows_k <= 64 or (128 < problem.rows_k <= 192 and width(problem) == 128)


@kept_for_any_rows
def _votes(problem: Problem) -> bool:
    return emit(problem.activation, problem.dtype, TARGET).packed_level == "guarded"


@kept_for_any_rows
def _forward_default(problem: Problem, many_queries: bool, few_keys: bool, few_queries: bool) -> Config:
    if few_queries:
        return replace(_forward_default(problem, False, few_keys, False), block_m=WARPGROUP_ROWS, ping_pong=False)
    if few_keys or looks_up_much(problem):
        return FORWARD_BY_64[width(problem)]
    by_three = many_queries and fits(problem, "fwd", FORWARD_BY_THREE)
    return FORWARD_BY_THREE if by_three else FORWARD[width(problem)]


def tuned(problem: Problem, which: str) -> Config | None:
    return _tuned(problem, which, tuning.key_class(problem.mean_keys))


@kept_for_any_rows
def _tuned(problem: Problem, which: str, keys: str) -> Config | None:
    shape = ShapeClass("hopper", which, tuning.dtype_name(problem.dtype), width(problem), keys)
    found: Config | None = tuning.choice(shape, problem.device, candidates)
    return found if found is not None and fits(problem, which, found) else None


@kept_for_any_rows
def no_room_for_params(problem: Problem) -> str | None:
    """Why the backward kernel does not take the derivatives by params. If f is finite at 0, masking s and dp is enough;
    a mask for each derivative would need registers that are not there (two params with 64 columns: 13 ms, 4.6 with the
    triton backend, which therefore has those functions). Nor are there any with positions."""
    if problem.n_params == 0:
        return None
    if problem.activation.placed is not None:
        return "there are no registers for positions and params"
    return None if finite_past_the_end(problem) else "a function with params may be infinite or undefined at 0"


# ---- what `gdpa tune` may choose from --------------------------------------------------------------------------------
SHARED_MEMORY = 227 * 1024  # of one program
# Barriers, what the compiler hands to the other warps (440 to 720 bytes with Triton 3.6), what the producer tells, row
# sums, and values of columns on their way: 2448 bytes at most.
RESERVED = 3072
MOST_STAGES = 6


def candidates(shape: ShapeClass) -> tuple[Config, ...]:
    """Every configuration that the kernels can run for some problem of the class."""
    if shape.which == "fwd":
        bases = [FORWARD[shape.columns]] + [FORWARD_BY_THREE] * (shape.columns == 64)
        tiles = [replace(base, block_n=n, ping_pong=p) for base in bases for n in (128, 64) for p in (True, False)]
    else:  # its tiles follow from how the consumers share dq
        tiles = [replace(BACKWARD[shape.columns], ping_pong=p) for p in (True, False)]
    found = (replace(tile, stages=stages) for tile in tiles for stages in range(2, MOST_STAGES + 1))
    return tuple(c for c in found if shared_memory(shape.which, c, shape.columns) <= SHARED_MEMORY)


@kept_for_any_rows
def fits(problem: Problem, which: str, c: Config) -> bool:
    """Whether this problem may use ``c``: three consumers have no registers for masks, for more than 64 columns, or for
    a function that is no block of PTX; and many operations on pairs leave none for 128 keys."""
    if which == "fwd" and looks_up_much(problem) and c.block_n > FORWARD_BY_64[width(problem)].block_n:
        return False
    if which == "fwd" and c.block_m > CONSUMERS * WARPGROUP_ROWS:
        shift = shift_of(problem) if has_bias(problem) else None
        emitted = emit(shift.outer if shift else problem.activation, problem.dtype, TARGET)
        short = emitted.short_value and (emitted.packed_level != "guarded" or c.block_n == 128)  # see forward_function
        if is_masked(problem) or width(problem) > 64 or not short or (shift is not None and problem.norm != PLAIN):
            return False
    return shared_memory(which, c, width(problem)) <= SHARED_MEMORY


# Instructions for a pair of rows, from which on a step of the backward is long: the function's with its derivative, and
# what it takes for every pair to find out places and entries of tables. With gelu_tanh's 10 a step of both consumers at
# D 64, where a thread has 64 scores at a time, is 34 KB of code, more than the instruction cache keeps: with one copy
# for both it runs at 390 instead of 348 TFLOP/s (2048 rows), silu, of 6, at 454 instead of 451. At D 128 steps are
# shorter, and of the score alone only functions behind masks gain (gelu_tanh among documents 849 to 780 us, silu among
# targets 928 to 955), while gelu has 468 instead of 477.
LONG_STEP = 10


@kept_for_any_rows
def shares_code(problem: Problem) -> bool:
    """Whether the backward's consumers have one copy of their code (see compiled/sharing.py). With params or gradients
    of tables all functions gain by it, 2 to 45 %, but for those that are no block of PTX; with row sums, which lost 3
    to 27 %, none has it."""
    if not _may_share_code(problem):
        return False
    emitted, placed = emit(problem.activation, problem.dtype, TARGET), problem.activation.placed
    if placed is not None:
        at_least = LONG_STEP + (width(problem) == 128)  # where ALiBi, with 10, has 470 instead of 485
        return problem.learn or emitted.backward_operations + placed.program.pair_operations >= at_least
    long = emitted.backward_operations >= LONG_STEP and (width(problem) == 64 or problem.mask is not None)
    return emitted.short_backward and (problem.n_params > 0 or long)


@kept_for_any_rows
def forward_shares_code(problem: Problem, c: Config) -> bool:
    """The same of the forward, whose code is short unless entries of tables are looked up for every pair: then it gains
    3 to 33 %, while silu loses 3. Three consumers cannot share it."""
    two = c.block_m == CONSUMERS * WARPGROUP_ROWS
    return two and looks_up_pairs(problem) and _may_share_code(problem)


def _may_share_code(problem: Problem) -> bool:
    from gdpa.backends.triton.compiled import sharing  # here: this module is read where there is no Triton

    return problem.norm == PLAIN and sharing.is_possible()


def shift_of(problem: Problem) -> Shift | None:
    """The Shift of a function g(s + leaves) of positions or tables (functions/places/shift.py); None for others."""
    placed = problem.activation.placed
    return None if placed is None else placed.shift


def has_usual_scale(problem: Problem) -> bool:
    return math.isclose(problem.scale, problem.head_dim**-0.5, rel_tol=1e-6)


@kept_for_any_rows
def has_bias(problem: Problem) -> bool:
    """Whether the forward's tensor cores can add what a shift adds to the scores (see forward/bias.py)."""
    if shift_of(problem) is None or padded(problem.head_dim) != padded(problem.head_dim_v):
        return False
    return has_usual_scale(problem) and emit(problem.activation, problem.dtype, TARGET).bias


def has_room_for_bias(problem: Problem, c: Config) -> bool:
    """Whether it fits beside all other tiles; if not, results take the place of queries, which is more than enough."""
    rows = 2 * c.block_m + c.stages * c.block_n
    return shared_memory("fwd", c, width(problem)) + rows * BIAS_COLUMNS * 2 <= SHARED_MEMORY


@kept_for_any_rows
def looks_up_pairs(problem: Problem) -> bool:
    """Whether entries of tables are looked up for every pair."""
    placed = problem.activation.placed
    return placed is not None and placed.program.gathers


@kept_for_any_rows
def looks_up_much(problem: Problem) -> bool:
    """The same, at indices that take many operations."""
    placed = problem.activation.placed
    return placed is not None and looks_up_pairs(problem) and placed.program.pair_operations >= MANY_OPERATIONS


@kept_for_any_rows
def finite_past_the_end(problem: Problem) -> bool:
    """Whether f and its derivatives are finite past a sequence's end, where rows are zero, and positions nobody's."""
    return problem.activation.finite_at_zero


@kept_for_any_rows
def is_masked(problem: Problem) -> bool:
    """Whether some blocks need a mask, if only those at the edges: zero rows alone do not hide f(0) = inf."""
    return not problem.band.unbounded or problem.mask is not None or not finite_past_the_end(problem)


def shared_memory(which: str, c: Config, columns: int) -> int:
    """Bytes of a kernel's buffers of 16-bit numbers (see forward_kernel and backward_kernel), and what is reserved."""
    row, part = 2 * columns, WARPGROUP_ROWS  # bytes of a row, rows of a consumer
    if which == "fwd":
        queries = 2 * c.block_m * row  # of this tile and the next
        out = c.block_m * row
        keys = c.stages * 2 * c.block_n * row  # k and v
        return queries + out + keys + RESERVED
    queries = c.stages * 2 * c.block_m * row  # q and do
    keys = 3 * c.block_n * row  # k of this tile and the next, v
    ds = 2 * c.block_n * c.block_m * 2
    out = CONSUMERS * max(part * part * 4, part * row)  # dq in float32, then dk and dv
    return queries + keys + ds + out + RESERVED


MOST_TILES = 64  # of keys, of one sequence, that can go round: programs of all of them must run at the same time
ROOM = 4  # blocks of queries per tile of keys whose sums can be on their way at once: 17 MB, which stay in the L2 cache


def dq_mode(problem: Problem, most_tiles: int = MOST_TILES) -> str:
    """How dq is summed over tiles of keys: "ring" (see backward/ring.py), for up to ``most_tiles`` of them; in a buffer
    of float32, by "turns" (see backward/turns.py) or "add" in any order; or "none", by a kernel of its own. What the
    host does not know of lengths must not matter: see launch.backward."""
    return _dq_mode(problem, most_tiles, torch.are_deterministic_algorithms_enabled())


@kept
def _dq_mode(problem: Problem, most_tiles: int, deterministic: bool) -> str:
    c = default(problem, "bwd")
    limit = most_tiles * c.block_n
    few = problem.longest_keys <= limit
    # Where some sequences may be longer, a second kernel makes their dq (see launch.backward), which takes 1.25 times
    # as long as sums in memory: if most are, it should not.
    mostly_few = few or (problem.varying_k and problem.mean_keys <= limit)
    enough = -(-problem.mean_queries // c.block_m) >= -(
        -problem.mean_keys // c.block_n
    )  # or tiles would wait for each other
    whole = problem.band.unbounded or _goes_round_whole(problem, c)
    in_order = problem.mask is None and enough and not problem.shared_q
    if in_order and whole and mostly_few:
        return "ring"
    # A tile comes to a block as many steps after the next tile as it has blocks of its own. One is too few: at D 64
    # a causal backward by turns takes 1.7 times as long as one that adds in any order, and 1.3 times as long as one
    # that does some products twice ("none"); unless all tiles run at once, when none waits for those before it to end.
    spaced = c.block_n >= 2 * c.block_m or (_is_causal(problem) and _runs_at_once(problem, c))
    bounded = not problem.band.unbounded
    alike = not bounded or None not in (problem.band.left, problem.band.right)
    if in_order and ((bounded and spaced) or (deterministic and alike)):
        return "turns"
    return "none" if deterministic else "add"


def takes_items(problem: Problem, mode: str) -> bool:
    """Whether programs of the backward take items as they come (see backward/items.py): by turns they must; and where
    tiles have different numbers of blocks, a fixed share may be 10 to 30 % more than the mean. (Without lists or masks,
    as in dense causal attention, shares are even, and taking items costs 2 % at D 64.)"""
    return mode == "turns" or (mode == "add" and (problem.varying_k or problem.mask is not None))


# Of all heads together, of one sequence. 16 heads of 8192 rows, causal: 1365 us instead of the 1925 of all heads at
# once, 32 heads 2720 instead of 3926, 8 of 16384 rows 2845 instead of 3777; packed, 24 sequences of U[1, 8192] rows and
# 16 heads 10.2 ms instead of 12.0. Half as many are 4 % better to 9 % worse.
QUERIES_AT_ONCE = 32768


def takes_some_heads(problem: Problem, mode: str) -> bool:
    """Whether programs take tiles of some heads before those of the others (see backward/items.py). The code for it
    takes a microsecond for each tile, 5 % where packed sequences have up to 1024 rows."""
    return mode == "turns" and _is_causal(problem) and problem.mean_queries * problem.heads_k > QUERIES_AT_ONCE


def _goes_round_whole(problem: Problem, c: Config) -> bool:
    """Whether the ring is worth the blocks that causal attention does not see. Two tiles see three quarters of all; but
    where all tiles run at once, the first one, which sees everything, should not wait for others: by turns 8 x 4 x 256
    takes 16.4 us instead of 18.4 and 1 x 12 x 1024 35.8 instead of 48.6 (D 64), 4 x 4 x 1024 51.6 instead of 62.2 (D
    128). (The lengths must be known to the host: other numbers would come out with a hint.)"""
    tiles = -(-problem.rows_k // c.block_n)
    few = tiles == 1 or (tiles == 2 and not _runs_at_once(problem, c))
    return problem.band.left is None and not problem.varying_k and not problem.packed_q and few


def _runs_at_once(problem: Problem, c: Config) -> bool:
    """Whether all tiles of keys run at the same time, as far as the host knows."""
    tiles = -(-problem.rows_k // c.block_n) * problem.heads_k * problem.n_seqs
    return not problem.varying_k and not problem.packed_q and tiles <= min(AT_ONCE, processors(problem.device))
