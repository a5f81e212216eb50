"""The comparison of test_correctness.py must reject wrong implementations: here are some, each wrong in one way."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functions.evaluation import by_autograd, worst
from gdpa.functions.activation import Activation, from_name
from gdpa.functions.graph import Graph, Node
from gdpa.testing.cases import Case, Inputs, dense, make_inputs
from support import (
    TINY_PACKED,
    TINY_WINDOW,
    Results,
    Target,
    bf16,
    compare,
    f16,
    f32,
    f64,
    output_gradient,
    problems,
    run_gdpa,
    run_naive,
    targets,
)

SMALL = dense("small", 1, 18, 30, heads=1, d=8)
CASE = dense("mutants", 2, 20, 27, heads=4, heads_k=2, d=16, dv=8, window=(6, 3))
OUT_SCALE = 0.7


# ---- a plain implementation with switches for mistakes ---------------------------------------------------------------
def attend(case: Case, x: Inputs, do: Tensor, fn: Any, flaw: str = "") -> Results:
    """Forward and backward by the formulas, wrong as ``flaw`` says. Dense tensors only."""
    q, k, v = (t.detach().float() for t in x.leaves)
    do, group = do.to(x.q.dtype).float(), case.heads // (case.heads_k or case.heads)
    spread = (
        (lambda t: t.repeat(1, group, 1, 1)) if flaw == "heads tiled" else (lambda t: t.repeat_interleave(group, 1))
    )
    gather = lambda t: t.unflatten(1, (-1, group)).sum(2)
    if flaw == "gradient of one head of a group":
        gather = lambda t: t.unflatten(1, (-1, group))[:, :, 0]
    scale = 1.0 if flaw == "no scale" else 1 / math.sqrt(case.d)
    out_scale = 1.0 if flaw == "no out_scale" else OUT_SCALE
    s = scale * q @ spread(k).mT
    keep = band(case, *s.shape[-2:], flaw)
    if flaw == "scores masked with -inf":
        s = s.masked_fill(~keep, -torch.inf)
    elif flaw == "scores masked with 0":
        s = s.masked_fill(~keep, 0.0)
    values = by_autograd(fn, s.flatten())
    p, slope = (row.float().view_as(s) for row in values)
    if flaw == "derivative of the identity":
        slope = torch.ones_like(s)
    if flaw == "derivative a little off":
        slope = slope * 1.01
    if not flaw.startswith("scores masked"):
        p = p * keep
        slope = slope if flaw == "derivative not masked" else slope * keep
    dp = out_scale * do @ spread(v).mT
    ds = dp * slope * (1.0 if flaw == "no scale in dk and dq" else scale)
    dv = (1.0 if flaw == "no out_scale in dv" else out_scale) * p.mT @ do
    grads = {"dq": ds @ spread(k), "dk": gather(ds.mT @ q), "dv": gather(dv)}
    return {"out": (out_scale * p @ spread(v)).to(x.q.dtype), **{n: g.to(x.q.dtype) for n, g in grads.items()}}


def band(case: Case, len_q: int, len_k: int, flaw: str) -> Tensor:
    left, right = case.window
    left, right = left + (flaw == "left one too wide"), right + (flaw == "right one too wide")
    left, right = left - (flaw == "left one too narrow"), right - (flaw == "right one too narrow")
    shift = 0 if flaw == "band aligned at the top left" else len_k - len_q
    distance = torch.arange(len_k) - torch.arange(len_q)[:, None] - shift
    return (distance >= -left) & (distance <= right)


FLAWS = [
    "heads tiled", "gradient of one head of a group", "no scale", "no out_scale", "scores masked with -inf",
    "scores masked with 0", "derivative of the identity", "derivative a little off", "derivative not masked",
    "no scale in dk and dq", "no out_scale in dv", "left one too wide", "right one too wide", "left one too narrow",
    "right one too narrow", "band aligned at the top left",
]  # fmt: skip
ONLY_IN_FLOAT32 = {"derivative a little off"}  # bfloat16 is off by more than 1 % itself


def shifted_gelu(s: Tensor) -> Tensor:
    """gelu(-inf) is NaN, and the value at 0 is not 0: both wrong ways to mask show."""
    return F.gelu(s + 1)


def verdict(flaw: str, dtype: torch.dtype) -> list[str]:
    x, do = make_inputs(CASE, dtype), output_gradient(CASE).to(dtype)
    exact, plain = (run_naive(CASE, x, t, shifted_gelu, (), do, out_scale=OUT_SCALE) for t in (f64, dtype))
    return problems(attend(CASE, x, do, shifted_gelu, flaw), plain, exact, dtype)


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_the_implementation_without_a_mistake_passes(dtype):
    assert verdict("", dtype) == []


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
@pytest.mark.parametrize("flaw", FLAWS)
def test_every_mistake_is_found(flaw, dtype):
    if dtype != f32 and flaw in ONLY_IN_FLOAT32:
        pytest.skip("below the rounding of 16 bits")
    assert verdict(flaw, dtype), f"{flaw!r} went unnoticed"


# ---- wrong functions, through the real backends ----------------------------------------------------------------------
def with_derivative_of(value: Any, other: Any) -> Any:
    """The value of one function with the derivative of another."""

    def fn(s: Tensor, *params: Tensor) -> Tensor:
        g = other(s, *params)
        return value(s, *params).detach() + (g - g.detach())

    return fn


gelu_tanh = lambda s: F.gelu(s, approximate="tanh")
WRONG_FUNCTIONS = {
    "gelu for gelu_tanh": (F.gelu, gelu_tanh),
    "derivative of gelu_tanh": (F.gelu, with_derivative_of(F.gelu, gelu_tanh)),
    "derivative 0.1 % off": (F.silu, with_derivative_of(F.silu, lambda s: 1.001 * F.silu(s))),
    "value 0.1 % off": (F.silu, with_derivative_of(lambda s: 1.001 * F.silu(s), F.silu)),
    "no derivative": (torch.tanh, lambda s: torch.tanh(s).detach() + 0 * s),
    "slope of leaky_relu": (F.leaky_relu, lambda s: F.leaky_relu(s, 0.011)),
    "no tail": (torch.sigmoid, lambda s: torch.sigmoid(s) * (s > -6)),
    "threshold of softplus": (F.softplus, lambda s: F.softplus(s, threshold=5.0)),
    "sign": (torch.sin, torch.cos),
    "relu for gelu": (F.gelu, torch.relu),
    "derivative of relu": (F.gelu, with_derivative_of(F.gelu, torch.relu)),
    "value 5 % off": (F.silu, with_derivative_of(lambda s: 1.05 * F.silu(s), F.silu)),
    "derivative 5 % off": (F.silu, with_derivative_of(F.silu, lambda s: 1.05 * F.silu(s))),
}


SUBTLE = {  # below what bfloat16 may round
    "gelu for gelu_tanh", "derivative of gelu_tanh", "derivative 0.1 % off", "value 0.1 % off", "slope of leaky_relu",
    "no tail", "threshold of softplus",
}  # fmt: skip


@pytest.mark.parametrize("target", [*targets(f32), *targets(f16, bf16, backends=("cpu",))])
@pytest.mark.parametrize("name", WRONG_FUNCTIONS)
def test_wrong_functions_are_found(name, target):
    if target.dtype != f32 and name in SUBTLE:
        pytest.skip("below the rounding of 16 bits")
    assert compare(SMALL, target, *WRONG_FUNCTIONS[name], ())


@pytest.mark.parametrize("target", [*targets(f32), *targets(f16, bf16, backends=("cpu",))])
def test_wrong_gradients_of_params_are_found(target):
    off = 1.01 if target.dtype == f32 else 1.25
    right = lambda s, a: torch.tanh(a * s)
    wrong = lambda s, a: (
        torch.tanh(a * s).detach() + (t := torch.tanh(s * a.detach() + off * (a - a.detach()) * s)) - t.detach()
    )
    params = (torch.tensor([0.4, 0.7]),)
    found = compare(TINY_PACKED, target, right, wrong, params)
    assert found
    assert all("dparam0" in one for one in found)


@pytest.mark.parametrize("target", targets(f32, f16, interpret=(f16,)))
def test_wrong_settings_are_found(target):
    """The arguments of the call, each a little off."""
    case = TINY_WINDOW
    x, do = make_inputs(case, target.dtype), output_gradient(case)
    exact, plain = (run_naive(case, x, dtype, torch.sigmoid, (), do, out_scale=0.5) for dtype in (f64, target.dtype))
    shifted = x.cu_k.clone()
    shifted[1] += 1  # the second sequence starts one key too late, the first has one too many
    mistakes = {
        "window": (replace(case, window=(7, None)), x, {"out_scale": 0.5}),
        "causal": (replace(case, causal=True), x, {"out_scale": 0.5}),
        "out_scale": (case, x, {"out_scale": 0.51}),
        "scale": (case, x, {"out_scale": 0.5, "scale": 0.26}),
        "offsets": (case, Inputs(*x.leaves, x.cu_q, shifted), {"out_scale": 0.5}),
    }
    right = run_gdpa(case, x, target, torch.sigmoid, (), do, out_scale=0.5)
    assert problems(right, plain, exact, target.dtype) == []
    for name, (other, inputs, kwargs) in mistakes.items():
        got = run_gdpa(other, inputs, target, torch.sigmoid, (), do, **kwargs)
        assert problems(got, plain, exact, target.dtype), f"a wrong {name} went unnoticed"


# ---- a compiler that makes mistakes ----------------------------------------------------------------------------------
def miscompiled(name: str, change: Any) -> Activation:
    """A built-in whose graph was changed after tracing, as a bug in the compiler would."""
    right = from_name(name)
    return Activation(f"broken_{name}", f"broken{len(name)}{change.__name__}", right._traced, change(right.joint), None)


def swapped_outputs(graph: Graph) -> Graph:
    return Graph(graph.n_inputs, graph.nodes, (graph.outputs[0], graph.outputs[0]))


def other_constant(graph: Graph) -> Graph:
    nodes = [
        Node(n.op, (n.args[0], n.args[1] * 1.001), n.dtype) if n.op == "mul" and isinstance(n.args[1], float) else n
        for n in graph.nodes
    ]
    return Graph(graph.n_inputs, tuple(nodes), graph.outputs)


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_a_function_miscompiled_for_hopper_is_found(dtype, monkeypatch):
    from gdpa.functions import activation as registry

    act = miscompiled("gelu_tanh", swapped_outputs)
    monkeypatch.setitem(registry._by_key, act.key, act)
    assert compare(SMALL, Target("hopper", dtype), gelu_tanh, act, ())


@pytest.mark.parametrize("change", [swapped_outputs, other_constant])
@pytest.mark.triton
def test_a_miscompiled_function_is_found(change, monkeypatch):
    from device.elementwise import joint
    from gdpa.functions import activation as registry

    act = miscompiled("gelu_tanh", change)
    monkeypatch.setitem(registry._by_key, act.key, act)
    assert compare(SMALL, Target("triton", f32), gelu_tanh, act, ())
    s = torch.linspace(-5, 5, 100)
    assert worst(joint(act, s)[1:].double(), by_autograd(gelu_tanh, s.double())).max() > 1e-5
