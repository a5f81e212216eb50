"""The model hstu trains as one whose layers are the published formula in eager float32 on padded tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gdpa.nn as gnn
from gdpa.data import SyntheticLog, batches
from gdpa.models import Features, build
from nn import formulas

STEPS = 50


class Published(nn.Module):
    """A layer's parameters, used by the formula."""

    def __init__(self, layer: gnn.HSTU) -> None:
        super().__init__()
        self.layer = layer
        self.formula = formulas.hstu(
            layer.num_heads, layer.longest, layer.head_dim, layer.value_dim, context=layer.context_len,
            buckets=layer.attention.score_bias[1].num_buckets, ahead=False,
        )  # fmt: skip

    def forward(self, x: gnn.Jagged, times: Tensor, num_targets: Tensor) -> gnn.Jagged:
        length = int(x.lengths.max())
        keep = torch.arange(length) < x.lengths[:, None]
        padded = torch.zeros(keep.shape, dtype=torch.int64).masked_scatter(keep, times)
        p = dict(self.layer.named_parameters())
        return x.with_values(self.formula(p, x.to_padded(length), keep, times=padded, targets=num_targets)[keep])


def losses(model: Any, log: SyntheticLog) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    found = []
    for batch in list(batches(log, 16))[:STEPS]:
        loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_training_is_that_of_the_published_formula() -> None:
    log = SyntheticLog(seed=2, size=16 * STEPS, longest=6, items=40, categories=6)
    torch.manual_seed(0)
    model = build("hstu", Features.of(log), dim=8, hidden=(16,), depth=2, num_layers=1, longest=8)
    published = copy.deepcopy(model)
    published.encoder = nn.ModuleList(Published(layer) for layer in published.encoder)  # type: ignore[union-attr]
    ours, theirs = losses(model, log), losses(published, log)
    assert len(ours) == STEPS
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert sum(ours[-10:]) < sum(ours[:10]) - 0.2  # it learns
    biases = [p for name, p in model.named_parameters() if "score_bias" in name]
    assert all(p.grad is not None and p.grad.any() for p in biases)
