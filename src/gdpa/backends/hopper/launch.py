"""Host side of the Hopper backend: what to launch, with which tiles and buffers. No device data is read."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdpa.backends.hopper import binding, config
from gdpa.backends.hopper.binding import (
    Items,
    band_of,
    forward_items,
    forward_scales,
    function_of,
    left_to_triton,
    scales,
)
from gdpa.backends.hopper.config import Config, padded, processors
from gdpa.backends.hopper.folding import fold
from gdpa.backends.hopper.pipeline import batch_rows, ragged_descriptor
from gdpa.backends.hopper.scheduling.schedule import Listed
from gdpa.backends.hopper.scheduling.work import (
    Launch,
    Listing,
    Tiling,
    is_listed,
    layout_of,
    listing,
    make_list,
    most_tiles,
)
from gdpa.backends.hopper.split_kv import IN_PARTS, add_parts, empty_parts, parts_of, with_parts
from gdpa.backends.hopper.visits import list_visits, names_of_places_and_visits, why_not, with_places
from gdpa.backends.hopper.wide_dq import empty_sums, round_dq, zero_sums
from gdpa.backends.triton import launch as portable
from gdpa.backends.triton.launching import Repeated, nested
from gdpa.backends.triton.row_sums import RowTerms
from gdpa.backends.triton.tables import NOTHING_LEARNED, LearnedTables, learned_lookups, places
from gdpa.device.visits import ListedTile, Visits
from gdpa.problem import PLAIN, Divided, Operands, Problem, is_regular, kept, kept_for_any_rows


def most_programs(problem: Problem) -> int:
    return processors(problem.device) * config.PROGRAMS_PER_SM


def grid(problem: Problem, items: int) -> int:
    return max(min(most_programs(problem), items), 1)


def visits_of(problem: Problem, x: Operands, of_keys: bool, c: Config, table: Tensor | None, tiles: int) -> Any:
    """Which blocks each tile of the list visits (see visits.py)."""
    return list_visits(problem, x, kind_of_lists(problem, of_keys, c), table, tiles, band_of(problem))


def kind_of_lists(problem: Problem, of_keys: bool, c: Config) -> ListedTile:
    return ListedTile(of_keys, c.block_m, c.block_n, FINITE_AT_ZERO=not binding.ends_count(problem))


def unlisted(problem: Problem) -> str | None:
    """Why the kernels cannot have this problem's mask."""
    return why_not(problem, config.WARPGROUP_ROWS, most_tiles)  # no tile is smaller, whatever is tuned


def is_empty(problem: Problem) -> bool:
    """Nothing sees anything: the results are zero, or have no elements. There is no descriptor of an empty tensor."""
    return 0 in (problem.n_seqs, problem.rows_q, problem.rows_k)


# ---- forward ---------------------------------------------------------------------------------------------------------
class Forward(NamedTuple):
    config: Config
    items: Items
    rows: int  # of an item
    listing: Listing | None  # of items, unless they can be counted
    launch: Launch


@kept
def forward_plan(problem: Problem, c: Config | None, with_sums: bool) -> Forward | None:
    """None if there is nothing to compute."""
    if is_empty(problem):
        return None
    parts = parts_of(problem, processors(problem.device)) if c is None and not with_sums and problem.mask is None else 1
    if parts > 1:
        c = IN_PARTS[config.width(problem)]
    c = c or config.forward_config(problem)
    items = forward_items(problem, c, parts)
    rows = c.block_m * items.tiles
    listed = None
    if is_listed(problem, of_keys=False) and not items.scans:
        zeros = problem.packed_q and parts == 1  # parts are added up into all rows, before some become zero
        listed = listing(problem, Tiling(False, rows, c.block_n, zeros=zeros))
    tiles = most_tiles(problem.packed_q, problem.rows_q, problem.n_seqs, rows)
    numbers = (tiles, problem.rows_q, problem.rows_k)
    programs = grid(problem, tiles * problem.heads_q * parts)
    launch = Launch(tiles, programs, numbers, repeated_forward(problem, c, items))
    return Forward(c, items, rows, listed, launch)


@kept_for_any_rows
def repeated_forward(problem: Problem, c: Config, items: Items) -> Repeated:
    tensors = ("q_desc", "k_desc", "v_desc", "o_desc", "p_table", "p_cu_k", "p_params")
    numbers = ("n_tiles", "rows_q", "rows_k")
    sums = (("row_sums.0", "row_sums.3"), ("row_sums.1", "row_sums.2")) if problem.norm != PLAIN else ((), ())
    placed = names_of_places_and_visits(problem, learned=False)
    bound = binding.bound_forward(problem, c, items)
    return Repeated(bound, (*tensors, *sums[0], *placed[0], *numbers, *sums[1], *placed[1]))


def forward(problem: Problem, x: Operands, out: Tensor, c: Config | None = None, sums: Tensor | None = None) -> None:
    """``out``: see Operands.written."""
    if c is None:
        problem, x, out, sums = fold(problem, x, out, sums)
    plan = forward_plan(problem, c, sums is not None)
    if plan is None:
        portable.forward(problem, x, x.written(out), sums=sums)
    elif plan.items.parts == 1:
        launch_forward(problem, x, out, plan, sums)
    else:
        out = x.written(out)
        in_parts = empty_parts(out, plan.items.parts)
        launch_forward(problem, x, in_parts, plan)
        add_parts(problem, x.kind, in_parts, out)
        portable.zero_unused_queries(problem, x, out)


def launch_forward(problem: Problem, x: Operands, out: Tensor, plan: Forward, sums: Tensor | None = None) -> None:
    """``out``: the result, or the sums over each part of the keys (see empty_parts)."""
    launch = plan.launch
    table = x.cu_q if plan.items.scans else None
    if plan.listing is not None:
        table = make_list(problem, x, plan.listing, out)
    visits = visits_of(problem, x, False, plan.config, table, launch.tiles)
    tensors: tuple[Any, ...] = (*x.starts, out, table, x.cu_k, x.params)
    numbers, layout = launch.numbers, layout_of(x.kind, tensors)
    if plan.items.parts > 1:
        layout = with_parts(layout, plan.items.parts, problem.rows_q)
    if sums is not None:
        first, *steps, sink = sums_argument(sums, x.sink)
        tensors, numbers = (*tensors, first, sink), (*numbers, *steps)
        layout = (layout, sums_layout(first, sink, steps))
    if problem.placed:
        tensors, numbers, layout = with_places(problem, x, tensors, numbers, layout, visits)
    launch.kernel(
        (launch.grid, 1, 1), layout, tensors, numbers,
        lambda: forward_arguments(
            problem, x, out if plan.items.parts > 1 else x.written(out), table, plan, sums, visits
        ),
    )  # fmt: skip


def sums_layout(t: Tensor, u: Tensor | None, steps: Sequence[int]) -> Hashable:
    """What code depends on in arguments for row sums, two tensors of float32 and the strides of the first one."""
    return t.data_ptr() & 15 == 0, None if u is None else u.data_ptr() & 15 == 0, nested(tuple(steps))


def sums_argument(sums: Tensor, sink: Tensor | None) -> tuple[Any, ...]:
    """row_sums of forward_kernel, for (out_batch, Hq, rows_q)."""
    return sums, 0 if sums.shape[0] == 1 else sums.stride(0), sums.stride(1), sink


def forward_arguments(
    problem: Problem, x: Operands, out: Tensor, table: Tensor | None, plan: Forward, sums: Tensor | None,
    visits: Visits | None,
) -> tuple[Any, ...]:  # fmt: skip
    block_n = plan.config.block_n
    q, o = (ragged_descriptor(t, config.WARPGROUP_ROWS, padded(t.shape[3])) for t in (x.q, out))
    k, v = (ragged_descriptor(t, block_n, padded(t.shape[3])) for t in (x.k, x.v))
    steps = batch_rows(x.q, x.k, x.v, out)
    if plan.items.parts > 1:  # batch entries of a packed result are one, whatever their parts are
        batch = problem.out_batch
        steps = (*steps[:3], 0 if batch == 1 else steps[3], batch * out.shape[1] * out.shape[2])
    return (
        q, k, v, o, table, x.cu_k, x.params, portable.stride_params(x.params),
        None if sums is None else sums_argument(sums, x.sink), places(problem, x), visits, steps, plan.launch.tiles,
        problem.heads_q, problem.rows_q, problem.rows_k, band_of(problem),
        *forward_scales(problem, plan.config, plan.items),
    )  # fmt: skip


# ---- backward --------------------------------------------------------------------------------------------------------
IN_TURN = ("ring", "turns")  # modes that write all of dq, but for rows of no sequence


class Backward(NamedTuple):
    """How dq is made, and of which sequences at first; the long ones may follow."""

    config: Config
    mode: str
    listed: Listed
    long: Listed | None


def most_at_once(problem: Problem) -> int:
    """Tiles of keys of one sequence that run at the same time."""
    return min(config.MOST_TILES, processors(problem.device))


@kept
def backward_plan(problem: Problem, c: Config | None, deterministic: bool) -> Backward:
    c = c or config.backward_config(problem)
    at_once = most_at_once(problem)
    mode = config.dq_mode(problem, at_once)
    limit = at_once * c.block_n
    some_long = mode == "ring" and problem.longest_keys > limit  # perhaps: the lengths are known on the device only
    listed = Listed(1, limit if mode == "ring" and problem.varying_k else None, False if some_long else None)
    return Backward(c, mode, listed, Listed(1, limit, True) if some_long else None)


@kept_for_any_rows
def has_regular_rows(problem: Problem, strides: tuple[int, ...]) -> bool:
    """Whether descriptors express the strides of an output's gradient."""
    shape = (problem.out_batch, problem.heads_q, 1, 1)
    return is_regular(torch.empty_strided(shape, strides, dtype=problem.dtype, device="meta"))


def backward(
    problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None,
    c: Config | None = None, dtables: Sequence[Tensor | None] = (), sums: Divided | None = None,
) -> None:  # fmt: skip
    if is_empty(problem) and sums is None:
        for t in (dq, dk, dv, dparams):
            if t is not None:
                t.zero_()
        return
    ordered = torch.are_deterministic_algorithms_enabled()
    # A key head whose query heads have different functions sums several results, which may not be rounded before that;
    # this kernel's leave in 16 bits, through buffers of that size.
    is_term = dk.dtype != problem.dtype
    # A sink has a gradient without keys, too.
    if is_empty(problem) or is_term or left_to_triton(problem, bool(dtables), ordered):
        portable.backward(problem, x, do, dq, dk, dv, dparams, dtables=dtables, sums=sums)
        return
    if do.data_ptr() % 16 or not has_regular_rows(problem, do.stride()):
        do = do.clone(memory_format=torch.contiguous_format)  # contiguous() may return one that begins anywhere
    plan = backward_plan(problem, c, ordered)
    terms = None if sums is None else portable.row_terms(problem, x, do, sums)
    learn = LearnedTables.of(problem, dtables)
    launch_backward(problem, x, do, dq, dk, dv, dparams, plan.mode, plan.config, plan.listed, terms, learn)
    if plan.long is not None and plan.long.LIMIT is not None:
        # Sums in memory would need a buffer for all rows, whatever few are of long sequences: there dq has a kernel of
        # its own.
        launch_backward(problem, x, do, dq, dk, dv, dparams, "none", plan.config, plan.long, terms, learn)
        portable.launch_other_dq(problem, x, do, dq, plan.long.LIMIT, terms)
    if plan.mode == "none":
        portable.launch_dq(problem, x, do, dq, terms)
    learn.add_to(dtables, scales(problem, function_of(problem).backward_factor)[1])


@kept
def backward_launch(
    problem: Problem, c: Config, mode: str, ordered: bool, listed: Listed
) -> tuple[Launch, Listing | None]:
    tiles = most_tiles(problem.packed_k, problem.rows_k, problem.n_seqs, c.block_n)
    numbers = (tiles, problem.rows_q, problem.rows_k)
    kernel = repeated_backward(problem, c, mode, ordered, config.takes_some_heads(problem, mode))
    launch = Launch(tiles, grid(problem, tiles * problem.heads_k), numbers, kernel)
    if not is_listed(problem, of_keys=True):
        return launch, None
    zeros = problem.varying_k and not listed.LONG
    # Otherwise all of dq is written, or launch_dq sees to it.
    zeros_other = problem.packed_q and mode in IN_TURN and not listed.LONG
    flags = ring_places(problem, c) if mode == "ring" else 0
    return launch, listing(problem, Tiling(True, c.block_n, c.block_m, listed, zeros, zeros_other, flags))


@kept_for_any_rows
def repeated_backward(problem: Problem, c: Config, mode: str, ordered: bool, some_heads: bool) -> Repeated:
    tensors = (
        "do_desc", "q_desc", "k_desc", "v_desc", "dq_desc", "ring_desc", "dk_desc", "dv_desc", "p_table", "p_cu_q",
        "p_params", "p_dparams", "p_flags",
    )  # fmt: skip
    numbers = ("n_tiles", "rows_q", "rows_k")
    terms = (("terms.0", "terms.1"), ("terms.2", "terms.3")) if problem.norm != PLAIN else ((), ())
    placed = names_of_places_and_visits(problem, learned=binding.learns(problem) and learned_lookups(problem) > 0)
    bound = binding.bound_backward(problem, c, mode, ordered, some_heads)
    return Repeated(bound, (*tensors, *terms[0], *placed[0], *numbers, *terms[1], *placed[1]))


def launch_backward(
    problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None, mode: str,
    c: Config, listed: Listed, terms: RowTerms | None = None, learn: LearnedTables = NOTHING_LEARNED,
) -> None:  # fmt: skip
    """dk, dv and dq (unless mode is "none") of the sequences in the list, and their share of dparams: the first list's
    is written, that of the long sequences added. Rows of no sequence are zero after the first list."""
    launch, of_keys = backward_launch(problem, c, mode, torch.are_deterministic_algorithms_enabled(), listed)
    sums = None  # per tile, consumer and head; summed afterwards in a fixed order
    if dparams is not None:
        shape = (launch.tiles, config.CONSUMERS, problem.heads_q, problem.n_params)
        sums = torch.zeros(shape, dtype=torch.float32, device=dq.device)
    wide, flags = dq_buffers(problem, dq, mode, c)
    table = None
    if of_keys is not None:
        table = make_list(problem, x, of_keys, dk, dv, dq, flags)
    elif problem.packed_q and mode in IN_TURN:
        portable.zero_unused_queries(problem, x, dq)
    tensors = (do, *x.starts, dq, wide, dk, dv, table, x.cu_q, x.params, sums, flags)
    run_backward_kernel(problem, x, tensors, launch, mode, c, terms, learn)
    if mode == "add" or sums is not None:
        scale, out_scale = scales(problem, function_of(problem).backward_factor)
        if mode == "add":
            round_dq(problem, x, wide, dq, scale * out_scale)
        if dparams is not None and sums is not None:
            found = sums.sum((0, 1)).T * out_scale
            dparams.add_(found) if listed.LONG else dparams.copy_(found)


def run_backward_kernel(
    problem: Problem, x: Operands, tensors: tuple[Any, ...], launch: Launch, mode: str, c: Config,
    terms: RowTerms | None, learn: LearnedTables,
) -> None:  # fmt: skip
    """``tensors``: those of repeated_backward, but for ``terms``."""
    visits = visits_of(problem, x, True, c, tensors[8], launch.tiles)
    layout, changing, numbers = layout_of(x.kind, tensors, 1), tensors, launch.numbers
    if terms is not None:
        changing, numbers = (*tensors, *terms[:2]), (*numbers, *terms[2:])
        layout = (layout, sums_layout(*terms[:2], terms[2:]))
    if problem.placed:
        changing, numbers, layout = with_places(problem, x, changing, numbers, layout, visits, learn)
    launch.kernel(
        (launch.grid, 1, 1), layout, changing, numbers,
        lambda: backward_arguments(problem, x, tensors, launch.tiles, mode, c, terms, visits, learn),
    )  # fmt: skip


def backward_arguments(
    problem: Problem, x: Operands, tensors: tuple[Any, ...], tiles: int, mode: str, c: Config, terms: RowTerms | None,
    visits: Visits | None, learn: LearnedTables,
) -> tuple[Any, ...]:  # fmt: skip
    """``tensors``: those of run_backward_kernel."""
    do, _, _, _, dq, wide, dk, dv, table, cu_q, params, sums, flags = tensors
    columns = config.width(problem)
    of_keys = config.WARPGROUP_ROWS if config.shares_code(problem) else c.block_n
    q, g = (ragged_descriptor(t, c.block_m, columns) for t in (x.q, do))
    k, v = (ragged_descriptor(t, of_keys, columns) for t in (x.k, x.v))
    gk, gv = (ragged_descriptor(t, config.WARPGROUP_ROWS, columns) for t in (dk, dv))
    gq, ring = (ragged_descriptor(t, config.WARPGROUP_ROWS, config.WARPGROUP_ROWS) for t in (dq, wide))
    return (
        q, k, v, g, gq, ring, gk, gv, table, cu_q, params, portable.stride_params(params), sums,
        None if terms is None else tuple(terms), places(problem, x, learn), visits, flags,
        batch_rows(x.q, x.k, x.v, do, wide if mode == "add" else dq, dk, dv), tiles, problem.heads_k,
        problem.rows_q, problem.rows_k, band_of(problem), *scales(problem, function_of(problem).backward_factor),
    )  # fmt: skip


def dq_buffers(problem: Problem, dq: Tensor, mode: str, c: Config) -> tuple[Tensor, Tensor | None]:
    """Float32 buffers for sums of dq, and flags, by mode. "ring": ROOM slots for each program, with a flag for each;
    "turns": all of dq, with a flag for each block of queries; "add": all of dq, zero, and a counter."""
    if mode == "turns":
        blocks = most_tiles(problem.packed_q, problem.rows_q, problem.n_seqs, c.block_m) * problem.heads_q
        return empty_sums(dq), torch.zeros(1 + blocks, dtype=torch.int32, device=dq.device)
    if mode == "add":
        return zero_sums(dq)
    places = ring_places(problem, c) if mode == "ring" else 0
    wide, flags = ring(places, c.block_m, config.width(problem), dq.device, not is_listed(problem, of_keys=True))
    return wide, flags if mode == "ring" else None


def ring(places: int, rows: int, columns: int, device: torch.device, zeros: bool) -> tuple[Tensor, Tensor]:
    """Blocks of ``rows`` rows and flags, which begin at zero: unless ``zeros``, the launch of the list sees to it."""
    if places == 0:
        return no_ring(rows, columns, device)
    # Numbers one by one: a tuple of them takes torch a microsecond longer.
    wide = torch.empty(1, 1, places * rows, columns, dtype=torch.float32, device=device)
    return wide, (torch.zeros if zeros else torch.empty)(places, dtype=torch.int32, device=device)


@cache
def no_ring(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What stands for a ring and its flags in arguments of kernels that have none: nobody reads or writes it."""
    wide = torch.empty(1, 1, rows, columns, dtype=torch.float32, device=device)
    return wide, torch.empty(1, dtype=torch.int32, device=device)


def ring_places(problem: Problem, c: Config) -> int:
    """How many slots a ring has. A tile that has all keys of its sequence needs none."""
    return 0 if problem.rows_k <= c.block_n else processors(problem.device) * config.ROOM
