"""The interface of row sums: arguments, layouts, autograd in all its modes, the operators."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

import gdpa
from gdpa.functions.activation import from_name
from gdpa.problem import EXP
from support import f64

H, D = 2, 4
BOTH = pytest.mark.parametrize("backend", ["reference", "cpu"])


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=f64, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


# ---- what is accepted, and what is refused ---------------------------------------------------------------------------
SINK = torch.ones(H)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown norm": ({"normalize": "l2"}, ValueError, "normalize must be None, .* got 'l2'"),
    "norms of too few heads": ({"normalize": ["sum"]}, ValueError, r"one entry per query head \(2\)"),
    "an array of norms": ({"normalize": np.array(["sum"] * 2)}, ValueError, "normalize must be None, .* got array"),
    "softmax by abs": ({"activation": "softmax", "normalize": "abs"}, ValueError, "contradicts"),
    "softmax without": ({"activation": "softmax", "normalize": ["sum", None]}, ValueError, "None contradicts"),
    "sink alone": ({"sink": 1.0}, ValueError, "sink=1.0 .* pass normalize"),
    "tensor sink alone": ({"sink": SINK}, ValueError, "pass normalize"),
    "negative sink": ({"activation": "softmax", "sink": -1.0}, ValueError, "not be negative for softmax, got -1.0"),
    "sink of another type": (
        {"normalize": "sum", "sink": "1"},
        TypeError,
        r"a number or a tensor of shape \(\) or \(2,\), got str",
    ),
    "sink beyond float32": ({"normalize": "sum", "sink": 1e39}, ValueError, "sink must be finite in float32"),
    "infinite sink": ({"normalize": "sum", "sink": float("inf")}, ValueError, "sink must be finite"),
    "integer sink": ({"normalize": "sum", "sink": torch.ones(H, dtype=torch.int64)}, TypeError, "int64"),
    "sink of another shape": ({"normalize": "sum", "sink": torch.ones(3)}, ValueError, r"shape \(\) or \(2,\)"),
    "sink elsewhere": ({"normalize": "sum", "sink": SINK.to("meta")}, ValueError, "q's device"),
    "sums of nothing": ({"return_weights_sum": True}, ValueError, "return_weights_sum=True needs normalize"),
    "sums by number": ({"normalize": "sum", "return_weights_sum": 1}, TypeError, "True or False"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals(name):
    options, error, words = WRONG[name]
    q = draw(1, H, 3, D).float()
    with pytest.raises(error, match=words):
        gdpa.attention(q, q, q, **{"activation": "silu", **options})


@pytest.mark.parametrize("fn", [lambda s: s / s.sum(-1, keepdim=True), lambda s: s.softmax(-1)])
def test_functions_of_rows_are_pointed_to_normalize(fn):
    q = draw(1, H, 3, D)
    with pytest.raises(gdpa.UnsupportedActivationError, match='normalize="sum"'):
        gdpa.attention(q, q, q, fn)


def test_softmax_is_no_function_of_one_score():
    assert "softmax" not in gdpa.activations()
    with pytest.raises(ValueError, match="exp divided by its sum"):
        from_name("softmax")


def test_explain_tells():
    q = draw(1, H, 3, D)
    told = gdpa.explain(q, q, q, ["softmax", "silu"], normalize=["sum", "abs"])
    assert "exp: divided by the sum of its row, with the maximum" in told
    assert "silu: divided by the sum of its row's absolute values" in told


def test_which_functions_are_exponentials():
    """By their graph: the last operation counts, whatever it is called."""
    for fn, found in ((torch.exp, True), (lambda s: (2 * s).exp(), True), (lambda s: s.exp() * 2, False)):
        assert (gdpa.activation(fn).exponent is not None) == found
    q = draw(1, 1, 3, D)
    call = gdpa.api._dense_call(
        q, q, q, torch.exp, (), (), None, "abs", 0.0, None, 1.0, False, None, None, False
    )  # |exp| is exp
    assert call.settings.problem(call.x).norm == EXP


# ---- layouts ---------------------------------------------------------------------------------------------------------
@BOTH
def test_layouts_agree(backend):
    """Dense, packed, jagged and in one tensor: outputs, sums and gradients."""
    qkv, sink = draw(2, 5, 3, H, D), draw(H)
    cu = torch.tensor([0, 5, 10])
    options = {"normalize": "abs", "sink": sink, "backend": backend, "return_weights_sum": True, "causal": True}
    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
    flat = qkv.flatten(0, 1)
    out, sums = gdpa.attention(q, k, v, "silu", **options)
    want = (out.transpose(1, 2), sums.transpose(1, 2))
    rows = flat.unbind(1)
    for call in (
        lambda: gdpa.attention_qkvpacked(qkv, "silu", **options),
        lambda: gdpa.attention_kvpacked(qkv[:, :, 0], qkv[:, :, 1:], "silu", **options),
        lambda: gdpa.attention_varlen(*rows, cu, cu, "silu", **options),
        lambda: gdpa.attention_varlen_qkvpacked(flat, cu, "silu", **options),
        lambda: gdpa.attention_varlen_kvpacked(flat[:, 0], flat[:, 1:], cu, cu, "silu", **options),
    ):
        out, sums = call()
        got = (out.view_as(want[0]), sums.view_as(want[1]))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        for a, b in zip(*(torch.autograd.grad(o[0].square().sum() + o[1].sin().sum(), (qkv, sink), retain_graph=True)
                          for o in (got, want)), strict=True):  # fmt: skip
            torch.testing.assert_close(a, b)


def test_nested():
    rows = [draw(n, H, D) for n in (3, 5)]
    x = torch.nested.as_nested_tensor([t.detach() for t in rows], layout=torch.jagged).transpose(1, 2)
    out, sums = gdpa.attention(x, x, x, "softmax", return_weights_sum=True)
    for got, total, t in zip(out.unbind(), sums.unbind(), rows, strict=True):
        s = t.transpose(0, 1) @ t.permute(1, 2, 0) / 2
        torch.testing.assert_close(got, s.softmax(-1) @ t.transpose(0, 1))
        torch.testing.assert_close(total, s.logsumexp(-1))


@BOTH
@pytest.mark.parametrize("used", [None, torch.tensor([1, 0, 2])])
def test_rows_of_no_sequence_have_no_sum_in_heads_without_one_either(used, backend):
    """Called directly, and through the operator."""
    x, cu = draw(8, H, D), torch.tensor([0, 3, 3, 5])
    rows = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0] if used is None else [1, 0, 0, 1, 1, 0, 0, 0])
    norms = ["sum", *[None] * (H - 1)]

    def sums(x):
        return gdpa.attention_varlen(
            x, x, x, cu, cu, "silu", normalize=norms, seqused_q=used, backend=backend, return_weights_sum=True
        )[1]

    for call in (sums, torch.compile(sums, backend="aot_eager", fullgraph=True)):
        assert torch.equal(call(x)[:, 1:], rows.to(x.dtype)[:, None].expand(-1, H - 1))


# ---- autograd --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("activation", "normalize"), [("softmax", None), (F.softplus, "sum"), (torch.tanh, "abs")])
@BOTH
def test_gradcheck(activation, normalize, backend):
    inputs = (draw(1, 2, 3, D), draw(1, 1, 4, D), draw(1, 1, 4, 3), draw(2).detach().abs().requires_grad_())
    call = partial(gdpa.attention, activation=activation, normalize=normalize, causal=True, backend=backend)
    both = lambda q, k, v, sink: call(q, k, v, sink=sink, return_weights_sum=True)
    assert torch.autograd.gradcheck(both, inputs)
    assert torch.autograd.gradcheck(lambda *x: both(*x)[0], inputs)
    if backend == "reference":
        assert torch.autograd.gradgradcheck(both, inputs)


def test_double_backward_of_fused_backends_is_refused():
    q = draw(1, H, 3, D)
    (g,) = torch.autograd.grad(gdpa.attention(q, q, q, "softmax").sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not available"):
        g.sum().backward()


@pytest.mark.parametrize("packed", [False, True])
def test_transforms(packed):
    qkv, sink = draw(2, 5, 3, H, D).detach(), draw(H).detach().abs()

    def loss(x: Tensor, sink: Tensor) -> Tensor:
        if packed:
            return gdpa.attention_qkvpacked(x, "softmax", sink=sink).square().sum()
        return gdpa.attention(*(t.transpose(1, 2) for t in x.unbind(2)), "softmax", sink=sink).square().sum()

    leaves = [t.clone().requires_grad_() for t in (qkv, sink)]
    want = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(grad(loss, argnums=(0, 1))(qkv, sink), want, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(vmap(grad(lambda x: loss(x[None], sink)))(qkv), want[0])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda sink: loss(qkv, sink), (sink,), (sink,))


def test_compiled_as_one_graph():
    q, k, v, sink = draw(1, H, 5, D), draw(1, H, 7, D), draw(1, H, 7, D), draw(H).detach().abs().requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        out, sums = gdpa.attention(q, k, v, ["softmax", "silu"], normalize=["sum", "abs"], sink=sink,
                                   return_weights_sum=True)  # fmt: skip
        return out * sums[..., None].tanh()

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    results = [
        (o, *torch.autograd.grad(o.sum(), (q, k, v, sink))) for o in (f(q, k, v, sink) for f in (compiled, call))
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_compiled_program_may_be_the_first_to_ask():
    """For the exponent of a function, which is traced when it is needed: inside the operator."""
    q = draw(1, H, 5, D)
    call = lambda q: gdpa.attention(q, q, q, lambda s: torch.exp(0.75 * s - 0.125), normalize="sum")
    out = torch.compile(call, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q, scale=0.75 / 2))


# ---- operators -------------------------------------------------------------------------------------------------------
def settings(name: str) -> list[Any]:
    return [[from_name(name).key], 0.5, 1.0, None, 0, None, None, "exact", None, None, False]


@pytest.mark.parametrize("sink", [None, draw(H).detach().abs()])
def test_opcheck(sink):
    q, k, v, qkv = draw(2, H, 5, D), draw(2, H, 6, D), draw(2, H, 6, 3), draw(2, 5, 3, H, D)
    sink = None if sink is None else sink.clone().requires_grad_()
    none = [None] * 5
    torch.library.opcheck(torch.ops.gdpa.normalized.default, (sink, ["sum"], q, k, v, *none, [], *settings("exp")))
    packed = (sink, ["abs"], None, qkv, *none, [], *settings("tanh"))
    torch.library.opcheck(torch.ops.gdpa.normalized_packed.default, packed)
    plain = [t.detach() for t in (q, k, v)]
    out, sums = torch.ops.gdpa.normalized(sink, ["sum"], *plain, *none, [], *settings("exp"))
    args = (
        torch.ones_like(out),
        torch.ones_like(sums),
        out.detach(),
        sums.detach(),
        sink,
        ["sum"],
        *plain,
        *none,
        [],
        *settings("exp"),
    )
    torch.library.opcheck(
        torch.ops.gdpa.normalized_backward.default, args, test_utils=("test_schema", "test_faketensor")
    )


def test_plain_calls_keep_nothing_more():
    """Without normalize the operator of before runs, and keeps q, k and v alone."""
    q, k, v = draw(1, H, 5, D), draw(1, H, 6, D), draw(1, H, 6, D)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = gdpa.attention(q, k, v, "silu")
    assert out.grad_fn is not None
    assert "attention" in out.grad_fn.name().lower()
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in (q, k, v)]
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = gdpa.attention(q, k, v, "silu", normalize="abs")
    shapes = [(1, H, 5, D), (1, H, 5), *(tuple(t.shape) for t in (q, k, v))]
    assert sorted(tuple(t.shape) for t in kept) == sorted(shapes)


def test_flops_are_those_of_the_products():
    from torch.utils.flop_counter import FlopCounterMode

    q = draw(1, H, 5, D)
    counts = []
    for options in ({}, {"normalize": "abs"}):
        with FlopCounterMode(display=False) as counter:
            gdpa.attention(q, q, q, "silu", **options).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
