"""Kernels for Hopper (compute capability 9.0) in Gluon: TMA, asynchronous tensor cores, specialised warps.

    host
    launch.py      what a call launches: plans, buffers, arguments. It asks
      config.py      for tile sizes and the way in which dq is summed (dq_mode), each by measurement,
      binding.py     for the code: the form of the function, the compile-time shape (tile.py, code.py), options
      visits.py      for the lists of blocks that a mask leaves to each tile
      split_kv.py    for the sums of a forward whose keys are split over programs (split-KV)
      folding.py     for grouped heads that are better computed as more queries of one head
      params.py      for params of functions of positions, which become one more table
      wide_dq.py     for dq as float32 sums in memory
    quick/         the same for calls that repeat, past all of this: only addresses and sizes are filled in

    device
    scheduling/    which program works on which tiles, and the list of tiles, which a kernel makes from cu_seqlens
    forward/       kernel.py; producer.py and consumer.py, which it runs side by side; what these are made of
    backward/      likewise; walk.py, ring.py, turns.py: how tiles of keys sum up dq together
    messages.py    what producers tell consumers, in shared memory
    pipeline.py    tensor descriptors of jagged tensors, named barriers; row_sums.py; compat.py: Gluon's names

Terms (item, tile, block, step, cut, place, spot, turn, ...) are explained in docs/kernels.md, which also says how the
kernels work and why. ``launch`` (and with it Triton) is imported on first use, so that this module loads on machines
without Triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gdpa.backends import interpreting, on_device_of, padding
from gdpa.backends.hopper.params import backward_pass, forward_pass, gradients_of, looked_up, operands_of
from gdpa.device.sources import read_quickly
from gdpa.functions.emit import emit
from gdpa.functions.places.program import MOST_ROWS
from gdpa.problem import PLAIN, Divided, Operands, Problem

TARGET = "sm90"
MAX_HEAD_DIM = 128
MAX_ROWS = 2**30  # see pipeline.py


@cache
def _launch() -> Any:
    with read_quickly():
        from gdpa.backends.hopper import launch

    return launch


@cache
def _quick() -> tuple[Any, Any, Any]:
    from gdpa.backends.hopper.quick.backward import backward_pass
    from gdpa.backends.hopper.quick.forward import forward_pass
    from gdpa.backends.hopper.quick.row_classes import classes

    return classes, forward_pass, backward_pass


class HopperBackend:
    """bfloat16 and float16, head dimensions up to 128. The rest is left to the triton backend."""

    name = "hopper"
    takes_given = True  # operands and the output in the caller's layout: see gdpa.calling.layouts.Given

    def supports(self, problem: Problem) -> str | None:
        if problem.device.type != "cuda":  # first, since finding modules takes 20 us
            return f"it needs a GPU, but these tensors are on {problem.device}"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if importlib.util.find_spec("triton.experimental.gluon") is None:
            return "it needs Triton 3.6 or newer"
        if interpreting():
            return "Triton's interpreter does not run Gluon kernels"
        if torch.version.hip is not None or torch.cuda.get_device_capability(problem.device) != (9, 0):
            return "it needs compute capability 9.0 (Hopper)"
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"it computes float16 and bfloat16, not {problem.dtype}"
        reason = padding.too_wide(problem, MAX_HEAD_DIM)
        if reason is not None:
            return reason
        if not (problem.regular or padding.padded_problem(problem)):
            return (
                "rows, heads and batch entries of q, k and v must begin at multiples of 16 bytes, "
                "and batch entries must lie a whole number of rows apart"
            )
        if problem.mask is not None:
            reason = _launch().unlisted(problem)
            if reason:
                return reason
        if max(problem.rows_q, problem.rows_k) > MAX_ROWS:
            return f"at most {MAX_ROWS} rows"
        if problem.placed and problem.most_rows > MOST_ROWS:
            return f"it supports positions for at most {MOST_ROWS} rows, but there are {problem.most_rows}"
        for activation in problem.activations:
            long = emit(activation, problem.dtype, TARGET).long_operations
            if long:
                return f"its kernels have no registers for the long code of {', '.join(long)} in {activation.name}"
        return None

    def backward_elsewhere(self, problem: Problem) -> list[tuple[str, str]]:
        """Functions whose backward the triton backend's kernels do, each with the reason."""
        from gdpa.backends.hopper.binding import left_to_triton

        kinds = list(zip(problem.activations, problem.norms or (PLAIN,) * len(problem.activations), strict=True))
        ordered, found = torch.are_deterministic_algorithms_enabled(), []
        for act, norm in dict.fromkeys(kinds):
            one = replace(problem, activations=(act,), norms=(norm,))
            heads = [h for h, kind in enumerate(kinds) if kind == (act, norm)]
            # The first ones, in one slice (see ops/heads.py): params are only looked up from head 0 on.
            if not ordered and heads == [*range(len(heads))] and (problem.group == 1 or len(heads) <= problem.group):
                one = looked_up(one) or one
            reason = left_to_triton(one, one.learn, ordered)
            of_key_heads = [kinds[i : i + problem.group] for i in range(0, len(kinds), problem.group)]
            if any((act, norm) in mine and len(set(mine)) > 1 for mine in of_key_heads):
                reason = "query heads that share a key head have different functions"
            if reason is not None:
                found.append((act.name.removesuffix("_exponent"), reason))
        return found

    def row_classes(self, problem: Problem) -> Callable[[int, int], Hashable]:
        """Numbers of rows, of problems that differ in nothing else, that share quick passes."""
        problem = padding.padded_problem(problem) or problem
        found: Callable[[int, int], Hashable] = _quick()[0](looked_up(problem) or problem)
        return found

    def quick_forward(self, problem: Problem, kind: Hashable) -> Callable[..., bool] | None:
        """See quick/."""
        if padding.padded_problem(problem):
            return None
        simpler = looked_up(problem)
        found: Callable[..., bool] | None = _quick()[1](simpler or problem, kind)
        return forward_pass(problem, found) if simpler and found else found

    def quick_backward(
        self, problem: Problem, kind: Hashable, deterministic: bool, strides: tuple[int, ...]
    ) -> Callable[..., bool] | None:
        if padding.padded_problem(problem):
            return None
        simpler = None if deterministic else looked_up(problem)  # gradients of tables are in no fixed order
        found: Callable[..., bool] | None = _quick()[2](simpler or problem, kind, deterministic, strides)
        return backward_pass(problem, found) if simpler and found else found

    def forward(self, problem: Problem, x: Operands, out: Tensor, sums: Tensor | None = None) -> None:
        wide = padding.padded_problem(problem)
        if wide is not None:
            return padding.forward(self.forward, problem, wide, x, x.written(out), sums)
        simpler = looked_up(problem)
        if simpler is not None:
            problem, x = simpler, operands_of(problem, x)
        with on_device_of(out):
            _launch().forward(problem, x, out, sums=sums)

    def backward(
        self, problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None,
        dtables: Sequence[Tensor | None] = (), sums: Divided | None = None,
    ) -> None:  # fmt: skip
        wide = padding.padded_problem(problem)
        if wide is not None:
            return padding.backward(self.backward, problem, wide, x, do, dq, dk, dv, dparams, sums, dtables=dtables)
        # dk and dv that are terms of a sum are triton's (see launch.backward), which adds up params in a fixed order.
        by_triton = torch.are_deterministic_algorithms_enabled() or dk.dtype != problem.dtype
        simpler = None if by_triton else looked_up(problem)
        if simpler is not None and dparams is not None:
            dtables, dparams = gradients_of(problem, dtables, dparams), None
            problem, x = simpler, operands_of(problem, x)
        with on_device_of(dq):
            _launch().backward(problem, x, do, dq, dk, dv, dparams, dtables=dtables, sums=sums)
