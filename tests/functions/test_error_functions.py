"""Error functions as one tanh of a polynomial, at the level "approx", and the operation that bounds the polynomial."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functions.evaluation import by_autograd
from gdpa.functions.accuracy.hardware import emulate
from gdpa.functions.activation import from_function, from_name
from gdpa.functions.emission.ptx import assemble
from gdpa.functions.emit import emit
from gdpa.functions.graph import Arg, Graph
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.fold import fold
from gdpa.functions.passes.simplify import Builder, value_of
from support import bf16

# A function, and how far p and f' are from float64, but for the errors of instructions.
ERRORS = {
    "gelu": (F.gelu, 6e-5, 1.2e-4),
    "erf": (torch.erf, 2.2e-4, 1e-7),
    "erfc": (torch.erfc, 2.2e-4, 1e-7),
    "stretched and shifted": (lambda s: s * torch.erf(1 - 0.4 * s), 1e-3, 2.2e-4),
}


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


@pytest.mark.parametrize("name", ERRORS)
def test_values_and_derivatives(name):
    fn, of_value, of_slope = ERRORS[name]
    joint = expand(from_function(fn, 0).joint, "approx")
    assert ops(joint).count("tanh") == 1
    assert not {"erf", "erfc"} & {*ops(joint)}
    s = torch.linspace(-8, 8, 16001, dtype=torch.float64)
    p, slope = (torch.stack(joint.evaluate(s)) - by_autograd(fn, s)).abs().amax(-1)
    assert p < of_value
    assert slope < of_slope


@pytest.mark.parametrize("scale", [1.0, 128**-0.5, 8.0])
def test_far_scores(scale):
    """There the polynomial would turn round: z^2 (c1 + c2 z^2) ends at 0 instead."""
    cheap = expand(value_of(from_name("gelu").joint), "approx")
    s = torch.tensor([20.0, 1e3, 1e9, 1e15])
    both = torch.cat([s, -s, torch.tensor([math.nan])])
    p = scale * emulate(fold(cheap, scale, scale), "approx", "sm90", both / scale)[0]
    torch.testing.assert_close(p[:4], s, rtol=1e-6, atol=0)
    assert (p[4:8] == 0).all()
    assert p[8].isnan()
    slope = emulate(fold(expand(from_name("gelu").joint, "approx")), "approx", "sm90", both)[1]
    assert slope[:8].tolist() == [1.0] * 4 + [0.0] * 4


@pytest.mark.parametrize(
    "fn",
    [lambda s, a: F.gelu(a * s), lambda s, a: F.gelu(s + a), lambda s, a: F.gelu(s + torch.exp(a)),
     lambda s, a: torch.erf(s - 100 * a)],
)  # fmt: skip
def test_params_leave_them_finite_at_zero(fn):
    assert from_function(fn, 1).finite_at_zero


def test_the_careful_code_needs_no_factor_of_its_own():
    """x + |x| - |x| erfc(c |x|) has gelu's factor, 1 / 2, as the cheap code has: both leave it to the kernel."""
    value = value_of(from_name("gelu").joint)
    s = torch.linspace(-30, 30, 6001, dtype=torch.float64)
    for level in ("approx", "short", "close"):
        code = fold(expand(value, level), 0.25, 0.125)
        assert not any(n.op == "mul" and n.args[1] in (0.5, 2.0) for n in code.nodes), code.text()
        torch.testing.assert_close(0.125 * code.evaluate(4 * s)[0], F.gelu(s), rtol=0, atol=2e-4)


# ---- saturate --------------------------------------------------------------------------------------------------------
def saturated(c: float) -> Graph:
    """c saturate(0.5 - 0.1 s^2) + s"""
    b = Builder(1)
    s = b.input(0)
    bounded: Arg = b("saturate", b("add", b("mul", b("mul", s, s), -0.1), 0.5))
    return b.finish((b("add", b("mul", bounded, c), s),))


@pytest.mark.parametrize("c", [0.25, -0.25, 1.0, -1.0, 1.5, -3.0])
def test_factors_go_through(c):
    """Into the constants of the sum below, whatever their sign; but more than 1 might saturate at the other end."""
    graph = saturated(c)
    code = fold(graph)
    s = torch.linspace(-4, 4, 801, dtype=torch.float64)
    torch.testing.assert_close(code.evaluate(s)[0], c * (0.5 - 0.1 * s * s).clamp_min(0) + s)
    times = [n for n in code.nodes if n.op == "mul" and n.args[1] == c]
    assert bool(times) == (abs(c) > 1), code.text()
    constant = next(n.args[1] for n in code.nodes if n.op == "add" and not isinstance(n.args[1], type(n.args[0])))
    assert constant == pytest.approx(0.5 * abs(c) if abs(c) <= 1 else 0.5)


def test_instructions():
    """One modifier of a multiply-add; in Triton, with no such thing, two operations."""
    block = assemble(fold(saturated(0.25)), "approx", bf16)
    assert block is not None
    lines = [line for line in block.text.splitlines() if "_0, " in line]
    assert [line.split()[0] for line in lines] == ["mul.rn.f32", "fma.rn.f32", "cvt.sat.f32.f32", "add.rn.f32"]
    source = emit(from_function(torch.erf, 0), bf16, "sm90").source
    assert "tl.minimum(tl.maximum(x3, 0.0), 1.0)" in source


def test_nobody_can_write_it():
    """torch's own clamp is another operation: it keeps NaN, and its argument may be more than 1."""

    def clamped(s: Tensor) -> Tensor:
        return torch.clamp(s, 0.0, 1.0)

    assert "saturate" not in ops(from_function(clamped, 0).joint)
