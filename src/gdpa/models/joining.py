"""Rows of several jagged batches put together and taken apart again, without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.nn import Jagged


def every(tokens: Tensor) -> Jagged:
    """Dense tokens (B, n, C) as a Jagged in which every sequence has n rows."""
    b, n, _ = tokens.shape
    cu = torch.arange(b + 1, device=tokens.device, dtype=torch.int32) * n
    return Jagged(tokens.flatten(0, 1), cu, n)


def join(parts: Sequence[Jagged]) -> tuple[Jagged, Tensor]:
    """Sequence b of the result is sequence b of each part, one after another. Also where each begins: (parts, B)."""
    lengths = torch.stack([part.lengths for part in parts])
    cu = F.pad(lengths.sum(0).cumsum(0, dtype=torch.int32), (1, 0))
    starts = cu[:-1] + lengths.cumsum(0, dtype=torch.int32) - lengths
    places = [
        torch.arange(part.values.shape[0], device=cu.device) + (start - part.cu_seqlens[:-1])[part.sequence_ids()]
        for part, start in zip(parts, starts.unbind(0), strict=True)
    ]
    values = torch.cat([part.values for part in parts])
    bounds = [part.max_seqlen for part in parts]
    longest = None if None in bounds else sum(bounds)  # type: ignore[arg-type]
    return Jagged(torch.empty_like(values).index_copy(0, torch.cat(places), values), cu, longest), starts


def first(x: Jagged, n: int) -> Tensor:
    """The first n rows of each sequence, all of which have as many: (B, n, C)."""
    index = x.cu_seqlens[:-1, None] + torch.arange(n, device=x.cu_seqlens.device)
    return x.values.index_select(0, index.flatten()).unflatten(0, (-1, n))


def last(values: Tensor, stop: Tensor, lengths: Tensor, n: int) -> Tensor:
    """The n rows before ``stop`` (B,), the last one first; zeros where ``lengths`` (B,) has fewer: (B, n, C)."""
    if values.shape[0] == 0:
        return values.new_zeros(stop.shape[0], n, values.shape[1])
    back = torch.arange(n, device=stop.device)
    index = (stop[:, None] - 1 - back).clamp_min(0)
    found = values.index_select(0, index.flatten()).unflatten(0, (-1, n))
    return torch.where((back < lengths[:, None])[..., None], found, 0.0)
