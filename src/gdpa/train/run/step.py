"""One step of training: the gradient of the mean loss over the batch of all ranks."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.data import Batch
from gdpa.train.data.reader import Portion
from gdpa.train.parallel.sharing import Shared


@dataclass(frozen=True)
class Outcome:
    """The mean loss over the batch of all ranks, and the norm of its gradient before it was clipped."""

    loss: float
    gradient_norm: float

    @property
    def problem(self) -> str | None:
        for name, value in (("loss", self.loss), ("norm of the gradient", self.gradient_norm)):
            if not math.isfinite(value):
                return f"the {name} is {value}"
        return None


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if dtype == "bf16" else nullcontext()


def check_logits(logits: Tensor, batch: Batch) -> None:
    if not isinstance(logits, Tensor):
        wanted = f"a tensor of logits of shape {tuple(batch.labels.shape)}"
        raise TypeError(f"the model must give {wanted}, not a {type(logits).__name__}")
    if logits.shape != batch.labels.shape:
        raise ValueError(f"the model must give logits of shape {tuple(batch.labels.shape)}, not {tuple(logits.shape)}")


def compute_gradients(model: Shared, portion: Portion, dtype: str, clip: float | None) -> Outcome:
    """Gradients into .grad of the parameters; the optimizer has not stepped yet."""
    ranks = model.ranks
    scale = ranks.shards / portion.total  # gradients are averaged over the shards
    losses = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for i, (part, count) in enumerate(zip(portion.parts, portion.counts, strict=True)):
        last = i == len(portion.parts) - 1
        with nullcontext() if last else model.without_sync():
            loss = _loss(model, part.to(ranks.device, non_blocking=True), dtype)
            (loss * (scale if count else 0.0)).backward()
        losses += loss.detach() * bool(count)
    model.finish_gradients()
    norm = model.gradient_norm(clip)
    return Outcome(ranks.sum_shards([losses.item()])[0] / portion.total, norm)


def _loss(model: Shared, batch: Batch, dtype: str) -> Tensor:
    """The sum over the batch."""
    with autocast(model.ranks.device, dtype):
        logits = model(batch)
    check_logits(logits, batch)
    return losses(logits, batch).sum()


def losses(logits: Tensor, batch: Batch) -> Tensor:
    """(B,) of each sample: its weight times the cross-entropy, summed over the labels where there are several."""
    found = F.binary_cross_entropy_with_logits(logits.float(), batch.labels, reduction="none")
    found = found if found.dim() == 1 else found.sum(1)
    return found if batch.weights is None else found * batch.weights
