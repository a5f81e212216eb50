"""Every operation of the compiler's table, value and derivative, and its conventions at special points."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functions.evaluation import EPS, by_autograd, by_graph, worst
from gdpa.functions import activation
from gdpa.functions.activation import Activation, from_function
from gdpa.functions.recent.glance import RecentFunctions
from gdpa.functions.tracing import lower

Fn = Callable[[Tensor], Tensor]


def unit(s: Tensor) -> Tensor:
    """Scores brought into (-1, 1)."""
    return torch.tanh(s / 4) * 0.98


def positive(s: Tensor) -> Tensor:
    return s.abs() + 0.5


# What a person writes, under the name of the aten operation it becomes. Several spellings are one entry.
OPS: dict[str, Fn] = {
    "add": lambda s: s + 1.5 + (2 + s) + torch.add(s, s, alpha=3) + torch.add(s, 2, alpha=0.5),
    "sub": lambda s: s - 1.5 + (2 - s) * 3 + torch.sub(s, s * s, alpha=0.5) + torch.rsub(s, 1.0, alpha=2),
    "mul": lambda s: s * 1.5 * s + (-2) * s + s * True,
    "div": lambda s: s / 3 + 2 / positive(s) + s / positive(s) + torch.true_divide(s, 7),
    "div-trunc": lambda s: s * torch.div(s, 0.75, rounding_mode="trunc") + torch.div(s, -0.625, rounding_mode="floor"),
    "neg": lambda s: -s + torch.negative(s * s),
    "abs": lambda s: abs(s) + s.absolute(),
    "sign": lambda s: s * torch.sign(s - 0.3) + torch.sgn(s),
    "minimum": lambda s: torch.minimum(s, s * s) + torch.min(s, 1 - s),
    "maximum": lambda s: torch.maximum(s, s * s) + torch.max(s, 1 - s),
    "pow": lambda s: s**2 + s**3 + 1e-4 * s**7 + positive(s) ** 1.3 + positive(s) ** -1.5 + 1.2**s + 1e-9 * s**9,
    "pow-tensor": lambda s: torch.pow(positive(s), unit(s)) + s**0 + s**1,
    "fmod": lambda s: torch.fmod(s, 1.25) + torch.fmod(s, -0.7),
    "remainder": lambda s: torch.remainder(s, 1.25) + s % -0.7,
    "atan2": lambda s: torch.atan2(s, positive(s)) + torch.arctan2(positive(s), s),
    "sqrt": lambda s: torch.sqrt(positive(s)) + positive(s) ** 0.5,
    "rsqrt": lambda s: torch.rsqrt(positive(s)) + positive(s) ** -0.5,
    "reciprocal": lambda s: torch.reciprocal(positive(s)) + 1 / positive(s) + positive(s) ** -1,
    "exp": lambda s: torch.exp(s / 4),
    "exp2": lambda s: torch.exp2(s / 4),
    "expm1": lambda s: torch.expm1(s / 4) + torch.special.expm1(1e-3 * s),
    "log": lambda s: torch.log(positive(s)),
    "log2": lambda s: torch.log2(positive(s)),
    "log10": lambda s: torch.log10(positive(s)),
    "log1p": lambda s: torch.log1p(positive(s)) + torch.log1p(1e-3 * unit(s)),
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": lambda s: torch.tan(unit(s) * 1.4),
    "asin": lambda s: torch.asin(unit(s)),
    "acos": lambda s: torch.arccos(unit(s)),
    "atan": torch.atan,
    "sinh": lambda s: torch.sinh(s / 4),
    "cosh": lambda s: torch.cosh(s / 4),
    "tanh": torch.tanh,
    "asinh": torch.asinh,
    "acosh": lambda s: torch.acosh(1.01 + s.abs()),
    "atanh": lambda s: torch.atanh(unit(s)),
    "sigmoid": lambda s: torch.sigmoid(s) + torch.special.expit(-s),
    "erf": lambda s: torch.erf(s / 3),
    "erfc": lambda s: torch.erfc(s / 3),
    "floor": lambda s: s * torch.floor(s),
    "ceil": lambda s: s * torch.ceil(s),
    "round": lambda s: s * torch.round(s),
    "trunc": lambda s: s * torch.trunc(s) + torch.fix(s) + torch.frac(s),
    "where": lambda s: torch.where(s > 1, s, -s) + torch.where(s < 0, 2.0, s) + s.masked_fill(s < -1, 0.5),
    "isnan": lambda s: torch.where(torch.isnan(torch.log(s)), s, 2 * s),
    "isinf": lambda s: torch.where(torch.isinf(1 / torch.relu(s)), s, 2 * s) + torch.where(torch.isfinite(s), s, 0),
    "comparisons": lambda s: s * (s < 1) + (s <= 1) * 2 - (s > 2) * s + (s >= -1) * s + (s == 0) + (s != 1) * s,
    "logical_and": lambda s: torch.where(torch.logical_and(s > 0, s < 2) & (s < 1.5), s, -s),
    "logical_or": lambda s: torch.where(torch.logical_or(s > 1, s < -2) | (s > 3), s, -s),
    "logical_xor": lambda s: torch.where(torch.logical_xor(s > 1, s > -2) ^ (s > 3), s, -s),
    "xor-constants": lambda s: torch.where((s > 1) ^ True, s, 0.5 * s) + torch.where((s > -1) ^ False, s, 0.0),
    "fmod-of-a-number": lambda s: torch.fmod(torch.full_like(s, 2.0), positive(s)),
    "casts-to-the-scores": lambda s: (s > 0).to(s.dtype) * s + torch.lerp(s.long().to(s.dtype), s, 0.3),
    "logical_not": lambda s: torch.where(torch.logical_not(s > 1), s, -s) + torch.where(~(s > 1), s, 0.0),
    "clamp": lambda s: s.clamp(-1, 2) + torch.clip(s, max=3) + s.clamp_min(-0.5) + s.clamp(min=0.25) + s.clamp(3, 1),
    "clamp-tensor": lambda s: torch.clamp(s, torch.tensor(-1.0), torch.tensor(2.0)) + torch.clamp(s, s * 0.5, s * s),
    "relu": lambda s: torch.relu(s) + F.relu6(s) + F.threshold(s, 0.5, 0.1),
    "hardtanh": lambda s: F.hardtanh(s, -2, 1) + F.hardsigmoid(s) + F.hardswish(s),
    "leaky_relu": lambda s: F.leaky_relu(s, 0.3) + F.leaky_relu(s, -0.2),
    "elu": lambda s: F.elu(s, 0.7) + F.selu(s) + F.celu(s, 1.3),
    "gelu": lambda s: F.gelu(s) + F.gelu(s, approximate="tanh"),
    "silu": lambda s: F.silu(s) + F.mish(s),
    "softplus": lambda s: F.softplus(s) + F.softplus(s, beta=2, threshold=3) + F.softplus(s, beta=0.2, threshold=-1),
    "logsigmoid": F.logsigmoid,
    "softsign": lambda s: F.softsign(s) + F.tanhshrink(s),
    "softshrink": lambda s: F.softshrink(s, 0.4) + F.hardshrink(s, 1.1),
    "lerp": lambda s: torch.lerp(s, s * s, 0.3) + torch.lerp(s, 2 * s, torch.sigmoid(s)),
    "addcmul": lambda s: torch.addcmul(s, s, s + 1, value=0.3) + torch.addcdiv(s, s, positive(s), value=-2),
    "nan_to_num": lambda s: torch.nan_to_num(s) + torch.nan_to_num(torch.sqrt(s - 40), nan=1.5) * s,
    "casts": lambda s: s.double().sin().float() + s.half().float() + s.int() * s + s.long() + s.bool() * s,
    "integers": lambda s: s * (s.int() * 2 + 1 - (s.int() > 2) * 4) + s.to(torch.int16).clamp(-3, 3) + s.int() // 2,
    "copies": lambda s: s.clone().contiguous().detach() * s + torch.positive(s) + s.to(s.dtype),
    "constants": lambda s: s * torch.tensor(2) + torch.tensor(0.1, dtype=torch.float64) * s + torch.scalar_tensor(3.0),
    "filled": lambda s: s * torch.full_like(s, 2) + torch.zeros(s.shape) + s.new_full((), 1.5) + torch.ones_like(s),
    "expand": lambda s: s * torch.tensor(0.3).expand_as(s) + torch.broadcast_to(torch.tensor(1.0), s.shape),
}  # fmt: skip

every_op = pytest.mark.parametrize("name", OPS)
SCORES = torch.cat([torch.linspace(-12, 12, 961), torch.randn(200, generator=torch.Generator().manual_seed(1))])


@pytest.fixture(scope="module")
def traced() -> tuple[dict[str, Activation], set[str]]:
    """All of them, and torch's operations that they are made of."""
    met: set[str] = set()
    original = lower.lower_call

    def record(b, node, env, exact=False):
        met.add(node.target._schema.name.split("::")[1])
        return original(b, node, env, exact)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower, "lower_call", record)
        patch.setattr(activation, "_by_fingerprint", RecentFunctions())  # what other tests have traced is traced again
        patch.setattr(activation, "_by_key", WeakValueDictionary())
        return {name: from_function(fn, 0) for name, fn in OPS.items()}, met


@every_op
def test_graph_matches_autograd(name, traced):
    exact = by_autograd(OPS[name], SCORES.double())
    error = worst(by_graph(traced[0][name], SCORES.double()), exact)
    assert error.max() < 1e-6, f"p and ds differ by {error.tolist()}"


@every_op
@pytest.mark.triton
def test_emitted_code_matches_autograd(name):
    from device.elementwise import joint

    fn = OPS[name]
    exact = by_autograd(fn, SCORES.double())
    plain = worst(by_autograd(fn, SCORES), exact)
    error = worst(joint(from_function(fn, 0), SCORES).double()[1:], exact)
    assert (error <= (3 * plain).clamp_min(12 * EPS)).all(), f"p and ds differ by {error.tolist()}, torch {plain}"


# In the table for other versions of PyTorch: here its decompositions spell them with other operations; and for what
# make_fx traces (see tracing/record.py).
UNREACHED = {
    "_efficientzerotensor",
    "clamp_max", "clamp_min", "contiguous", "detach", "empty", "empty_like", "lift_fresh", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "positive", "sgn", "square", "zeros", "zeros_like",
}  # fmt: skip


def test_every_operation_of_the_table_is_tried(traced):
    tried = traced[1]
    table = {*lower.PRIMITIVE, *lower.COMPOSITE, *lower.SAME_VALUE, *lower.FILLED, *lower.ZEROS, *lower.ONES}
    assert table - tried <= UNREACHED, f"never tried: {sorted(table - tried - UNREACHED)}"


# ---- conventions -----------------------------------------------------------------------------------------------------
KINKS: dict[str, tuple[Fn, list[float]]] = {
    "relu": (torch.relu, [0.0, -0.0]),
    "abs": (torch.abs, [0.0, -0.0]),
    "sign": (lambda s: s * torch.sign(s), [0.0]),
    "leaky_relu": (lambda s: F.leaky_relu(s, 0.2), [0.0, -0.0]),
    "leaky_relu-negative": (lambda s: F.leaky_relu(s, -0.2), [0.0]),
    "elu": (lambda s: F.elu(s, 0.7), [0.0]),
    "selu": (F.selu, [0.0]),
    "celu": (lambda s: F.celu(s, 0.7), [0.0]),
    "clamp": (lambda s: s.clamp(-1.5, 2.0), [-1.5, 2.0]),
    "clamp_min": (lambda s: s.clamp(min=0.5), [0.5]),
    "clamp_max": (lambda s: s.clamp(max=0.5), [0.5]),
    "clamp-equal": (lambda s: s.clamp(1.0, 1.0), [0.5, 1.0, 2.0]),
    "clamp-crossed": (lambda s: s.clamp(2.0, 1.0), [0.5, 1.0, 1.5, 2.0, 3.0]),
    "hardtanh": (F.hardtanh, [-1.0, 1.0]),
    "relu6": (F.relu6, [0.0, 6.0]),
    "hardsigmoid": (F.hardsigmoid, [-3.0, 3.0]),
    "hardswish": (F.hardswish, [-3.0, 3.0]),
    "hardshrink": (lambda s: F.hardshrink(s, 0.5), [-0.5, 0.5]),
    "softshrink": (lambda s: F.softshrink(s, 0.5), [-0.5, 0.5]),
    "threshold": (lambda s: F.threshold(s, 0.5, 2.0), [0.5]),
    "maximum": (lambda s: torch.maximum(s, 2 - s), [1.0]),
    "minimum": (lambda s: torch.minimum(s, 2 - s), [1.0]),
    "maximum-constant": (lambda s: torch.maximum(s, torch.tensor(0.5)), [0.5]),
    "maximum-self": (lambda s: torch.maximum(s, s * 1), [0.3]),
    "where": (lambda s: torch.where(s >= 1, s * 3, s), [1.0]),
    "softplus": (lambda s: F.softplus(s, 2.0, 6.0), [3.0]),
    "floor": (lambda s: torch.floor(s) * s, [-1.0, 0.0, 1.0]),
    "round": (lambda s: torch.round(s) * s, [-1.5, -0.5, 0.5, 1.5, 2.5]),
    "remainder": (lambda s: torch.remainder(s, 1.5), [0.0, 1.5, -1.5]),
    "sqrt-at-0": (torch.sqrt, [0.0]),
    "pow-at-0": (lambda s: torch.pow(s, 1.5) + torch.pow(s, 2), [0.0]),
    "log-at-0": (torch.log, [0.0]),
    "reciprocal-at-0": (torch.reciprocal, [0.0]),
    "softsign": (F.softsign, [0.0]),
    "logsigmoid": (F.logsigmoid, [0.0]),
    "xlogy": (lambda s: torch.xlogy(s, s), [0.0]),
    "sinc": (torch.sinc, [0.0]),
    "asin-at-1": (torch.asin, [1.0, -1.0]),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "points"), KINKS.values(), ids=KINKS.keys())
def test_kinks_as_in_pytorch(fn, points):
    """Exactly at a kink, a bound or a tie the derivative is a convention: PyTorch's."""
    s = torch.tensor(points)
    assert worst(by_graph(from_function(fn, 0), s), by_autograd(fn, s)).max() < 4 * EPS


@pytest.mark.parametrize(("fn", "points"), KINKS.values(), ids=KINKS.keys())
@pytest.mark.triton
def test_emitted_kinks_as_in_pytorch(fn, points):
    from device.elementwise import joint

    s = torch.tensor(points)
    assert worst(joint(from_function(fn, 0), s)[1:].double(), by_autograd(fn, s)).max() < 4 * EPS


NON_FINITE = torch.tensor([torch.nan, torch.inf, -torch.inf])


@pytest.mark.parametrize(
    "fn",
    [torch.relu, torch.abs, torch.sign, torch.exp, torch.sigmoid, torch.tanh, torch.nan_to_num, F.hardtanh, torch.atan,
     lambda s: torch.maximum(s, -s), lambda s: s.clamp(-1, 1), lambda s: torch.where(s > 0, s, 0.0), F.softplus,
     torch.erf, torch.log1p, torch.expm1, torch.floor, torch.round, lambda s: s**2, lambda s: s / 2, lambda s: s * 0],
    ids=lambda fn: fn.__name__,
)  # fmt: skip
def test_non_finite_scores_as_in_pytorch(fn):
    expected = by_autograd(fn, NON_FINITE)[0]
    assert torch.equal(by_graph(from_function(fn, 0), NON_FINITE)[0].nan_to_num(7.0), expected.nan_to_num(7.0))
