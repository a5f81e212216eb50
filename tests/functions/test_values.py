"""Every function of the library, value and derivatives, against float64 autograd of the Python function itself."""

from __future__ import annotations

import pytest
import torch

from functions.evaluation import EPS, UNIT, by_autograd, by_graph, compiled, grid, worst
from functions.library import FUNCTIONS, Function
from gdpa.functions.activation import from_function
from support import FULL, INTERPRET, bf16, f16, f32, f64

every_function = pytest.mark.parametrize("f", FUNCTIONS, ids=repr)
LARGE = torch.tensor([0.0, 88.0, 89.0, 104.0, 1e3, 1e4, 1e6, 1e10, 1e-3, 1e-10, 1e-30, 20.0, 44.0])
LARGE = torch.cat([LARGE, -LARGE])


def interpretable(f: Function) -> None:
    if INTERPRET and not f.interpreted:
        pytest.skip("Triton's interpreter casts to bfloat16 wrongly")


@every_function
def test_graph_matches_autograd(f):
    """Derivatives keep constants in float32, so 1e-6 is the accuracy to ask for."""
    s = grid(f).double()
    exact = by_autograd(f.fn, s, f.scalar_params())
    got = by_graph(compiled(f), s, f.scalar_params())
    error = worst(got, exact)
    assert error.max() < 1e-6, f"p, ds, dparams differ by {error.tolist()}"
    torch.testing.assert_close(
        got[0], exact[0], rtol=1e-6, atol=1e-13, equal_nan=True
    )  # tiny values count as others do


@every_function
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_eager_runs_what_pytorch_would_have_run(f, dtype):
    s = grid(f, 500).to(dtype)
    params = [torch.tensor(p, dtype=dtype) for p in f.scalar_params()]
    got = compiled(f).eager(s, *params)
    assert got.dtype == dtype
    expected = f.fn(s.clone(), *params).expand_as(s).to(dtype)
    # What f says of dtypes it says of float32, so that float64 scores may meet a float32 inside it.
    torch.testing.assert_close(got, expected, rtol=0.0 if dtype == f32 else 1e-6, atol=0.0 if dtype == f32 else 1e-6)


@pytest.mark.parametrize(
    "fn",
    [lambda s: s.double().exp().to(s.dtype), lambda s: s.double().exp(), lambda s: torch.float_power(s.abs() + 1, 1.5),
     lambda s: (s > 0).double() * s + (s.double() + 1 / 3).sin().type_as(s)],
)  # fmt: skip
def test_a_detour_through_float64_is_none_for_float64(fn):
    s = torch.linspace(-3, 3, 7, dtype=f64)
    assert torch.equal(from_function(fn, 0).eager(s), fn(s))


@pytest.mark.parametrize(
    ("fn", "at"),
    [(lambda s: 1 + 1e-6 - torch.tanh(s), 9.0), (lambda s: 1 + 5e-7 - torch.erf(s), 5.0),
     (lambda s: s * 1.0000005 + s * torch.tanh(s), -12.0), (lambda s: torch.tanh(s) ** 2 - (1 + 1e-5), -9.0),
     (lambda s: 0.9999 + torch.tanh(s), -9.0), (lambda s: 3 * torch.erf(s) - 3.000003, 5.0)],
)  # fmt: skip
def test_what_keeps_weights_from_vanishing_is_kept(fn, at):
    """Sums that would cancel but for it: what they are written as instead is that much more."""
    exact = by_autograd(fn, torch.tensor([at], dtype=f64))
    got = from_function(fn, 0).joint.evaluate(torch.tensor([at]))
    torch.testing.assert_close(got[0].double(), exact[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "fn", [lambda s: s * (0.1 * torch.erf(s)) + 0.1 * s, lambda s: (0.3 * torch.tanh(s)) * s + 0.3 * s]
)
def test_derivatives_have_no_such_rest(fn):
    """Autograd has 0.1 as a number of float32 beside the 0.1 of the function."""
    s = torch.tensor([-30.0, -10.0, -6.0], dtype=f64)
    _, slope = from_function(fn, 0).joint.evaluate(s)
    torch.testing.assert_close(slope, by_autograd(fn, s)[1], rtol=1e-3, atol=1e-14)


@every_function
def test_finite_where_pytorch_is(f):
    """No inf * 0 and no overflow in a branch not taken: the compiled graph has a number wherever autograd has one."""
    expected = by_autograd(f.fn, LARGE, f.scalar_params())
    got = by_graph(compiled(f), LARGE, f.scalar_params())
    lost = expected.isfinite() & ~got.isfinite()
    assert not lost.any(), f"not finite at {LARGE[lost.any(0)].tolist()}"


@every_function
@pytest.mark.triton
def test_emitted_code_matches_autograd(f):
    """As accurate as float32 allows: 12 roundings, or 3 times the error of PyTorch's own float32."""
    from device.elementwise import joint

    interpretable(f)
    s = grid(f)
    exact = by_autograd(f.fn, s.double(), f.scalar_params())
    plain = worst(by_autograd(f.fn, s, f.scalar_params()), exact)
    got = joint(compiled(f), s, f.scalar_params(), f32).double()
    error = worst(got, torch.cat([exact[:1], exact]))  # forward and backward may round p differently
    allowed = (3 * torch.cat([plain[:1], plain])).clamp_min(16 * EPS)
    assert (error <= allowed).all(), f"p, p, ds, dparams differ by {error.tolist()}, allowed {allowed.tolist()}"


# Under the interpreter every second one: graphs of all of them meet a scale in test_compiler.py.
@pytest.mark.parametrize("f", FUNCTIONS[::2] if INTERPRET and not FULL else FUNCTIONS, ids=repr)
@pytest.mark.triton
def test_emitted_code_with_the_scale_folded_in(f):
    """f(scale * s) and its derivatives by s and by params. Steps must not move, so there the scale is a power of 2."""
    from device.elementwise import joint

    interpretable(f)
    scale = 128**-0.5 if f.smooth else 64**-0.5
    fn = lambda s, *params: f.fn(s * scale, *params)
    s = grid(f) / scale
    exact = by_autograd(fn, s.double(), f.scalar_params())
    plain = worst(by_autograd(fn, s, f.scalar_params()), exact)
    got = joint(compiled(f), s, f.scalar_params(), f32, scale).double()
    error = worst(got, torch.cat([exact[:1], exact]))  # forward and backward may round p differently
    allowed = (3 * torch.cat([plain[:1], plain])).clamp_min(32 * EPS)
    assert (error <= allowed).all(), f"p, p, ds, dparams differ by {error.tolist()}, allowed {allowed.tolist()}"


@every_function
@pytest.mark.triton
def test_emitted_code_is_finite_where_pytorch_is(f):
    from device.elementwise import joint

    interpretable(f)
    expected = by_autograd(f.fn, LARGE, f.scalar_params())
    lost = expected.isfinite() & ~joint(compiled(f), LARGE, f.scalar_params(), f32)[1:].isfinite()
    assert not lost.any(), f"not finite at {LARGE[lost.any(0)].tolist()}"


@every_function
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.triton
@pytest.mark.gpu
def test_approximations_stay_below_the_rounding_of_16_bits(f, dtype, record_property):
    """For 16-bit inputs hardware approximations may be used; their error must not exceed half a unit of the dtype."""
    from device.elementwise import joint

    s = grid(f)
    exact = by_autograd(f.fn, s.double(), f.scalar_params())
    plain = worst(by_autograd(f.fn, s, f.scalar_params()), exact)
    error = worst(joint(compiled(f), s, f.scalar_params(), dtype).double()[1:], exact)
    record_property("error of p, ds, dparams", error.tolist())
    allowed = (3 * plain).clamp_min(UNIT[dtype])
    assert (error <= allowed).all(), f"p, ds, dparams differ by {error.tolist()}, allowed {allowed.tolist()}"
