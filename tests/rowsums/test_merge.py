"""gdpa.merge, and gradients through row sums, which it needs."""

from __future__ import annotations

import pytest
import torch

import gdpa
from gdpa import merging
from support import f32, targets


@pytest.mark.parametrize("target", targets(f32, backends=("reference", "cpu", "triton")))
@pytest.mark.parametrize(("activation", "kind"), [("softmax", "softmax"), ("silu", "sum")])
def test_parts_of_the_keys_make_the_whole(activation, kind, target):
    """Three parts, one of which nobody sees: output, sums and gradients are those of one call."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, device=target.device, requires_grad=True) for n in (5, 21, 21))
    sink = torch.rand(2, device=target.device, requires_grad=True)
    options = {"normalize": "sum" if activation == "softmax" else "abs", "return_weights_sum": True}
    options |= {"backend": target.backend}
    whole = gdpa.attention(q, k, v, activation, sink=sink, **options)
    parts = []
    for start, stop in ((0, 16), (16, 21), (21, 21)):
        own = {"sink": sink} if start == 0 else {}
        parts.append(gdpa.attention(q, k[:, :, start:stop], v[:, :, start:stop], activation, **own, **options))
    merged = gdpa.merge(*zip(*parts, strict=True), kind=kind)
    weights = torch.randn_like(whole[0])
    results = [
        (out, sums, *torch.autograd.grad((out * weights).sum() + sums.sin().sum(), (q, k, v, sink)))
        for out, sums in (whole, merged)
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_rows_that_see_nothing():
    """Of no part: zeros, -inf, and gradients without NaN."""
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    k = torch.randn(1, 1, 2, 8)
    parts = [gdpa.attention(q, k, k, "softmax", causal=True, return_weights_sum=True) for _ in range(2)]
    out, lse = gdpa.merge(*zip(*parts, strict=True))
    assert bool((out[:, :, :2] == 0).all())
    assert bool((lse[:, :, :2] == -torch.inf).all())
    assert bool(torch.autograd.grad(out.sum(), q)[0].isfinite().all())


@pytest.mark.parametrize("packed", [False, True])
def test_heads_of_different_kinds(packed):
    """One entry per head: logarithms, sums, and heads that nothing divides."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 9, 9))

    def call(keys):
        own = [q, k[:, :, keys], v[:, :, keys]]
        own = [x.transpose(1, 2)[0] for x in own] if packed else own
        offsets = [torch.tensor([0, len(x)]) for x in own[:2]] if packed else []
        attention = gdpa.attention_varlen if packed else gdpa.attention
        options = {"normalize": ["sum", "sum", None, "abs"], "return_weights_sum": True}
        return attention(*own, *offsets, ["softmax", "relu", "gelu", "relu"], **options)

    whole = call(slice(0, 9))
    merged = gdpa.merge(*zip(call(slice(0, 2)), call(slice(2, 9)), strict=True), kind=["softmax", "sum", None, "sum"])
    gradients = [torch.autograd.grad(out.sin().sum() + sums.sin().sum(), (q, k, v)) for out, sums in (whole, merged)]
    for a, b in zip((*whole, *gradients[0]), (*merged, *gradients[1]), strict=True):
        torch.testing.assert_close(a, b)


def test_heads_of_one_kind_are_merged_together(monkeypatch):
    """One pass for each kind, wherever its heads are, and the numbers of one pass for each head."""
    torch.manual_seed(0)
    kinds = ["softmax", None, "sum", "softmax", None, "softmax"]
    outs, sums = ([torch.rand(2, 6, *rest) for _ in range(3)] for rest in ((4, 8), (4,)))
    apart = [gdpa.merge([o[:, h] for o in outs], [s[:, h] for s in sums], kind) for h, kind in enumerate(kinds)]
    passes, merged = [], merging._merged
    monkeypatch.setattr(merging, "_merged", lambda *args: passes.append(args[2]) or merged(*args))
    together = gdpa.merge(outs, sums, kinds)
    assert passes == ["softmax", None, "sum"]
    for whole, heads in zip(together, zip(*apart, strict=True), strict=True):
        assert whole.equal(torch.stack(heads, 1))


def test_refusals():
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    nested = torch.nested.as_nested_tensor([out[0, 0]], layout=torch.jagged)
    for outs, sums, named in (
        (out, lse, "outs must be a list or tuple of tensors, one for each part, got Tensor"),
        ([out], (x for x in [lse]), "sums must be a list or tuple of tensors, one for each part, got generator"),
        ([out], [0.5], r"sums\[0\] must be a tensor, got float"),
        ([nested], [lse], r"outs\[0\] is a nested tensor; use gdpa.attention_varlen"),
        ([out.long()] * 2, [lse] * 2, r"outs\[0\] must be of a float dtype, .*, got torch.int64"),
        ([out], [lse.bool()], r"sums\[0\] must be of a float dtype, .*, got torch.bool"),
        (
            [out, out.double()],
            [lse] * 2,
            r"outs must have one dtype, got torch.float32 and torch.float64 in outs\[1\]",
        ),
        (
            [out.half()] * 2,
            [lse, lse.double()],
            r"sums must have one dtype, got torch.float32 and torch.float64 in sums",
        ),
    ):
        with pytest.raises(TypeError, match=named):
            gdpa.merge(outs, sums)
    for outs, sums, kind, words in (
        ([out], [lse], "log", 'kind must be "softmax", "sum" or None, got \'log\''),
        ([out], [lse], ["sum"], r"kind is a list of length 1, but needs one entry per head \(2\)"),
        ([out], [lse], ["sum", "log"], r"kind\[1\] must be"),
        ([out[0, 0]], [lse[0, 0]], ["sum", "sum"], r"outs\[0\] must be \(B, H, L, D\)"),
        ([], [], "sum", "0 and 0"),
        ([out, out], [lse], "sum", "2 and 1"),
        ([out, out.to("meta")], [lse, lse], "sum", r"on one device, but outs\[0\] is on cpu and outs\[1\] on meta"),
        ([out, out], [lse, lse[:, :1]], "sum", r"sums\[1\] must have shapes"),
    ):
        with pytest.raises(ValueError, match=words):
            gdpa.merge(outs, sums, kind)
