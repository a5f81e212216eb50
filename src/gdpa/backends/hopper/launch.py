"""Host side of the Hopper backend: what to launch, with which tiles and buffers. No device data is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from gdpa.backends.hopper import TARGET, config
from gdpa.backends.hopper.backward import backward_kernel
from gdpa.backends.hopper.config import Config, is_masked, padded
from gdpa.backends.hopper.forward import forward_kernel
from gdpa.backends.hopper.pipeline import LARGEST, LAUNCH_REGISTERS, ragged_descriptor
from gdpa.backends.hopper.schedule import ordered_records_kernel
from gdpa.backends.hopper.tile import BackwardTile, ForwardTile
from gdpa.backends.triton import launch as portable
from gdpa.device.sequences import RECORD, Band
from gdpa.functions.emit import JitFunctions, jit_functions
from gdpa.problem import Operands, Problem, is_regular


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Work:
    """The tiles of one side, per head: how many at most, and for a packed side the table made on the device."""

    tiles: int
    table: Tensor | None


def make_work(
    cu: Tensor | None, cu_other: Tensor | None, rows: int, rows_other: int, n_seqs: int, block: int, other: int
) -> Work:
    if cu is None:
        return Work(n_seqs * triton.cdiv(rows, block), None)
    most = rows // block + n_seqs
    table = torch.empty(1 + most, RECORD.value, dtype=torch.int32, device=cu.device)
    ordered_records_kernel[(n_seqs,)](
        table, cu, cu_other, rows, rows_other, n_seqs, most, BLOCK=block, OTHER=other, CHUNK=1024, num_warps=4,
        enable_fp_fusion=True,  # there is none here, but Triton 3.9 warns of a default that will change
    )  # fmt: skip
    return Work(most, table)


def batch_rows(*tensors: Tensor) -> tuple[int, ...]:
    """Rows from one batch entry to the next, for each tensor; 0 where there is one entry for all sequences."""
    return tuple(0 if t.shape[0] == 1 else t.stride(0) // t.stride(2) for t in tensors)


def folded_scale(problem: Problem) -> float:
    """The scale that becomes part of the function's code: the usual one. Others are multiplied in by the kernel, since
    each new scale would be a new kernel to compile."""
    usual = math.isclose(problem.scale, problem.head_dim**-0.5, rel_tol=1e-6)
    return problem.scale if usual and problem.activation.triton is None else 1.0


def function_of(problem: Problem) -> JitFunctions:
    return jit_functions(problem.activation, problem.dtype, TARGET, folded_scale(problem))


def forward_tile(problem: Problem, c: Config) -> ForwardTile:
    return ForwardTile(
        GROUP=problem.group, D=padded(problem.head_dim), DV=padded(problem.head_dim_v), BLOCK_M=c.block_m,
        CONSUMERS=c.block_m // config.WARPGROUP_ROWS,
        ITEM_ROWS=c.block_m * config.tiles_per_item(problem, c), BLOCK_N=c.block_n, STAGES=c.stages,
        SCALE_FOLDED=folded_scale(problem) == problem.scale, MASKED=is_masked(problem),
        MASK_SCORES=is_masked(problem) and function_of(problem).zero_at_zero,
        FINITE_AT_ZERO=problem.activation.finite_at_zero, PING_PONG=c.ping_pong,
    )  # fmt: skip


def backward_tile(problem: Problem, c: Config, mode: str, tiles: int, narrow_dq: bool) -> BackwardTile:
    prescaled = problem.dtype == torch.float16
    return BackwardTile(
        GROUP=problem.group, D=config.width(problem), BLOCK_M=c.block_m, BLOCK_N=c.block_n, TILES=tiles,
        STAGES=c.stages, N_PARAMS=problem.n_params, SCALE_FOLDED=folded_scale(problem) == problem.scale,
        MASKED=is_masked(problem), FINITE_AT_ZERO=problem.activation.finite_at_zero, DQ=mode,
        SCALE_DQ=narrow_dq and not prescaled, PRESCALED=prescaled, PING_PONG=c.ping_pong,
    )  # fmt: skip


def forward_function(problem: Problem) -> Any:
    """The form of f that the forward kernel uses: the one of the fewest instructions that it may."""
    f = function_of(problem)
    if is_masked(problem) and not f.zero_at_zero:
        return f.forward  # a mask on packed values would unpack them: 600 bytes of spills with Triton 3.9
    return f.packed_forward


def options(consumers: int) -> dict[str, Any]:
    return {"num_warps": 4, "maxnreg": LAUNCH_REGISTERS[consumers], "enable_fp_fusion": True}


def grid(problem: Problem, items: int) -> tuple[int]:
    return (max(min(processors(problem.device) * config.PROGRAMS_PER_SM, items), 1),)


def scales(problem: Problem, factor: float) -> tuple[float, float]:
    """scale and out_scale as the kernels take them: a folded scale is in the function and its derivative, and a
    ``factor`` of the function is not."""
    folded = folded_scale(problem) == problem.scale
    return 1.0 if folded else problem.scale, problem.out_scale * factor


def is_empty(problem: Problem) -> bool:
    """Nothing sees anything: the results are zero, or have no elements. There is no descriptor of an empty tensor."""
    return 0 in (problem.n_seqs, problem.rows_q, problem.rows_k)


def forward(problem: Problem, x: Operands, out: Tensor, c: Config | None = None) -> None:
    if is_empty(problem):
        out.zero_()
        return
    c = c or config.forward_config(problem)
    f = function_of(problem)
    tile = forward_tile(problem, c)
    work = make_work(x.cu_q, x.cu_k, problem.rows_q, problem.rows_k, problem.n_seqs, tile.ITEM_ROWS, c.block_n)
    q, o = (ragged_descriptor(t, config.WARPGROUP_ROWS, padded(t.shape[3])) for t in (x.q, out))
    k, v = (ragged_descriptor(t, c.block_n, padded(t.shape[3])) for t in (x.k, x.v))
    forward_kernel[grid(problem, work.tiles * problem.heads_q)](
        q, k, v, o, work.table, x.cu_k, x.params, portable.stride_params(x.params), batch_rows(x.q, x.k, x.v, out),
        work.tiles, problem.heads_q, problem.rows_q, problem.rows_k, Band(problem.band.left, problem.band.right),
        *scales(problem, f.factor), FORWARD=forward_function(problem), LOAD_PARAMS=f.load_params, T=tile,
        **options(tile.CONSUMERS),
    )  # fmt: skip


def backward(
    problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None,
    c: Config | None = None,
) -> None:  # fmt: skip
    if is_empty(problem):
        for t in (dq, dk, dv, dparams):
            if t is not None:
                t.zero_()
        return
    if not config.holds_params(problem):
        portable.backward(problem, x, do, dq, dk, dv, dparams)
        return
    do = do if is_regular(do) else do.contiguous()
    if dk.dtype != problem.dtype:  # sums over heads with different functions are wider than the kernel's results
        narrow_dk, narrow_dv = torch.empty_like(x.k), torch.empty_like(x.v)
        backward(problem, x, do, dq, narrow_dk, narrow_dv, dparams, c)
        dk.copy_(narrow_dk)
        dv.copy_(narrow_dv)
        return
    c = c or config.backward_config(problem)
    mode, parts = dq_target(problem, dq, c)
    launch_backward(problem, x, do, parts, dk, dv, dparams, mode, c)
    if mode == "none":
        portable.launch_dq(problem, x, do, dq)
    elif len(parts) == 2:
        torch.add(*parts, out=dq)
    elif parts[0] is not dq:
        factor = (
            1.0 if problem.dtype == torch.float16 else math.prod(scales(problem, function_of(problem).backward_factor))
        )
        torch.mul(parts[0], factor, out=dq)


def dq_target(problem: Problem, dq: Tensor, c: Config) -> tuple[str, tuple[Tensor, ...]]:
    """How dq is made ("store", "add", or "none": by a kernel of its own), and what the kernel adds to: one tensor, or
    two for tiles of keys with even and odd numbers, whose sum is dq."""
    if problem.longest_keys <= c.block_n * config.key_tiles_per_item(problem, c) and not problem.shared_q:
        if problem.packed_k or not problem.band.unbounded:
            dq.zero_()  # no tile visits queries that see no key
        return "store", (dq,)
    if torch.are_deterministic_algorithms_enabled():
        two_tiles = config.summed_keys(problem) <= config.DETERMINISTIC_KEYS and not config.wide_dq(problem)
        return "add" if two_tiles else "none", (dq.zero_() if two_tiles else dq,)
    two_sums = config.summed_keys(problem) > config.ONE_SUM_KEYS
    if config.wide_dq(problem) or (two_sums and 2 * dq[..., 0].numel() > LARGEST):  # the rows of both must have numbers
        return "add", (torch.zeros_like(dq, dtype=torch.float32),)
    return "add", dq.new_zeros(2, *dq.shape).unbind(0) if two_sums else (dq.zero_(),)


def launch_backward(
    problem: Problem, x: Operands, do: Tensor, dq_parts: tuple[Tensor, ...], dk: Tensor, dv: Tensor,
    dparams: Tensor | None, mode: str, c: Config,
) -> None:  # fmt: skip
    """dk, dv, dparams, and dq unless mode is "none"."""
    dq = dq_parts[0]
    to_other_part = (dq_parts[-1].storage_offset() - dq.storage_offset()) // dq.stride(2)
    f, columns = function_of(problem), config.width(problem)
    tiles = config.key_tiles_per_item(problem, c) if mode == "store" else 1
    work = make_work(x.cu_k, x.cu_q, problem.rows_k, problem.rows_q, problem.n_seqs, tiles * c.block_n, c.block_m)
    scale, out_scale = scales(problem, f.backward_factor)
    sums = None  # per tile, consumer and head; summed afterwards in a fixed order
    if dparams is not None:
        shape = (work.tiles * tiles, config.CONSUMERS, problem.heads_q, problem.n_params)
        sums = torch.zeros(shape, dtype=torch.float32, device=dq.device)
    q, g = (ragged_descriptor(t, c.block_m, columns) for t in (x.q, do))
    k, v = (ragged_descriptor(t, c.block_n, columns) for t in (x.k, x.v))
    gq = ragged_descriptor(dq, config.WARPGROUP_ROWS, config.WARPGROUP_ROWS)
    gk, gv = (ragged_descriptor(t, config.WARPGROUP_ROWS, columns) for t in (dk, dv))
    backward_kernel[grid(problem, work.tiles * problem.heads_k)](
        q, k, v, g, gq, gk, gv, work.table, x.cu_q, x.params, portable.stride_params(x.params), sums,
        (*batch_rows(x.q, x.k, x.v, do, dq, dk, dv), to_other_part), work.tiles, problem.heads_k, problem.rows_q,
        problem.rows_k, Band(problem.band.left, problem.band.right), scale, out_scale, BACKWARD=f.packed_backward,
        LOAD_PARAMS=f.load_params, T=backward_tile(problem, c, mode, tiles, dq.dtype == problem.dtype),
        **options(config.CONSUMERS),
    )  # fmt: skip
    if dparams is not None and sums is not None:
        dparams.copy_(sums.sum((0, 1)).T * out_scale)
