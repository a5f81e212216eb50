"""Decompositions written so that a function and its derivative share their costly parts.

PyTorch's own tables decompose the backward of gelu, silu, mish, ... but leave some forwards whole, or write the two in
forms with nothing in common. Here both sides are spelled with the same erf, tanh or exp, which the graph then computes
once. Each pair is tested against PyTorch in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

aten = torch.ops.aten

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x * Phi(x), or its tanh form 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3)."""
    if approximate == "tanh":
        return (x * _tanh_u(x, x * x) + x) * 0.5
    return (x * torch.erf(x * math.sqrt(0.5)) + x) * 0.5


def _tanh_u(x: Tensor, sq: Tensor) -> Tensor:
    return torch.tanh(x * (sq * (SQRT_2_OVER_PI * CUBIC) + SQRT_2_OVER_PI))


def gelu_backward(g: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    """tanh form: 0.5 (1 + t) + 0.5 x (1 - t^2) u'.  erf form: Phi(x) + x phi(x)."""
    sq = x * x
    if approximate == "tanh":
        t = _tanh_u(x, sq)
        slope = x * (sq * (3 * SQRT_2_OVER_PI * CUBIC) + SQRT_2_OVER_PI)
        return g * (((1 - t * t) * slope + (t + 1)) * 0.5)
    density = torch.exp(sq * -0.5) * math.sqrt(2 / math.pi)
    return g * ((x * density + (torch.erf(x * math.sqrt(0.5)) + 1)) * 0.5)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def silu_backward(g: Tensor, x: Tensor) -> Tensor:
    """y = sigmoid(x): y (1 + x (1 - y))."""
    y = torch.sigmoid(x)
    return g * (y * (x * (1 - y) + 1))


def mish(x: Tensor) -> Tensor:
    """x tanh(softplus(x)) = x n / (n + 2) with n = e^x (e^x + 2); beyond 20 the ratio is 1 to float32."""
    e = torch.exp(torch.clamp_max(x, 20.0))
    n = e * (e + 2)
    return x * (n / (n + 2))


def mish_backward(g: Tensor, x: Tensor) -> Tensor:
    """r = n / (n + 2); dr/dx = 4 e (e + 1) / (n + 2)^2, zero past 20 where r has settled."""
    e = torch.exp(torch.clamp_max(x, 20.0))
    n = e * (e + 2)
    settled = 1 / (n + 2)
    return g * (x * (e * (e + 1) * 4 * settled * settled) + n * settled)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + e^(beta x)) / beta, and x itself past the threshold."""
    z = x * beta
    return torch.where(z > threshold, x, torch.log1p(torch.exp(z)) / beta)


def softplus_backward(g: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    """sigmoid(beta x) as e / (1 + e), sharing e with the value; e may be inf only where the other branch is taken."""
    z = x * beta
    e = torch.exp(z)
    return g * torch.where(z > threshold, 1.0, e / (e + 1))


def tanh_backward(g: Tensor, t: Tensor) -> Tensor:
    return g * (1 - t * t)


def sigmoid_backward(g: Tensor, y: Tensor) -> Tensor:
    return g * (y * (1 - y))


DECOMPOSITIONS = {
    aten.gelu.default: gelu,
    aten.gelu_backward.default: gelu_backward,
    aten.silu.default: silu,
    aten.silu_backward.default: silu_backward,
    aten.mish.default: mish,
    aten.mish_backward.default: mish_backward,
    aten.softplus.default: softplus,
    aten.softplus_backward.default: softplus_backward,
    aten.tanh_backward.default: tanh_backward,
    aten.sigmoid_backward.default: sigmoid_backward,
}
