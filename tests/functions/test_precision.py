"""Levels of precision: that the chosen one keeps the contract on scores it was not chosen on, and flaws do not pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functions.evaluation import by_autograd, compiled
from functions.library import BUILTIN_FUNCTIONS, BY_NAME, FUNCTIONS, Function
from gdpa.functions.accuracy import precision
from gdpa.functions.accuracy.hardware import SM90, emulate
from gdpa.functions.accuracy.precision import LEVELS, ROUNDING, choose_level
from gdpa.functions.activation import Activation, from_function, from_name
from gdpa.functions.emit import emit
from gdpa.functions.graph import Graph
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.fold import fold
from gdpa.functions.passes.simplify import value_of
from support import FULL, bf16, f16, f32, in_turn

both_dtypes = pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
NVIDIA = ("cuda", "sm90")
ALL_TARGETS = (*NVIDIA, "hip", "interpret")

SMALL = (
    Function("sigmoid_minus_7", lambda s: torch.sigmoid(s - 7)),
    Function("bell", lambda s: torch.exp(-s * s)),
    Function("fourth_power", lambda s: s**4),
    Function("relu_squared_mean", lambda s: F.relu(s) ** 2 / 2048),
    Function("swish", lambda s, beta: s * torch.sigmoid(beta * s), params=(1.3,)),
)


def level_of(act: Activation, dtype: torch.dtype, target: str = "sm90") -> tuple[str, str]:
    forward, backward = (choose_level(act, dtype, target, derivatives) for derivatives in (False, True))
    return forward, backward


# ---- on fresh scores -------------------------------------------------------------------------------------------------
def device_code(act: Activation, dtype: torch.dtype, s: Tensor, params: tuple[float, ...]) -> Tensor:
    """(outputs + 1, n): the emulated value, then value and derivatives, as the kernels compute them on an H200."""
    values = [torch.full_like(s, p) for p in params]
    rows = []
    for graph, level in zip((value_of(act.joint), act.joint), level_of(act, dtype), strict=True):
        rows += emulate(fold(expand(graph, level)), level, "sm90", s, *values)
    return torch.stack(rows).double()


def plain(fn: Callable[..., Tensor], s: Tensor, params: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """What PyTorch makes of it in ``dtype``: with params all but the scores is float32."""
    rounded = s.to(dtype)
    return by_autograd(fn, rounded.float() if params else rounded, params)


def rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


# Not those that round inside: a value beside a step is anywhere.
STEPLESS = [f for f in (*FUNCTIONS, *SMALL) if not f.rounding]


@pytest.mark.parametrize(
    ("f", "dtype"), [(f, dtype) for i, f in enumerate(STEPLESS) for dtype in in_turn((f16, bf16), i)], ids=str
)
def test_the_chosen_level_keeps_the_contract_on_fresh_scores(f, dtype):
    """Random means and spreads; by autograd of the function itself in float64, float32 and ``dtype``."""
    act, params = compiled(f), f.scalar_params()
    rng = torch.Generator().manual_seed(len(f.name))
    for _ in range(6 if FULL else 2):
        mean, spread = (float(torch.rand((), generator=rng)) for _ in range(2))
        mean, spread = 16 * mean - 8, 0.1 * 40**spread
        s = mean + spread * torch.randn(2000, generator=rng)
        exact = torch.stack(act.joint.evaluate(s.double(), *(torch.full_like(s, p).double() for p in params)))
        exact = torch.cat([exact[:1], exact])
        theirs, in_float32 = (
            torch.cat([x[:1], x]) for x in (plain(f.fn, s, params, dtype), by_autograd(f.fn, s, params))
        )
        usable = (exact.isfinite() & (exact.abs() < torch.finfo(dtype).max) & theirs.isfinite()).all(0)
        found = device_code(act, dtype, s, params)[:, usable]
        exact, theirs, in_float32 = exact[:, usable], theirs[:, usable], in_float32[:, usable]
        if usable.sum() < 1000:
            continue
        defined = in_float32.to(dtype).double() - exact
        rounding = torch.maximum(ROUNDING[dtype] * rms(exact), rms(defined))
        unit = rms(exact) < 1e-30
        told = f"{f} {dtype} mean {mean:.2f} spread {spread:.2f} {level_of(act, dtype)}"
        if abs(mean) <= 3 and spread >= 0.3:
            assert ((rms(found - exact) <= 0.6 * rounding) | unit).all(), told
        ours = rms(found.to(dtype).double() - exact)
        assert ((ours <= 1.1 * rms(theirs.to(dtype).double() - exact)) | unit).all(), told


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
@both_dtypes
def test_tails_never_above_plain_pytorch(name, dtype):
    act, fn = from_name(name), BY_NAME[name].fn
    for mean in torch.arange(-8.0, 8.1, 0.5).tolist():
        for spread in (0.1, 0.3, 1.0):
            s = mean + spread * torch.randn(4000, generator=torch.Generator().manual_seed(int(10 * mean) + 100))
            exact = torch.stack(act.joint.evaluate(s.double()))
            found = device_code(act, dtype, s, ())[1:].to(dtype).double()
            assert (rms(found - exact) <= 1.02 * rms(plain(fn, s, (), dtype) - exact)).all(), (mean, spread)


# ---- which level -----------------------------------------------------------------------------------------------------
EXPECTED = {
    ("relu", bf16): ("approx", "approx"), ("silu", bf16): ("approx", "approx"), ("silu", f16): ("short", "short"),
    ("gelu_tanh", bf16): ("short", "short"), ("gelu", bf16): ("short", "short"), ("gelu", f16): ("close", "close"),
    ("tanh", bf16): ("approx", "approx"), ("sigmoid", bf16): ("approx", "approx"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), EXPECTED, ids=str)
def test_levels_of_the_usual_functions(name, dtype):
    """A change here changes the speed of everything: look at the instructions in test_ptx.py too."""
    assert level_of(from_name(name), dtype) == EXPECTED[name, dtype]
    emitted = emit(from_name(name), dtype, "sm90")
    assert (emitted.level, emitted.backward_level) == EXPECTED[name, dtype]


def test_level_by_dtype_and_target():
    tanh = from_name("tanh")
    levels = {target: choose_level(tanh, bf16, target, derivatives=False) for target in ALL_TARGETS}
    assert levels == {"cuda": "short", "sm90": "approx", "hip": "accurate", "interpret": "accurate"}
    assert all(choose_level(tanh, f32, target, derivatives=False) == "accurate" for target in ALL_TARGETS)


def test_only_the_measured_gpu_has_its_error():
    """Elsewhere tanh.approx may be off by 2^-11, as its manual says: too much for a sigmoid's left tail."""
    assert level_of(from_name("silu"), bf16, "sm90")[0] == "approx"
    assert level_of(from_name("silu"), bf16, "cuda")[0] != "approx"


@pytest.mark.parametrize(
    ("capability", "name"), [((9, 0), "sm90"), ((8, 0), "cuda"), ((10, 0), "cuda"), ((12, 0), "cuda")]
)
def test_target_of_a_gpu(capability, name, monkeypatch):
    launch = pytest.importorskip("gdpa.backends.triton.launch")
    monkeypatch.setattr(launch, "capability", lambda device: capability)
    monkeypatch.setattr(launch, "INTERPRET", False)
    assert launch.target(torch.device("cuda")) == name


def test_a_function_that_amplifies_errors_gets_accurate_code():
    amplified = from_function(lambda s: (torch.tanh(s) - torch.tanh(s * 1.001)) * 1e5, 0)
    assert level_of(amplified, bf16, "cuda") == ("accurate", "accurate")
    assert "_approx" not in emit(amplified, bf16, "cuda").source
    assert "_close" not in emit(amplified, bf16, "cuda").source


def test_params_are_tried_at_different_values():
    """tanh(a s) - tanh(b s) cancels where both are equal."""
    act = from_function(lambda s, a, b: torch.sigmoid(a * s) * torch.sigmoid(-b * s), 2)
    seen = [tuple(float(p[0, 0]) for p in case.params) for case in precision.cases_of(act, bf16, derivatives=False)]
    assert len(set(seen)) == len(seen) > 4
    assert all(a != b for a, b in seen)
    assert {math.copysign(1, a) for a, _ in seen} == {1.0, -1.0}


def test_params_may_use_short_code():
    """s sigmoid(beta s) far to the left is tiny for beta = 4, but keeps its digits as 1 / (1 + 2^x)."""
    swish = from_function(lambda s, beta: s * torch.sigmoid(beta * s), 1)
    assert level_of(swish, bf16) == ("short", "close")
    assert "asm" in emit(swish, bf16, "sm90").source.split("def forward_packed")[1]


# ---- planted flaws ---------------------------------------------------------------------------------------------------
def value_case(act: Activation, dtype: torch.dtype) -> precision.Case:
    (case,) = precision.cases_of(act, dtype, derivatives=False)
    return case


def keeps_rules(act: Activation, found: Callable[[Tensor], Tensor], dtype: torch.dtype = bf16) -> bool:
    case = value_case(act, dtype)
    return bool(precision.keeps_rules(found(case.s)[None], case).all())


def test_exact_values_pass():
    for name in ("gelu", "gelu_tanh", "silu", "relu", "sigmoid"):
        act = from_name(name)
        assert keeps_rules(act, lambda s, act=act: act.joint.evaluate(s)[0])


def test_an_erf_good_to_1e_5_does_not_pass_for_gelu():
    wrong = lambda s: 0.5 * s * (1 + torch.erf(s * math.sqrt(0.5)) + 1e-5 * torch.cos(30 * s))
    assert not keeps_rules(from_name("gelu"), wrong)


def test_a_function_in_bfloat16_does_not_pass():
    def narrow(s: Tensor) -> Tensor:
        s = s.to(bf16)
        return (0.5 * s + 0.5 * s * torch.tanh(s * (s * s * 0.0356774 + 0.7978846))).double()

    assert not keeps_rules(from_name("gelu_tanh"), narrow)


def test_sigmoid_by_tanh_does_not_pass_far_to_the_left():
    act = from_function(lambda s: torch.sigmoid(s - 7), 0)
    assert not precision.passes(value_of(act.joint), "approx", "sm90", value_case(act, bf16))
    assert level_of(act, bf16)[0] == "short"


def test_a_small_error_of_one_sign_does_not_pass():
    """A thousandth hides in the rounding of one value, not in that of a sum of thousands."""
    silu = from_name("silu")
    assert keeps_rules(silu, lambda s: F.silu(s) * (1 + 2e-4))
    assert not keeps_rules(silu, lambda s: F.silu(s) * (1 + 1e-3))


def test_infinite_code_does_not_pass():
    assert not keeps_rules(from_name("silu"), lambda s: torch.where(s < -20, torch.nan, F.silu(s)))


# ---- models of the hardware ------------------------------------------------------------------------------------------
def test_measured_tanh_is_odd_and_saturates():
    x = torch.tensor([[0.3, 2.0, 7.9, 8.0, 12.0]]).double()
    x = torch.cat([x, -x])
    y = torch.tanh(x)
    found = y + SM90["tanh"](x, y, 1)
    assert torch.equal(found[0], -found[1]) or (found[0] + found[1]).abs().max() < 1e-5
    assert (found[:, 3:].abs() == 1).all()
    assert ((found - y).abs() <= 1.1e-5 * y.abs()).all()


@pytest.mark.parametrize("fn", [lambda s: torch.tanh(1e19 * s), lambda s: torch.sigmoid(torch.exp(s) ** 8)])
def test_tanh_of_huge_numbers(fn):
    """Also of infinite ones, where float32 overflows before."""
    x = torch.tensor([[1e19, -1e30, math.inf, -math.inf]]).double()
    assert torch.equal(x.tanh() + SM90["tanh"](x, x.tanh(), 1), x.sign())
    assert level_of(from_function(fn, 0), bf16)


def test_emulation_flushes_and_keeps_infinity():
    b = expand(from_function(lambda s: torch.exp(s), 0).joint, "short")
    values = emulate(fold(value_of(b)), "short", "sm90", torch.tensor([-90.0, 90.0, 0.0]))[0]
    assert values[0] == 0
    assert values[1] == math.inf
    assert values[2] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("f", BUILTIN_FUNCTIONS, ids=repr)
def test_levels_are_in_order(f):
    """The code of each level is right to what it says; levels that differ do so because one is coarser."""
    graph: Graph = value_of(compiled(f).joint)
    s = torch.linspace(-4, 4, 801).double()
    exact = graph.evaluate(s)[0]
    errors = [rms(emulate(fold(expand(graph, level)), level, "sm90", s)[0].double() - exact) for level in LEVELS]
    assert all(coarse >= 0.2 * fine for coarse, fine in itertools.pairwise(errors))
    assert max(errors) < 3e-4 * rms(exact)


def test_the_choice_does_not_depend_on_what_runs_around_it():
    """Fake tensors, inference mode, another default device and dtype."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with FakeTensorMode(), torch.inference_mode(), torch.device("meta"):
            found = choose_level.__wrapped__(from_name("gelu_tanh"), bf16, "sm90", True)
    finally:
        torch.set_default_dtype(default)
    assert found == choose_level(from_name("gelu_tanh"), bf16, "sm90", derivatives=True)
