"""Backends: which of them can run a problem, which one does, and why the others do not.

A backend is an object with a name, a ``supports`` that answers in words, and a forward and backward that write into
tensors they are given. To add one: write a module with a class of such objects and put its place into ``BACKENDS``
below, before those it should be preferred to.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pkgutil import resolve_name
from typing import Any, Protocol

import torch
from torch import Tensor

from gdpa.backends import padding
from gdpa.errors import UnsupportedProblemError
from gdpa.problem import ABS, EXP, PLAIN, SUM, Divided, Operands, Problem

# Where each is, in the order of preference. Imported on first use, so that `import gdpa` loads no kernel.
BACKENDS = {
    "hopper": "gdpa.backends.hopper:HopperBackend",
    "triton": "gdpa.backends.triton:TritonBackend",
    "cpu": "gdpa.backends.cpu:CpuBackend",
    "reference": "gdpa.reference:ReferenceBackend",
}


class Backend(Protocol):
    """What the ops need of a backend. ``supports`` is asked about the whole call; ``forward`` and ``backward`` only get
    problems whose heads all share one function (ops/heads.py slices the others)."""

    name: str

    def supports(self, problem: Problem) -> str | None:
        """None if this backend can run ``problem``, otherwise the reason in words."""

    def forward(self, problem: Problem, x: Operands, out: Tensor, sums: Tensor | None = None) -> None:
        """Write ``out`` (out_batch, Hq, rows_q, Dv), every element of it; and, where problem.norm is not PLAIN, the
        ``sums`` (out_batch, Hq, rows_q) of rows that belong to a sequence."""

    def backward(
        self, problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None,
        dtables: Sequence[Tensor | None] = (), sums: Divided | None = None,
    ) -> None:  # fmt: skip
        """Write the gradients, shaped like q, k, v and params. dk and dv may be wider than k and v (fp32). Those of the
        function's tables (None for integers) are added to ``dtables``, which is empty if nobody wants them; ``sums`` is
        there where problem.norm is not PLAIN. A backend that refuses such problems need not take these."""


@cache
def get(name: str) -> Backend:
    """The backend called ``name``."""
    check_name(name)
    backend: Backend = resolve_name(BACKENDS[name])()
    return backend


def interpreting() -> bool:
    """Whether Triton's kernels are run by its interpreter, on the CPU, instead of being compiled."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


_here = nullcontext()


def on_device_of(t: Tensor) -> AbstractContextManager[Any]:
    """With the device of ``t`` as the current one, which it almost always is already."""
    here = not t.is_cuda or t.get_device() == torch.cuda.current_device()
    return _here if here else torch.cuda.device_of(t)


def check_name(name: str | None) -> None:
    """Refuse what is neither the name of a backend nor None, the best one."""
    if name is not None and not (isinstance(name, str) and name in BACKENDS):
        raise ValueError(f"backend={name!r} is unknown; known backends: {', '.join(BACKENDS)}")


def select(problem: Problem, requested: str | None) -> Backend:
    """The backend that runs ``problem``: the requested one, or the first of BACKENDS that can."""
    if requested is not None:
        backend = get(requested)
        reason = backend.supports(problem)
        if reason is not None:
            raise UnsupportedProblemError(f"backend={requested!r} cannot run this call: {reason}")
        return backend
    for name in BACKENDS:
        if get(name).supports(problem) is None:
            _warn_of_plain_code(problem, name)
            return get(name)
    raise UnsupportedProblemError(f"no backend can run this call:\n{explain(problem, None)}")


def _warn_of_plain_code(problem: Problem, chosen: str) -> None:
    """On a GPU nobody expects plain PyTorch, which keeps all Lq x Lk weights. (Each reason is told once.)"""
    if chosen == "reference" and problem.device.type != "cpu":
        reason = get("triton").supports(problem)
        warnings.warn(
            "gdpa: this call runs as plain PyTorch, which is slow and keeps a matrix of weights for every head, since "
            f"no kernel takes it: {reason}. backend='reference' asks for that",
            stacklevel=2,
        )


def explain(problem: Problem, requested: str | None) -> str:
    """One line per backend: which runs, and why each other one does not."""
    lines, chosen = [], None
    for name in BACKENDS:
        reason = get(name).supports(problem)
        if reason is not None:
            lines.append(f"  {name}: no, {reason}")
        elif requested not in (None, name):
            lines.append(f"  {name}: could run, but backend={requested!r} was requested")
        elif chosen is None:
            chosen = name
            lines.append(f"  {name}: runs" + (", as requested" if requested else ", the first that can"))
        else:
            lines.append(f"  {name}: could run, but {chosen} is preferred")
    head = f"backend: {chosen}" if chosen else "backend: none can run this call"
    return "\n".join(
        [
            head,
            f"precision: {problem.precision}{_meaning(problem, chosen)}",
            *_explain_sums(problem),
            *_explain_places(problem),
            *_explain_padding(problem, chosen),
            *_explain_backward(problem, chosen),
            *lines,
        ]
    )


def _explain_backward(problem: Problem, chosen: str | None) -> list[str]:
    """The functions whose backward the chosen backend leaves to another one."""
    elsewhere = getattr(get(chosen), "backward_elsewhere", None) if chosen else None
    found = elsewhere(problem) if elsewhere else []
    return [f"backward of {name}: by the triton backend: {reason}" for name, reason in found]


def _meaning(problem: Problem, backend: str | None) -> str:
    """What "fast" does to a call, in brackets."""
    if problem.precision == "exact":
        return ""
    narrow = backend == "triton" and problem.dtype == torch.float32 and not interpreting()
    return " (products of float32 in TF32)" if narrow else " (no faster form here: same as exact)"


def _explain_padding(problem: Problem, chosen: str | None) -> list[str]:
    """What kernels are given instead of the caller's tensors."""
    wide = padding.padded_problem(problem) if chosen in ("hopper", "triton") else None
    if wide is None:
        return []
    given, taken = ((p.head_dim, p.head_dim_v) for p in (problem, wide))
    copied = "in copies of q, k, v and the result"
    return [f"head dimensions: {given[0]} and {given[1]}, padded to {taken[0]} and {taken[1]} {copied}"]


def _explain_sums(problem: Problem) -> list[str]:
    """What outputs are divided by."""
    said = {
        PLAIN: "not divided",
        SUM: "divided by the sum of its row",
        ABS: "divided by the sum of its row's absolute values",
        EXP: "divided by the sum of its row, with the maximum of its exponents subtracted",
    }
    kinds = dict.fromkeys(zip(problem.activations, problem.norms, strict=False))
    return [f"row sums: {act.name.removesuffix('_exponent')}: {said[norm]}" for act, norm in kinds]


def _explain_places(problem: Problem) -> list[str]:
    """Where the tables of a placed function are read, and what becomes of a mask."""
    lines = []
    for act in dict.fromkeys(problem.activations):
        if act.placed is None:
            continue
        program = act.placed.program
        lines.append(f"function: {act.name}, reads positions {', '.join(program.positions) or 'none'}")
        for i, kind in enumerate(program.tables):
            where = program.looked_up(i)
            lines.append(f"  tables[{i}] ({str(kind.dtype).removeprefix('torch.')}): {where}")
    if problem.mask is not None:
        lines.append(f"mask: {problem.mask.name}; tiles that it leaves empty are skipped, whole ones are not masked")
    return lines
