"""Other ways to compute the attention inside a model, for comparison: padded, by plain torch or by its softmax.

A core has the interface of gdpa.nn.Attention. ``replace`` puts one in the place of every Attention of a model.

>>> model = gdpa.models.build("interformer", Features.of(gdpa.data.SyntheticLog()))
>>> model = replace(model, PaddedEager)  # the same results, on padded tensors
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gdpa.api import MaskLike
from gdpa.arguments import checks
from gdpa.functions.activation import Activation
from gdpa.functions.mask import mask_from_key
from gdpa.functions.places.program import Places
from gdpa.functions.places.tables import TableView
from gdpa.masks.band import Band
from gdpa.nn import Attention, Jagged
from gdpa.nn.attention import row_counts, unpacked
from gdpa.nn.options import Options, TimesLike
from gdpa.problem import ABS

ModuleT = TypeVar("ModuleT", bound=nn.Module)
STATE = {"training", "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}  # of any module


def replace(model: ModuleT, make_core: Callable[[Attention], nn.Module]) -> ModuleT:
    """Puts ``make_core(attention)`` in the place of every gdpa.nn.Attention inside ``model``, which is returned."""
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, Attention):
                setattr(module, name, make_core(part))
    return model


class _Padded(Options):
    """q, k and v in padded tensors (B, H, L, D) with a mask of the pairs that count, and the result packed again. The
    options are those of the Attention that it is made of, the parameters are shared with it."""

    def __init__(self, attention: Attention) -> None:
        nn.Module.__init__(self)
        hooks = vars(self).keys() - STATE  # whatever was hung on the attention is no part of this
        adopted = {n: v for n, v in vars(attention).items() if n not in hooks and not hasattr(Attention, n)}
        vars(self).update({name: copy.copy(value) for name, value in adopted.items()})
        self.band = checks.band(attention.causal, attention.window)

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
        times: TimesLike = None,
        mask: MaskLike = None,
    ) -> Tensor:
        q, k, v = unpacked(q, k, v)
        stamps = self._times(times, lambda: row_counts(q, k, v, cu_seqlens_q, cu_seqlens_k))
        side_q, side_k = _side(q, cu_seqlens_q, max_seqlen_q), _side(k, cu_seqlens_k, max_seqlen_k)
        q4, k4, v4 = side_q.pad(q), side_k.pad(k), side_k.pad(v)
        group = self.num_heads // k4.shape[1]
        if group > 1:
            k4, v4 = (t.repeat_interleave(group, dim=1) for t in (k4, v4))
        q4 = q4.expand(k4.shape[0], -1, -1, -1)  # shared queries
        scale = 1 / math.sqrt(q4.shape[-1]) if self.scale is None else self.scale
        keep, at, seen = self._keep(side_q, side_k), {}, self._mask(mask)
        if seen is not None or self._biases:
            at = _positions(side_q, side_k, self.num_heads, k4.shape[0])
            real = at["q_idx"] < at["q_len"]  # padding stands nowhere that a table must have an entry for
            keep = real if keep is None else keep & real
        if seen is not None:
            visible = mask_from_key(seen.key).eager(Places(at, _views(seen.tables, keep)), q4)
            keep = keep & visible if keep is not None else visible
        places = Places(at, _views(self._tables(stamps), keep))
        out = self.attend(q4, k4, v4, scale, keep, places) * self.out_scale
        return side_q.unpad(out.transpose(1, 2))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, keep: Tensor | None, places: Places | None = None
    ) -> Tensor:
        """(B, H, Lq, Dv) of q (B, H, Lq, D), k and v; ``keep`` (broadcast to the scores) is False where a pair is
        masked, ``places`` are for biases."""
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


def _positions(side_q: _Side, side_k: _Side, heads: int, batch: int) -> dict[str, Tensor]:
    """Of the scores (B, H, Lq, Lk), to be broadcast against them."""
    device = side_k.device
    b = torch.arange(batch, device=device)[:, None, None, None]
    i, j = torch.arange(side_q.length, device=device)[:, None], torch.arange(side_k.length, device=device)
    at = {"b": b, "h": torch.arange(heads, device=device)[:, None, None], "q_idx": i, "kv_idx": j}
    for name, side, place in (("q", side_q, i), ("kv", side_k, j)):
        lengths = torch.full_like(b, side.length) if side.lengths is None else side.lengths.long().view_as(b)
        first = b * side.length if side.lengths is None else lengths.cumsum(0) - lengths
        at |= {f"{name}_len": lengths, f"{name}_row": first + place}
    return at


def _views(tables: Sequence[Tensor], visible: Tensor | None) -> list[TableView]:
    return [TableView(t, f"tables[{i}]", visible) for i, t in enumerate(tables)]


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
        return x if self.places is None else _SelectDistinctRows.apply(x.flatten(0, 1), self.places)


class _SelectDistinctRows(torch.autograd.Function):
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

    With bounds on the lengths (max_seqlen_q, max_seqlen_k) nothing waits for the device.
    """

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, keep: Tensor | None, places: Places | None = None
    ) -> Tensor:
        mine, s = self._heads(), (q @ k.mT) * scale
        columns = [p.expand(self.num_heads)[:, None, None].to(s.dtype) for p in mine.params]
        kept = s.new_ones((), dtype=torch.bool) if keep is None else keep
        sink = torch.as_tensor(mine.sink, dtype=s.dtype, device=s.device).expand(self.num_heads)[:, None, None]
        norms = mine.normalize if isinstance(mine.normalize, list) else [mine.normalize]
        if isinstance(mine.activation, Activation) and len(norms) == 1:
            return weights(mine.activation, norms[0], s, columns, kept, sink, places) @ v
        functions = mine.activation if isinstance(mine.activation, list) else [mine.activation] * self.num_heads
        heads = []
        for h, (act, norm) in enumerate(
            zip(functions, norms if len(norms) > 1 else norms * len(functions), strict=True)
        ):
            at = slice(h, h + 1)
            own = kept if kept.dim() < 3 or kept.shape[-3] == 1 else kept[:, at]
            there = None if places is None else Places({**places.at, "h": torch.tensor(h)}, places.tables)
            heads.append(weights(act, norm, s[:, at], [c[at] for c in columns], own, sink[at], there) @ v[:, at])
        return torch.cat(heads, dim=1)


def weights(
    act: Activation, norm: str | None, s: Tensor, params: list[Tensor], kept: Tensor, sink: Tensor,
    places: Places | None,
) -> Tensor:  # fmt: skip
    """What values are multiplied by: f(s), divided by its sum if there is a norm; of exp the row's maximum first."""
    exponent = None if norm is None else act.exponent
    if exponent is not None:
        e = torch.where(kept, exponent.eager(s, *params, places=places), -torch.inf)
        m = torch.maximum(e.detach().amax(-1, keepdim=True), sink.detach().log()).clamp(min=-1e30)
        p, sink = (e - m).exp(), sink * (-m).clamp(max=80.0).exp()
    else:
        p = torch.where(kept, act.eager(s, *params, places=places), 0.0)
    if norm is None:
        return p
    d = sink + (p.abs() if norm == ABS else p).sum(-1, keepdim=True)
    return torch.where(d == 0, 0.0, p / torch.where(d == 0, 1.0, d))


class PaddedSoftmax(_Padded):
    """softmax in place of the function, by F.scaled_dot_product_attention on padded tensors.

        o_i = out_scale * sum_j softmax_j(scale * <q_i, k_j>) v_j         zero where query i sees no key

    The activation of the Attention that it is made of, and its params, play no part.
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__(attention)
        if self._biases or self.sink:
            raise ValueError(
                "PaddedSoftmax has neither biases of scores nor a sink, as the attention it is made of has"
            )
        self.params, self._starts, self.function = nn.ParameterList(), (), None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, keep: Tensor | None, places: Places | None = None
    ) -> Tensor:
        if keep is None:
            return F.scaled_dot_product_attention(q, k, v, scale=scale)
        # A row without keys gets all of them, so that no kernel divides by zero, and then nothing.
        some = keep.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep | ~some, scale=scale)
        return torch.where(some, out, 0.0)
