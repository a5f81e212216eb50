"""The portable GPU backend in plain Triton: any function, band and mask, on NVIDIA and AMD, and in the interpreter.

    host
    launch.py      what a call launches; arguments.py, tables.py: tensors, tiles and tables as kernel arguments
    config.py      tile sizes, by measurement
    code.py, tile.py   the compile-time arguments of every kernel: CODE, the functions, and T, the shape
    launching.py   launches that skip Triton's own binder; both GPU backends use it
    compiled/      compiled kernels found again by later processes, filled with other functions, compiled ahead
    compat.py      the inner names of Triton that this takes, and what is done where a release lacks them

    device
    forward.py     one program per tile of queries; normalized.py: the same with row sums
    backward.py    one program per tile of keys, and kernels that compute dq by themselves
    walk.py        the loops of all these: which blocks a tile visits, and which of them are masked
    row_sums.py    row sums: how the forward keeps them and the backward uses them

What the kernels share with Hopper's is in gdpa.device. ``launch`` (and with it Triton) is imported on first use, so
that this module loads on machines without Triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gdpa.backends import interpreting, on_device_of, padding
from gdpa.device.sources import read_quickly
from gdpa.functions.places.program import MOST_ROWS
from gdpa.problem import Divided, Operands, Problem

MAX_HEAD_DIM = 256
MAX_GRID_Y = 65535


@cache
def _launch() -> Any:
    with read_quickly():
        from gdpa.backends.triton import launch

    return launch


class TritonBackend:
    """sm_80 and up, AMD by the same source, CPU tensors under TRITON_INTERPRET=1."""

    name = "triton"

    def supports(self, problem: Problem) -> str | None:
        if problem.device.type != "cuda" and not interpreting():  # first, since finding modules takes time
            return f"it needs a GPU, but these tensors are on {problem.device} (TRITON_INTERPRET=1 runs it on the CPU)"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if interpreting():
            if problem.dtype == torch.bfloat16:
                return "Triton's interpreter computes bfloat16 wrongly; use float16 or float32"
        elif torch.version.hip is None and torch.cuda.get_device_capability(problem.device) < (8, 0):
            return "it needs compute capability 8.0 or newer"
        if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"it computes float16, bfloat16 and float32, not {problem.dtype}"
        reason = padding.too_wide(problem, MAX_HEAD_DIM)
        if reason is not None:
            return reason
        if problem.placed and problem.most_rows > MOST_ROWS:
            return f"it supports positions for at most {MOST_ROWS} rows, but there are {problem.most_rows}"
        if problem.heads_q > MAX_GRID_Y:
            return f"at most {MAX_GRID_Y} query heads, but there are {problem.heads_q}"
        return None

    def forward(self, problem: Problem, x: Operands, out: Tensor, sums: Tensor | None = None) -> None:
        wide = padding.padded_problem(problem)
        if wide is not None:
            return padding.forward(self.forward, problem, wide, x, out, sums)
        with on_device_of(out):
            _launch().forward(problem, x, out, sums=sums)

    def backward(
        self, problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None,
        dtables: Sequence[Tensor | None] = (), sums: Divided | None = None,
    ) -> None:  # fmt: skip
        wide = padding.padded_problem(problem)
        if wide is not None:
            return padding.backward(self.backward, problem, wide, x, do, dq, dk, dv, dparams, sums, dtables=dtables)
        with on_device_of(dq):
            _launch().backward(problem, x, do, dq, dk, dv, dparams, dtables=dtables, sums=sums)
