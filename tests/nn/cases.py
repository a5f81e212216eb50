"""The sequence layers that the tests share, each with its formula: (a function that makes it, the formula)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gdpa
import gdpa.nn as gnn
from nn import formulas as f

C, H, LENGTHS = 16, 4, (5, 0, 3, 1, 7)
CONTEXT = (2, 6)  # tokens, width
FOUR = [f.gelu, f.silu, f.relu, f.silu]
NAMES = ["gelu", "silu", "relu", "silu"]


@dataclass(frozen=True)
class Layer:
    make: Callable[..., nn.Module]  # of device and dtype
    formula: Callable[..., Tensor]
    pools: bool = False
    takes_context: bool = False


def _self(formula: Any, *args: Any, **kwargs: Any) -> Layer:
    return Layer(lambda **factory: gnn.SelfAttention(C, H, *args, **kwargs, **factory), formula)


def _pffn(formula: Any, *args: Any, **kwargs: Any) -> Layer:
    make = lambda **factory: gnn.PFFN(C, H, 5, *CONTEXT, *args, **kwargs, **factory)
    return Layer(make, formula, takes_context=True)


class ByKey(gnn.ScoreBias):
    """A learned number per place of a key, up to 16 of them."""

    def __init__(self, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def tables(self, times: Any = None) -> tuple[Tensor, ...]:
        return (self.weight,)

    def bias(self, weight: Tensor, *, kv_idx: Tensor) -> Tensor:  # type: ignore[override]
        return weight[kv_idx.clamp(0, 15)]


SCALES = {"scale": 0.7, "out_scale": 1 / 8}
LAYERS = {
    "self": _self(f.self_attention([f.gelu] * H)),
    "self-heads": _self(f.self_attention(FOUR), NAMES, bias=False),
    "self-hstu": _self(
        f.self_attention([f.silu] * H, right=0, rotary=1e4, **SCALES), "silu", causal=True, rotary=1e4, **SCALES
    ),
    "self-window": _self(f.self_attention([f.gelu] * H, left=2, right=1), window=(2, 1)),
    "self-params": _self(f.self_attention([f.leaky] * H), f.leaky, params=(0.2,)),
    "self-norm": _self(
        f.self_attention([f.tempered] * H, kv_heads=2, rotary=100.0),
        f.tempered,
        params=(2.0, torch.tensor(-1.0)),
        num_kv_heads=2,
        head_dim=6,
        qk_norm=True,
        rotary=100.0,
    ),
    "self-softmax": Layer(
        lambda **k: gnn.SelfAttention(
            C, H, "softmax", causal=True, sink=1.0, learn_sink=True, score_bias=gnn.ALiBi(H, learned=True, **k), **k
        ),
        f.self_attention([torch.exp] * H, right=0, normalize="sum", bias=f.alibi),
    ),
    "self-biased": Layer(
        lambda **k: gnn.SelfAttention(
            C, H, f.leaky, params=(0.2,), mask=gdpa.masks.window(3, 1), score_bias=gnn.RelativeBias(3, H, **k), **k
        ),
        f.self_attention([f.leaky] * H, left=3, right=1, bias=f.relative(3)),
    ),
    "hstu": Layer(
        lambda **k: gnn.HSTU(C, H, 4, time_buckets=None, context_len=1, max_attn_len=2, **k),
        f.hstu(H, 4, 4, 4, context=1, window=2),
    ),
    "pma-abs": Layer(
        lambda **k: gnn.PMA(
            C, H, 2, "silu", normalize="abs", sink=0.5, learn_sink=True, score_bias=ByKey(**k), norm=True, **k
        ),
        f.pma([f.silu] * H, normalize="abs", bias=f.by_key),
        pools=True,
    ),
    "seeds": Layer(lambda **k: gnn.SeedPooling(C, H, 3, NAMES, **k), f.seed_pooling(FOUR), pools=True),
    "seeds-norm": Layer(
        lambda **k: gnn.SeedPooling(C, H, 3, f.leaky, params=(0.1,), seed_norm=True, bias=False, **SCALES, **k),
        f.seed_pooling([f.leaky] * H, **SCALES),
        pools=True,
    ),
    "pma": Layer(lambda **k: gnn.PMA(C, H, 2, "silu", **k), f.pma([f.silu] * H), pools=True),
    "pma-norm": Layer(
        lambda **k: gnn.PMA(C, H, 2, f.leaky, params=(torch.linspace(0, 1, H),), norm=True, **SCALES, **k),
        f.pma([f.leaky] * H, **SCALES),
        pools=True,
    ),
    "hierarchical": Layer(
        lambda **k: gnn.HierarchicalSeedPooling(C, H, 6, 3, 2, NAMES, **k), f.hierarchical(FOUR), pools=True
    ),
    "pffn": _pffn(f.pffn(FOUR, 5, True), NAMES),
    "pffn-plain": _pffn(
        f.pffn([f.leaky] * H, 5, False, **SCALES), f.leaky, params=(0.3,), norm=False, bias=False, **SCALES
    ),
    "gating": Layer(lambda **k: gnn.Gating(C, hidden=[5], **k), f.gating),
    "masknet": Layer(lambda **k: gnn.MaskNet(C, 6, mask_hidden=[5], hidden=[7], **k), f.mask_net),
}


def stirred(layer: nn.Module, seed: int = 0) -> nn.Module:
    """The layer with no parameter at a value that hides it, such as a zero bias or a norm's one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator).to(p.dtype)
    return layer


def made(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return stirred(LAYERS[name].make(dtype=dtype))


def context(name: str, sequences: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """What the layer takes beside the sequence."""
    if not LAYERS[name].takes_context:
        return ()
    return (torch.randn(sequences, *CONTEXT, generator=torch.Generator().manual_seed(7)).to(dtype).requires_grad_(),)


def values(lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(sum(lengths), C, generator=torch.Generator().manual_seed(3))
    return (1.5 * drawn).to(dtype).requires_grad_()


def rows(y: Any) -> Tensor:
    """The values of a result in any form."""
    if isinstance(y, gnn.Jagged):
        return y.values
    return y.values() if y.is_nested else y
