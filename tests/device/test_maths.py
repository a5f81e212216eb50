"""The element-wise device functions against float64: accuracy in units of the last place, and special values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from support import GPU, INTERPRET

if not (INTERPRET or GPU):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from device.elementwise import evaluate

pytestmark = pytest.mark.triton

# Results below 2^-126 may be flushed to zero, as GPUs do.
SMALLEST = 2.0**-126


def units(got: Tensor, exact: Tensor) -> Tensor:
    """|got - exact| in units of the last place of float32; 0 where both are NaN, or the same after rounding."""
    unit = torch.ldexp(torch.ones_like(exact), (torch.frexp(exact).exponent - 24).clamp_min(-149))
    error = (got.double() - exact).abs() / unit
    same = (got == exact.float()) | (got.isnan() & exact.isnan()) | (exact.abs() < SMALLEST) & (got.abs() <= SMALLEST)
    return torch.where(same, 0.0, error).nan_to_num(nan=math.inf, posinf=math.inf)


def scores() -> Tensor:
    """[-30, 30] densely, everything up to overflow, around 1 and close to 0."""
    tiny = 10.0 ** torch.linspace(-30, 0, 2000)
    return torch.cat(
        [torch.linspace(-30, 30, 20001), torch.linspace(-105, 105, 5001), torch.linspace(-1, 1, 5001), tiny, -tiny]
    )


# Device code, the same in torch, and the units of the last place it may be off.
ACCURATE = {
    "maths.exp(x)": (torch.exp, 3), "tl.exp2(x)": (torch.exp2, 3), "maths.expm1(x)": (torch.expm1, 6),
    "tl.log(x)": (torch.log, 4), "tl.log2(x)": (torch.log2, 4), "maths.log1p(x)": (torch.log1p, 6),
    "tl.sin(x)": (torch.sin, 3), "tl.cos(x)": (torch.cos, 3), "maths.tan(x)": (torch.tan, 6),
    "maths.asin(x)": (torch.asin, 6), "maths.acos(x)": (torch.acos, 6), "maths.atan(x)": (torch.atan, 5),
    "maths.sinh(x)": (torch.sinh, 6), "maths.cosh(x)": (torch.cosh, 6), "maths.tanh(x)": (torch.tanh, 6),
    "maths.sigmoid(x)": (torch.sigmoid, 5), "tl.erf(x)": (torch.erf, 3), "maths.erfc(x)": (torch.erfc, 7),
    "tl.sqrt_rn(x)": (torch.sqrt, 0.5), "tl.rsqrt(x)": (torch.rsqrt, 3), "1.0 / x": (torch.reciprocal, 2),
    "maths.pow(x, 1.5)": (lambda x: x**1.5, 4), "maths.pow(x, 10.0)": (lambda x: x**10, 4),
    "maths.pow(x, -3.0)": (lambda x: x**-3.0, 4), "maths.pow(x, 0.3125)": (lambda x: x**0.3125, 4),
    "maths.pow(1.25, x)": (lambda x: 1.25**x, 4),
    "maths.fmod(x, 1.5)": (lambda x: torch.fmod(x, 1.5), 0.5),
    "maths.fmod(x, -0.375)": (lambda x: torch.fmod(x, -0.375), 0.5),
    "maths.remainder(x, 1.5)": (lambda x: torch.remainder(x, 1.5), 0.5),
    "maths.remainder(x, -0.375)": (lambda x: torch.remainder(x, -0.375), 0.5),
    "maths.round(x)": (torch.round, 0), "maths.trunc(x)": (torch.trunc, 0), "maths.sign(x)": (torch.sign, 0),
    "tl.floor(x)": (torch.floor, 0), "tl.ceil(x)": (torch.ceil, 0),
}  # fmt: skip


@pytest.mark.parametrize("code", ACCURATE)
def test_accuracy(code):
    reference, allowed = ACCURATE[code]
    x = scores()
    exact = reference(x.double())
    error = units(evaluate(code, x), exact)
    # tan and sin lose all digits near their zeros at large arguments, in any implementation of float32
    i = int(error.argmax())
    assert error[i] <= allowed, f"{error[i]:.1f} units at {x[i].item()!r}: exact value {exact[i].item()!r}"


SPECIAL = torch.tensor(
    [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 88.0, -88.0, 104.0, -104.0, 1e4,
     -1e4, 1e30, -1e30, 3e38, -3e38, 8388609.0, -8388609.0, 4194305.5, 2147483648.0]
)  # fmt: skip
# sin and cos of huge numbers are not expected to reduce them exactly; a quotient beyond 2^29 leaves no remainder.
ORDINARY_ONLY = {"tl.sin(x)", "tl.cos(x)", "maths.tan(x)"} | {c for c in ACCURATE if "mod" in c or "remainder" in c}


@pytest.mark.parametrize("code", ACCURATE)
def test_special_values(code):
    reference, allowed = ACCURATE[code]
    x = SPECIAL[~(SPECIAL.abs() > 1e6) | SPECIAL.isinf()] if code in ORDINARY_ONLY else SPECIAL
    if "pow" in code:
        x = x[(x != 0) | ~torch.signbit(x)]  # (-0)^-3 is inf here, -inf in C
    got, exact = evaluate(code, x), reference(x.double())
    wrong = units(got, exact) > max(allowed, 1)
    table = [(a, b, c) for a, b, c in zip(x[wrong].tolist(), got[wrong].tolist(), exact[wrong].tolist(), strict=True)]
    assert not table, f"(x, got, exact): {table}"


ODD = ["maths.tanh(x)", "maths.sinh(x)", "maths.atan(x)", "maths.asin(x)", "maths.round(x)", "maths.trunc(x)"]


@pytest.mark.parametrize("code", ODD)
def test_sign_of_zero(code):
    assert torch.signbit(evaluate(code, torch.tensor([0.0, -0.0]))).tolist() == [False, True]


def pairs(values: list[float]) -> tuple[Tensor, Tensor]:
    x, y = torch.meshgrid(torch.tensor(values), torch.tensor(values), indexing="ij")
    return x.flatten().contiguous(), y.flatten().contiguous()


def test_pow_special_cases():
    """C's table of special cases, but for the sign of zero and of infinity at -0."""
    x, y = pairs([0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, torch.inf, -torch.inf, torch.nan, 1e10, -1e10, 33.0])
    got, exact = evaluate("maths.pow(x, y)", x, y), torch.pow(x.double(), y.double())
    wrong = units(got, exact) > 4
    assert not wrong.any(), list(zip(x[wrong].tolist(), y[wrong].tolist(), got[wrong].tolist(), strict=True))


def test_pow_accuracy():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(20000, generator=rng) * 40, (torch.rand(20000, generator=rng) - 0.5) * 40
    assert units(evaluate("maths.pow(x, y)", x, y), torch.pow(x.double(), y.double())).max() <= 4


def test_atan2():
    x, y = pairs([0.0, 1.0, -1.0, 0.3, -0.3, torch.inf, -torch.inf, torch.nan, 1e30, 1e-30, -1e-30, 3e38])
    assert units(evaluate("maths.atan2(x, y)", x, y), torch.atan2(x.double(), y.double())).max() <= 5
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 20000, generator=rng)
    assert units(evaluate("maths.atan2(x, y)", x, y), torch.atan2(x.double(), y.double())).max() <= 5


# The levels for 16-bit data: (relative, absolute) error that functions/accuracy/precision.py counts on.
COARSE = {
    "maths.tanh_approx(x)": (torch.tanh, 2**-11, 0.0), "maths.log2_close(x)": (torch.log2, 0.0, 2**-20),
    "maths.rcp_close(x)": (torch.reciprocal, 2**-22, 0.0), "maths.pow_close(x, 1.5)": (lambda x: x**1.5, 2**-16, 0.0),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("code", COARSE)
def test_coarse_levels_keep_their_bounds(code):
    reference, relative, absolute = COARSE[code]
    x = torch.linspace(-30, 30, 60001)
    exact = reference(x.double())
    got = evaluate(code, x).double()
    usable = exact.isfinite() & (x != 0)
    error = (got - exact).abs()[usable]
    allowed = (exact.abs() * relative + absolute + 2**-24)[usable]
    worst = int((error / allowed).argmax())
    assert (error <= allowed).all(), f"at {x[usable][worst]}: {error[worst]} of {allowed[worst]}"
