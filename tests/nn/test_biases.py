"""Biases of scores, learned sinks and masks of layers, in float64 against formulas on one sequence after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gdpa
import gdpa.nn as gnn
from gdpa import masks
from nn.cases import LENGTHS, C, H, stirred
from support import default_dtype

# (gap, q, k) are i - j and the numbers of a sequence's rows; a bias (H or 1, L, L) of its module.
TIMES = torch.tensor([3, 17, 18, 1000, 40_000_000, 5, 5, 90, 7, 1, 2, 4, 8, 700, 3000, 50_000])
Formula = Callable[[Any, Tensor, Tensor], Tensor]


def t5(bias: gnn.T5Bias, gap: Tensor, times: Tensor) -> Tensor:
    """As transformers has it, number by number."""
    found = torch.zeros_like(gap)
    count = bias.buckets // 2 if bias.bidirectional else bias.buckets
    for index in range(gap.numel()):
        n = int(gap.flatten()[index])  # i - j
        first = count if bias.bidirectional and n < 0 else 0
        n = abs(n) if bias.bidirectional else max(n, 0)
        exact = count // 2
        if n >= exact:
            steps = torch.tensor(n / exact).log() / torch.tensor(bias.max_distance / exact).log() * (count - exact)
            n = min(exact + int(steps), count - 1)
        found.view(-1)[index] = first + n
    return bias.weight[:, found]


def by_time(bias: gnn.TimeBias, gap: Tensor, times: Tensor) -> Tensor:
    between = (times[:, None] - times).abs().clamp(min=1)
    index = (between.double().log() / 0.301).long().clamp(0, bias.num_buckets)
    return bias.weight[index] if bias.weight.dim() == 1 else bias.weight[:, index]


def relative(bias: gnn.RelativeBias, gap: Tensor, times: Tensor) -> Tensor:
    return bias.weight[gap.clamp(1 - bias.longest, bias.longest - 1) + bias.longest - 1]


BIASES: dict[str, tuple[Callable[[], gnn.ScoreBias], Formula]] = {
    "alibi": (lambda: gnn.ALiBi(H), lambda b, gap, t: -b.slopes[:, None, None] * gap.abs()),
    "alibi-causal": (lambda: gnn.ALiBi(H, causal=True), lambda b, gap, t: -b.slopes[:, None, None] * gap.abs()),
    "relative": (lambda: gnn.RelativeBias(3), relative),
    "t5": (lambda: gnn.T5Bias(H, 8, 6), t5),
    "t5-causal": (lambda: gnn.T5Bias(H, 4, 5, bidirectional=False), t5),
    "time": (lambda: gnn.TimeBias(20), by_time),
    "time-heads": (lambda: gnn.TimeBias(20, H), by_time),
}


def gated(s: Tensor, *, bias: Tensor) -> Tensor:
    return F.silu(s) * torch.sigmoid(bias)


FUNCTIONS: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor], bool]] = {
    "silu": ("silu", lambda s, b: F.silu(s + b), False),
    "softmax": ("softmax", lambda s, b: (s + b).exp(), True),
    "gated": (gated, lambda s, b: F.silu(s) * torch.sigmoid(b), False),
    "traced": (gdpa.activation(lambda s: torch.tanh(s) ** 2), lambda s, b: torch.tanh(s + b) ** 2, False),
}


def inputs() -> tuple[gnn.Jagged, Tensor]:
    rows = torch.randn(sum(LENGTHS), C, generator=torch.Generator().manual_seed(2)).double().requires_grad_()
    return gnn.Jagged.from_lengths(rows, torch.tensor(LENGTHS)), TIMES[: sum(LENGTHS)]


def by_sequence(
    layer: gnn.SelfAttention, formula: Formula, x: gnn.Jagged, times: Tensor, fn: Any, normalized: bool
) -> Tensor:
    outs = []
    for rows, t in zip(x.unbind(), times.split(LENGTHS), strict=True):
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(0, 1) for part in layer.qkv(rows).chunk(3, -1))
        gap = torch.arange(len(rows))[:, None] - torch.arange(len(rows))
        p = fn(q @ k.mT / 2, sum(formula(one, gap, t) for one in layer.attention.score_bias))
        p = torch.where(gap >= 0, p, 0.0)
        outs.append(layer.out(((p / p.sum(-1, keepdim=True) if normalized else p) @ v).transpose(0, 1).flatten(1)))
    return torch.cat(outs)


def agree(got: Tensor, want: Tensor, leaves: list[Tensor]) -> None:
    weights = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view(got.shape)
    grads = [torch.autograd.grad((y * weights).sum(), leaves) for y in (got, want)]
    torch.testing.assert_close([got, *grads[0]], [want, *grads[1]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("bias", "function"),
    [*((bias, "silu") for bias in BIASES), ("t5", "softmax"), ("time", "softmax"), ("relative", "gated"),
     ("alibi", "traced")],
)  # fmt: skip
def test_biases(bias: str, function: str, backend: str) -> None:
    make, formula = BIASES[bias]
    activation, fn, normalized = FUNCTIONS[function]
    layer = gnn.SelfAttention(C, H, activation, causal=True, score_bias=make(), backend=backend).double()
    x, times = inputs()
    given = {"times": times} if "time" in bias else {}
    y = stirred(layer)(x, **given).values
    agree(y, by_sequence(layer, formula, x, times, fn, normalized), [x.values, *layer.parameters()])
    if "time" in bias:  # dense ones are (B, L)
        one = layer(x.values[:5][None], times=times[:5][None])
        torch.testing.assert_close(one[0], y[:5])


def test_biases_add_up() -> None:
    x, times = inputs()
    pair = [gnn.RelativeBias(3), gnn.TimeBias(20)]
    layer = stirred(gnn.SelfAttention(C, H, "silu", causal=True, score_bias=pair).double())
    both = lambda one, gap, t: (relative if isinstance(one, gnn.RelativeBias) else by_time)(one, gap, t)
    want = by_sequence(layer, both, x, times, FUNCTIONS["silu"][1], False)
    agree(layer(x, times=times).values, want, [x.values, *layer.parameters()])


def test_times_of_queries_and_keys() -> None:
    """A pair of times, for queries of other rows than the keys'."""
    core = gnn.Attention(2, "silu", score_bias=gnn.TimeBias(9)).double()
    q, k, v = (torch.randn(n, 2, 4, dtype=torch.float64) for n in (5, 7, 7))
    cu_q, cu_k = torch.tensor([0, 2, 5]), torch.tensor([0, 7, 7])
    times_q, times_k = torch.tensor([5, 100, 1, 2, 3]), torch.arange(7) ** 2
    out = core(q, k, v, cu_q, cu_k, times=(times_q, times_k))
    index = ((times_q[:2, None] - times_k).abs().clamp(min=1).log() / 0.301).long().clamp(0, 9)
    s = torch.einsum("ihd,jhd->hij", q[:2], k) / 2 + stirred(core).score_bias[0].weight[index]
    out = core(q, k, v, cu_q, cu_k, times=(times_q, times_k))
    torch.testing.assert_close(out[:2], torch.einsum("hij,jhd->ihd", F.silu(s), v))
    assert not out[2:].any()


def test_masks_of_the_layer_and_of_the_batch_are_joined() -> None:
    x, _ = inputs()
    counts = torch.tensor([2, 0, 1, 0, 3])
    layer = gnn.SelfAttention(C, H, "silu", mask=masks.window(2, 2)).double()
    joined = gnn.SelfAttention(C, H, "silu", mask=masks.window(2, 2) & masks.targets(counts)).double()
    joined.load_state_dict(layer.state_dict())
    y = layer(x, mask=masks.targets(counts)).values
    torch.testing.assert_close(y, joined(x).values)
    assert not torch.allclose(y, layer(x).values)
    assert joined.attention.mask_table0.dtype == torch.int64  # a buffer: it moves with the module, whatever the dtype


@pytest.mark.parametrize("narrow", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to("cpu", torch.bfloat16)])
def test_tables_that_are_data_keep_their_digits(narrow: Callable[[nn.Module], nn.Module]) -> None:
    ids, slopes = torch.tensor([[256.0, 257.0, 258.0, 259.0]]), gnn.ALiBi(3).slopes
    layer = narrow(gnn.SelfAttention(6, 3, "sigmoid", mask=masks.document(ids), score_bias=gnn.ALiBi(3)))
    assert torch.equal(layer.attention.mask_table0, ids)
    assert torch.equal(layer.attention.score_bias[0].slopes, slopes)
    assert layer.qkv.weight.dtype != torch.float32
    x = torch.randn(1, 4, 6, dtype=layer.qkv.weight.dtype)
    others = torch.cat([x[:, :1], x[:, 1:] + 1], 1)
    assert torch.equal(layer(x)[:, :1], layer(others)[:, :1])  # a row sees itself only
    assert layer.double().attention.mask_table0.dtype == torch.float64


def test_fixed_tables_do_not_depend_on_the_default_dtype() -> None:
    """Models are built under another one, and given the weights of one that was not."""
    buckets, slopes = gnn.T5Bias(4).bucket, gnn.ALiBi(3).slopes
    with default_dtype(torch.bfloat16):
        narrow, alibi = gnn.T5Bias(4), gnn.ALiBi(3)
    assert narrow.weight.dtype == torch.bfloat16
    assert torch.equal(narrow.bucket, buckets)
    assert torch.equal(alibi.slopes, slopes)
    assert torch.equal(gnn.ALiBi(3, dtype=torch.float16).slopes, slopes)


def test_masks_compile_once() -> None:
    """New tables, no new graph."""
    torch._dynamo.reset()  # of other tests' layers, which count as well
    layer = gnn.SelfAttention(C, H, "softmax", causal=True, score_bias=gnn.TimeBias(20))
    step = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            rows = torch.randn(8, C, generator=torch.Generator().manual_seed(seed))
            x, times = gnn.Jagged.from_lengths(rows, torch.tensor([5, 3])), TIMES[seed : seed + 8]
            mask = masks.targets(torch.tensor([seed, 1]))
            torch.testing.assert_close(step(x, times=times, mask=mask).values, layer(x, times=times, mask=mask).values)


def test_a_learned_sink_starts_where_it_is_told() -> None:
    layer = gnn.SelfAttention(C, H, "softmax", sink=2.0, learn_sink=True)
    fixed = gnn.SelfAttention(C, H, "softmax", sink=2.0)
    missing, extra = fixed.load_state_dict(layer.state_dict(), strict=False)
    assert (missing, extra) == ([], ["attention.sink_logits"])
    x = torch.randn(2, 5, C)
    torch.testing.assert_close(layer(x), fixed(x))
    assert "sink=2.0" in repr(fixed)


def test_learned_sinks_are_as_wide_as_the_sums() -> None:
    """In float16 exp(12) is inf."""
    layer = gnn.Attention(2, "softmax", sink=1.0, learn_sink=True, dtype=torch.float16)
    assert layer.sink_logits is not None
    with torch.no_grad():
        layer.sink_logits.fill_(12.0)
    q, k, v = torch.randn(3, 1, 5, 2, 8, dtype=torch.float16).unbind(0)
    got, sink = layer(q, k, v), torch.tensor(12.0).exp()
    exact = gdpa.attention(*(t.transpose(1, 2) for t in (q, k, v)), "softmax", sink=sink)
    assert torch.equal(got, exact.transpose(1, 2))
    got.float().sum().backward()
    assert layer.sink_logits.grad.isfinite().all()
    assert layer.double()._heads().sink.dtype == torch.float64
    with pytest.raises(ValueError, match="sink must be finite in float32"):
        gnn.Attention(2, "softmax", sink=1e39, learn_sink=True)
    largest = gnn.Attention(2, "softmax", sink=3e38, learn_sink=True)._heads().sink
    torch.testing.assert_close(largest, torch.tensor([3e38] * 2), rtol=1e-5, atol=0)
    assert gnn.Attention(2, "softmax", sink=1e39, learn_sink=True, dtype=torch.float64).sink == 1e39


def test_a_learned_sink_beyond_the_largest() -> None:
    """It has all the weight beside scores near 0."""
    layer = gnn.Attention(2, "softmax", sink=1.0, learn_sink=True)
    assert layer.sink_logits is not None
    with torch.no_grad():
        layer.sink_logits.copy_(torch.tensor([89.0, 1e9]))
    out = layer(*torch.randn(3, 1, 5, 2, 8).unbind(0))
    torch.testing.assert_close(out, torch.zeros_like(out))
    out.sum().backward()
    assert layer.sink_logits.grad.isfinite().all()


def test_heads_of_their_own_with_a_bias() -> None:
    """Functions and sums per head, one bias for all of them; a layer that is made of a bias leaves it as it is."""
    x, _ = inputs()
    bias = gnn.RelativeBias(3)
    functions: list[Any] = ["softmax", "silu", gated, "silu"]
    layer = gnn.SelfAttention(C, H, functions, normalize=["sum", "abs", None, None], score_bias=bias).double()
    stirred(layer)
    got = layer(x).values
    parts = []
    for h, (name, norm) in enumerate(zip(functions, ("sum", "abs", None, None), strict=True)):
        one = gnn.SelfAttention(C, H, name, normalize=norm, score_bias=bias).double()
        one.load_state_dict(layer.state_dict())
        with torch.no_grad():
            one.out.weight[:, : h * 4] = 0
            one.out.weight[:, (h + 1) * 4 :] = 0
            one.out.bias.zero_()
        parts.append(one(x).values)
    torch.testing.assert_close(got, sum(parts) + layer.out.bias)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gnn.SelfAttention(C, H, score_bias=nn.Linear(2, 2)), "score_bias must be a gdpa.nn.ScoreBias"),
        (lambda: gnn.SelfAttention(C, H, score_bias=gnn.ALiBi(3)), r"score_bias\[0\] is for 3 heads, .* num_heads=4"),
        (lambda: gnn.SelfAttention(C, H, sink=1.0), "sink=1.0 is added to the row sums, but there are none"),
        (lambda: gnn.SelfAttention(C, H, learn_sink=True), "learn_sink=True is added to the row sums, but there"),
        (lambda: gnn.SelfAttention(C, H, "softmax", learn_sink=True), "learn_sink=True needs a positive sink"),
        (lambda: gnn.SelfAttention(C, H, "softmax", normalize="abs"), "contradicts"),
        (lambda: gnn.SelfAttention(C, H, normalize="max"), "normalize must be None"),
        (lambda: gnn.SelfAttention(C, H, lambda s, *, bias: s + bias), "keyword-only argument 'bias'"),
        (lambda: gnn.SelfAttention(C, H, mask=3), "mask must be a gdpa.Mask"),
        (lambda: gnn.T5Bias(H, 2, 8), "buckets=2 with max_distance=8 leave no logarithmic part"),
        (lambda: gnn.TimeBias(4, bucket=3), "bucket must be a function"),  # type: ignore[arg-type]
        (lambda: gnn.ALiBi(H, learned=1), "learned must be True or False"),  # type: ignore[arg-type]
        (lambda: gnn.ALiBi(H, causal="yes"), "causal must be True or False"),  # type: ignore[arg-type]
        (lambda: timed()(torch.zeros(2, 3, C)), "times must be a tensor, or a pair"),
        (lambda: timed()(torch.zeros(2, 3, C), times=torch.zeros(2, 3)), "times must be integers .* got torch.float32"),
        (lambda: timed()(torch.zeros(2, 3, C), times=torch.zeros(3).long()), "times must have one entry per row"),
        (lambda: gnn.Attention(2, score_bias=gnn.TimeBias(4))(*torch.zeros(3, 1, 2, 2, 4), times=torch.zeros(3).int()),
         r"one entry per row of the queries \(2\), got shape \(3,\)"),
        (lambda: gnn.SelfAttention(C, H)(torch.zeros(2, 3, C), times=torch.zeros(2, 3).long()), "no time bias"),
        (lambda: gnn.SelfAttention(C, H, gdpa.activation(lambda s, *, h: s * h), score_bias=gnn.ALiBi(H)),
         "already has positions or tables"),
        (lambda: gnn.SelfAttention(C, H, lambda s, t, *, q_idx: s + t[q_idx], score_bias=gnn.ALiBi(H)),
         "cannot be called with a score and 0 params: missing .* 't'. With score_bias a layer gives its function no"),
        (lambda: gnn.SelfAttention(C, H, lambda s, *, bias: s + bias, params=(1.0,), score_bias=gnn.ALiBi(H)),
         "cannot be called with a score and 1 params: too many"),
    ],
)  # fmt: skip
def test_refusals(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make()


def timed() -> gnn.SelfAttention:
    return gnn.SelfAttention(C, H, score_bias=gnn.TimeBias(4))


@pytest.mark.parametrize("layer", [gnn.SeedPooling, gnn.PMA])
def test_seeds_have_no_times(layer: Any) -> None:
    with pytest.raises(ValueError, match="seeds have none"):
        layer(16, 2, num_seeds=2, score_bias=gnn.TimeBias(8))


def test_a_bias_without_its_methods_is_named() -> None:
    class Bare(gnn.ScoreBias):
        pass

    with pytest.raises(NotImplementedError, match="Bare has no method"):
        gnn.SelfAttention(16, 2, "silu", score_bias=Bare())
