"""A step of training: forward, loss, backward, AdamW. Compiled or not, in the dtype of autocast, batch after batch.

Weights, their gradients and AdamW's averages are float32; with bfloat16, torch.autocast decides what is computed in it,
as in `gdpa train --dtype bf16`. AdamW is torch's fused one on a GPU. Tables have dense gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gdpa.bench.models.padded import PaddedBatch
from gdpa.bench.timing import Timing, summarise
from gdpa.data import Batch

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class StepEffort:
    """How much time one contender may take on one case, in ms, and bounds on the steps that are timed."""

    warmup_ms: float = 500.0
    measure_ms: float = 1500.0
    least: int = 8
    most: int = 60


QUICK = StepEffort(warmup_ms=0.0, measure_ms=300.0, least=4, most=12)


class Trainer:
    """A model with its optimizer. Calling it trains one step on the next batch, and gives the loss."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool,
        kernels: Sequence[SDPBackend],
    ) -> None:
        self.model, self.device, self.dtype, self.kernels = model, device, dtype, list(kernels)
        self.compiled = compiled
        self._loss: Any = self._plain_loss
        if compiled:
            # It gives up on a function after a few recompilations, and every contender compiles the same ones.
            torch.compiler.reset()
            self._loss = torch.compile(self._plain_loss, fullgraph=True)
        self.start([])

    def start(self, inputs: Sequence[Any]) -> None:
        """Weights and optimizer as at the beginning, and other batches."""
        torch.manual_seed(0)
        self.model.reset_parameters()  # type: ignore[operator]
        self.model.zero_grad()
        fused = self.device.type == "cuda" or None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=fused)
        if self.compiled:
            for one in inputs:
                mark_lengths(one)
        self._next = cycle(inputs)

    def forget(self) -> None:
        """Gradients, the optimizer's averages and the batches."""
        self.model.zero_grad()
        self.optimizer.state.clear()
        self._next = cycle(())

    def _plain_loss(self, batch: Batch | PaddedBatch) -> Tensor:
        labels = batch.batch.labels if isinstance(batch, PaddedBatch) else batch.labels
        narrow = self.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype if narrow else torch.bfloat16, enabled=narrow):
            logits = self.model(batch)
        return F.binary_cross_entropy_with_logits(logits.float(), labels)

    def __call__(self) -> Tensor:
        with sdpa_kernel(self.kernels, set_priority=True):
            self.optimizer.zero_grad()
            loss = self._loss(next(self._next))
            loss.backward()
            self.optimizer.step()
        return loss.detach()


def mark_lengths(batch: Batch | PaddedBatch) -> None:
    """Tells torch.compile that other batches have other numbers of events. A whole padded batch always has the same."""
    if isinstance(batch, Batch):
        from gdpa.compat import maybe_mark_dynamic

        for events in batch.sequences.values():
            maybe_mark_dynamic(events.ids, 0)
            maybe_mark_dynamic(events.values, 0)


@dataclass(frozen=True)
class Measured:
    """``loss``: of the first step, equal where contenders compute the same. ``compile_s``: of the first steps, beyond
    what they take later. ``graphs``: how many torch.compile made; 1 for a contender's first case and 0 for the next if
    lengths make no difference."""

    timing: Timing
    loss: float
    peak: int | None
    compile_s: float
    graphs: int | None


def measure(trainer: Trainer, batches: int, effort: StepEffort) -> Measured:
    """Time steps of ``trainer``, which has just been started on that many batches."""
    device = trainer.device
    with counted_graphs(trainer.compiled) as graphs:
        began = time.perf_counter()
        losses = [trainer() for _ in range(batches)]  # compiles, allocates; every length has been seen
        first = [float(loss) for loss in losses]
        compiling = time.perf_counter() - began
        if not all(map(math.isfinite, first)):
            raise ArithmeticError(f"the losses of the first steps are {first}")
        once = max(step_times(trainer, 1, device)[0], 1e-3)
        step_times(trainer, min(int(effort.warmup_ms / once), effort.most), device)
        repeats = min(max(int(effort.measure_ms / once), effort.least), effort.most)
        repeats = math.ceil(repeats / batches) * batches  # every batch as often as the others
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        timing = summarise(step_times(trainer, repeats, device))
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    compile_s = max(compiling - batches * timing.median_ms / 1e3, 0.0)
    return Measured(timing, first[0], peak, compile_s, len(graphs) if trainer.compiled else None)


def step_times(trainer: Trainer, steps: int, device: torch.device) -> list[float]:
    """Milliseconds from the end of each step to the end of the next, as training has them: the host's time counts
    where the GPU waits for it."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(steps):
            trainer()
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        trainer()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(events)]


@contextmanager
def counted_graphs(compiled: bool) -> Iterator[list[None]]:
    """Gives a list that has, in the end, an entry for every graph that torch.compile made meanwhile."""
    made: list[None] = []
    if not compiled:
        yield made
        return
    from gdpa.compat import dynamo_counters as counters

    before = counters["stats"]["unique_graphs"]
    yield made
    made += [None] * (counters["stats"]["unique_graphs"] - before)
