"""Head dimensions that the GPU kernels do not have, by zeros: rows of 50 numbers become rows of 56.

Kernels load rows in pieces of 16 bytes. Zeros change no score and no output but the columns that are cut off again. The
copies of q, k, v and of the result cost what they take in memory, where plain PyTorch would keep every weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gdpa.problem import Divided, Operands, Problem, kept_with_rows

STEP = 8  # numbers, 16 bytes of 16-bit ones


def padded(d: int) -> int:
    return -(-d // STEP) * STEP


def too_wide(problem: Problem, most: int) -> str | None:
    """Why kernels with up to ``most`` columns cannot have this problem's head dimensions."""
    for name, d in (("D", problem.head_dim), ("Dv", problem.head_dim_v)):
        if d > most:
            return f"head dimensions must be at most {most}, {name} is {d}"
    return None


@kept_with_rows
def padded_problem(problem: Problem) -> Problem | None:
    """The problem of padded operands; None if it needs no padding."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    if (d, dv) == (problem.head_dim, problem.head_dim_v):
        return None
    return replace(problem, head_dim=d, head_dim_v=dv, regular=True)


def forward(
    run: Callable[..., None], problem: Problem, wide: Problem, x: Operands, out: Tensor, sums: Tensor | None
) -> None:
    """The forward of ``problem`` by ``run``, that of a backend, on its padded form."""
    padded_x, padded_out = _pad_operands(x), _empty_padded(out)
    run(wide, padded_x, padded_out, sums)
    out.copy_(padded_out[..., : problem.head_dim_v])


def backward(
    run: Callable[..., None], problem: Problem, wide: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, dparams: Tensor | None, sums: Divided | None, **more: Any,
) -> None:  # fmt: skip
    """The same of the backward."""
    found = [_empty_padded(t) for t in (dq, dk, dv)]
    if sums is not None:
        sums = replace(sums, out=_pad(sums.out))
    run(wide, _pad_operands(x), _pad(do), *found, dparams, sums=sums, **more)
    for t, into in zip(found, (dq, dk, dv), strict=True):
        into.copy_(t[..., : into.shape[-1]])


def _pad_operands(x: Operands) -> Operands:
    others = (x.cu_q, x.cu_k, x.params, x.used_q, x.used_k, x.tables, x.sink)
    return Operands(_pad(x.q), _pad(x.k), _pad(x.v), *others)


def _pad(t: Tensor) -> Tensor:
    """t (B, H, L, D) with columns of zeros. (F.pad may keep the order of the dimensions in memory, as it does where
    there is nothing to pad, and descriptors do not express every order.)"""
    d, wide = t.shape[-1], _empty_padded(t)
    wide[..., :d] = t
    wide[..., d:] = 0
    return wide


def _empty_padded(t: Tensor) -> Tensor:
    """Its rows one after the other, as ``padded_problem`` says."""
    return torch.empty(*t.shape[:-1], padded(t.shape[-1]), dtype=t.dtype, device=t.device)
