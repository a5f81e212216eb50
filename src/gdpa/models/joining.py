"""Rows of several jagged batches put together and taken apart again, without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.nn import Jagged
from gdpa.ops import transformed


def every(tokens: Tensor) -> Jagged:
    """Dense tokens (B, n, C) as a Jagged in which every sequence has n rows."""
    b, n, _ = tokens.shape
    cu = torch.arange(b + 1, device=tokens.device, dtype=torch.int32) * n
    return Jagged(tokens.flatten(0, 1), cu, n)


def join(parts: Sequence[Jagged]) -> tuple[Jagged, Tensor]:
    """Sequence b of the result is sequence b of each part, one after another. Also where each begins: (parts, B).
    Rows of no sequence (see Jagged) come after all others."""
    lengths = torch.stack([part.lengths for part in parts])
    cu = F.pad(lengths.sum(0).cumsum(0, dtype=torch.int32), (1, 0))
    starts = cu[:-1] + lengths.cumsum(0, dtype=torch.int32) - lengths
    places, free = [], cu[-1:]  # the first place that no row has yet, behind all sequences
    for part, start in zip(parts, starts.unbind(0), strict=True):
        rows, end = part.values.shape[0], part.cu_seqlens[-1:]
        shifts = torch.cat([start - part.cu_seqlens[:-1], free - end])
        places.append(torch.arange(rows, device=cu.device) + shifts[part.sequence_ids()])
        free = free + (rows - end)
    values = torch.cat([part.values for part in parts])
    bounds = [part.max_seqlen for part in parts]
    longest = None if None in bounds else sum(bounds)  # type: ignore[arg-type]
    return Jagged(torch.empty_like(values).index_copy(0, torch.cat(places), values), cu, longest), starts


def ends(x: Jagged, first: int, starts: Tensor, recent: int) -> tuple[Jagged, Tensor, Tensor]:
    """x; the first rows of each of its sequences, all of which have as many, (B, first, C); and the ``recent`` rows at
    the end of each part of a sequence, the last one first, zeros where a part has fewer, (B, parts * recent, C).
    ``starts`` (parts, B): where parts begin, each of which stops where the next one does, or the sequence.

    What else uses x is to use the one that is returned: see ``pick``.
    """
    cu, n = x.cu_seqlens, starts.shape[1]
    back = torch.arange(recent, device=cu.device)
    stops = torch.cat([starts, cu[None, 1:]])[1:]
    beginning = cu[:-1, None] + torch.arange(first, device=cu.device)
    index = _beside(beginning, (stops[..., None] - 1 - back).clamp_min(0))
    there = _beside(torch.ones_like(beginning, dtype=torch.bool), back < (stops - starts)[..., None])
    values, found = pick(x.values, index.flatten())
    found = torch.where(there[..., None], found.unflatten(0, (n, index.shape[1])), 0.0)
    return x.with_values(values), found[:, :first], found[:, first:]


def _beside(first: Tensor, parts: Tensor) -> Tensor:
    """(B, n) and (parts, B, m) as (B, n + parts * m). To flatten a transposed tensor instead would hold exported
    programs to B != 1, where strides mean nothing; and of no parts ``unbind`` would be a node that cannot be loaded."""
    return torch.cat([first, *(parts[i] for i in range(parts.shape[0]))], dim=1)


def pick(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """x, and its rows ``index``. Backward adds the gradient of the rows to that of the x that is returned, where
    autograd by itself would make a tensor of zeros as large as x for them, and add that."""
    if not torch.is_grad_enabled() or torch.compiler.is_exporting() or transformed():
        return x, x.index_select(0, index)
    return _Pick.apply(x, index)


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(index)
        return x.view_as(x), x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, found: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return dx.index_add(0, index, found), None
