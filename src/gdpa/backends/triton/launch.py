"""Host side of the Triton backend: what to launch, with which tiles and buffers. No device data is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from gdpa.backends.triton import config
from gdpa.backends.triton.backward import backward_kernel, dq_kernel
from gdpa.backends.triton.config import Config, padded
from gdpa.backends.triton.forward import forward_kernel
from gdpa.device.sequences import seq_of_tile_kernel
from gdpa.functions.emit import JitFunctions, jit_functions
from gdpa.problem import Operands, Problem

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def capability(device: torch.device) -> tuple[int, int]:
    return (9, 0) if INTERPRET else torch.cuda.get_device_capability(device)


def target() -> str:
    """What the emitted code may use: PTX on NVIDIA only."""
    if INTERPRET:
        return "interpret"
    return "hip" if torch.version.hip else "cuda"


def precision(problem: Problem) -> str:
    """float32 products are IEEE unless torch's own setting allows TF32 for matrix products."""
    allowed = problem.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"
    return "tf32" if allowed else "ieee"


@dataclass(frozen=True)
class Tiles:
    """Tiles of one side: how many, and for a packed side the sequence each belongs to."""

    count: int
    seq: Tensor | None


def make_tiles(cu: Tensor | None, rows: int, n_seqs: int, block: int) -> Tiles:
    """Dense: ceil(rows / block) tiles per sequence. Packed: a table made on the device, without a sync."""
    if cu is None:
        return Tiles(n_seqs * triton.cdiv(rows, block), None)
    count = rows // block + n_seqs
    seq = torch.empty(count, dtype=torch.int32, device=cu.device)
    if n_seqs:
        seq_of_tile_kernel[(n_seqs,)](cu, seq, rows, count, BLOCK=block, CHUNK=128, num_warps=1)
    return Tiles(count, seq)


def strides(t: Tensor, packed: bool = False) -> tuple[int, int, int]:
    """(batch, head, row) strides; a packed side and shared queries have one batch entry for all sequences."""
    return (0 if packed or t.shape[0] == 1 else t.stride(0), t.stride(1), t.stride(2))


def function_of(problem: Problem) -> JitFunctions:
    return jit_functions(problem.activation, problem.dtype, target())


def common(problem: Problem, c: Config) -> dict[str, Any]:
    """The compile-time arguments all kernels share."""
    return dict(
        LOAD_PARAMS=function_of(problem).load_params, FINITE_AT_ZERO=problem.activation.finite_at_zero,
        GROUP=problem.group, D=problem.head_dim, DV=problem.head_dim_v, BLOCK_D=padded(problem.head_dim),
        BLOCK_DV=padded(problem.head_dim_v), BLOCK_M=c.block_m, BLOCK_N=c.block_n, PRECISION=precision(problem),
        num_warps=c.num_warps, num_stages=c.num_stages,
    )  # fmt: skip


def pick(problem: Problem, choose: Any) -> Config:
    return config.INTERPRETED if INTERPRET else choose(problem, capability(problem.device))


def forward(problem: Problem, x: Operands, out: Tensor) -> None:
    c = pick(problem, config.forward_config)
    tiles = make_tiles(x.cu_q, problem.rows_q, problem.n_seqs, c.block_m)
    if tiles.count == 0 or out.numel() == 0:
        return
    f = function_of(problem)
    forward_kernel[(tiles.count, problem.heads_q)](
        x.q, x.k, x.v, out, x.cu_q, x.cu_k, tiles.seq, x.params,
        strides(x.q, problem.packed_q), strides(x.k, problem.packed_k), strides(x.v, problem.packed_k),
        strides(out, problem.packed_q), stride_params(x.params), problem.rows_q, problem.rows_k, problem.n_seqs,
        problem.band.left, problem.band.right, problem.scale, problem.out_scale * f.factor,
        FORWARD=f.forward, **common(problem, c),
    )  # fmt: skip


def stride_params(params: Tensor | None) -> int:
    return params.stride(0) if params is not None else 0


def backward(
    problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None
) -> None:
    c = pick(problem, config.backward_config)
    deterministic = torch.are_deterministic_algorithms_enabled()
    one_tile_of_keys = longest_keys(problem) <= c.block_n and not problem.shared_q
    if one_tile_of_keys:
        mode, buffer = "store", dq
        if problem.packed_k or problem.rows_k == 0 or not problem.band.unbounded:
            buffer.zero_()  # no tile visits queries that see no key
    elif deterministic:
        mode, buffer = "none", dq
    else:
        mode, buffer = "add", torch.zeros_like(dq, dtype=torch.float32)
    launch_backward(problem, x, do, buffer, dk, dv, dparams, mode, c)
    if mode == "none":
        launch_dq(problem, x, do, dq)
    elif buffer is not dq:
        dq.copy_(buffer)


def longest_keys(problem: Problem) -> int:
    """An upper bound on the number of keys of any sequence, from what is known without reading the device."""
    if problem.packed_k:
        return problem.rows_k if problem.max_k is None else min(problem.max_k, problem.rows_k)
    return problem.rows_k


def launch_backward(
    problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None, mode: str,
    c: Config,
) -> None:  # fmt: skip
    """dk, dv, dparams, and dq unless mode is "none"."""
    f, n_params = function_of(problem), problem.n_params
    tiles = make_tiles(x.cu_k, problem.rows_k, problem.n_seqs, c.block_n)
    sums = None  # per tile and head; summed afterwards in a fixed order
    if dparams is not None:
        sums = torch.zeros(tiles.count, problem.heads_q, n_params, dtype=torch.float32, device=dq.device)
    if tiles.count and dk.numel():
        backward_kernel[(tiles.count, problem.heads_k)](
            x.q, x.k, x.v, do, dq, dk, dv, sums, x.cu_q, x.cu_k, tiles.seq, x.params,
            strides(x.q, problem.packed_q), strides(x.k, problem.packed_k), strides(x.v, problem.packed_k),
            strides(do, problem.packed_q), strides(dq, problem.packed_q), strides(dk, problem.packed_k),
            strides(dv, problem.packed_k), (0, 0) if sums is None else sums.stride()[:2], stride_params(x.params),
            problem.rows_q, problem.rows_k, problem.n_seqs, problem.band.left, problem.band.right, problem.scale,
            problem.out_scale * f.factor, BACKWARD=f.backward, N_PARAMS=n_params,
            BLOCK_P=triton.next_power_of_2(max(n_params, 1)), DQ=mode, **common(problem, c),
        )  # fmt: skip
    if dparams is not None and sums is not None:
        dparams.copy_(sums.sum(0).T)


def launch_dq(problem: Problem, x: Operands, do: Tensor, dq: Tensor) -> None:
    """dq in a fixed order of additions. Shared queries get one partial dq per sequence, then a sum over them."""
    c = pick(problem, config.dq_config)
    f = function_of(problem)
    tiles = make_tiles(x.cu_q, problem.rows_q, problem.n_seqs, c.block_m)
    target_dq = dq
    if problem.shared_q:
        target_dq = torch.empty((problem.n_seqs, *dq.shape[1:]), dtype=torch.float32, device=dq.device)
    if tiles.count and target_dq.numel():
        dq_kernel[(tiles.count, problem.heads_q)](
            x.q, x.k, x.v, do, target_dq, x.cu_q, x.cu_k, tiles.seq, x.params,
            strides(x.q, problem.packed_q), strides(x.k, problem.packed_k), strides(x.v, problem.packed_k),
            strides(do, problem.packed_q), strides(target_dq, problem.packed_q), stride_params(x.params),
            problem.rows_q, problem.rows_k, problem.n_seqs, problem.band.left, problem.band.right, problem.scale,
            problem.out_scale * f.factor, BACKWARD=f.backward, N_PARAMS=problem.n_params, **common(problem, c),
        )  # fmt: skip
    if target_dq is not dq:
        dq.copy_(target_dq.sum(0, keepdim=True))
