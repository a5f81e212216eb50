"""Row sums on every backend: against float64, against F.scaled_dot_product_attention, and where they are delicate."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gdpa
from rowsums.formulas import BY_NAME, FUNCTIONS, check
from support import CASES, INTERPRET, TINY, TINY_CASES, TINY_PACKED, Target, bf16, f16, f32, f64, on_targets, targets

KERNELS = ("reference", "cpu", "triton")
ALL_CASES = TINY_CASES if INTERPRET else list(CASES.values())
FEW = ["softmax"] if INTERPRET else ["softmax", "tempered", "silu", "sigmoid"]
# The slow interpreter gets functions that differ in what a kernel does with them.
INTERPRETED = ["off by one", "gaussian", "tempered", "leaky", "half gelu"]
HERE = [BY_NAME[name] for name in INTERPRETED] if INTERPRET else FUNCTIONS


@pytest.mark.parametrize("target", targets(f32, backends=KERNELS))
@pytest.mark.parametrize("f", HERE, ids=repr)
def test_functions(f, target):
    check(TINY_PACKED if INTERPRET else CASES["gqa-causal-unequal-d"], target, f)


@pytest.mark.parametrize(("case", "target"), on_targets(ALL_CASES, f32, f16, bf16, backends=KERNELS, interpret=(f32,)))
@pytest.mark.parametrize("name", FEW)
def test_cases(name, case, target):
    check(case, target, BY_NAME[name], out_scale=0.5)


@pytest.mark.parametrize("target", targets(f32, f64, backends=KERNELS, interpret=(f32,)))
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_is_that_of_torch(causal, target):
    torch.manual_seed(0)
    if target == Target("triton", f64):
        pytest.skip("it computes no float64")
    q, k, v, do = (torch.randn(2, 2, 18, 16, dtype=target.dtype, device=target.device) for _ in range(4))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    ours = gdpa.attention(q, k, v, "softmax", causal=causal, backend=target.backend)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    for a, b in zip(
        (ours, *torch.autograd.grad(ours, inputs, do)), (theirs, *torch.autograd.grad(theirs, inputs, do)), strict=True
    ):
        torch.testing.assert_close(a, b, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("target", targets(f32, backends=KERNELS))
@pytest.mark.parametrize("sink", [0.0, 1.0])
@pytest.mark.parametrize("level", [1e4, -1e4])
def test_large_scores_do_not_overflow(level, sink, target):
    """Scores around +-1e4, alike but for a few units, over several tiles of keys."""
    torch.manual_seed(0)
    s = level + 3 * torch.randn(20, 37)
    q = torch.eye(20, 40)[None, None]
    k = torch.zeros(1, 1, 37, 40)
    k[0, 0, :, :20] = s.T
    v = torch.randn(1, 1, 37, 8)
    q, k, v = (t.to(target.device).requires_grad_() for t in (q, k, v))
    out, lse = gdpa.attention(q, k, v, "softmax", scale=1.0, sink=sink, backend=target.backend, return_weights_sum=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    logits = F.pad(s.double(), (0, 1), value=0.0) if sink else s.double()
    weights = logits.softmax(-1)[:, :37]
    torch.testing.assert_close(out[0, 0].cpu().double(), weights @ v[0, 0].cpu().double(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse[0, 0].cpu().double(), logits.logsumexp(-1), atol=2e-3, rtol=1e-6)
    assert all(bool(g.isfinite().all()) for g in grads)
    torch.testing.assert_close(
        grads[2][0, 0, :, 0].cpu().double(), weights.sum(0), atol=2e-3, rtol=2e-3
    )  # dv is the sum of weights


@pytest.mark.parametrize("target", targets(f32, backends=KERNELS))
@pytest.mark.parametrize(("activation", "normalize"), [("softmax", None), ("relu", "sum"), ("relu", "abs")])
def test_rows_without_a_denominator(activation, normalize, target):
    """Nothing visible, or relu of nothing but negative scores: zeros, zero gradients, no NaN."""
    q = torch.ones(1, 1, 6, 8)
    k = -torch.ones(1, 1, 4, 8)
    v = torch.ones(1, 1, 4, 8)
    q, k, v = (t.to(target.device).requires_grad_() for t in (q, k, v))
    sink = torch.zeros(1, device=target.device, requires_grad=True)
    out, sums = gdpa.attention(
        q, k, v, activation, normalize=normalize, sink=sink, causal=True, backend=target.backend,
        return_weights_sum=True,
    )  # fmt: skip
    grads = torch.autograd.grad(out.sum(), (q, k, v, sink))
    assert all(bool(g.isfinite().all()) for g in grads)
    blind = 2 if activation == "softmax" else 6  # two queries see no key at all
    assert bool((out[:, :, :blind] == 0).all())
    assert bool((grads[0][:, :, :blind] == 0).all())
    assert bool((sums[:, :, :blind] == (-torch.inf if activation == "softmax" else 0)).all())
    if activation == "softmax":
        torch.testing.assert_close(out[:, :, 2:], torch.ones_like(out[:, :, 2:]))
    else:
        assert all(bool((g == 0).all()) for g in grads)


@pytest.mark.parametrize("target", targets(f32, bf16, backends=KERNELS))
@pytest.mark.parametrize("sink", [0.0, 1.0])
def test_nan_does_not_become_a_row_of_zeros(sink, target):
    """A denominator of NaN is not one of 0: training must see that a query has gone wrong."""
    q, k, v = torch.randn(3, 1, 1, 8, 16, device=target.device, dtype=target.dtype)
    q[0, 0, 2, 0] = torch.nan
    v.requires_grad_()
    out, lse = gdpa.attention(q, k, v, "softmax", sink=sink, backend=target.backend, return_weights_sum=True)
    assert out.isnan().any(-1).flatten().tolist() == lse.isnan().flatten().tolist() == [i == 2 for i in range(8)]
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert bool(dv.isnan().all())


@pytest.mark.parametrize("target", targets(f32, backends=("cpu", "triton", "hopper")))
@pytest.mark.parametrize(("f", "normalize"), [("softmax", None), ("sigmoid", ["sum", None])])
def test_sums_have_gradients_where_outputs_are_multiplied_by_0(f, normalize, target):
    inputs = torch.randn(3, 1, 2, 18, 16, device=target.device).to(target.dtype).unbind()
    sink, dsums = torch.rand(2, 2, 18, device=target.device).unbind()
    options = {"normalize": normalize, "out_scale": 0.0, "causal": True, "return_weights_sum": True}

    def gradients(backend):
        q, k, v, s = leaves = [t.detach().clone().requires_grad_() for t in (*inputs, sink[:, 0])]
        out, sums = gdpa.attention(q, k, v, f, sink=s, backend=backend, **options)
        return torch.autograd.grad((out, sums), leaves, (torch.ones_like(out), dsums[None]), materialize_grads=True)

    for got, want in zip(gradients(target.backend), gradients("reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-5 if target.dtype == f32 else 2e-2)
    assert bool(got.any())  # of the sink


@pytest.mark.parametrize("target", targets(f32, bf16, backends=("reference", "cpu", "triton", "hopper")))
def test_infinite_sums_make_nan_of_infinite_products(target):
    q, k, v = torch.ones(3, 1, 1, 8, 16, device=target.device, dtype=target.dtype)
    q[0, 0, 2] = 3e38
    out = gdpa.attention(q, k, v, "relu", normalize="sum", scale=1.0, backend=target.backend)
    assert out.isnan().any(-1).flatten().tolist() == [i == 2 for i in range(8)]


@pytest.mark.parametrize("target", targets(f32, backends=KERNELS))
@pytest.mark.parametrize("name", ["softmax", "tanh"])
def test_masks(name, target):
    case = TINY if INTERPRET else CASES["dense"]
    striped = lambda b, len_q, len_k: (torch.arange(len_q)[:, None] + torch.arange(len_k)) % 3 == 0
    check(case, target, BY_NAME[name], mask=(gdpa.Mask(lambda q_idx, kv_idx: (q_idx + kv_idx) % 3 == 0), striped))


@pytest.mark.parametrize("target", targets(f32, backends=KERNELS))
def test_heads_may_differ(target):
    """Normalised and plain heads in one call, with GQA, are what each is alone."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 10, 16, device=target.device, requires_grad=True)
    k, v = (torch.randn(2, 2, 18, 16, device=target.device, requires_grad=True) for _ in range(2))
    sink = torch.rand(4, device=target.device, requires_grad=True)
    acts, norms = ["softmax", "silu", "silu", "relu"], ["sum", "abs", None, "sum"]
    inputs = (q, k, v, sink)

    def alone(h: int) -> Tensor:
        g = slice(h // 2, h // 2 + 1)
        options = {} if norms[h] is None else {"normalize": norms[h], "sink": sink[h]}
        return gdpa.attention(q[:, h : h + 1], k[:, g], v[:, g], acts[h], backend="reference", **options)

    ours, sums = gdpa.attention(
        q, k, v, acts, normalize=norms, sink=sink, backend=target.backend, return_weights_sum=True
    )
    want = torch.cat([alone(h) for h in range(4)], dim=1)
    do = torch.randn_like(want)
    assert bool((sums[:, 2] == 1).all())
    for a, b in zip(
        (ours, *torch.autograd.grad(ours, inputs, do)), (want, *torch.autograd.grad(want, inputs, do)), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("target", targets(f32, backends=("cpu", "triton")))
@pytest.mark.parametrize("deterministic", [False, True])
def test_positions_and_tables(deterministic, target):
    """softmax with a learned relative bias, of which it must not matter that exp is the last operation."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 18, 16, device=target.device, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 40, device=target.device, requires_grad=True)

    def biased(s, table, *, h, q_idx, kv_idx):
        return torch.exp(s + table[h, q_idx - kv_idx + 18])

    results = []
    options = {"tables": (bias,), "normalize": "sum", "sink": 0.5, "causal": True, "return_weights_sum": True}
    do = torch.arange(16.0, device=target.device).expand(1, 2, 18, 16)
    torch.use_deterministic_algorithms(deterministic)
    try:
        for backend in (target.backend, "reference"):
            out, sums = gdpa.attention(q, k, v, biased, **options, backend=backend)
            grads = torch.autograd.grad((out, sums), (q, k, v, bias), (do, torch.ones_like(sums)))
            results.append((out, *grads))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("target", targets(f32, backends=("reference", "cpu", "triton")))
def test_unused_rows(target):
    """Rows behind the offsets and behind seqused: zeros, whatever lies in them."""
    torch.manual_seed(0)
    x = torch.randn(24, 2, 8, device=target.device)
    cu = torch.tensor([0, 9, 9, 20], device=target.device)
    used = torch.tensor([7, 0, 11], device=target.device)
    dirty = x.clone()
    dirty[7:9], dirty[20:] = torch.nan, torch.nan
    q = dirty.requires_grad_()
    out, sums = gdpa.attention_varlen(
        q, q, q, cu, cu, "softmax", seqused_q=used, seqused_k=used, backend=target.backend, return_weights_sum=True
    )
    (grad,) = torch.autograd.grad(out.sum(), q)
    for t in (out, sums, grad):
        assert bool(t.isfinite().all())
        assert bool((t[7:9] == 0).all() and (t[20:] == 0).all())
    want = gdpa.attention_varlen(*(x[:7],) * 3, *(torch.tensor([0, 7], device=target.device),) * 2, "softmax")
    torch.testing.assert_close(out[:7], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("target", targets(f32, backends=("cpu", "triton")))
@pytest.mark.parametrize("name", ["softmax", "leaky"])
def test_deterministic_backward(name, target):
    """By another kernel, which adds dq up in a fixed order."""
    case = TINY_CASES[2] if INTERPRET else CASES["shared-queries-packed-keys"]
    torch.use_deterministic_algorithms(True)
    try:
        check(case, target, BY_NAME[name])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("target", targets(f32, backends=KERNELS))
def test_sequences_do_not_see_each_other(target):
    """NaN and infinite scores of one sequence leave the others as they are, sums and gradients too."""
    torch.manual_seed(0)
    x = torch.randn(3, 21, 2, 8, device=target.device)
    cu = torch.tensor([0, 5, 12, 21], dtype=torch.int32, device=target.device)

    def results(x: Tensor) -> list[Tensor]:
        q, k, v = (t.clone().requires_grad_() for t in x)
        out, sums = gdpa.attention_varlen(
            q, k, v, cu, cu, "softmax", sink=0.5, backend=target.backend, return_weights_sum=True
        )
        return [out, sums, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    poisoned = x.clone()
    poisoned[:, 5:12] = torch.nan
    poisoned[0, 6] = torch.inf
    for a, b in zip(results(x), results(poisoned), strict=True):
        assert torch.equal(a[:5], b[:5])
        assert torch.equal(a[12:], b[12:])
