"""The layers' formulas in plain PyTorch, sharing no code with gdpa: on padded sequences (B, L, C) with a mask.

Each takes the layer's parameters by name, the padded input, ``keep`` (B, L), true where there is a row, and context.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

P = dict[str, Tensor]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, H * D) -> (B, H, L, D)."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def layer_norm(x: Tensor, p: P, name: str) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return x * p[f"{name}.weight"] + p[f"{name}.bias"] if f"{name}.weight" in p else x


def linear(x: Tensor, p: P, name: str) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def mlp(x: Tensor, p: P, name: str) -> Tensor:
    """Linear layers 0, 2, 4, ... with x * sigmoid(x) between them."""
    i = 0
    while f"{name}.{i}.weight" in p:
        x = linear(x * x.sigmoid() if i else x, p, f"{name}.{i}")
        i += 2
    return x


def attend(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, p: P, fns: list[Callable[..., Tensor]], scale: float | None = None,
    out_scale: float = 1.0, name: str = "attention", normalize: str | None = None, bias: Any = None,
) -> Tensor:  # fmt: skip
    """(B, H, Lq, D), (B, Hk, Lk, D), keep (B, Lq, Lk) -> (B, Lq, H * Dv), head by head. ``bias(p, h, Lq, Lk)`` is
    added to the scores."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    outs = []
    for h, fn in enumerate(fns):
        g = h * k.shape[1] // len(fns)
        params = []
        while f"{name}.params.{len(params)}" in p:
            value = p[f"{name}.params.{len(params)}"]
            params.append(value[h] if value.dim() else value)
        s = scale * q[:, h] @ k[:, g].mT
        if bias is not None:
            s = s + bias(p, h, *s.shape[1:])
        weights = torch.where(keep, fn(s, *params), 0.0)
        if normalize is not None:
            d = (weights.abs() if normalize == "abs" else weights).sum(-1, keepdim=True)
            if f"{name}.sink_logits" in p:
                d = d + p[f"{name}.sink_logits"][h].exp()
            weights = torch.where(d == 0, 0.0, weights / torch.where(d == 0, 1.0, d))
        outs.append(out_scale * weights @ v[:, g])
    return torch.cat(outs, dim=-1)


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """x (B, H, L, D) as complex numbers times exp(i angle); positions (L,) or (B, L)."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([base ** (-2 * c / x.shape[-1]) for c in range(half)], dtype=x.dtype)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * positions[..., None] * frequencies)
    return torch.cat([turned.real, turned.imag], dim=-1)


def self_attention(
    fns: list[Any], kv_heads: int | None = None, rotary: float | None = None, left: int | None = None,
    right: int | None = None, **options: Any,
) -> Callable[..., Tensor]:  # fmt: skip
    def formula(p: P, x: Tensor, keep: Tensor, context: Tensor | None = None) -> Tensor:
        heads, kv = len(fns), kv_heads or len(fns)
        d = p["out.weight"].shape[1] // heads
        q, k, v = (
            split_heads(t, n)
            for t, n in zip(linear(x, p, "qkv").split([heads * d, kv * d, kv * d], -1), (heads, kv, kv), strict=True)
        )
        if "q_norm.weight" in p:
            q, k = rms_norm(q, p["q_norm.weight"], 1e-6), rms_norm(k, p["k_norm.weight"], 1e-6)
        place = torch.arange(x.shape[1])
        if rotary is not None:
            q, k = rotate(q, place, rotary), rotate(k, place, rotary)
        distance = place[None, :] - place[:, None]
        band = torch.ones_like(distance, dtype=torch.bool)
        band = band if left is None else band & (distance >= -left)
        band = band if right is None else band & (distance <= right)
        return linear(attend(q, k, v, keep[:, None, :] & band, p, fns, **options), p, "out")

    return formula


def _pool(p: P, q: Tensor, x: Tensor, keep: Tensor, fns: list[Any], options: Any, name: str = "") -> Tensor:
    k, v = (split_heads(t, len(fns)) for t in linear(x, p, f"{name}kv").chunk(2, -1))
    q = split_heads(q.expand(x.shape[0], *q.shape), len(fns))
    keep = keep[:, None, :].expand(-1, q.shape[2], -1)
    return attend(q, k, v, keep, p, fns, name=f"{name}attention", **options)


def seed_pooling(fns: list[Any], name: str = "", **options: Any) -> Callable[..., Tensor]:
    def formula(p: P, x: Tensor, keep: Tensor, context: Tensor | None = None) -> Tensor:
        seeds = p[f"{name}seeds"]
        if f"{name}seed_norm.weight" in p:
            seeds = layer_norm(seeds, p, f"{name}seed_norm")
        return linear(_pool(p, linear(seeds, p, f"{name}q"), x, keep, fns, options, name), p, f"{name}out")

    return formula


def pma(fns: list[Any], **options: Any) -> Callable[..., Tensor]:
    def formula(p: P, x: Tensor, keep: Tensor, context: Tensor | None = None) -> Tensor:
        q = linear(p["seeds"], p, "q")
        o = q + _pool(p, q, x, keep, fns, options)
        o = layer_norm(o, p, "attention_norm") if "attention_norm.weight" in p else o
        y = o + linear(o, p, "ffn").clamp(min=0)
        return layer_norm(y, p, "ffn_norm") if "ffn_norm.weight" in p else y

    return formula


def sum_kron(z: Tensor, w: Tensor, h: Tensor) -> Tensor:
    """sum_i Z_i^T H W_i, term by term; z (out, rank, in)."""
    return sum(z[:, i] @ h @ w[i] for i in range(w.shape[0]))  # type: ignore[return-value]


def hierarchical(fns: list[Any], **options: Any) -> Callable[..., Tensor]:
    def formula(p: P, x: Tensor, keep: Tensor, context: Tensor | None = None) -> Tensor:
        return sum_kron(p["compress.z"], p["compress.w"], seed_pooling(fns, "pool.", **options)(p, x, keep))

    return formula


def pffn(fns: list[Any], hidden: int, norm: bool, **options: Any) -> Callable[..., Tensor]:
    def formula(p: P, x: Tensor, keep: Tensor, context: Tensor) -> Tensor:
        weights = linear(context.reshape(context.shape[0], -1), p, "generate")
        k, v = (split_heads(t.reshape(t.shape[0], hidden, -1), len(fns)) for t in weights.chunk(2, -1))
        n = layer_norm(x, {}, "") if norm else x
        visible = torch.ones(x.shape[0], x.shape[1], hidden, dtype=torch.bool)
        o = attend(split_heads(n, len(fns)), k, v, visible, p, fns, **options)
        return x + (rms_norm(o + n, p["out_norm.weight"], 1e-5) if norm else o)

    return formula


def gating(p: P, x: Tensor, keep: Tensor, context: Tensor | None = None) -> Tensor:
    return x / (1 + torch.exp(-mlp(x, p, "mlp")))


def mask_net(p: P, x: Tensor, keep: Tensor, context: Tensor | None = None) -> Tensor:
    return mlp(x * mlp(x, p, "mask"), p, "mlp")


def gelu(s: Tensor) -> Tensor:
    return 0.5 * s * (1 + torch.erf(s / math.sqrt(2)))


def silu(s: Tensor) -> Tensor:
    return s / (1 + torch.exp(-s))


def relu(s: Tensor) -> Tensor:
    return F.threshold(s, 0.0, 0.0)


def leaky(s: Tensor, slope: Tensor) -> Tensor:
    return torch.where(s > 0, s, slope * s)


def tempered(s: Tensor, temperature: Tensor, shift: Tensor) -> Tensor:
    return torch.sigmoid(s / temperature + shift)


def distances(len_q: int, len_k: int) -> Tensor:
    """i - j."""
    return torch.arange(len_q)[:, None] - torch.arange(len_k)


def alibi(p: P, h: int, len_q: int, len_k: int) -> Tensor:
    return -p["attention.score_bias.0.slopes"][h] * distances(len_q, len_k).abs()


def relative(longest: int) -> Callable[..., Tensor]:
    def bias(p: P, h: int, len_q: int, len_k: int) -> Tensor:
        index = distances(len_q, len_k).clamp(1 - longest, longest - 1) + longest - 1
        return p["attention.score_bias.0.weight"][h][index]

    return bias


def by_key(p: P, h: int, len_q: int, len_k: int) -> Tensor:
    """A number per key, by its place."""
    return p["attention.score_bias.0.weight"][torch.arange(len_k)].expand(len_q, -1)


def hstu_sees(
    i: int, j: int, length: int, targets: int, context: int, window: int | None, full: int, group: int
) -> bool:
    """Whether row i of HSTU's sequence sees row j: contexts count as one row, all targets as one, after the history."""
    if i == j:
        return True
    history = range(context, length - targets)
    place = lambda row: 0 if row < context else (len(history) if row >= length - targets else row - context)
    extra = 1 if context else 0  # the contexts' own place
    row, column = (place(r) + (extra if r >= context else 0) for r in (i, j))
    if i < context:
        return j < length - targets
    if i >= length - targets and j >= length - targets:
        return group > 1 and j < i and (i - length + targets) // group == (j - length + targets) // group
    tail = row >= len(history) + extra - full
    return column < row and (window is None or row - column <= window or (full > 0 and tail))


def hstu(
    heads: int, longest: int, head_dim: int, value_dim: int, context: int = 0, window: int | None = None, full: int = 0,
    group: int = 1, buckets: int | None = None, fn: Callable[[Tensor], Tensor] | None = None, ahead: bool = True,
) -> Callable[..., Tensor]:  # fmt: skip
    """The published layer on padded sequences."""

    def formula(
        p: P, x: Tensor, keep: Tensor, _: Tensor | None = None, times: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        b, n, _ = x.shape
        lengths = keep.sum(1)
        uqkv = linear(layer_norm(x, p, "in_norm"), p, "uqkv")
        uqkv = uqkv * uqkv.sigmoid()
        wide, narrow = heads * value_dim, heads * head_dim
        u, q, k, v = uqkv.split([wide, narrow, narrow, wide], -1)
        q, k, v = (split_heads(t, heads) for t in (q, k, v))
        s = q @ k.mT / math.sqrt(head_dim)
        distance = distances(n, n).clamp(1 - longest, longest - 1) + longest - 1
        s = s + p["attention.score_bias.0.weight"][distance]
        if buckets is not None:
            assert times is not None
            of_query = times.clone()
            for row, length in enumerate(lengths.tolist() if ahead else []):
                of_query[row, : max(length - 1, 0)] = times[row, 1 : max(length, 1)]
            gap = (of_query[:, :, None] - times[:, None, :]).abs().clamp(min=1)
            index = (gap.float().log() / 0.301).long().clamp(0, buckets)
            s = s + p["attention.score_bias.1.weight"][index][:, None]
        counts = [0] * b if targets is None else targets.tolist()
        seen = torch.zeros(b, 1, n, n, dtype=torch.bool)
        for row, length in enumerate(lengths.tolist()):
            for i in range(length):
                for j in range(length):
                    seen[row, 0, i, j] = hstu_sees(i, j, length, counts[row], context, window, full, group)
        a = torch.where(seen, (s * s.sigmoid() if fn is None else fn(s)) / longest, 0.0) @ v
        a = layer_norm(a.transpose(1, 2).flatten(2), p, "out_norm")
        return x + linear(a * u, p, "out")

    return formula
