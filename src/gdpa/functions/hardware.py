"""What the special function unit makes of an operation: models of its errors, and an emulation of emitted code.

``emulate`` runs a graph as the kernels do: in float32, each instruction of the special function unit disturbed by its
error. For most of them that is the bound of the PTX manual, all to one side, which is what an error of one sign over
many keys would be. tanh.approx on compute capability 9.0 was measured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gdpa.functions.graph import Graph

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


def _tanh_sm90(x: Tensor, y: Tensor, sign: int) -> Tensor:
    noise = torch.minimum(4e-6*y.abs(), 0.02 * (1 - y.abs())) * _alternating(y)*sign
    return torch.where(x.abs() >= 8.0, y.sign() - y, noise)


def _alternating(y: Tensor) -> Tensor:
    """1, -1, 1, ...: errors without a mean."""
    return 1 - 2 * (torch.arange(y.shape[-1], device=y.device) % 2).to(y.dtype)


MANUAL: dict[str, Error] = {
    "exp2": _relative(2**-22), "log2": _log2, "reciprocal": _relative(2**-23), "sqrt": _relative(2**-23),
    "rsqrt": _relative(2**-22), "tanh": _tanh,
    "pow": _relative(2**-16),  # 2^(y log2 x), whose exponent is rounded
}  # fmt: skip
MODELS = {"cuda": MANUAL, "sm90": {**MANUAL, "tanh": _tanh_sm90}}


def emulate(graph: Graph, level: str, target: str, *inputs: Tensor, sign: int = 1) -> list[Tensor]:
    """The outputs of an expanded and folded graph (see expand.py, fold.py) on float32 ``inputs``."""
    models = {} if level == "accurate" else MODELS[target]
    values: list[Tensor] = []

    def hook(index: int, value: Tensor) -> Tensor:
        node = graph.nodes[index]
        model = models.get(node.op)
        if model is not None and node.dtype == torch.float32:
            x = values[node.args[0].index] if hasattr(node.args[0], "index") else value
            found = value + model(x, value, sign).to(value.dtype)
            value = torch.where(value.isfinite(), torch.where(found.abs() < SMALLEST, 0.0, found), value)
        values.append(value)
        return value

    return graph.evaluate(*(t.float() for t in inputs), hook=hook)
