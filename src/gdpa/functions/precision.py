"""Which approximations a function may use, decided by what they would do to its result.

Three levels of device code exist for costly operations: "accurate" (float32), "close" (1e-7 to 2e-5, by operation) and
"approx" (tanh and what is made of it from one MUFU instruction). For 16-bit data the cheapest level is taken whose
error stays below the rounding of the output: the function is evaluated in float64 on a dense grid with every such
operation disturbed by its error bound, in several sign patterns, and compared with the undisturbed one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from gdpa.functions.graph import Graph
from gdpa.functions.kept import KEPT

LEVELS = ("approx", "close", "accurate")  # cheapest first

# A bound on the error of each operation's device code, as a function of its exact result y.
Bound = Callable[[Tensor], Tensor]


def _relative(size: float) -> Bound:
    return lambda y: y.abs() * size


def _absolute(size: float) -> Bound:
    return lambda y: torch.full_like(y, size)


def _saturating(relative: float, tail: float) -> Bound:
    """For tanh: a relative error that cannot exceed a share of the distance to 1, since the result saturates there."""
    return lambda y: torch.minimum(y.abs() * relative, (1 - y.abs()) * tail)


# tanh.approx: the PTX manual allows 2^-11. On sm_90 it was measured at 2^24 points of [0, 12]: at most 1.1e-5 relative,
# and near 1 at most 6 % of the distance to 1, until the result is exactly 1 from 8.0 on (docs/kernels.md).
# "close": the manual's bounds for ex2, lg2 and rcp.
TANH_APPROX = {"cuda": _saturating(2**-11, 1.0), "sm90": _saturating(1.2e-5, 1.0)}
TANH_CLOSE = _saturating(2**-20, 1.0)


def _approximate(tanh: Bound) -> dict[str, Bound]:
    """Bounds of the operations that are built on tanh.approx."""

    def erf(y: Tensor) -> Tensor:
        return tanh(y) + torch.minimum(torch.full_like(y, 2.8e-4), 1 - y.abs())

    return {
        "tanh": tanh,
        "sigmoid": lambda y: 0.5 * tanh(2 * y - 1),
        "erf": erf,
        "erfc": lambda y: erf(1 - y),
    }


def _sigmoid_close(y: Tensor) -> Tensor:
    """1 / (1 + e^-x): near 1 the error of e^-x no longer counts, only those of the sum and of rcp."""
    return y * ((1 - y) * 2**-17 + 2**-22)


CLOSE: dict[str, Bound] = {
    "tanh": TANH_CLOSE, "sigmoid": _sigmoid_close, "erf": _absolute(2.3e-5), "exp": _relative(2**-17),
    "exp2": _relative(2**-20), "expm1": lambda y: (y + 1) * 2**-17, "log": _absolute(2**-20),
    "log2": _absolute(2**-20), "log1p": _absolute(2**-20), "pow": _relative(2**-16),
    "erfc": _absolute(2.3e-5), "sinh": lambda y: (y.abs() + 1) * 2**-17, "cosh": _relative(2**-17),
    "reciprocal": _relative(2**-22), "div": _relative(2**-21), "sqrt": _relative(2**-22), "rsqrt": _relative(2**-22),
}  # fmt: skip
UNIT = {torch.bfloat16: 2**-9, torch.float16: 2**-11}  # half an ulp of a number near 1
GRID = 30.0
SIGN_PATTERNS = 4
PARAM_SAMPLES = (-2.0, 0.1, 1.0, 3.0)  # values of params at which a function that has some is tried


@lru_cache(maxsize=KEPT)
def choose_level(graph: Graph, dtype: torch.dtype, target: str) -> str:
    """The cheapest level whose effect on every output of ``graph`` is below the rounding of ``dtype``."""
    if dtype not in UNIT or target not in TANH_APPROX:
        return "accurate"
    # Params can have any value, and no sample covers them all: the coarsest level is not tried then.
    for level in LEVELS[:-1] if graph.n_inputs == 1 else LEVELS[1:-1]:
        if worst_error(graph, level, target) <= UNIT[dtype]:
            return level
    return "accurate"


def worst_error(graph: Graph, level: str, target: str) -> float:
    """max |disturbed - exact| / max(1, |exact|) over the grid, sampled params, all outputs, several sign patterns."""
    s = torch.linspace(-GRID, GRID, 6001, dtype=torch.float64)
    bounds = {**CLOSE, **_approximate(TANH_APPROX[target])} if level == "approx" else CLOSE
    worst = 0.0
    for sample in PARAM_SAMPLES if graph.n_inputs > 1 else PARAM_SAMPLES[:1]:
        inputs = [s] + [torch.full_like(s, sample)] * (graph.n_inputs - 1)
        exact = torch.stack(graph.evaluate(*inputs))
        usable = exact.isfinite() & (exact.abs() < 1e30)
        for pattern in range(SIGN_PATTERNS):
            disturbed = torch.stack(graph.evaluate(*inputs, hook=_disturber(graph, bounds, pattern)))
            error = (disturbed - exact).abs() / exact.abs().clamp_min(1.0)
            worst = max(worst, _max(error[usable]))
    return worst


def _max(error: Tensor) -> float:
    return float(error.nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0


def _disturber(graph: Graph, bounds: dict[str, Bound], pattern: int) -> Callable[[int, Tensor], Tensor]:
    """A hook for Graph.evaluate that pushes each operation's result by its bound: all up, all down, or at random."""
    rng = torch.Generator().manual_seed(pattern)

    def hook(index: int, value: Tensor) -> Tensor:
        bound = bounds.get(graph.nodes[index].op)
        if bound is None or not value.is_floating_point():
            return value
        size = bound(value)
        if pattern < 2:
            return value + size * (1 - 2 * pattern)
        return value + size * torch.randint(0, 2, value.shape, generator=rng).mul(2).sub(1)

    return hook
