"""The functions the tests run on: every built-in, and functions as people write them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gdpa.functions.builtin import BUILTINS


@dataclass(frozen=True)
class Function:
    """``fn(s, *params)``, and the numbers a test needs to use it.

    A param is a float (shape ()) or a tuple (one value per head, repeated as needed). ``spread`` is the standard
    deviation of scores that keeps p within float16. ``smooth``: differentiable twice, and no steps. ``grid``: where
    values are compared with float64. ``rounding``: the relative precision of what f computes in 16 bits itself.
    ``interpreted``: not if it casts to bfloat16, which Triton's interpreter gets wrong.
    """

    name: str
    fn: Callable[..., Tensor]
    params: tuple[float | tuple[float, ...], ...] = ()
    spread: float = 2.5
    smooth: bool = True
    grid: tuple[float, float] = (-30.0, 30.0)
    builtin: bool = False
    rounding: float = 0.0
    interpreted: bool = True

    @property
    def activation(self) -> Any:
        """What a user passes as ``activation``."""
        return self.name if self.builtin else self.fn

    def make_params(self, heads: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """Differentiable params of shape () or (heads,)."""

        def values(p: float | tuple[float, ...]) -> Any:
            return [p[h % len(p)] for h in range(heads)] if isinstance(p, tuple) else p

        return tuple(torch.tensor(values(p), device=device, dtype=dtype).requires_grad_() for p in self.params)

    def scalar_params(self) -> tuple[float, ...]:
        return tuple(p[0] if isinstance(p, tuple) else p for p in self.params)

    def __repr__(self) -> str:
        return self.name


KINKED = {"relu", "relu_squared", "leaky_relu", "hardswish", "elu"}
BUILTIN_FUNCTIONS = tuple(
    Function(
        fn.__name__, fn, builtin=True, smooth=fn.__name__ not in KINKED, spread=1.5 if fn.__name__ == "exp" else 2.5
    )
    for fn in BUILTINS
)

USER_FUNCTIONS: list[Function] = []


def user(**settings: Any) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Put a function into the library."""

    def add(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = settings.pop("name", None) or fn.__name__
        USER_FUNCTIONS.append(Function(name, fn, **settings))
        return fn

    return add


# ---- compositions ----------------------------------------------------------------------------------------------------
@user()
def squared_softplus(s):
    return F.softplus(s) ** 2


@user()
def damped_sine(s):
    return torch.sin(2 * s) * torch.exp(-0.125 * s * s) + 0.1 * s


@user()
def gaussian(s):
    return torch.exp(-(s**2) / 8)


@user()
def rational(s):
    return (1 + s) / (1 + 0.3 * s * s) - torch.reciprocal(2 + s.square())


@user()
def polynomial(s):
    return 0.01 * s**3 - 0.2 * s**2 + torch.pow(s, 1) + 0.5


@user()
def soft_exponent(s):
    return torch.exp2(0.25 * s) * torch.rsqrt(1 + s * s)


@user()
def bounded_below(s):
    """Weights that stay positive, however far the scores are."""
    return 1 + 1e-5 - torch.erf(s / 2)


@user()
def swish_of_tanh(s):
    t = torch.tanh(s / 3)
    return t * torch.sigmoid(4 * t) + F.logsigmoid(s)


@user()
def hyperbolic(s):
    return torch.sinh(s / 4) / torch.cosh(s / 4) ** 2 + 0.01 * torch.cosh(s / 8)


@user()
def trigonometry(s):
    u = torch.tanh(s / 4) * 0.9
    return torch.asin(u) - torch.acos(u / 2) + torch.atan(s) + torch.tan(0.5 * u) * torch.cos(s)


@user()
def inverse_hyperbolic(s):
    return torch.asinh(s) + torch.atanh(torch.tanh(s / 6) * 0.5) - 0.1 * torch.acosh(2 + s * s)


@user()
def logarithms(s):
    u = 1.5 + s * s
    return torch.log(u) - torch.log2(u) / 3 + torch.log1p(s * s) * 0.2 + torch.log10(u)


@user()
def error_functions(s):
    return torch.erf(s / 2) + 0.5 * torch.erfc(0.4 * s) * torch.expm1(-s.abs() / 4 - s * s / 16)


@user()
def two_gelus(s):
    return F.gelu(s) - 0.25 * F.gelu(1 - s, approximate="tanh")


@user()
def many_activations(s):
    return F.silu(s) + F.mish(0.5 * s) - 0.5 * F.softsign(s) + 0.1 * F.tanhshrink(s)


# ---- kinks -----------------------------------------------------------------------------------------------------------
@user(smooth=False)
def clamped_ramp(s):
    return s.clamp(-1.5, 2.5) + s.clamp_min(-3) * 0.1 - 0.2 * s.clamp(max=1.25)


@user(smooth=False)
def kinks(s):
    return F.hardtanh(s, -2.0, 1.0) + F.leaky_relu(s, 0.2) - 0.5 * F.relu6(s) + s.abs() * 0.25


@user(smooth=False)
def hard_gates(s):
    return F.hardswish(s) + F.hardsigmoid(s) * F.threshold(s, 0.5, -0.25)


@user(smooth=False)
def exponential_units(s):
    return F.elu(s, alpha=0.7) + F.selu(0.5 * s) - F.celu(s, alpha=1.5)


@user(smooth=False)
def shrinks(s):
    return F.softshrink(s, 0.75) - 0.5 * F.hardshrink(s, 1.25)


@user(smooth=False)
def extremes(s):
    return torch.minimum(s, 2 - s) + torch.maximum(0.5 * s, -s) - torch.max(s, torch.tensor(1.0))


@user(smooth=False)
def sawtooth(s):
    return torch.remainder(s, 1.75) - torch.fmod(s, 0.8) + torch.frac(s) * 0.5


@user(smooth=False)
def staircase(s):
    return torch.floor(s) * 0.25 + torch.ceil(2 * s) * 0.125 - torch.round(s) * s * 0.1 + torch.trunc(s) + 0.1 * s


@user(smooth=False)
def signs(s):
    return torch.sign(s) * torch.sqrt(s.abs() + 0.25) + 0.3 * torch.sgn(s - 1)


@user(smooth=False)
def straight_through(s):
    return s + (torch.round(s) - s).detach()


# ---- guards ----------------------------------------------------------------------------------------------------------
@user(smooth=False)
def guarded_log(s):
    safe = torch.where(s > 0.1, s, 1.0)
    return torch.where(s > 0.1, torch.log(safe) + 2.5, s)


@user(smooth=False)
def signed_sqrt(s):
    positive = s > 0
    root = torch.sqrt(torch.where(positive, s, 1.0))
    return torch.where(positive, root, -0.1 * torch.sqrt(torch.where(positive, 1.0, 1e-3 - s)))


@user(smooth=False)
def sharp_softplus(s):
    return F.softplus(s, beta=3.0, threshold=5.0)


@user(smooth=False)
def mended(s):
    nearest = torch.round(s)
    u = nearest + 0.25 + 0.1 * (s - nearest)  # negative or positive, never near 0
    return torch.nan_to_num(torch.log(u), nan=-0.5) + s * 0.1


@user(smooth=False)
def banded(s):
    inside = torch.logical_and(s > -2, ~(s >= 3))
    outer = (s < -5) | torch.logical_xor(s > 6, s > 7)
    return torch.where(inside, s * s, torch.where(outer, torch.zeros_like(s), -s)) + s.masked_fill(s.ne(s), 0.0)


@user()
def double_where(s):
    """log1p of a large exponential, as written by someone who has been bitten by inf * 0."""
    big = s > 15
    return torch.where(big, s, torch.log1p(torch.exp(torch.where(big, torch.zeros_like(s), s))))


# ---- powers ----------------------------------------------------------------------------------------------------------
@user(smooth=False)
def powers(s):
    a = s.abs() + 0.5
    return a**1.5 - torch.pow(a, -2) + torch.sqrt(a) * 0.5 + a**-0.5 + 1e-3 * s**5


@user(grid=(-6.0, 6.0))
def tenth_power(s):
    return (s / 4) ** 10 * 1e-2 + torch.pow(1.5, s)


@user(params=(1.7,))
def power_of_a_param(s, exponent):
    return torch.pow(F.softplus(s) + 0.1, exponent)


# ---- params ----------------------------------------------------------------------------------------------------------
@user(params=((0.1, 0.25, -0.3),), smooth=False)
def prelu(s, slope):
    return torch.where(s > 0, s, slope * s)


@user(params=(0.7, (-0.4, 0.3)))
def gelu_with_temperature(s, temperature, shift):
    return F.gelu(s / temperature + shift)


@user(params=(0.8, (1.3, 0.6), -0.2))
def scaled_sigmoid(s, height, slope, shift):
    return height * torch.sigmoid(slope * s + shift)


@user(params=((0.9, 1.4),), smooth=False)
def clamped_by_param(s, bound):
    return torch.maximum(torch.minimum(s, bound), -bound) + 0.1 * s


@user(params=(0.6,))
def only_the_param(s, height):
    return torch.exp(height).expand_as(s) * torch.ones_like(s)


@user(params=(0.3, 0.9))
def lerped(s, weight, slope):
    return torch.lerp(F.silu(s), s * slope, weight)


# ---- how people write ------------------------------------------------------------------------------------------------
@user(smooth=False)
def in_place(s):
    s.mul_(0.5).add_(0.1)
    y = s.clone()
    y.clamp_(min=-1).sub_(s.relu_())
    y += 2.0
    return y.tanh_()


@user()
def constants(s):
    half = torch.tensor(0.5)
    ones = torch.ones_like(s)
    return s * half + torch.full_like(s, 0.25) * ones - s.new_zeros(s.shape) + torch.full(s.shape, 0.125)


@user(smooth=False)
def fused_arithmetic(s):
    y = torch.addcmul(s, s, s + 1, value=0.1) - torch.addcdiv(s, s, 1 + s * s, value=0.5)
    return torch.add(y, s, alpha=0.3) - torch.rsub(s, 2.0, alpha=0.5) + torch.sub(s, 1, alpha=2)


@user(smooth=False, rounding=2**-9, interpreted=False)
def sixteen_bits(s):
    return s.to(torch.bfloat16).float() * 0.5 + s.half().to(torch.float32).tanh()


@user(smooth=False, rounding=2**-10)
def half_precision(s):
    return torch.sigmoid(s.half()).float() + (s.half() * s.half()).to(s.dtype) * 0.01


@user()
def double_precision(s):
    d = s.double()
    return (torch.exp(-d * d) + torch.log1p(d * d) + 0.1 * torch.pow(d * d + 1, 0.3)).float()


@user(smooth=False)
def integers(s):
    step = s.to(torch.int32)
    return (step % 3).float() * 0.5 + step * 0.1 + (s > step).to(s.dtype) * s


@user(smooth=False)
def whole_quotients(s):
    step = s.to(torch.int32)
    y = torch.div(step, 3, rounding_mode="trunc") + torch.div(step, -2, rounding_mode="floor") + 7 // (step.abs() + 1)
    mixed = torch.div(s, step.abs() + 1, rounding_mode="floor") + torch.div(s.double(), 0.7, rounding_mode="trunc")
    return (y + mixed).to(s.dtype) * 0.25 + s


@user(smooth=False)
def whole_numbers_keep_their_digits(s):
    small = s.detach().abs().to(torch.uint8) - 3  # below 0 it wraps around
    large = (s.int() + 2**24 == 2**24 + 1) | (s.long() + 2**53 > 2**53)
    return small.to(s.dtype) * 0.01 + torch.where(large, s, 0.5 * s)


@user()
def logaddexp(s):
    return torch.logaddexp(s, torch.zeros_like(s)) + torch.atan2(s, 1 + s * s)


def _scaled(alpha: float, power: int) -> Callable[[Tensor], Tensor]:
    return lambda s: alpha * F.relu(s) ** power


def _shifted(s: Tensor, shift: float, *, gain: float = 1.0) -> Tensor:
    return gain * torch.tanh(s - shift)


USER_FUNCTIONS += [
    Function("closure", _scaled(0.25, 2), smooth=False),
    Function("partial", functools.partial(_shifted, shift=0.5, gain=1.5)),
    Function("lambda", lambda s: F.silu(s) / math.sqrt(7.0)),
    Function("torch_function", torch.atan),
    Function("method", Tensor.sigmoid),
    Function("nn_sequential", nn.Sequential(nn.GELU("tanh"), nn.Softplus(beta=0.5), nn.Tanh())),
    Function("nn_hardshrink", nn.Hardshrink(0.3), smooth=False),
    Function("nn_celu", nn.CELU(0.5), smooth=False),
    Function("nn_logsigmoid", nn.LogSigmoid()),
    Function("nn_threshold", nn.Threshold(0.5, 0.1), smooth=False),
]

FUNCTIONS: tuple[Function, ...] = (*BUILTIN_FUNCTIONS, *USER_FUNCTIONS)
BY_NAME = {f.name: f for f in FUNCTIONS}
