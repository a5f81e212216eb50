"""Which approximations a function may use, decided by what they would do to its result.

Three levels of device code exist for costly operations: "accurate" (float32), "close" (about 1e-6) and "approx"
(about 5e-4, one MUFU instruction). For 16-bit data the cheapest level is taken whose error stays below the rounding
of the output: the function is evaluated in float64 on a dense grid with every such operation disturbed by its error
bound, in several sign patterns, and compared with the undisturbed one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gdpa.functions.graph import Graph

LEVELS = ("approx", "close", "accurate")  # cheapest first

# Bounds (relative, absolute) on the error of each operation's device code. "close" comes from the PTX manual's bounds
# for ex2, lg2 and rcp; tanh.approx was measured on an H200 over all floats in [-30, 30] (docs/kernels.md).
ERROR = {
    "approx": {"tanh": (2**-11, 0.0), "sigmoid": (0.0, 2**-12), "erf": (0.0, 2**-11 + 2.8e-4)},
    "close": {
        "tanh": (0.0, 2**-20), "sigmoid": (0.0, 2**-20), "erf": (0.0, 2.3e-5), "exp": (2**-17, 0.0),
        "exp2": (2**-20, 0.0), "expm1": (2**-17, 2**-17), "log": (0.0, 2**-20), "log2": (0.0, 2**-20),
        "log1p": (0.0, 2**-20), "pow": (2**-16, 0.0), "reciprocal": (2**-22, 0.0), "div": (2**-21, 0.0),
        "sqrt": (2**-22, 0.0), "rsqrt": (2**-22, 0.0),
    },
}  # fmt: skip
UNIT = {torch.bfloat16: 2**-9, torch.float16: 2**-11}  # half an ulp of a number near 1
GRID = 30.0
SIGN_PATTERNS = 4


@cache
def choose_level(graph: Graph, dtype: torch.dtype) -> str:
    """The cheapest level whose effect on every output of ``graph`` is below the rounding of ``dtype``."""
    if dtype not in UNIT:
        return "accurate"
    if graph.n_inputs > 1:  # params can have any value, so no grid covers the function
        return "close"
    for level in LEVELS[:-1]:
        if worst_error(graph, level) <= UNIT[dtype]:
            return level
    return "accurate"


def worst_error(graph: Graph, level: str) -> float:
    """max |disturbed - exact| / max(1, |exact|) over the grid, all outputs and several sign patterns."""
    s = torch.linspace(-GRID, GRID, 6001, dtype=torch.float64)
    exact = torch.stack(graph.evaluate(s))
    usable = exact.isfinite() & (exact.abs() < 1e30)
    worst = 0.0
    for pattern in range(SIGN_PATTERNS):
        disturbed = torch.stack(graph.evaluate(s, hook=_disturber(level, pattern)))
        error = (disturbed - exact).abs() / exact.abs().clamp_min(1.0)
        worst = max(worst, _max(error[usable]))
    return worst


def _max(error: Tensor) -> float:
    return float(error.nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0


def _disturber(level: str, pattern: int):
    """A hook for Graph.evaluate that pushes each operation's result by its bound: all up, all down, or at random."""
    rng = torch.Generator().manual_seed(pattern)

    def hook(op: str, value: Tensor) -> Tensor:
        bound = ERROR[level].get(op) or (ERROR["close"].get(op) if level == "approx" else None)
        if bound is None or not value.is_floating_point():
            return value
        size = value.abs() * bound[0] + bound[1]
        if pattern < 2:
            return value + size * (1 - 2 * pattern)
        return value + size * torch.randint(0, 2, value.shape, generator=rng).mul(2).sub(1)

    return hook
