"""Functions in bfloat16 arithmetic: which may be computed so, that ptxas takes it, and what it computes."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functions.evaluation import compiled
from functions.library import BY_NAME, FUNCTIONS
from gdpa.functions import narrow
from gdpa.functions.activation import Activation, from_function, from_name
from gdpa.functions.emit import emit, jit_functions
from gdpa.functions.fold import expand, factor_of, fold
from gdpa.functions.graph import Graph, vanishes_at_zero
from support import INTERPRET, bf16, f16, f32

SCALES = (72**-0.5, 96**-0.5, 128**-0.5)  # of head dimensions whose kernel uses it
GOOD = ("gelu", "gelu_tanh", "silu", "relu", "identity", "relu_squared")
every_function = pytest.mark.parametrize("f", FUNCTIONS, ids=repr)


def value_graph(act: Activation, scale: float) -> Graph:
    """p of the unscaled score, as it is emitted."""
    graph = expand(Graph(act.joint.n_inputs, act.joint.nodes, act.joint.outputs[:1]), "approx")
    return fold(graph, scale, factor_of(graph, scale))


def emitted(act: Activation, dtype: torch.dtype = bf16, scale: float = 128**-0.5) -> bool:
    return "narrow_forward" in emit(act, dtype, "sm90", scale).source


# ---- which functions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("scale", SCALES, ids="{:.3f}".format)
def test_the_usual_functions_may(name, scale):
    assert emitted(from_name(name), scale=scale)


@pytest.mark.parametrize("name", ["sigmoid", "exp", "softplus", "tanh"])
def test_functions_that_lose_too_much_may_not(name):
    """PyTorch rounds their values once, where bfloat16 arithmetic rounds several times; or it has no logarithm."""
    assert not emitted(from_name(name))


CANCELLING = {
    "a difference of large numbers": lambda s: (s + 100.0) - torch.tanh(s) - 100.0,
    "a small rest": lambda s: F.relu(s) - 0.999 * F.relu(s),
    "nothing but zeros at the usual scores": lambda s: F.relu(s - 50),
    "a constant that bfloat16 has not": lambda s: torch.maximum(s * 1.001 - s, s * 0.0),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_cancellation_is_noticed(name):
    assert not emitted(from_function(CANCELLING[name], 0))


def test_only_bfloat16_without_params():
    assert not emitted(from_name("gelu"), f16), "s^2 overflows in float16"
    assert not emitted(from_name("gelu"), f32)
    slope = from_function(lambda s, a: torch.maximum(s, a * s), 1)
    assert not emitted(slope), "no sample covers all values of a param"


# ---- how good it is --------------------------------------------------------------------------------------------------
def errors(p: Tensor, exact: Tensor) -> tuple[float, float]:
    return float((p - exact).norm() / exact.norm()), float((p - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("spread", [0.1, 0.7, 2.5, 6.0, 50.0])
def test_as_good_as_plain_pytorch_in_bfloat16(name, spread):
    """At widths that the choice did not look at, by PyTorch's own bfloat16."""
    scale, fn = 128**-0.5, BY_NAME[name].fn
    s = torch.randn(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * spread
    graph, act = value_graph(from_name(name), scale), from_name(name)
    factor = factor_of(expand(Graph(1, act.joint.nodes, act.joint.outputs[:1]), "approx"), scale)
    ours = errors(narrow.evaluate(graph, s / scale) * factor, fn(s))
    plain = errors(fn(s.to(bf16)).double(), fn(s))
    assert ours[0] <= 1.3 * plain[0], (ours, plain)
    assert ours[1] <= 2 * plain[1], (ours, plain)


# ---- the code --------------------------------------------------------------------------------------------------------
def test_gelu_tanh_takes_three_and_a_half_instructions_per_score():
    """Six for two scores (round, product, sum and product, product, tanh, sum and product), tanh counting twice."""
    block = narrow.assemble(value_graph(from_name("gelu_tanh"), 128**-0.5))
    found = Counter(re.findall(r"^(mul|fma|add|sub|neg|tanh|cvt)\.", block.text, re.MULTILINE))
    pairs = found["tanh"]
    assert found == {"mul": 2 * pairs, "fma": 2 * pairs, "tanh": pairs, "cvt": pairs}, block.text


@every_function
def test_ptxas_takes_it(f):
    if not emitted(compiled(f)):
        pytest.skip("not computed in bfloat16")
    pytest.importorskip("triton")
    if INTERPRET:
        pytest.skip("Triton interprets in this process")
    from aot import compile_for
    from device.elementwise import packed_kernel

    j = jit_functions(compiled(f), bf16, "sm90", 128**-0.5)
    functions = {"LOAD_PARAMS": j.load_params, "FORWARD": j.narrow_forward, "BACKWARD": j.packed_backward}
    s = torch.empty(256)
    settings = {"N_PARAMS": 0, "BLOCK": 256, "num_warps": 4}
    assert "bf16x2" in compile_for(packed_kernel, (s, None, s, 256), {**functions, **settings}, 90).asm["ptx"]


@pytest.mark.hopper
@pytest.mark.parametrize("name", GOOD)
def test_the_hardware_computes_what_the_choice_was_made_on(name):
    """tanh.approx may differ by its stated error, which is two roundings of the result."""
    from device.elementwise import narrow as on_device

    scale, act = 128**-0.5, from_name(name)
    s = torch.linspace(-12, 12, 24001, dtype=torch.float64).float() / scale
    want = narrow.evaluate(value_graph(act, scale), s.double())
    got = on_device(act, s, scale).double()
    assert ((got - want).abs() <= 2**-7 * s.abs().clamp_min(1e-3) + 2**-8 * want.abs()).all()
    assert ((got == want).double().mean() > 0.5) or name in ("gelu", "gelu_tanh", "silu")


@pytest.mark.hopper
@pytest.mark.parametrize("name", GOOD)
def test_special_scores(name):
    """0, inf and NaN come out as in float32 (-inf is NaN in most of these, there too)."""
    from device.elementwise import narrow as on_device

    s = torch.tensor([0.0, -0.0, math.inf, math.nan, 3e38, 1e-30] * 64)
    got = on_device(from_name(name), s, 128**-0.5)[:6].tolist()
    assert got[0] == got[1] == 0
    assert got[2] == math.inf
    assert math.isnan(got[3])
    assert got[4] > 0
    assert abs(got[5]) < 1e-20


# ---- exactly zero at zero --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu", "identity", "relu_squared", "tanh", "hardswish"])
def test_functions_with_a_factor_s_vanish(name):
    for level in ("approx", "close", "accurate"):
        joint = expand(from_name(name).joint, level)
        cancels = (name, level) == ("tanh", "close")  # 1 - 2 / (1 + e^2s)
        assert vanishes_at_zero(Graph(1, joint.nodes, joint.outputs[:1])) == (not cancels)


NOT_ZERO = {
    "one": lambda s: torch.sigmoid(s),
    "cancels": lambda s: torch.exp(s) - 1.0,
    "infinite": lambda s: s * torch.log(s.abs()),
    "overflows on the way": lambda s: s * torch.cosh(s + 89),
    "zero by luck": lambda s: torch.cos(s) - 1.0,
    "one branch": lambda s: torch.where(s >= 0, s, s - 1.0),
}


@pytest.mark.parametrize("name", [n for n in NOT_ZERO if n != "one branch"])
def test_others_are_not_trusted(name):
    joint = expand(from_function(NOT_ZERO[name], 0).joint, "close")
    assert not vanishes_at_zero(Graph(1, joint.nodes, joint.outputs[:1]))


def test_the_branch_not_taken_counts():
    joint = from_function(NOT_ZERO["one branch"], 0).joint
    assert not vanishes_at_zero(Graph(1, joint.nodes, joint.outputs[:1]))
