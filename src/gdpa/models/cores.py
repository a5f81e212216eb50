"""Other ways to compute the attention inside a model, for comparison: padded, and with softmax.

A core has the interface of gdpa.nn.Attention. ``replace`` puts one in the place of every Attention of a model.

>>> model = gdpa.models.build("interformer", Features.of(gdpa.data.SyntheticLog()))
>>> model = replace(model, PaddedEager)  # the same results, on padded tensors
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gdpa import checks
from gdpa.api import attention_varlen
from gdpa.functions.activation import Activation
from gdpa.nn import Attention, Jagged
from gdpa.nn.attention import unpacked
from gdpa.problem import Band

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def replace(model: ModuleT, make_core: Callable[[Attention], nn.Module]) -> ModuleT:
    """Puts ``make_core(attention)`` in the place of every gdpa.nn.Attention inside ``model``, which is returned."""
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, Attention):
                setattr(module, name, make_core(part))
    return model


class _Padded(nn.Module):
    """q, k and v in padded tensors (B, H, L, D) with a mask of the pairs that count, and the result packed again."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.num_heads, self.scale, self.out_scale = attention.num_heads, attention.scale, attention.out_scale
        self.band = checks.band(attention.causal, attention.window)
        self._like = attention.extra_repr()

    def forward(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        *,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        q, k, v = unpacked(q, k, v)
        side_q, side_k = _side(q, cu_seqlens_q, max_seqlen_q), _side(k, cu_seqlens_k, max_seqlen_k)
        q4, k4, v4 = side_q.pad(q), side_k.pad(k), side_k.pad(v)
        group = self.num_heads // k4.shape[1]
        if group > 1:
            k4, v4 = (t.repeat_interleave(group, dim=1) for t in (k4, v4))
        q4 = q4.expand(k4.shape[0], -1, -1, -1)  # shared queries
        scale = 1 / math.sqrt(q4.shape[-1]) if self.scale is None else self.scale
        out = self.attend(q4, k4, v4, scale, self._keep(side_q, side_k)) * self.out_scale
        return side_q.unpad(out.transpose(1, 2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, keep: Tensor | None) -> Tensor:
        """(B, H, Lq, Dv) of q (B, H, Lq, D), k and v; ``keep`` (B, 1, Lq or 1, Lk) is False where a pair is masked."""
        raise NotImplementedError

    def _keep(self, side_q: _Side, side_k: _Side) -> Tensor | None:
        """Pairs inside both sequences and inside the band, which ends where both end (bottom right)."""
        band, device = Band(*self.band), side_k.device
        j = torch.arange(side_k.length, device=device)
        keep = None if side_k.lengths is None else (j < side_k.lengths[:, None])[:, None, None]
        if band.unbounded:
            return keep
        i = torch.arange(side_q.length, device=device)[:, None]
        end_q = side_q.length if side_q.lengths is None else side_q.lengths[:, None, None, None]
        end_k = side_k.length if side_k.lengths is None else side_k.lengths[:, None, None, None]
        inside = band.holds(j - i - (end_k - end_q))
        return inside if keep is None else keep & inside

    def reset_parameters(self) -> None:
        """It has no parameters of its own; the layer that it is part of asks for this."""

    def extra_repr(self) -> str:
        return self._like


@dataclass(frozen=True)
class _Side:
    """Queries, or keys and values: how their rows lie in a padded tensor (B, length, H, D)."""

    length: int
    device: torch.device
    lengths: Tensor | None = None  # (B,) of packed rows
    places: Tensor | None = None  # (T,) of packed rows, in (B * length)

    def pad(self, x: Tensor) -> Tensor:
        """(B, H, length, D), zeros behind the ends."""
        if self.places is None or self.lengths is None:
            return (x if x.dim() == 4 else x[None]).transpose(1, 2)
        b = self.lengths.shape[0]
        padded = x.new_zeros(b * self.length, *x.shape[1:]).index_copy(0, self.places, x)
        return padded.view(b, self.length, *x.shape[1:]).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """The inverse, of (B, length, H, D)."""
        return x if self.places is None else _Rows.apply(x.flatten(0, 1), self.places)


class _Rows(torch.autograd.Function):
    """index_select of rows that are all different: its gradient is copied to them, not added up atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy(0, places, grad), None


def _side(x: Tensor, cu_seqlens: Tensor | None, bound: int | None) -> _Side:
    if cu_seqlens is None:
        return _Side(x.shape[-3], x.device)
    rows = Jagged(x.flatten(1), cu_seqlens)
    lengths = rows.lengths
    length = int(lengths.max()) if bound is None else bound
    return _Side(length, x.device, lengths, rows.sequence_ids() * length + rows.positions())


class PaddedEager(_Padded):
    """The formula of gdpa.nn.Attention in plain torch on padded tensors, of which every score is kept for backward.

    With bounds on the lengths (max_seqlen_q, max_seqlen_k) nothing waits for the device. It shares the params of the
    Attention it is made of.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__(attention)
        one = attention.activation
        self.activations = (one,) if isinstance(one, Activation) else tuple(one)
        self.params, self._starts = attention.params, attention._starts

    def reset_parameters(self) -> None:
        """The params where they started."""
        with torch.no_grad():
            for p, start in zip(self.params, self._starts, strict=True):
                p.copy_(start)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, keep: Tensor | None) -> Tensor:
        s = (q @ k.mT) * scale
        columns = [p.expand(self.num_heads)[:, None, None].to(s.dtype) for p in self.params]
        if len(self.activations) == 1:
            p = self.activations[0].eager(s, *columns)
        else:
            each = enumerate(self.activations)
            p = torch.stack([act.eager(s[:, h], *(c[h] for c in columns)) for h, act in each], dim=1)
        return (p if keep is None else torch.where(keep, p, 0.0)) @ v


class PaddedSoftmax(_Padded):
    """softmax in place of the function, by F.scaled_dot_product_attention on padded tensors.

        o_i = out_scale * sum_j softmax_j(scale * <q_i, k_j>) v_j         zero where query i sees no key

    The activation of the Attention that it is made of, and its params, play no part. Where no bound says how far to
    pad, gdpa.attention_varlen computes it, which needs none: an exported program cannot look at lengths.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        *,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        sides = ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k))
        if all(cu is None or bound is not None for cu, bound in sides):
            bounds = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
            return super().forward(q, k, v, cu_seqlens_q, cu_seqlens_k, **bounds)
        q, k, v = unpacked(q, k, v)
        out = attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, "softmax", scale=self.scale, out_scale=self.out_scale,
            window=self.band, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        )  # fmt: skip
        if cu_seqlens_q is not None or cu_seqlens_k is None:
            return out
        return out.view(cu_seqlens_k.shape[0] - 1, q.shape[0], *out.shape[1:])  # shared queries

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, keep: Tensor | None) -> Tensor:
        if keep is None:
            return F.scaled_dot_product_attention(q, k, v, scale=scale)
        # A row without keys gets all of them, so that no kernel divides by zero, and then nothing.
        some = keep.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep | ~some, scale=scale)
        return torch.where(some, out, 0.0)
