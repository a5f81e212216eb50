"""Host side of the Hopper backend: what to launch, with which tiles and buffers. No device data is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gdpa.backends.hopper import TARGET, config
from gdpa.backends.hopper.backward import backward_kernel
from gdpa.backends.hopper.config import Config, is_masked, padded
from gdpa.backends.hopper.forward import forward_kernel
from gdpa.backends.hopper.long_sequences import long_rows_kernel
from gdpa.backends.hopper.parts import IN_PARTS, add_parts, empty_parts, parts_of
from gdpa.backends.hopper.pipeline import LAUNCH_REGISTERS, ragged_descriptor
from gdpa.backends.hopper.schedule import Listed, ordered_records_kernel
from gdpa.backends.hopper.sorting import EVERY, MANY_SEQUENCES, OPTIONS, sorted_records
from gdpa.backends.hopper.tile import BackwardTile, ForwardTile
from gdpa.backends.triton import launch as portable
from gdpa.backends.triton.launching import Bound, bind, cdiv
from gdpa.backends.triton.sums import RowTerms
from gdpa.device.rounding import LEAST_FACTOR
from gdpa.device.sequences import RECORD, Band
from gdpa.functions.emit import JitFunctions, jit_functions
from gdpa.problem import EXP, PLAIN, SUM, Divided, Operands, Problem, is_regular, kept_for_any_rows


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Work:
    """The tiles of one side, per head: how many at most, and for a packed side the table made on the device."""

    tiles: int
    table: Tensor | None


def make_work(
    cu: Tensor | None, cu_other: Tensor | None, rows: int, rows_other: int, n_seqs: int, block: int, other: int,
    used: Tensor | None = None, used_other: Tensor | None = None, listed: Listed = EVERY,
) -> Work:  # fmt: skip
    most = n_seqs * cdiv(rows, block) if cu is None else rows // block + n_seqs
    if cu is None and used is None and used_other is None:
        return Work(most, None)
    offsets = (cu, cu_other, used, used_other)
    device = next(t.device for t in offsets if t is not None)
    table = torch.empty(1 + most, RECORD.value, dtype=torch.int32, device=device)
    if n_seqs > MANY_SEQUENCES:
        sorted_records(table, offsets, rows, rows_other, n_seqs, most, block, other, listed)
        return Work(most, table)
    write = bind(
        portable.BOUND, ordered_records_kernel, BLOCK=block, OTHER=other, CHUNK=1024, L=listed, num_warps=4, **OPTIONS
    )
    write((n_seqs,), table, *offsets, rows, rows_other, n_seqs, most)
    return Work(most, table)


def batch_rows(*tensors: Tensor) -> tuple[int, ...]:
    """Rows from one batch entry to the next, for each tensor; 0 where there is one entry for all sequences."""
    return tuple(0 if t.shape[0] == 1 else t.stride(0) // t.stride(2) for t in tensors)


@kept_for_any_rows
def folded_scale(problem: Problem) -> float:
    """The scale that becomes part of the function's code: the usual one. Others are multiplied in by the kernel, since
    each new scale would be a new kernel to compile."""
    usual = math.isclose(problem.scale, problem.head_dim**-0.5, rel_tol=1e-6)
    return problem.scale if usual and problem.activation.triton is None else 1.0


@kept_for_any_rows
def function_of(problem: Problem) -> JitFunctions:
    # An error of an exponent is a relative one of p, so it must be small whatever p is rounded to.
    dtype = torch.float32 if problem.norm == EXP else problem.dtype
    return jit_functions(problem.activation, dtype, TARGET, folded_scale(problem))


def padding_counts_nothing(problem: Problem) -> bool:
    """Whether zero rows past a sequence's end leave the forward as it is: they hide what is finite, but not from a sum
    of the weights themselves."""
    if problem.norm == PLAIN:
        return problem.activation.finite_at_zero
    return problem.norm == SUM and function_of(problem).zero_at_zero


@kept_for_any_rows
def forward_tile(problem: Problem, c: Config, tiles: int, parts: int) -> ForwardTile:
    """``tiles``: of an item, see config.tiles_per_item; ``parts``: of the keys of a tile, see parts.py."""
    return ForwardTile(
        GROUP=problem.group, D=padded(problem.head_dim), DV=padded(problem.head_dim_v), BLOCK_M=c.block_m,
        CONSUMERS=c.block_m // config.WARPGROUP_ROWS,
        ITEM_ROWS=c.block_m * tiles, BLOCK_N=c.block_n, STAGES=c.stages, PARTS=parts,
        SCALE_FOLDED=folded_scale(problem) == problem.scale,
        MASKED=is_masked(problem) or not padding_counts_nothing(problem),
        MASK_SCORES=is_masked(problem) and function_of(problem).zero_at_zero and problem.norm != EXP,
        FINITE_AT_ZERO=padding_counts_nothing(problem), PING_PONG=c.ping_pong, NORM=problem.norm,
        GAIN=function_of(problem).factor, PLACED=problem.placed,
    )  # fmt: skip


@kept_for_any_rows
def backward_tile(problem: Problem, c: Config, mode: str, ordered: bool) -> BackwardTile:
    return BackwardTile(
        GROUP=problem.group, D=config.width(problem), BLOCK_M=c.block_m, BLOCK_N=c.block_n, STAGES=c.stages,
        N_PARAMS=problem.n_params, SCALE_FOLDED=folded_scale(problem) == problem.scale, MASKED=is_masked(problem),
        FINITE_AT_ZERO=problem.activation.finite_at_zero, DQ=mode,
        ROOM=config.ROOM, ORDERED=ordered,
        PRESCALED=problem.dtype == torch.float16, PING_PONG=c.ping_pong, NORM=problem.norm,
        GAIN=function_of(problem).backward_factor, PLACED=problem.placed,
    )  # fmt: skip


def forward_function(problem: Problem) -> Any:
    """The form of f that the forward kernel uses: the one of the fewest instructions that it may."""
    f = function_of(problem)
    if problem.norm != PLAIN or problem.placed:
        return f.forward  # sums are of unrounded weights; and only the scores themselves come packed
    if is_masked(problem) and not f.zero_at_zero:
        return f.forward  # a mask on packed values would unpack them: 600 bytes of spills with Triton 3.9
    return f.packed_forward


@kept_for_any_rows
def bound_forward(problem: Problem, c: Config, tiles: int, parts: int) -> Bound:
    f, tile = function_of(problem), forward_tile(problem, c, tiles, parts)
    return bind(
        problem.activation.derived, forward_kernel, FORWARD=forward_function(problem), LOAD_PARAMS=f.load_params,
        T=tile, **options(tile.CONSUMERS),
    )  # fmt: skip


@kept_for_any_rows
def bound_backward(problem: Problem, c: Config, mode: str, ordered: bool) -> Bound:
    f, tile = function_of(problem), backward_tile(problem, c, mode, ordered)
    packed = problem.norm == PLAIN and not problem.placed  # see forward_function
    return bind(
        problem.activation.derived, backward_kernel, BACKWARD=f.packed_backward if packed else f.backward,
        LOAD_PARAMS=f.load_params, T=tile,
        launch_cooperative_grid=mode == "ring", **options(config.CONSUMERS),
    )  # fmt: skip


def options(warpgroups: int) -> dict[str, Any]:
    return {"num_warps": 4, "maxnreg": LAUNCH_REGISTERS[warpgroups], "enable_fp_fusion": True}


def grid(problem: Problem, items: int) -> tuple[int]:
    return (max(min(processors(problem.device) * config.PROGRAMS_PER_SM, items), 1),)


@kept_for_any_rows
def band_of(problem: Problem) -> Band:
    return Band(problem.band.left, problem.band.right)


@kept_for_any_rows
def scales(problem: Problem, factor: float) -> tuple[float, float]:
    """scale and out_scale as the kernels take them: a folded scale is in the function and its derivative, and a
    ``factor`` of the function is not."""
    folded = folded_scale(problem) == problem.scale
    return 1.0 if folded else problem.scale, problem.out_scale * (1.0 if problem.norm == EXP else factor)


def is_empty(problem: Problem) -> bool:
    """Nothing sees anything: the results are zero, or have no elements. There is no descriptor of an empty tensor."""
    return 0 in (problem.n_seqs, problem.rows_q, problem.rows_k)


def forward(problem: Problem, x: Operands, out: Tensor, c: Config | None = None, sums: Tensor | None = None) -> None:
    if is_empty(problem):
        portable.forward(problem, x, out, sums=sums)
        return
    parts = parts_of(problem, processors(problem.device)) if c is None and sums is None else 1
    if parts > 1:
        sums = empty_parts(out, parts)
        launch_forward(problem, x, sums, IN_PARTS[config.width(problem)], 1, parts)
        add_parts(sums, out)
    else:
        c = c or config.forward_config(problem)
        launch_forward(problem, x, out, c, config.tiles_per_item(problem, c), 1, sums)
    portable.zero_unused_queries(problem, x, out)


def sums_argument(sums: Tensor, sink: Tensor | None) -> tuple[Any, ...]:
    """row_sums of forward_kernel, for (out_batch, Hq, rows_q)."""
    return sums, 0 if sums.shape[0] == 1 else sums.stride(0), sums.stride(1), sink


def launch_forward(
    problem: Problem, x: Operands, out: Tensor, c: Config, tiles: int, parts: int, sums: Tensor | None = None
) -> None:
    """``out``: the result, or the sums over each of ``parts`` parts of the keys (see empty_parts)."""
    f = function_of(problem)
    work = make_work(
        x.cu_q, x.cu_k, problem.rows_q, problem.rows_k, problem.n_seqs, c.block_m * tiles, c.block_n, x.used_q, x.used_k
    )
    q, o = (ragged_descriptor(t, config.WARPGROUP_ROWS, padded(t.shape[3])) for t in (x.q, out))
    k, v = (ragged_descriptor(t, c.block_n, padded(t.shape[3])) for t in (x.k, x.v))
    steps = batch_rows(x.q, x.k, x.v, out)
    if parts > 1:  # batch entries of a packed result are one, whatever their parts are
        batch = problem.out_batch
        steps = (*steps[:3], 0 if batch == 1 else steps[3], batch * out.shape[1] * out.shape[2])
    bound_forward(problem, c, tiles, parts)(
        grid(problem, work.tiles * problem.heads_q * parts), q, k, v, o, work.table, x.cu_k, x.params,
        portable.stride_params(x.params), None if sums is None else sums_argument(sums, x.sink),
        portable.places(problem, x), steps, work.tiles,
        problem.heads_q, problem.rows_q, problem.rows_k, band_of(problem), *scales(problem, f.factor),
    )  # fmt: skip


def backward(
    problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None,
    c: Config | None = None, dtables: Sequence[Tensor | None] = (), sums: Divided | None = None,
) -> None:  # fmt: skip
    if is_empty(problem) and sums is None:
        for t in (dq, dk, dv, dparams):
            if t is not None:
                t.zero_()
        return
    if is_empty(problem) or dtables or not config.holds_params(problem):  # a sink has a gradient without keys, too
        portable.backward(problem, x, do, dq, dk, dv, dparams, dtables=dtables, sums=sums)
        return
    if not is_regular(do):
        do = do.clone(memory_format=torch.contiguous_format)  # .contiguous() keeps an address that is no multiple of 16
    if dk.dtype != problem.dtype:  # sums over heads with different functions are wider than the kernel's results
        narrow_dk, narrow_dv = torch.empty_like(x.k), torch.empty_like(x.v)
        backward(problem, x, do, dq, narrow_dk, narrow_dv, dparams, c, sums=sums)
        dk.copy_(narrow_dk)
        dv.copy_(narrow_dv)
        return
    c = c or config.backward_config(problem)
    terms = None if sums is None else portable.row_terms(problem, x, do, sums)
    portable.zero_unused_keys(problem, x, dk, dv)
    most_tiles = min(config.MOST_TILES, processors(problem.device))  # that run at the same time
    mode = config.dq_mode(problem, most_tiles)
    if mode == "ring":  # otherwise all of dq is written, or launch_dq sees to it
        portable.zero_unused_queries(problem, x, dq)
    limit = most_tiles * c.block_n
    some_long = mode == "ring" and problem.longest_keys > limit  # perhaps: the lengths are known on the device only
    listed = Listed(1, limit if mode == "ring" and problem.varying_k else None, False if some_long else None)
    launch_backward(problem, x, do, dq, dk, dv, dparams, mode, c, listed, terms)
    if some_long:
        launch_backward(problem, x, do, dq, dk, dv, dparams, "add", c, Listed(1, limit, True), terms)
    if mode == "none":
        portable.launch_dq(problem, x, do, dq, terms)


def launch_backward(
    problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None, mode: str,
    c: Config, listed: Listed, terms: RowTerms | None = None,
) -> None:  # fmt: skip
    """dk, dv and dq (unless mode is "none") of the sequences in the list, and their share of dparams: the first list's
    is written, that of the long sequences added."""
    f, columns = function_of(problem), config.width(problem)
    work = make_work(
        x.cu_k, x.cu_q, problem.rows_k, problem.rows_q, problem.n_seqs, c.block_n, c.block_m, x.used_k, x.used_q, listed
    )
    scale, out_scale = scales(problem, f.backward_factor)
    sums = None  # per tile, consumer and head; summed afterwards in a fixed order
    if dparams is not None:
        shape = (work.tiles, config.CONSUMERS, problem.heads_q, problem.n_params)
        sums = torch.zeros(shape, dtype=torch.float32, device=dq.device)
    q, g = (ragged_descriptor(t, c.block_m, columns) for t in (x.q, do))
    k, v = (ragged_descriptor(t, c.block_n, columns) for t in (x.k, x.v))
    gk, gv = (ragged_descriptor(t, config.WARPGROUP_ROWS, columns) for t in (dk, dv))
    wide, flags = dq_buffers(problem, x, dq, mode, c, listed)
    gq, ring = (ragged_descriptor(t, config.WARPGROUP_ROWS, config.WARPGROUP_ROWS) for t in (dq, wide))
    bound_backward(problem, c, mode, torch.are_deterministic_algorithms_enabled())(
        grid(problem, work.tiles * problem.heads_k), q, k, v, g, gq, ring, gk, gv, work.table, x.cu_q, x.params,
        portable.stride_params(x.params), sums, None if terms is None else tuple(terms),
        portable.places(problem, x), flags,
        batch_rows(x.q, x.k, x.v, do, wide if mode == "add" else dq, dk, dv), work.tiles, problem.heads_k,
        problem.rows_q, problem.rows_k, band_of(problem), scale, out_scale,
    )  # fmt: skip
    if mode == "add":
        round_dq(problem, x, wide, dq, scale * out_scale, listed)
    if dparams is not None and sums is not None:
        dparams.add_(sums.sum((0, 1)).T * out_scale) if listed.LONG else dparams.copy_(sums.sum((0, 1)).T * out_scale)


def dq_buffers(
    problem: Problem, x: Operands, dq: Tensor, mode: str, c: Config, listed: Listed
) -> tuple[Tensor, Tensor | None]:
    """Room for sums of dq in float32: ROOM blocks for each program, which are on their way in a ring, with a flag for
    each; or all of them, zero (those of long sequences only, if the list is of those)."""
    if mode == "add" and listed.LONG:
        wide = torch.empty_like(dq, dtype=torch.float32)
        launch_long_rows(problem, x, wide, None, 0.0, listed)
        return wide, None
    if mode == "add":
        return torch.zeros_like(dq, dtype=torch.float32), None
    places = processors(problem.device) * config.ROOM if mode == "ring" else 1
    wide = torch.empty(1, 1, places * c.block_m, config.width(problem), dtype=torch.float32, device=dq.device)
    return wide, torch.zeros(places, dtype=torch.int32, device=dq.device)


def round_dq(problem: Problem, x: Operands, wide: Tensor, dq: Tensor, factor: float, listed: Listed) -> None:
    """dq from its sums. In float16 part of the factor, or all of it, is in them (see ds_factors)."""
    if problem.dtype == torch.float16:
        factor = min(abs(factor) / LEAST_FACTOR.value, 1.0) if factor else 1.0
    if listed.LONG:
        launch_long_rows(problem, x, wide, dq, factor, listed)
    else:
        torch.mul(wide, factor, out=dq)


SLICES = 64  # programs that share the rows of a long sequence


def launch_long_rows(
    problem: Problem, x: Operands, wide: Tensor, dq: Tensor | None, factor: float, listed: Listed
) -> None:
    """Zeros in the rows of long sequences in ``wide``, or, where ``dq`` is given, dq of those rows."""
    targets = (wide,) if dq is None else (wide, dq)
    rows, align = portable.as_rows(problem, targets, ())
    write = bind(
        portable.BOUND, long_rows_kernel, LIMIT=listed.LIMIT, D=problem.head_dim, COLUMNS=config.width(problem),
        ALIGN=align, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    write(
        (problem.n_seqs, SLICES), rows[0], None if dq is None else rows[1], x.cu_q, x.cu_k, x.used_q, x.used_k,
        problem.rows_q, problem.rows_k, problem.heads_q, factor,
    )  # fmt: skip
