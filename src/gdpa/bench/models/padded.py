"""Training code that pads whole batches: every sequence gets the same number of events, and all layers work on them.

Padding goes before the events (the newest stay last, as in the public benchmarks of click models), behind the tokens
that a model puts at the front. So that results stay right, attention masks the keys of padding, and places (of rotary
positions and of windows) are counted without it. Everything else computes on padding as it does on events, and nothing
reads what comes of it. Padding has ids 0, 1, 2, ... in turn and values of 0: with one id its gradients would all meet
in one row of a table, a cost that padding_idx spares other code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from gdpa.api import MaskLike, autocast
from gdpa.data import Batch, PackedEvents
from gdpa.masks.band import Band
from gdpa.models import Features, Model, cores
from gdpa.nn import Attention, Rotary, SelfAttention
from gdpa.nn.attention import unpacked
from gdpa.nn.options import TimesLike


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A batch of sequences of one length, and how much of each is padding, (B,)."""

    batch: Batch
    padding: Tensor


def pad(batch: Batch, features: Features) -> PaddedBatch:
    """``batch`` with its one sequence filled up to PackedEvents.longest."""
    (sequence,) = features.sequences
    events = batch.sequences[sequence.name]
    n, longest, device = len(batch), events.longest, events.ids.device
    assert longest is not None
    missing = longest - events.lengths().long()
    rows = torch.arange(n * longest, device=device).view(n, longest)
    real = (torch.arange(longest, device=device) >= missing[:, None]).flatten()
    sizes = torch.tensor([features.vocabularies[name] for name in sequence.vocabularies], device=device)
    ids = rows.view(-1, 1) % sizes
    ids[real] = events.ids
    values = events.values.new_zeros(n * longest, events.values.shape[1])
    values[real] = events.values
    cu = torch.arange(n + 1, device=device, dtype=torch.int32) * longest
    filled = PackedEvents(ids, values, cu, longest)
    return PaddedBatch(replace(batch, sequences={sequence.name: filled}), missing)


class Padding(nn.Module):
    """Where the padding is: in sequence b, ``rows[b]`` rows behind the first ``front``."""

    rows: Tensor

    def __init__(self, batch: int, front: int, device: torch.device | str) -> None:
        super().__init__()
        self.batch, self.front = batch, front
        self.register_buffer("rows", torch.zeros(batch, dtype=torch.int64, device=device), persistent=False)

    def places(self, length: int) -> Tensor:
        """(B, length): the place of each row, padding not counted."""
        row = torch.arange(length, device=self.rows.device)
        return torch.where(row < self.front, row, row - self.rows[:, None])

    def real(self, length: int) -> Tensor:
        """(B, length): False for padding."""
        row = torch.arange(length, device=self.rows.device)
        return (row < self.front) | (row >= self.front + self.rows[:, None])


class _WholeBatch(cores._Padded):
    """A core for sequences that all have the same number of rows: padding is masked, and nothing is moved."""

    padding: Padding

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
        assert times is None, "positions of padded batches are not those of a bias by time"
        assert self._mask(mask) is None, "nor those of a mask"
        b = self.padding.batch
        q, k, v = autocast(*unpacked(q, k, v))
        q4 = q.unflatten(0, (b, -1)) if cu_seqlens_q is not None else q.expand(b, *q.shape[-3:])
        k4, v4 = (t if cu_seqlens_k is None else t.unflatten(0, (b, -1)) for t in (k, v))
        keep = None if cu_seqlens_k is None else self.padding.real(k4.shape[1])[:, None, None]
        if self.band != (None, None):
            keep = self._band(keep, q4.shape[1], k4.shape[1])
        scale = q4.shape[-1] ** -0.5 if self.scale is None else self.scale
        q4, k4, v4 = (t.transpose(1, 2) for t in (q4, k4, v4))
        out = (self.attend(q4, k4, v4, scale, keep) * self.out_scale).transpose(1, 2)
        return out if cu_seqlens_q is None else out.flatten(0, 1)

    def _band(self, keep: Tensor | None, length_q: int, length_k: int) -> Tensor:
        """Of self-attention."""
        assert length_q == length_k, "a band over padded sequences is for self-attention"
        place = self.padding.places(length_k)
        inside = Band(*self.band).holds(place[:, None, None, :] - place[:, None, :, None])
        return inside if keep is None else keep & inside


class BatchEager(_WholeBatch, cores.PaddedEager):
    """The formula on whole padded batches."""


class BatchSoftmax(_WholeBatch, cores.PaddedSoftmax):
    """F.scaled_dot_product_attention on whole padded batches."""


class Places(nn.Module):
    """Rotary positions that do not count padding. Positions that a model gives itself, as times, stay."""

    def __init__(self, rotary: Rotary, padding: Padding) -> None:
        super().__init__()
        self.rotary, self.padding = rotary, padding

    def forward(self, x: Tensor, positions: Tensor, *, heads: int | None = None) -> Tensor:
        if not positions.is_floating_point():
            positions = self.padding.places(x.shape[0] // self.padding.batch).flatten()
        return self.rotary(x, positions, heads=heads)


class WholeBatch(nn.Module):
    """A model for PaddedBatch, with ``core`` in the place of every attention."""

    def __init__(self, model: Model, core: type[_WholeBatch], batch: int, front: int) -> None:
        super().__init__()
        self.padding = Padding(batch, front, next(model.parameters()).device)
        self.model = cores.replace(model, self._make(core))
        for part in list(model.modules()):
            if isinstance(part, SelfAttention) and part.rotary is not None:
                part.rotary = cast(Any, Places(part.rotary, self.padding))

    def _make(self, core: type[_WholeBatch]) -> Any:
        def make(attention: Attention) -> nn.Module:
            made = core(attention)
            made.padding = self.padding
            return made

        return make

    def reset_parameters(self) -> None:
        self.model.reset_parameters()

    def forward(self, padded: PaddedBatch) -> Tensor:
        self.padding.rows.copy_(padded.padding)
        return self.model(padded.batch)
