"""Predictions for a whole split, each rank those of its shard, and the metrics of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from gdpa.data import Batch, Stream
from gdpa.train.data.reader import portions
from gdpa.train.errors import ConfigError
from gdpa.train.parallel.ranks import Ranks
from gdpa.train.run.metrics import Metrics, compute
from gdpa.train.run.step import autocast, check_logits

Columns = tuple[np.ndarray, np.ndarray, np.ndarray]  # logits and labels (N,) or (N, K), groups (N,)


def evaluate(
    model: nn.Module,
    stream: Stream,
    batch_size: int,
    ranks: Ranks,
    spare: Batch,
    dtype: str = "fp32",
    each: Callable[[int], None] = lambda samples: None,
    name: str = "the file or split",
) -> Metrics:
    """The metrics of one process, on every rank: the samples of all shards in the order of the data.

    ``each`` is told after every batch how many samples all ranks have done. ``name`` is what errors call the stream.
    """
    training, total = model.training, 0
    model.eval()
    held: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        for portion in portions(stream, batch_size, 1, ranks, spare):
            (batch,), (count,) = portion.parts, portion.counts
            with autocast(ranks.device, dtype):
                logits = model(batch.to(ranks.device, non_blocking=True))
            check_logits(logits, batch)
            if count:  # a rank whose shard has ended only keeps the others company
                # Detached: without gradients, a view of a parameter requires them all the same.
                held.append((logits.detach().float().cpu(), batch.labels, batch.groups))
            each(portion.total)
            total += portion.total
    model.train(training)
    if not total:  # on every rank alike
        raise ConfigError(f"{name} has no samples to evaluate: {_why_empty(stream)}")
    shards = ranks.gather_shards(_columns(held))
    return ranks.from_lead(lambda: _metrics(shards or []))


def _why_empty(stream: Stream) -> str:
    skipped = getattr(stream, "skipped", 0)
    return f"all its rows ({skipped}) were left out as bad, see skip_bad" if skipped else "it has no rows"


def _columns(held: list[tuple[Tensor, Tensor, Tensor]]) -> Columns:
    if not held:
        return np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64)
    logits, labels, groups = (torch.cat(parts).numpy() for parts in zip(*held, strict=True))
    return logits, labels, groups


def _metrics(shards: list[Columns]) -> Metrics:
    shards = [shard for shard in shards if len(shard[0])] if any(len(shard[0]) for shard in shards) else shards
    logits, labels, groups = (interleaved([shard[i] for shard in shards]) for i in range(3))
    if bad := int((~np.isfinite(logits)).sum()):
        raise ArithmeticError(f"{bad} of {logits.size} predictions are inf or NaN")
    if logits.ndim == 1:
        return compute(logits, labels, groups)
    first, *others = (compute(own, label, groups) for own, label in zip(logits.T, labels.T, strict=True))
    return replace(first, others=tuple(others))


def interleaved(parts: list[np.ndarray]) -> np.ndarray:
    """Shard r of n holds samples r, r + n, r + 2 n, ...: back in their order."""
    whole = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=parts[0].dtype)
    for r, part in enumerate(parts):
        whole[r :: len(parts)] = part
    return whole
