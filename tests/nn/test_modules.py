"""What people expect of an nn.Module: initialisation, state_dict, device and dtype, copies, repr, autocast."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gdpa
import gdpa.nn as gnn
from gdpa.functions.activation import from_name
from nn import formulas as f
from nn.cases import LAYERS, LENGTHS, C, H, context, made, rows, stirred, values

TOKENS: dict[str, Callable[..., nn.Module]] = {
    "kron": lambda **k: gnn.SumKronLinear(C, 2, C, 4, 3, **k),
    "cross": lambda **k: gnn.CrossNet(C, 2, rank=3, **k),
    "mlp": lambda **k: gnn.MLP([C, 5, 2], **k),
    "wukong": lambda **k: gnn.WukongBlock(C, C, 3, 2, 4, [7], **k),
}
MAKERS = {**{name: layer.make for name, layer in LAYERS.items()}, **TOKENS}
makers = pytest.mark.parametrize("name", MAKERS)
layers = pytest.mark.parametrize("name", LAYERS)


def jagged(dtype: torch.dtype = torch.float64) -> gnn.Jagged:
    return gnn.Jagged.from_lengths(values(dtype=dtype), torch.tensor(LENGTHS))


def call(name: str, layer: nn.Module, dtype: torch.dtype = torch.float64) -> Tensor:
    if name in TOKENS:
        return layer(values((C, C), dtype).view(2, C, C))
    return rows(layer(jagged(dtype), *context(name, len(LENGTHS), dtype)))


@makers
def test_state_dict_there_and_back(name: str) -> None:
    one, other = stirred(MAKERS[name](dtype=torch.float64)), MAKERS[name](dtype=torch.float64)
    assert not torch.equal(call(name, one), call(name, other))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    assert (
        str(other.load_state_dict(torch.load(file, weights_only=True), strict=True))
        == "<All keys matched successfully>"
    )
    assert torch.equal(call(name, one), call(name, other))
    state = one.state_dict()
    state.pop(next(iter(state)))
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(state, strict=True)


@makers
def test_every_parameter_is_reset_and_used(name: str) -> None:
    torch.manual_seed(0)
    layer = MAKERS[name](dtype=torch.float64)
    start = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(torch.nan)
    torch.manual_seed(0)
    layer.reset_parameters()
    for key, value in layer.state_dict().items():
        assert value.isfinite().all(), key
        assert value.shape == start[key].shape
    for p, grad in zip(
        layer.parameters(), torch.autograd.grad(call(name, layer).square().sum(), layer.parameters()), strict=True
    ):
        assert grad.shape == p.shape


@makers
def test_device_and_dtype(name: str) -> None:
    for p in MAKERS[name](device="meta", dtype=torch.bfloat16).parameters():
        assert (p.device.type, p.dtype) == ("meta", torch.bfloat16)
    layer = MAKERS[name](device="meta", dtype=torch.float64).to_empty(device="cpu")
    layer.reset_parameters()
    assert call(name, layer).isfinite().all()
    assert all(p.dtype == torch.float32 for p in MAKERS[name]().parameters())


@makers
def test_copies(name: str) -> None:
    layer = stirred(MAKERS[name](dtype=torch.float64))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(call(name, layer), call(name, other))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@layers
@pytest.mark.parametrize("how", ["float32", "autocast"])
def test_lower_precision(name: str, how: str) -> None:
    """float32 throughout, and bfloat16 by autocast, forward and backward."""
    layer = made(name, torch.float32)
    exact = copy.deepcopy(layer).double()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = call(name, layer, torch.float32)
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    want = call(name, exact)
    assert (y.double() - want).abs().max() <= (1e-5 if how == "float32" else 0.1) * want.abs().max()


@layers
def test_bfloat16_throughout(name: str) -> None:
    y = call(name, made(name, torch.bfloat16), torch.bfloat16)
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()


@layers
def test_it_starts_at_a_sensible_size(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name].make(dtype=torch.float64)
    assert 0.01 < float(call(name, layer).detach().std()) < 10


def test_fused_projections_start_as_separate_ones() -> None:
    layer = gnn.SelfAttention(64, 4, num_kv_heads=2)
    for part in layer.qkv.weight.split([64, 32, 32]):
        bound = math.sqrt(6 / (64 + part.shape[0]))
        assert 0.9 * bound < float(part.detach().abs().max()) <= bound
    assert not layer.qkv.bias.any()


def test_params_of_the_function() -> None:
    """A number is one value per head, a tensor keeps its shape; both are trained and restored."""
    layer = gnn.SelfAttention(C, H, f.tempered, params=(2.0, torch.tensor(-1.0)))
    slope, shift = layer.attention.params
    assert (slope.shape, shift.shape) == ((H,), ())
    assert "attention.params.0" in layer.state_dict()
    layer(torch.randn(2, 5, C)).sum().backward()
    assert slope.grad is not None
    assert shift.grad is not None
    assert slope.grad.all()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert (slope != 2.0).all()
    layer.reset_parameters()
    assert torch.equal(slope, torch.full((H,), 2.0))
    assert shift.item() == -1.0


def test_repr() -> None:
    text = repr(gnn.SelfAttention(C, H, ["gelu", "silu"] * 2, causal=True, rotary=1e4, num_kv_heads=2, backend="cpu"))
    for words in (
        "dim=16, head_dim=4, num_kv_heads=2",
        "['gelu', 'silu', 'gelu', 'silu']",
        "causal=True",
        "base=10000",
    ):
        assert words in text
    assert "scale" not in text
    assert "backend='cpu'" in text
    assert "num_seeds=3" in repr(gnn.SeedPooling(C, H, 3))
    assert "hidden=5, context_tokens=2, context_dim=6" in repr(made("pffn"))


def test_the_backend_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    select = gdpa.calling.plans.select
    monkeypatch.setattr(
        gdpa.calling.plans, "select", lambda problem, backend: (used.append(backend), select(problem, backend))[1]
    )
    from_name("gelu").plans.clear()  # of other tests
    for options in ({}, {"qk_norm": True}):  # from one tensor, and separate
        layer = gnn.SelfAttention(C, H, backend="cpu", **options)
        layer(torch.randn(1, 2, C))
        layer(gnn.Jagged.from_lengths(torch.randn(3, C), torch.tensor([1, 2])))
    assert used == ["cpu"] * 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gnn.SelfAttention(10, 4), "dim must be a multiple of num_heads, got dim=10 and num_heads=4"),
        (lambda: gnn.SelfAttention(C, H, num_kv_heads=3), "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        (lambda: gnn.SelfAttention(C, 0), "num_heads must be at least 1, got 0"),
        (lambda: gnn.SelfAttention(C, H, "soft"), "activation='soft' is unknown"),
        (
            lambda: gnn.SelfAttention(C, H, ["gelu"]),
            "activation is a list of length 1, but needs one entry per query head",
        ),
        (lambda: gnn.SelfAttention(C, H, "gelu", params=(1.0,)), "params has length 1, but activation 'gelu' takes 0"),
        (lambda: gnn.SelfAttention(C, H, f.leaky, params=torch.ones(4)), r"write params=\(x,\)"),
        (lambda: gnn.SelfAttention(C, H, f.leaky, params=0.1), r"got float: write params=\[0\.1\]"),
        (lambda: gnn.SelfAttention(C, H, f.leaky, params=(torch.ones(3),)), r"params\[0\] must .* got \(3,\)"),
        (lambda: gnn.SelfAttention(C, H, f.leaky, params=("a",)), r"params\[0\] must be a Python number, got str"),
        (lambda: gnn.SelfAttention(C, H, window=3), r"window must be None or a pair \(left, right\), got 3"),
        (lambda: gnn.SelfAttention(C, H, causal=1), "causal must be True or False, got 1"),
        (lambda: gnn.SelfAttention(C, H, scale="x"), "scale must be a Python number"),
        (lambda: gnn.SelfAttention(C, H, backend="cudnn"), "backend='cudnn' is unknown"),
        (lambda: gnn.SelfAttention(12, 4, rotary=1e4), "head_dim must be even"),
        (lambda: gnn.PMA(C, H, 0), "num_seeds must be at least 1, got 0"),
        (lambda: gnn.PFFN(C, H, True, 1, 1), "hidden must be an int, got True"),
        (lambda: gnn.MaskNet(C, -1), "out_dim must be at least 1, got -1"),
        (lambda: gnn.Attention(2)(*torch.zeros(3, 1, 2, 2, 4), max_seqlen_q=2), "max_seqlen_q=2 is for packed"),
        (
            lambda: gnn.Attention(4)(*torch.zeros(3, 1, 2, 2, 4)),
            r"q must have shape \(\.\.\., 4, D\), got \(1, 2, 2, 4\)",
        ),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make()
