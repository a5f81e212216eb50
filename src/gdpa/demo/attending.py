"""What the attention of a trained InterFormer does: its weights on one history, and the scores it really sees."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gdpa.data import Sample, collate
from gdpa.models.cores import PaddedEager, replace, weights
from gdpa.nn.attention import unpacked

SHORTEST, LONGEST = 9, 12  # events of the history that is shown
MANY = 200  # samples whose scores are counted
COMPARED = 1000  # samples whose logits are compared
BINS = 48


def look(model: nn.Module, samples: Sequence[Sample]) -> dict[str, Any]:
    """Of the last layer's self-attention, the head whose weights vary most on the history that is shown.

    weights (n, n) of the tokens in rows on those in columns; labels of the tokens; scores: how many of them lie between
    two ``edges``; curve: f(s), for softmax e^s; params: those of the head.
    """
    shown = next(s for s in samples if SHORTEST <= len(s.sequences["history"]) <= LONGEST and s.label)
    core = _core(model)
    (scores,) = _scores(model, [shown])
    p = _weights(core, scores, core.normalize)
    head = int((p.flatten(1).std(1) / p.flatten(1).abs().amax(1)).argmax())
    seen = torch.cat([s[head].flatten() for s in _scores(model, samples[:MANY])]).numpy()
    low, high = np.floor(np.quantile(seen, 0.002)), np.ceil(np.quantile(seen, 0.998))
    counts, edges = np.histogram(seen, BINS, (min(low, -2.0), max(high, 2.0)))
    s = torch.linspace(float(edges[0]), float(edges[-1]), 161)
    curve = _weights(core, s.expand(len(p), 1, -1), None)[head, 0]
    return {
        "labels": _labels(model, shown),
        "head": head,
        "weights": p[head].tolist(),
        "params": [float(param.detach().expand(len(p))[head]) for param in core._heads().params],
        "scores": {"edges": edges.tolist(), "counts": counts.tolist()},
        "curve": {"s": s.tolist(), "p": curve.tolist()},
    }


def disagreement(model: nn.Module, samples: Sequence[Sample]) -> float:
    """max |logit - exact| / max |exact|, exact: the same weights in float64, by plain padded PyTorch."""
    batch = collate(samples[:COMPARED])
    exact = replace(copy.deepcopy(model), PaddedEager).double()
    with torch.no_grad():
        found, want = model(batch).double(), exact(batch)
    return float((found - want).abs().max() / want.abs().max())


def _core(model: Any) -> Any:
    return model.sequence[-1].attention.attention


def _scores(model: nn.Module, samples: Sequence[Sample]) -> list[Tensor]:
    """(H, n, n) of each sample, before the function."""
    core: Any = _core(model)
    seen: list[Any] = []
    with core.register_forward_pre_hook(lambda _, args: seen.append(args)), torch.no_grad():
        model(collate(samples))
    ((*qkv, offsets, _),) = seen
    q, k, _ = unpacked(*qkv)
    scale = 1 / math.sqrt(q.shape[-1]) if core.scale is None else core.scale
    cuts = offsets.tolist()
    pairs = [(q[a:b], k[a:b]) for a, b in pairwise(cuts)]
    return [scale * torch.einsum("ihd,jhd->hij", *pair) for pair in pairs]


def _weights(core: Any, scores: Tensor, normalize: str | None) -> Tensor:
    """p of scores (H, n, m), divided by its sum if ``normalize``."""
    columns = [p.expand(len(scores))[:, None, None] for p in core._heads().params]
    everything, sink = torch.tensor(True), torch.zeros(len(scores), 1, 1)
    with torch.no_grad():
        return weights(core.activation, normalize, scores, columns, everything, sink, None)


def _labels(model: Any, sample: Sample) -> list[str]:
    """The tokens: those of the context, then the events by their category; a star: that of the candidate."""
    candidate = int(sample.sparse[1])
    events = [int(category) for category in sample.sequences["history"].ids[:, 1]]
    context = [f"context {i + 1}" for i in range(model.config.cls_tokens)]
    return [*context, *(f"{'★ ' if c == candidate else ''}category {c}" for c in events)]
