"""The built-in activations: ordinary torch functions, compiled like anybody's."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def identity(s: Tensor) -> Tensor:
    """s. Linear attention without a kernel trick."""
    return s.clone()


def relu(s: Tensor) -> Tensor:
    """max(s, 0) (ReLU attention: set out_scale = 1 / L)."""
    return F.relu(s)


def relu_squared(s: Tensor) -> Tensor:
    """max(s, 0)^2 (Primer, Mega)."""
    r = F.relu(s)
    return r * r


def leaky_relu(s: Tensor) -> Tensor:
    """s if s > 0 else 0.01 s."""
    return F.leaky_relu(s)


def gelu(s: Tensor) -> Tensor:
    """s Phi(s) = 0.5 s (1 + erf(s / sqrt 2)) (GDPA, Kunlun)."""
    return F.gelu(s)


def gelu_tanh(s: Tensor) -> Tensor:
    """0.5 s (1 + tanh(sqrt(2/pi) (s + 0.044715 s^3)))."""
    return F.gelu(s, approximate="tanh")


def silu(s: Tensor) -> Tensor:
    """s sigmoid(s) (HSTU: set out_scale = 1 / N)."""
    return F.silu(s)


def hardswish(s: Tensor) -> Tensor:
    """s clamp(s + 3, 0, 6) / 6."""
    return F.hardswish(s)


def sigmoid(s: Tensor) -> Tensor:
    """1 / (1 + e^-s) (sigmoid attention)."""
    return torch.sigmoid(s)


def tanh(s: Tensor) -> Tensor:
    """tanh(s)."""
    return torch.tanh(s)


def softplus(s: Tensor) -> Tensor:
    """log(1 + e^s), s itself beyond 20."""
    return F.softplus(s)


def elu(s: Tensor) -> Tensor:
    """s if s > 0 else e^s - 1."""
    return F.elu(s)


def mish(s: Tensor) -> Tensor:
    """s tanh(log(1 + e^s))."""
    return F.mish(s)


def laplace(s: Tensor) -> Tensor:
    """0.5 (1 + erf((s - mu) / (sigma sqrt 2))), mu = sqrt(1/2), sigma = sqrt(1/(4 pi)) (Mega)."""
    mu, sigma = math.sqrt(0.5), math.sqrt(0.25 / math.pi)
    return 0.5 * (1.0 + torch.erf((s - mu) / (sigma * math.sqrt(2.0))))


def exp(s: Tensor) -> Tensor:
    """e^s: softmax's numerator."""
    return torch.exp(s)


BUILTINS = (
    identity, relu, relu_squared, leaky_relu, gelu, gelu_tanh, silu, hardswish,
    sigmoid, tanh, softplus, elu, mish, laplace, exp,
)  # fmt: skip
