"""The operators: opcheck, autograd, FLOP formulas, meta tensors, and the modes of PyTorch they are called in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gdpa
from gdpa import api, reference
from gdpa.testing.cases import Case, Inputs, call, make_inputs
from support import CASES, FULL

SQUARE = gdpa.activation(lambda s: torch.relu(s) ** 2)
POWER = gdpa.activation(lambda s, a, b: torch.relu(s) ** a + b)


@pytest.fixture
def op_arguments(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Fills up with the arguments of every call of the operator, whose way every call takes."""
    seen: list[tuple[Any, ...]] = []
    attention = api.ops.attention

    def record(*args: Any) -> Tensor:
        seen.append(args)
        return attention(*args)

    monkeypatch.setattr(api.ops, "attention", record)
    monkeypatch.setattr(api.direct, "nobody_watches", lambda: False)
    return seen


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> Inputs:
    return make_inputs(case, dtype)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def params(heads: int) -> tuple[Tensor, Tensor]:
    return (
        torch.linspace(1.1, 2.0, heads, dtype=torch.float64).requires_grad_(),
        torch.tensor(0.3, dtype=torch.float64, requires_grad=True),
    )


# ---- opcheck -------------------------------------------------------------------------------------------------------
OPCHECKED = {
    **{name: (case, {}) for name, case in CASES.items()},
    "params": (CASES["gqa-causal-unequal-d"], {"activation": POWER, "params": params(4)}),
    "params-packed": (CASES["packed"], {"activation": POWER, "params": params(2)}),
    "functions-per-head": (CASES["gqa-causal-unequal-d"], {"activation": ["relu", "gelu", SQUARE, "relu"]}),
}


if not FULL:  # each kind of argument, and each way in which q and k lie, once
    SOME = ("window-more-queries-than-keys", "shared-queries", "packed-mqa-window", "packed-dense-keys",
            "shared-queries-packed-keys", "params-packed", "functions-per-head")  # fmt: skip
    OPCHECKED = {name: OPCHECKED[name] for name in SOME}


@pytest.mark.parametrize(("case", "kwargs"), OPCHECKED.values(), ids=OPCHECKED.keys())
def test_opcheck(case: Case, kwargs: dict[str, Any], op_arguments: list[tuple[Any, ...]]) -> None:
    out = call(case, inputs(case), **{"activation": "silu", "out_scale": 0.5, **kwargs})
    (args,) = op_arguments
    torch.library.opcheck(torch.ops.gdpa.attention, args)
    # aot_dispatch would differentiate the backward, which is refused: it runs without gradients.
    grad = torch.randn_like(args[0][..., :1]).expand(*args[0].shape[:3], case.dv or case.d)
    grad = grad.expand(torch.ops.gdpa.attention(*args).shape)
    assert out.numel() == grad.numel()
    plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in (grad, *args))
    torch.library.opcheck(torch.ops.gdpa.attention_backward, plain)


def test_opcheck_with_strides_that_views_must_keep(op_arguments: list[tuple[Any, ...]]) -> None:
    q, k, v = (torch.randn(2, 5, 3, 8, requires_grad=True).transpose(1, 2) for _ in range(3))
    out = gdpa.attention(q, k, v)
    assert out.stride() == q.stride()
    torch.library.opcheck(torch.ops.gdpa.attention, op_arguments[0])


# ---- autograd ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
@pytest.mark.parametrize("case", [CASES["gqa-causal-unequal-d"], CASES["packed"]], ids=lambda case: case.name)
def test_only_some_inputs_require_gradients(case: Case, wanted: str) -> None:
    full = inputs(case)
    expected = torch.autograd.grad(call(case, full, "silu").square().sum(), full.leaves)
    x = inputs(case)
    for name in "qkv":
        getattr(x, name).requires_grad_(name in wanted)
    call(case, x, "silu").square().sum().backward()
    for name, want in zip("qkv", expected, strict=True):
        got = getattr(x, name).grad
        if name in wanted:
            close(got, want)
        else:
            assert got is None


def test_gradients_of_params_alone() -> None:
    case = CASES["dense"]
    x, (a, b) = inputs(case), params(2)
    frozen = Inputs(*(t.detach() for t in x.leaves), None, None)
    got = torch.autograd.grad(call(case, frozen, POWER, params=(a, b)).sum(), (a, b))
    want = torch.autograd.grad(call(case, frozen, POWER, params=(a, b), backend="reference").sum(), (a, b))
    assert got[1].shape == ()
    for g, w in zip(got, want, strict=True):
        close(g, w)


@pytest.mark.parametrize("reduce", [Tensor.sum, lambda out: out.mean(2).sum(), lambda out: out[..., ::2].sum()])
def test_output_gradients_of_any_strides(reduce: Any) -> None:
    x = inputs(CASES["dense"])
    got = torch.autograd.grad(reduce(gdpa.attention(*x.leaves)), x.leaves)
    want = torch.autograd.grad(reduce(gdpa.attention(*x.leaves, backend="reference")), x.leaves)
    for g, w in zip(got, want, strict=True):
        close(g, w)


def test_gradients_of_expanded_inputs_are_summed() -> None:
    q, k = (
        torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 1, 6, 8, dtype=torch.float64),
    )
    k.requires_grad_()

    def grads(backend: str | None) -> tuple[Tensor, ...]:
        wide_k = k.expand(-1, 2, -1, -1)
        out = gdpa.attention(q.expand(3, -1, -1, -1), wide_k, wide_k, "silu", backend=backend)
        return torch.autograd.grad(out.square().sum(), (q, k))

    for g, w in zip(grads(None), grads("reference"), strict=True):
        close(g, w)


def test_the_backward_keeps_nothing_but_the_inputs() -> None:
    x = inputs(CASES["dense"])
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gdpa.attention(*x.leaves)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in x.leaves]


def test_double_backward_is_refused_on_fused_backends() -> None:
    x = inputs(CASES["dense"])
    (dq,) = torch.autograd.grad(gdpa.attention(*x.leaves).sum(), x.q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward is not available.*backend='reference'"):
        torch.autograd.grad(dq.square().sum(), x.k)


@pytest.mark.parametrize("case", [CASES["gqa-causal-unequal-d"], CASES["packed"]], ids=lambda case: case.name)
def test_the_reference_differentiates_twice(case: Case) -> None:
    small = Case("small", (3, 2), (2, 3), heads=case.heads, heads_k=case.heads_k, d=2, packed_q=True, packed_k=True)
    x = inputs(small)

    def attend(*leaves: Tensor) -> Tensor:
        return call(small, Inputs(*leaves, x.cu_q, x.cu_k), "silu", backend="reference")

    assert torch.autograd.gradcheck(attend, x.leaves)
    assert torch.autograd.gradgradcheck(attend, x.leaves)


def test_the_reference_as_an_operator() -> None:
    """What compiled code and devices without a kernel get: one operator, differentiable once."""
    x = inputs(CASES["dense"])
    key = [gdpa.functions.activation.from_name("silu").key]
    settings = (*[None] * 5, [], key, 0.25, 1.0, None, None, None, None, "exact", "reference", None, False)
    got = torch.autograd.grad(torch.ops.gdpa.attention(*x.leaves, *settings).sum(), x.leaves)
    want = torch.autograd.grad(gdpa.attention(*x.leaves, "silu", backend="reference", scale=0.25).sum(), x.leaves)
    for g, w in zip(got, want, strict=True):
        close(g, w)


def test_an_unknown_key_is_explained() -> None:
    x = inputs(CASES["dense"])
    settings = (["nonsense"], 1.0, 1.0, *[None] * 4, "exact", None, None, False)
    with pytest.raises(RuntimeError, match="no activation with the key 'nonsense'"):
        torch.ops.gdpa.attention(*x.leaves, *[None] * 5, [], *settings)


# ---- modes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    x = inputs(CASES["dense"])
    want = torch.autograd.grad(gdpa.attention(*x.leaves).square().sum(), x.leaves)
    checkpoint(gdpa.attention, *x.leaves, use_reentrant=reentrant).square().sum().backward()
    for leaf, w in zip(x.leaves, want, strict=True):
        close(leaf.grad, w)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    x = inputs(CASES["packed"])
    want = call(CASES["packed"], x, "silu").detach()
    with mode():
        out = call(CASES["packed"], x, "silu")
    assert not out.requires_grad
    close(out, want)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        q = torch.randn(2, 2, 5, 8)
        out = gdpa.attention(q, q, q)
    close(gdpa.attention(q, q, q), out)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_meta_tensors_have_shapes(case: Case, backend: str | None) -> None:
    x = inputs(case)
    want = call(case, x, "silu")
    cu_q, cu_k = (None if cu is None else cu.to("meta") for cu in (x.cu_q, x.cu_k))
    meta = Inputs(*(t.detach().to("meta").requires_grad_() for t in x.leaves), cu_q, cu_k)
    out = call(case, meta, "silu", backend=backend)
    assert (out.shape, out.stride(), out.dtype, out.device.type) == (want.shape, want.stride(), want.dtype, "meta")
    out.sum().backward()
    assert meta.q.grad.shape == x.q.shape


def test_fake_tensors_have_shapes() -> None:
    with torch._subclasses.FakeTensorMode():
        q, kv, cu = torch.randn(7, 2, 8), torch.randn(9, 2, 8), torch.zeros(4, dtype=torch.int32)
        assert gdpa.attention_varlen(q, kv, kv, cu, cu, SQUARE).shape == (7, 2, 8)


# ---- FLOP formulas -------------------------------------------------------------------------------------------------
FLOP_CASES = [
    Case("equal", (48,) * 3, (32,) * 3, heads=2, d=16),
    Case("gqa-unequal-d", (5,) * 2, (7,) * 2, heads=4, heads_k=2, d=24, dv=40),
    Case("packed", (0, 5, 33), (7, 1, 20), heads=2, d=16, packed_q=True, packed_k=True),
    Case("packed-dense-keys", (0, 5, 33), (12,) * 3, heads=2, d=16, dv=8, packed_q=True),
    Case("shared", (20,) * 3, (33,) * 3, heads=2, d=16, shared=True),
    Case("shared-packed-keys", (9,) * 3, (0, 33, 5), heads=2, heads_k=1, d=16, packed_k=True, shared=True),
]


@pytest.mark.parametrize("case", FLOP_CASES, ids=lambda case: case.name)
def test_flops(case: Case) -> None:
    x = inputs(case, torch.float32)
    with FlopCounterMode(display=False) as forward:
        out = call(case, x, "silu")
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    pairs = sum(q * k for q, k in zip(case.len_q, case.len_k, strict=True))
    d, dv = case.d, case.dv or case.d
    assert forward.get_total_flops() == 2 * case.heads * pairs * (d + dv)
    assert backward.get_total_flops() == 2 * case.heads * pairs * (3 * d + 2 * dv)
    if d == dv:
        assert forward.get_total_flops() == 4 * case.heads * d * pairs
        assert backward.get_total_flops() == 2.5 * forward.get_total_flops()


def test_flops_of_a_band_and_of_nested_tensors_are_those_without() -> None:
    case = FLOP_CASES[2]
    x = inputs(case, torch.float32)
    q = torch.nested.nested_tensor_from_jagged(x.q, x.cu_q.long()).transpose(1, 2)
    offsets = x.cu_k.long()
    k, v = (torch.nested.nested_tensor_from_jagged(t, offsets).transpose(1, 2) for t in (x.k, x.v))
    with FlopCounterMode(display=False) as counter:
        gdpa.attention(q, k, v, causal=True)
    assert counter.get_total_flops() == 4 * case.heads * case.d * (5 * 1 + 33 * 20)


def test_flops_without_data_take_equal_lengths() -> None:
    q, k, cu = (
        torch.randn(8, 2, 16, device="meta"),
        torch.randn(12, 2, 16, device="meta"),
        torch.zeros(5, device="meta"),
    )
    with FlopCounterMode(display=False) as counter:
        gdpa.attention_varlen(q, k, k, cu.long(), cu.long())
    assert counter.get_total_flops() == 4 * 2 * 16 * (4 * 2 * 3)


def test_the_reference_is_used_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "attention", lambda *args: pytest.fail("the reference ran"))
    x = inputs(CASES["dense"])
    gdpa.attention(*x.leaves)
