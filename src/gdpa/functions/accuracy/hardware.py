"""What the special function unit makes of an operation: models of its errors, and an emulation of emitted code.

``emulate`` runs a graph as the kernels do: in float32, each instruction of the special function unit disturbed by its
error. For NVIDIA GPUs in general that is the bound of the PTX manual, all to one side: errors of one sign add up over
keys. Those of compute capability 9.0 were measured, and are no promise for any other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from gdpa.functions.accuracy import tanh_sm90
from gdpa.functions.graph import Graph, Ref

# (x, y, sign) -> the error of an instruction whose argument is x and exact result y; sign is which way it errs.
Error = Callable[[Tensor, Tensor, int], Tensor]

SMALLEST = torch.finfo(torch.float32).tiny  # what is below is flushed to 0


def _relative(size: float) -> Error:
    return lambda x, y, sign: y * (sign * size)


def _log2(x: Tensor, y: Tensor, sign: int) -> Tensor:
    """2^-22 absolute near 1, relative elsewhere."""
    return y.abs().clamp_min(1.0) * (sign * 2**-22)


def _tanh(x: Tensor, y: Tensor, sign: int) -> Tensor:
    """The manual's bound; the result does not exceed 1."""
    return torch.minimum(y.abs() * 2**-11, 1 - y.abs()) * y.sign() * sign


def _measured(mean: float, noise: float) -> Error:
    """Relative: an error of one sign, and one that averages out."""
    return lambda x, y, sign: y * (sign * mean + noise * _alternating(y))


def _log2_sm90(x: Tensor, y: Tensor, sign: int) -> Tensor:
    return y.abs().clamp_min(1.0) * (sign * 8e-8 + 5e-8 * _alternating(y))


def _tanh_sm90(x: Tensor, y: Tensor, sign: int) -> Tensor:
    mean, noise = _tanh_table()
    a = x.abs().nan_to_num(nan=0.0)
    # An integer holds no infinity.
    bins = (a.clamp_max(tanh_sm90.SATURATES_AT) * tanh_sm90.BINS_PER_UNIT).long().clamp_max(len(mean) - 1)
    error = (mean[bins] + sign * noise[bins] * _alternating(y)).to(y.dtype)
    return torch.where(a < tanh_sm90.SATURATES_AT, error * x.sign(), y.sign() - y)


@cache
def _tanh_table() -> tuple[Tensor, Tensor]:
    """Per bin the mean, and what is left of the root mean square."""
    mean, rms = (
        torch.tensor(t, dtype=torch.float64, device="cpu") * tanh_sm90.UNIT for t in (tanh_sm90.MEAN, tanh_sm90.RMS)
    )
    return mean, (rms**2 - mean**2).clamp_min(0.0).sqrt()


def _alternating(y: Tensor) -> Tensor:
    """1, -1, 1, ...: what has no mean."""
    return 1 - 2 * (torch.arange(y.shape[-1], device=y.device) % 2).to(y.dtype)


# The bounds of the PTX manual.
MANUAL: dict[str, Error] = {
    "exp2": _relative(2**-22), "log2": _log2, "reciprocal": _relative(2**-23), "sqrt": _relative(2**-23),
    "rsqrt": _relative(2**-22), "tanh": _tanh,
    "pow": _relative(2**-16),  # 2^(y log2 x), whose exponent is rounded
}  # fmt: skip
# Measured on an H200: the largest mean of any bin of arguments, and the root mean square.
SM90 = {
    **MANUAL, "exp2": _measured(5.2e-8, 3.5e-8), "log2": _log2_sm90, "reciprocal": _measured(1.4e-8, 4e-8),
    "tanh": _tanh_sm90,
}  # fmt: skip
MODELS = {"cuda": MANUAL, "sm90": SM90}


def emulate(graph: Graph, level: str, target: str, *inputs: Tensor, sign: int = 1) -> list[Tensor]:
    """The outputs of an expanded and folded graph (see expand.py, fold.py) on float32 ``inputs``."""
    models = {} if level == "accurate" else MODELS[target]
    values: list[Tensor] = []

    def hook(index: int, value: Tensor) -> Tensor:
        node = graph.nodes[index]
        model = models.get(node.op)
        if model is not None and node.dtype == torch.float32:
            x = values[node.args[0].index] if isinstance(node.args[0], Ref) else value
            found = value + model(x, value, sign).to(value.dtype)
            value = torch.where(value.isfinite(), torch.where(found.abs() < SMALLEST, 0.0, found), value)
        values.append(value)
        return value

    return graph.evaluate(*(t.float() for t in inputs), hook=hook)
