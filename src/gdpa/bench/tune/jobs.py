"""What is run to tune a class: a backend's kernels on a benchmark case, with a configuration of our choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gdpa import ops
from gdpa.backends.tuning import ShapeClass, dtype_name, key_class
from gdpa.bench.kernels import suite
from gdpa.bench.tune.select import Config, Job
from gdpa.masks.band import Band
from gdpa.problem import Operands, Problem, make_problem
from gdpa.spec import Loaded
from gdpa.testing.cases import Case, Inputs, make_inputs

NAMES = ("hopper", "triton")

# What no representative case has: a band, grouped heads, lengths of 0, 1 and one past a tile. The winner must agree
# here as well, since it will run such problems.
EDGES = Case(
    "edges", (0, 1, 129, 300, 64), (7, 0, 200, 300, 65), heads_k=2, packed_q=True, packed_k=True, causal=True
)  # fmt: skip


@dataclass(frozen=True)
class Tunable:
    """What tuning needs of a backend."""

    name: str
    columns: Callable[[int], int]
    candidates: Callable[[ShapeClass], tuple[Config, ...]]
    default: Callable[[Problem, str], Config]
    fits: Callable[[Problem, str, Config], bool]

    def class_of(self, case: Case, which: str, dtype: torch.dtype) -> ShapeClass:
        """The class that the case's problem has, without its tensors."""
        keys = sum(case.len_k) // len(case.len_k) if case.packed_k else case.len_k[0]
        columns = max(self.columns(case.d), self.columns(case.dv or case.d))
        return ShapeClass(self.name, which, dtype_name(dtype), columns, key_class(keys))


def tunable(name: str, capability: tuple[int, int]) -> Tunable:
    if name == "hopper":
        from gdpa.backends.hopper import config as hopper

        return Tunable(name, hopper.padded, hopper.candidates, hopper.default, hopper.fits)
    from gdpa.backends.triton import config as triton

    defaults = {"fwd": triton.forward_default, "bwd": triton.backward_default}
    return Tunable(
        name, triton.padded, triton.candidates(capability), lambda problem, which: defaults[which](problem, capability),
        lambda problem, which, config: True,
    )  # fmt: skip


def launcher(name: str) -> Any:
    """The backend's launch module, which imports Triton."""
    if name == "hopper":
        from gdpa.backends.hopper import launch as hopper

        return hopper
    from gdpa.backends.triton import launch as triton

    return triton


def make_job(
    backend: Tunable, which: str, case: Case, function: Loaded, dtype: torch.dtype, device: torch.device
) -> Job:
    """A pass of ``backend`` on the case, as the operator would launch it."""
    x = operands(case, make_inputs(case, dtype, device), function)
    problem = problem_of(case, x, function)
    launch = launcher(backend.name)
    out = ops.empty_output(x.q, x.v, problem.out_batch)
    if which == "fwd":
        results = {"out": out}

        def run(config: Config) -> None:
            launch.forward(problem, x, out, config)

    else:
        do = torch.randn_like(out)
        results = {name: torch.empty_like(t) for name, t in (("dq", x.q), ("dk", x.k), ("dv", x.v))}
        dparams = None if x.params is None else torch.empty_like(x.params)

        def run(config: Config) -> None:
            launch.backward(problem, x, do, *results.values(), dparams, config)

    return Job(
        case.name, function.name, len(case.len_q), backend.default(problem, which), run, results,
        lambda config: backend.fits(problem, which, config),
    )  # fmt: skip


def edges_job(backend: Tunable, shape: ShapeClass, function: Loaded, dtype: torch.dtype, device: torch.device) -> Job:
    return make_job(backend, shape.which, replace(EDGES, d=shape.columns), function, dtype, device)


def operands(case: Case, x: Inputs, function: Loaded) -> Operands:
    """The tensors in the layout of problem.py."""

    def rows(t: Tensor) -> Tensor:
        t = t.detach()
        if not case.varlen:
            return t
        return t.transpose(0, 1)[None] if t.ndim == 3 else t.transpose(1, 2)

    params = None
    if function.params:
        params = torch.tensor(function.params, device=x.q.device)[:, None].repeat(1, case.heads)
    return Operands(rows(x.q), rows(x.k), rows(x.v), x.cu_q, x.cu_k, params)


def problem_of(case: Case, x: Operands, function: Loaded) -> Problem:
    longest = (max(case.len_q), max(case.len_k)) if case.varlen else (None, None)
    return make_problem(x, (function.compile(),), case.d**-0.5, 1.0, Band(*case.band), *longest)


# ---- sizes -----------------------------------------------------------------------------------------------------------
def fitting(name: str, itemsize: int, free: int) -> Case:
    """The benchmark case, its batch halved until it needs at most half of the free memory."""
    batch = suite.FULL_SCALE.batch
    while True:
        case = suite.make(name, suite.Scale(batch, 1))
        if batch == 1 or memory_needed(case, itemsize) <= free // 2:
            return case
        batch //= 2


def memory_needed(case: Case, itemsize: int) -> int:
    """Bytes: inputs and results, the default's results beside them, dq and the comparison in float32."""
    n = case.elements()
    return 2 * case.bytes(itemsize, backward=True) + 4 * n["q"] + 8 * max(n.values())
