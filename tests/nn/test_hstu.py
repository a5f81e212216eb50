"""gdpa.nn.HSTU in float64 against the published formula on padded sequences, its mask pair by pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gdpa.nn as gnn
from gdpa import ops
from nn import formulas as f
from nn.cases import C, H, stirred
from support import INTERPRET

LENGTHS = (7, 0, 4, 12, 1)
TARGETS = torch.tensor([2, 0, 1, 5, 0])
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"max_attn_len": 2},
    "full tail": {"max_attn_len": 2, "full_attn_len": 3},
    "contexts": {"context_len": 2},
    "groups": {"target_group": 2},
    "everything": {"context_len": 1, "max_attn_len": 3, "full_attn_len": 1, "target_group": 3},
}


def sees(length: int, targets: int, options: dict[str, Any]) -> Tensor:
    given = [options.get(name, usual) for name, usual in
             (("context_len", 0), ("max_attn_len", None), ("full_attn_len", 0), ("target_group", 1))]  # fmt: skip
    found = [[f.hstu_sees(i, j, length, targets, *given) for j in range(length)] for i in range(length)]
    return torch.tensor(found, dtype=torch.bool).view(length, length)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("with_targets", [False, True])
def test_the_mask_pair_by_pair(name: str, with_targets: bool) -> None:
    """Values that are unit vectors, and a function that is 1 everywhere: the output is the mask."""
    layer = gnn.HSTU(C, 1, 4, time_buckets=None, position_bias=False, **OPTIONS[name])
    core = gnn.Attention(1, lambda s: s * 0 + 1, causal=layer.attention.causal)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    rows = gnn.Jagged(torch.randn(sum(LENGTHS), C), cu)
    v = torch.cat([torch.eye(max(LENGTHS))[:n] for n in LENGTHS])[:, None]
    q = torch.randn(len(v), 1, 4)
    mask = layer._mask(rows, TARGETS if with_targets else None)
    out = core(q, q, v, cu, cu, mask=mask)[:, 0]
    for got, length, count in zip(out.split(LENGTHS), LENGTHS, TARGETS.tolist(), strict=True):
        want = sees(length, count if with_targets else 0, OPTIONS[name])
        assert torch.equal(got[:, :length] != 0, want)


def inputs() -> tuple[gnn.Jagged, Tensor]:
    rng = torch.Generator().manual_seed(5)
    rows = torch.randn(sum(LENGTHS), C, generator=rng).double().requires_grad_()
    return gnn.Jagged.from_lengths(rows, torch.tensor(LENGTHS)), torch.randint(0, 10**6, (len(rows),), generator=rng)


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({"time_buckets": 40}, f.hstu(H, 4, 4, 4, buckets=40)),
        (
            {"time_buckets": 40, "next_time": False, "head_dim": 3, "value_dim": 5, **OPTIONS["everything"]},
            f.hstu(H, 4, 3, 5, context=1, window=3, full=1, group=3, buckets=40, ahead=False),
        ),
        (
            {"time_buckets": 8, "activation": "sigmoid", "context_len": 2},
            f.hstu(H, 4, 4, 4, context=2, buckets=8, fn=torch.sigmoid),
        ),
    ],
    ids=["published", "everything", "sigmoid"],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_published_formula(options: dict[str, Any], formula: Any, backend: str) -> None:
    x, times = inputs()
    layer = stirred(gnn.HSTU(C, H, 4, backend=backend, **options).double())
    got = layer(x, times=times, num_targets=TARGETS).values
    keep = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    padded = gnn.Jagged(times[:, None].double(), x.cu_seqlens).to_padded()[..., 0].long()
    want = formula(dict(layer.named_parameters()), x.to_padded(), keep, times=padded, targets=TARGETS)[keep]
    leaves = [x.values, *layer.parameters()]
    weights = torch.linspace(-1, 1, got.numel()).double().view(got.shape)
    grads = [torch.autograd.grad((y * weights).sum(), leaves) for y in (got, want)]
    torch.testing.assert_close([got, *grads[0]], [want, *grads[1]], rtol=1e-8, atol=1e-9)


@pytest.mark.triton
def test_on_triton() -> None:
    """The whole layer with everything in it, in float32 beside the reference."""
    device = "cpu" if INTERPRET else "cuda"
    found = []
    for backend in ("reference", "triton"):
        torch.manual_seed(0)
        x, times = inputs()
        layer = stirred(gnn.HSTU(2 * C, 2, 4, backend=backend, time_buckets=40, **OPTIONS["everything"])).to(device)
        rows = gnn.Jagged(x.values.detach().float().repeat(1, 2).to(device), x.cu_seqlens.to(device))
        y = layer(rows, times=times.to(device), num_targets=TARGETS.to(device)).values
        weights = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape)
        found.append([y, *torch.autograd.grad((y * weights).sum(), list(layer.parameters()))])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_one_call_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    forward = ops.write_output
    monkeypatch.setattr(ops, "write_output", lambda *args: (called.append(args[0]), forward(*args))[1])
    x, times = inputs()
    gnn.HSTU(C, H, 4, **OPTIONS["everything"]).double()(x, times=times, num_targets=TARGETS)
    assert len(called) == 1


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("_fresh")
def test_one_graph_for_all_lengths() -> None:
    """Forward; models/test_compile.py has the gradients."""
    layer = gnn.HSTU(C, H, 4, time_buckets=9, context_len=1)
    step = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, lengths in enumerate([(5, 0, 3, 12, 2), (2, 9, 4, 4), (7, 7, 0, 1, 1, 3)]):
        x = gnn.Jagged.from_lengths(torch.randn(sum(lengths), C), torch.tensor(lengths))
        given = {"times": torch.arange(sum(lengths)) * 99, "num_targets": torch.tensor(lengths) // 3}
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=i > 0, specialize_float=True):
            got = step(x, **given).values
        torch.testing.assert_close(got, layer(x, **given).values)


def test_dense_is_jagged() -> None:
    layer = gnn.HSTU(C, H, 4, time_buckets=9)
    x, times = torch.randn(3, 5, C), torch.randint(0, 1000, (3, 5))
    packed = gnn.Jagged.from_lengths(x.flatten(0, 1), torch.full((3,), 5))
    counts = torch.tensor([0, 2, 5])
    want = layer(packed, times=times.flatten(), num_targets=counts).values
    torch.testing.assert_close(layer(x, times=times, num_targets=counts).flatten(0, 1), want)


def test_softmax_is_not_divided_by_the_length() -> None:
    assert gnn.HSTU(C, H, 4, "softmax").attention.out_scale == 1.0
    assert gnn.HSTU(C, H, 4).attention.out_scale == 0.25
    assert gnn.HSTU(C, H, 4, out_scale=0.5).attention.out_scale == 0.5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: gnn.HSTU(C, H, 0), "longest must be at least 1, got 0"),
        (lambda x: gnn.HSTU(C, H, 4, context_len=-1), "context_len must be at least 1, got -1"),
        (lambda x: gnn.HSTU(C, H, 4, max_attn_len=0), "max_attn_len must be at least 1, got 0"),
        (lambda x: gnn.HSTU(C, H, 4, next_time=1), "next_time must be True or False"),  # type: ignore[arg-type]
        (lambda x: gnn.HSTU(C, H, 4)(x), "times must be a tensor"),
        (lambda x: gnn.HSTU(C, H, 4)(x, times=torch.zeros(3).long()), "times must have one entry per row"),
        (lambda x: gnn.HSTU(C, H, 4, time_buckets=None)(x, num_targets=3), "num_targets must be a tensor of integers"),
        (lambda x: gnn.HSTU(C, H, 4, time_buckets=None)(x, num_targets=torch.ones(2).long()),
         r"num_targets must have shape \(5,\), got \(2,\)"),
    ],
)  # fmt: skip
def test_refusals(call: Any, words: str) -> None:
    x = gnn.Jagged.from_lengths(torch.randn(sum(LENGTHS), C), torch.tensor(LENGTHS))
    with pytest.raises((ValueError, TypeError), match=words):
        call(x)
