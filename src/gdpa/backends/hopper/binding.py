"""Chooses the code of a problem's kernels: the form of the function, the compile-time shape, the compiler's options."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gdpa.backends.hopper import TARGET, config
from gdpa.backends.hopper.backward.kernel import backward_kernel
from gdpa.backends.hopper.code import BackwardCode, ForwardCode
from gdpa.backends.hopper.config import Config, is_masked, padded, shift_of
from gdpa.backends.hopper.forward.kernel import forward_kernel
from gdpa.backends.hopper.pipeline import LAUNCH_REGISTERS
from gdpa.backends.hopper.tile import BackwardTile, ForwardTile
from gdpa.backends.hopper.visits import per_head
from gdpa.backends.triton.launching import Bound, bind
from gdpa.device.rounding import least_factor
from gdpa.device.sequences import BandBounds
from gdpa.functions.emission.masks import near_keep
from gdpa.functions.emit import Emitted, JitFunctions, emit, jit_functions
from gdpa.functions.places.program import KEY, QUERY
from gdpa.problem import ABS, EXP, PLAIN, SUM, Problem, kept, kept_for_any_rows


@kept_for_any_rows
def folded_scale(problem: Problem) -> float:
    """The scale that becomes part of the function's code, if it is the usual one. Other scales are multiplied in by the
    kernel, since each would be a new kernel to compile."""
    is_part = problem.activation.triton is None and shift_of(problem) is None  # a sum takes it in the same instruction
    return problem.scale if config.has_usual_scale(problem) and is_part else 1.0


@kept_for_any_rows
def function_of(problem: Problem) -> JitFunctions:
    """The function; or, if it is a function of a sum of the score and positions (see shift_of), that function of the
    sum."""
    shift = shift_of(problem)
    f = problem.activation if shift is None else shift.outer
    return jit_functions(f, code_dtype(problem), TARGET, folded_scale(problem))


@kept_for_any_rows
def code_with_shift(problem: Problem) -> JitFunctions | None:
    """The code of the whole function where shift_of has a Shift: it includes that of the shift."""
    return None if shift_of(problem) is None else jit_functions(problem.activation, problem.dtype, TARGET)


@kept_for_any_rows
def function_with_bias(problem: Problem) -> JitFunctions:
    """The same for a forward whose scores have the shift's other terms from the tensor cores: of unscaled scores."""
    shift = shift_of(problem)
    assert shift is not None
    return jit_functions(shift.outer, code_dtype(problem), TARGET, problem.scale)


def forward_function_of(problem: Problem, items: Items) -> JitFunctions:
    return function_with_bias(problem) if items.adds_bias else function_of(problem)


@kept_for_any_rows
def voting_function(problem: Problem) -> JitFunctions:
    """function_of for a forward that may vote (see emission/guarded.py): it takes the shift in units of its own."""
    whole, shift = code_with_shift(problem), shift_of(problem)
    if whole is None or shift is None:
        return function_of(problem)
    return jit_functions(shift.outer, problem.dtype, TARGET, whole.units)


def learns(problem: Problem) -> bool:
    """Whether the backward kernel adds up the gradients of tables: of those that a shift looks up, in any order."""
    return problem.learn and shift_of(problem) is not None


def left_to_triton(problem: Problem, learning: bool, ordered: bool) -> str | None:
    """Why the triton backend's kernels do a backward, with gradients of tables (``learning``), in a fixed order."""
    if learning and ordered:
        return "in deterministic mode gradients of tables are added up in a fixed order"
    if learning and not learns(problem):
        return "gradients of tables are those of g(score + bias)"
    return config.no_room_for_params(problem) or no_room_for_sums_and_params(problem)


# Instructions for a score. The exponent of softmax(a s) has 3, relu(s - a) 7, tanh(a s) 13: at D 128 these spill 0.4,
# 0.4 and 2.5 KB a step, at D 64 0.3, 1.4 and 4.2. 128 x 1024 rows take 1.7, 2.4 and 4.3 ms here and 3.3, 3.0 and 3.8
# with the triton backend, at D 64 1.3, 1.5 and 2.9, and 1.8, 1.7 and 2.1.
MOST_OF_SUMS_AND_PARAMS = 10


@kept_for_any_rows
def no_room_for_sums_and_params(problem: Problem) -> str | None:
    """Why the backward kernel does not take derivatives by params through row sums: Triton's own code for f and all its
    derivatives, which those need, is held for many scores at once."""
    if problem.n_params == 0 or problem.norm == PLAIN:
        return None
    short = emit(problem.activation, code_dtype(problem), TARGET).backward_operations <= MOST_OF_SUMS_AND_PARAMS
    return None if short else "there are no registers for row sums and params of so long a function"


def code_dtype(problem: Problem) -> torch.dtype:
    """Of the function's code. An error of an exponent is a relative one of p, so it must be small whatever p is rounded
    to."""
    return torch.float32 if problem.norm == EXP else problem.dtype


def is_placed(problem: Problem) -> bool:
    """Whether function_of takes positions itself."""
    return problem.activation.placed is not None and shift_of(problem) is None


def padding_counts_nothing(problem: Problem) -> bool:
    """Whether zero rows past a sequence's end do not change the forward: a zero value row cancels any finite weight,
    but not in a sum of the weights themselves."""
    if problem.norm == PLAIN:
        return config.finite_past_the_end(problem)
    return problem.norm in (SUM, ABS) and function_of(problem).zero_at_zero and shift_of(problem) is None


def masks_scores(problem: Problem, items: Items) -> bool:
    """Whether scores are masked, and not weights. Sums of scores and positions would have to be held until they are
    (724 bytes of spills), but for guarded code, which they wait for in any case."""
    held = shift_of(problem) is None or items.adds_bias or may_vote(problem)
    return is_masked(problem) and function_of(problem).zero_at_zero and problem.norm != EXP and held


def may_vote(problem: Problem) -> bool:
    """Whether the forward may use guarded code: pairs that are hidden must not mislead its vote. Before the left edge
    of a band, or behind a mask, may be all that a lane samples of a row; and a hidden sum is no 0, which has no vote,
    unless the function of 0 is 0 (see masks_scores). Row sums are of unrounded weights, which it has not."""
    f, band = function_of(problem), problem.band
    if f.packed_scores == 1 or problem.norm != PLAIN or problem.mask is not None or band.left is not None:
        return False
    return shift_of(problem) is None or band.unbounded or f.zero_at_zero


class Items(NamedTuple):
    """What a program of the forward takes at a time."""

    tiles: int  # of queries, that share one loading of the keys
    parts: int  # of the keys of a tile, see split_kv.py
    whole: bool  # all keys are in whole blocks, and so no block needs a mask for what lies past the end
    scans: bool = False  # packed tiles are found among the offsets, without a list: see scheduling/scanning.py
    adds_bias: bool = False  # the tensor cores add what the shift adds to the scores, see forward/bias.py


ADDED_BY_CONSUMERS = Items(1, 1, whole=False)  # sums of scores and places
RESIDENT_TILES = 8
MOST_EARLY_COLUMNS = 2  # for which there is shared memory
MANY_ITEMS = 1024  # about eight for each of an H200's 132 SMs


@kept
def forward_items(problem: Problem, c: Config, parts: int) -> Items:
    """Keys are loaded once for several tiles where all those of a sequence fit into shared memory, and enough items
    remain to fill the chip evenly. (Masks at the ends and several tiles together are 472 bytes of spills.)"""
    adds_bias = parts == 1 and config.has_bias(problem)
    free = problem.band.unbounded and problem.mask is None
    open_ended = free and not padding_counts_nothing(problem)
    even = not (problem.packed_k or problem.used_k) and problem.rows_k % c.block_n == 0
    # The last part may have no keys, and reads zeros all the same.
    whole = (open_ended or votes_on_sums(problem, c)) and even and parts == 1
    resident = free and problem.longest_keys <= c.stages * c.block_n and (whole or not open_ended) and parts == 1
    tiles = problem.heads_q * (problem.rows_q if problem.packed_q else problem.rows_q * problem.n_seqs) // c.block_m
    several = resident and tiles >= RESIDENT_TILES * MANY_ITEMS and not adds_bias  # which is written with the keys
    return Items(RESIDENT_TILES if several else 1, parts, whole, parts == 1 and scans(problem, c), adds_bias)


def scans(problem: Problem, c: Config) -> bool:
    """Whether programs look for their tiles among the offsets."""
    listed_anyway = problem.mask is not None or problem.used_q or problem.used_k
    few = c.block_m == config.WARPGROUP_ROWS and problem.n_seqs <= config.MOST_SCANNED
    return problem.packed_q and few and config.has_few_queries(problem) and not listed_anyway


def is_paired(problem: Problem, items: Items) -> bool:
    """Whether items are tiles of dense causal attention."""
    dense = not (problem.packed_q or problem.used_q or problem.used_k or problem.mask is not None)
    return dense and problem.band.left is None and problem.band.right is not None and items.tiles == items.parts == 1


def takes_items(problem: Problem, items: Items) -> bool:
    """Whether programs of the forward take items as they come: where tiles have different numbers of blocks, beyond
    what the order of their list makes up for."""
    if items.parts > 1 or items.scans:
        return False
    listed = problem.packed_q or problem.used_q or problem.used_k
    return problem.mask is not None or (listed and not problem.band.unbounded)


@kept_for_any_rows
def forward_tile(problem: Problem, c: Config, items: Items) -> ForwardTile:
    masked = is_masked(problem) or not padding_counts_nothing(problem)
    votes = votes_on_sums(problem, c)
    return ForwardTile(
        GROUP=problem.group, D=padded(problem.head_dim), DV=padded(problem.head_dim_v), BLOCK_M=c.block_m,
        CONSUMERS=c.block_m // config.WARPGROUP_ROWS,
        ITEM_ROWS=c.block_m * items.tiles, BLOCK_N=c.block_n, STAGES=c.stages, PARTS=items.parts,
        SCALE_FOLDED=votes or items.adds_bias or folded_scale(problem) == problem.scale,
        MASKED=masked and not (items.whole and problem.band.unbounded and problem.mask is None),
        MASK_SCORES=masks_scores(problem, items),
        FINITE_AT_ZERO=padding_counts_nothing(problem), PING_PONG=c.ping_pong, PAIRED=is_paired(problem, items),
        NORM=problem.norm, GAIN=gain(problem, forward_function_of(problem, items).factor), PLACED=is_placed(problem),
        SHIFTED=shift_of(problem) is not None and not items.adds_bias,
        COLUMNS=0 if items.adds_bias else early_columns(problem),
        BIAS_FACTOR=1 / problem.scale if items.adds_bias else 0.0,
        OUT_IN_Q=items.adds_bias and not config.has_room_for_bias(problem, c),
        VOTES=votes and not items.whole,
        LISTED=problem.mask is not None, PER_HEAD=per_head(problem), TAKES=takes_items(problem, items),
        SCANS=items.scans, ALIKE=config.forward_shares_code(problem, c),
    )  # fmt: skip


def early_columns(problem: Problem) -> int:
    """How many values of keys the forward hands out beside the products of the scores. (Beside lookups for every pair
    there are no registers for them until they are needed.)"""
    placed = problem.activation.placed
    if placed is None or config.looks_up_pairs(problem):
        return 0
    return min(len(placed.program.columns(KEY)), MOST_EARLY_COLUMNS)


@kept_for_any_rows
def backward_tile(problem: Problem, c: Config, mode: str, ordered: bool, some_heads: bool) -> BackwardTile:
    return BackwardTile(
        GROUP=problem.group, D=config.width(problem), BLOCK_M=c.block_m, BLOCK_N=c.block_n, STAGES=c.stages,
        N_PARAMS=problem.n_params, SCALE_FOLDED=folded_scale(problem) == problem.scale,
        MASKED=is_masked(problem) or ends_count(problem),
        FINITE_AT_ZERO=not ends_count(problem), DQ=mode, ROOM=config.ROOM, ORDERED=ordered and mode == "ring",
        LEAST_FACTOR=least_factor(problem.dtype, folded_scale(problem)), PING_PONG=c.ping_pong, NORM=problem.norm,
        GAIN=gain(problem, function_of(problem).backward_factor), PLACED=is_placed(problem),
        SHIFTED=shift_of(problem) is not None, LISTED=problem.mask is not None, PER_HEAD=per_head(problem),
        BY_EIGHT=computes_by_eight(problem), IN_TURN=mode in ("ring", "turns"),
        TAKES=config.takes_items(problem, mode), SOME_HEADS=some_heads, ALIKE=config.shares_code(problem),
    )  # fmt: skip


def ends_count(problem: Problem) -> bool:
    """Whether keys past the end must be hidden from the backward, also in tiles that a mask does not cut
    (launch.kind_of_lists): where the function of 0 may be infinite; and where a row sum takes something of their dp, by
    which they would be part of the gradients of params and tables."""
    summed = problem.norm != PLAIN and (problem.n_params > 0 or learns(problem))
    return summed or not config.finite_past_the_end(problem)


def computes_by_eight(problem: Problem) -> bool:
    """Whether a thread of the backward computes 8 scores at a time: a function with params that is a block of PTX.
    (softplus(a s) / a, which is none, has 13.1 KB of spills by halves of a step at D 64, and 26.9 by eight.)"""
    return problem.n_params > 0 and _emitted(problem).short_backward


def _emitted(problem: Problem) -> Emitted:
    return emit(problem.activation, problem.dtype, TARGET, folded_scale(problem))


def gain(problem: Problem, factor: float) -> float:
    """Of row sums. Other kernels do not read it, and are the same whatever it is."""
    return 1.0 if problem.norm == PLAIN else factor


def forward_function(problem: Problem, c: Config, items: Items) -> Any:
    """The form of f that the forward kernel uses: the one of the fewest instructions that it may."""
    f, sums = forward_function_of(problem, items), shift_of(problem) is not None and not items.adds_bias
    if c.block_n * config.WARPGROUP_ROWS < f.packed_scores * config.WARPGROUP_THREADS:
        return f.forward  # of 64 keys: in parts, where kernels wait for memory, or tuned
    if problem.norm != PLAIN or is_placed(problem):
        return f.forward  # sums are of unrounded weights; and only the scores themselves come packed
    if is_masked(problem) and not masks_scores(problem, items) and not sums:
        return f.forward  # a mask on packed values would unpack them: 600 bytes of spills with Triton 3.9
    if not may_vote(problem):
        return f.careful_forward
    return (voting_function(problem) if sums else f).packed_forward


def votes_on_sums(problem: Problem, c: Config) -> bool:
    """Whether the function of sums of scores and places is guarded code here, whoever adds them up."""
    if shift_of(problem) is None or not may_vote(problem):
        return False
    return forward_function(problem, c, ADDED_BY_CONSUMERS) is voting_function(problem).packed_forward


def forward_scales(problem: Problem, c: Config, items: Items) -> tuple[float, float]:
    """``scales`` of the forward."""
    whole = code_with_shift(problem)
    if items.adds_bias:
        out_scale = problem.out_scale
        return 1.0, out_scale if problem.norm == EXP else out_scale * function_with_bias(problem).factor
    if whole is None or not votes_on_sums(problem, c):
        return scales(problem, function_of(problem).factor)
    return problem.scale / whole.units, problem.out_scale * voting_function(problem).factor


def holder(problem: Problem) -> dict[Any, Any]:
    """The object that kernels live as long as: see the triton backend's launch."""
    return problem.activation.derived if problem.mask is None else problem.of_any_rows


@kept_for_any_rows
def bound_forward(problem: Problem, c: Config, items: Items) -> Bound:
    f, whole, tile = forward_function_of(problem, items), code_with_shift(problem), forward_tile(problem, c, items)
    if whole is not None and items.adds_bias:
        of_sums = dict(SHIFT=None, COLUMNS=None, BIAS_OF_QUERIES=whole.bias_of_queries, BIAS_OF_KEYS=whole.bias_of_keys)
    else:
        shift = whole and (whole.shift_for_vote if votes_on_sums(problem, c) else whole.shift)
        of_sums = dict(SHIFT=shift, COLUMNS=columns_code(problem, KEY), BIAS_OF_QUERIES=None, BIAS_OF_KEYS=None)
    code = ForwardCode(
        FORWARD=forward_function(problem, c, items), LOAD_PARAMS=f.load_params, KEEP=keep_code(problem), **of_sums
    )
    return bind(holder(problem), forward_kernel, CODE=code, T=tile, **options(tile.CONSUMERS))


@kept_for_any_rows
def bound_backward(problem: Problem, c: Config, mode: str, ordered: bool, some_heads: bool) -> Bound:
    f, tile = function_of(problem), backward_tile(problem, c, mode, ordered, some_heads)
    packed = problem.norm == PLAIN and not is_placed(problem)  # see forward_function
    whole = code_with_shift(problem)
    plain = f.products if problem.n_params else f.packed_backward
    code = BackwardCode(
        BACKWARD=plain if packed else f.backward, GAINS=f.gains if packed else None, LOAD_PARAMS=f.load_params,
        SHIFT=whole and whole.shift,
        LEARN=whole.learn_shifted if whole and learns(problem) else None, KEEP=keep_code(problem),
        COLUMNS=columns_code(problem, QUERY),
    )  # fmt: skip
    return bind(
        holder(problem), backward_kernel, CODE=code, T=tile, launch_cooperative_grid=mode == "ring",
        **options(config.CONSUMERS),
    )  # fmt: skip


def keep_code(problem: Problem) -> Any | None:
    return None if problem.mask is None else near_keep(problem.mask)


def columns_code(problem: Problem, side: str) -> Any | None:
    """What looks up values for a tile's columns, if those are of ``side``, and, if they are keys, for its rows; None if
    the function looks none up."""
    placed = problem.activation.placed
    if placed is None or not (placed.program.columns(side) or (side == KEY and placed.program.rows(QUERY))):
        return None
    return (code_with_shift(problem) or function_of(problem)).columns


def options(warpgroups: int) -> dict[str, Any]:
    return {"num_warps": 4, "maxnreg": LAUNCH_REGISTERS[warpgroups], "enable_fp_fusion": True}


@kept_for_any_rows
def band_of(problem: Problem) -> BandBounds:
    return BandBounds(problem.band.left, problem.band.right)


@kept_for_any_rows
def scales(problem: Problem, factor: float) -> tuple[float, float]:
    """scale and out_scale as the kernels take them: a folded scale is in the function and its derivative, and a
    ``factor`` of the function is not."""
    folded = folded_scale(problem) == problem.scale
    return 1.0 if folded else problem.scale, problem.out_scale * (1.0 if problem.norm == EXP else factor)
