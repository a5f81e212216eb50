"""A small model with everything that training can trip over: dropout, a scalar parameter, one that nothing uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gdpa.nn
from gdpa.data import Batch
from gdpa.models import Features
from gdpa.nn import Jagged


class Tiny(nn.Module):
    def __init__(self, features: Features, width: int = 8, dropout: float = 0.2) -> None:
        super().__init__()
        sizes = features.vocabularies
        self.sparse = nn.ModuleList(nn.Embedding(sizes[name], width) for name in features.sparse)
        (history,) = features.sequences
        self.events = nn.ModuleList(nn.Embedding(sizes[name], width) for name in history.vocabularies)
        self.dense = nn.Linear(len(features.dense), width) if features.dense else None
        self.attention = gdpa.nn.SelfAttention(width, 4, _scaled, params=(torch.tensor(1.0),), out_scale=0.05)
        self.pool = gdpa.nn.SeedPooling(width, 4, 2, "silu", out_scale=0.05)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(3 * width, 1)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, batch: Batch) -> Tensor:
        (history,) = batch.sequences.values()
        x = _sum(table(ids) for table, ids in zip(self.events, history.ids.unbind(1), strict=True))
        events = self.attention(Jagged(x, history.cu_seqlens, history.longest))
        context = _sum(table(ids) for table, ids in zip(self.sparse, batch.sparse.unbind(1), strict=True))
        if self.dense is not None:
            context = context + self.dense(batch.dense)
        pooled = self.pool(events).flatten(1)
        return self.head(self.dropout(torch.cat([context, pooled], 1))).squeeze(1)


def _scaled(s: Tensor, slope: Tensor) -> Tensor:
    return torch.nn.functional.gelu(s) * slope


def _sum(parts: Any) -> Tensor:
    first, *rest = parts
    for part in rest:
        first = first + part
    return first


def build(features: Features, **options: Any) -> nn.Module:
    return Tiny(features, **options)


def without_dropout(features: Features) -> nn.Module:
    return Tiny(features, dropout=0.0)


DATA = {"size": 60, "valid_size": 30, "test_size": 20, "longest": 6, "items": 20, "categories": 4, "users": 5}


def settings(**changes: Any) -> dict[str, Any]:
    """Ten steps of six samples an epoch, and one batch that is not full after two epochs of 64 samples."""
    data = {**DATA, **changes.pop("data", {})}
    return {"batch_size": 8, "lr": 0.01, "data": data, "eval_batch_size": 16, **changes}
