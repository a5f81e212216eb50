"""A step of training: forward, loss, backward, AdamW. Compiled or not, in the dtype of autocast, batch after batch.

Weights, their gradients and AdamW's averages are float32; with bfloat16, torch.autocast decides what is computed in it,
as in `gdpa train --dtype bf16`. AdamW is torch's fused one on a GPU. Tables have dense gradients, unless they are
updated row by row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from statistics import median
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gdpa.bench.models.padded import PaddedBatch
from gdpa.bench.timing import Timing, summarise
from gdpa.data import Batch
from gdpa.train.run.rowwise import ROWWISE, Joined, tables_of

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
    """A model with its optimizer, at rest until it is started. Calling it trains one step on the next batch, and gives
    the loss. ``table_updates``: as of `gdpa train`; None for AdamW of dense gradients."""

    optimizer: torch.optim.Optimizer | None

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool,
        kernels: Sequence[SDPBackend],
        table_updates: str | None = None,
    ) -> None:
        self.model, self.device, self.dtype, self.kernels = model, device, dtype, list(kernels)
        self.compiled, self.table_updates = compiled, table_updates
        self.tables = tables_of(model) if table_updates is not None else []
        for tables in self.tables:
            tables.row_gradients = True
        self._sizes = [p.untyped_storage().nbytes() for p in model.parameters()]
        self._loss: Any = self._plain_loss
        if compiled:
            self._loss = torch.compile(with_own_code(self._plain_loss), fullgraph=True)
        self.rest()

    def start(self, inputs: Sequence[Any]) -> None:
        """Weights and optimizer as at the beginning, and other batches."""
        self._resize(self._sizes)
        torch.manual_seed(0)
        self.model.reset_parameters()  # type: ignore[operator]
        self.optimizer = self._make_optimizer()
        if self.compiled:
            for one in inputs:
                mark_lengths(one)
        self._next = cycle(inputs)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        by_row = [p for tables in self.tables for p in tables.parameters()]
        others = [p for p in self.model.parameters() if not any(p is row for row in by_row)]
        adam = torch.optim.AdamW(others, lr=LEARNING_RATE, fused=self.device.type == "cuda" or None)
        if self.table_updates is None:
            return adam
        return Joined([adam, ROWWISE[self.table_updates](by_row, lr=LEARNING_RATE, modules=self.tables)])

    def rest(self) -> None:
        """Gives its memory back until the next start: batches, gradients, averages, and the weights too, which begin
        anew then. Copies on the host would do as well, but cost a second each way."""
        self.model.zero_grad()
        for tables in self.tables:
            tables.clear_gradients()
        self.optimizer = None
        self._next = cycle(())
        self._resize([0] * len(self._sizes))

    def _resize(self, sizes: Sequence[int]) -> None:
        """Of the weights' storages; the parameters stay the same objects, which compiled code knows them by."""
        for p, size in zip(self.model.parameters(), sizes, strict=True):
            p.untyped_storage().resize_(size)

    def _autocast(self) -> torch.autocast:
        narrow = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype if narrow else torch.bfloat16, enabled=narrow)

    def _plain_loss(self, batch: Batch | PaddedBatch) -> Tensor:
        labels = batch.batch.labels if isinstance(batch, PaddedBatch) else batch.labels
        with self._autocast():
            logits = self.model(batch)
        return F.binary_cross_entropy_with_logits(logits.float(), labels)

    def __call__(self) -> Tensor:
        assert self.optimizer is not None, "it has not been started"
        with sdpa_kernel(self.kernels, set_priority=True):
            self.optimizer.zero_grad()
            batch = next(self._next)
            if self.compiled:
                self._expect(batch)
            loss = self._loss(batch)
            loss.backward()
            self.optimizer.step()
        return loss.detach()

    def _expect(self, batch: Batch) -> None:
        """Tells tables with gradients by row, which compiled code cannot make, of what comes; lengths differ."""
        from gdpa.compat import maybe_mark_dynamic

        for tables in self.tables:
            with self._autocast():
                tables.expect(batch)
            for leaf in tables.expected or ():
                if leaf is not None and leaf.shape[0] != len(batch):
                    maybe_mark_dynamic(leaf, 0)


def with_own_code(method: Any) -> Any:
    """A copy of ``method``. torch.compile keeps what it makes by code object, and gives up on one after a few
    recompilations: contenders that share none compile once each, whoever comes between."""
    fn = method.__func__
    copy = FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    return MethodType(copy, method.__self__)


def mark_lengths(batch: Batch | PaddedBatch) -> None:
    """Tells torch.compile that other batches have other numbers of events. A whole padded batch always has the same."""
    if isinstance(batch, Batch):
        from gdpa.compat import maybe_mark_dynamic

        for events in batch.sequences.values():
            maybe_mark_dynamic(events.ids, 0)
            maybe_mark_dynamic(events.values, 0)


@dataclass(frozen=True)
class Measured:
    """``turns_ms``: the median of each turn. ``loss``: of the first step, equal where contenders compute the same.
    ``compile_s``: of the first steps, beyond what they take later. ``graphs``: how many torch.compile made; 1 for a
    contender's first case and 0 for the next if lengths make no difference."""

    timing: Timing
    turns_ms: list[float]
    loss: float
    peak: int | None
    compile_s: float
    graphs: int | None


class StepWatch:
    """Times the steps of one trainer on one case, in several turns; what others do in between does not count."""

    def __init__(self, trainer: Trainer, effort: StepEffort, turns: int) -> None:
        self._trainer, self._effort, self._turns = trainer, effort, turns
        self._times: list[list[float]] = []  # of each turn
        self._once = self._first_s = self._loss = 0.0
        self._graphs = self._peak = self._batches = 0

    def turn(self, inputs: Sequence[Any]) -> None:
        """One of the turns, from the first weights on; the trainer does not rest after it."""
        trainer, device = self._trainer, self._trainer.device
        trainer.start(inputs)
        with counted_graphs(trainer.compiled) as graphs:
            self._see_every_length(len(inputs))
            effort = self._effort
            step_times(trainer, min(int(effort.warmup_ms / self._turns / self._once), effort.most), device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            self._times.append(step_times(trainer, self._repeats(len(inputs)), device))
            if device.type == "cuda":
                self._peak = max(self._peak, torch.cuda.max_memory_allocated(device))
        self._graphs += len(graphs)

    def _see_every_length(self, batches: int) -> None:
        """A step on each batch, in which code is compiled and memory allocated."""
        began = time.perf_counter()
        losses = [float(loss) for loss in [self._trainer() for _ in range(batches)]]
        if not all(map(math.isfinite, losses)):
            raise ArithmeticError(f"the losses of the first steps are {losses}")
        if not self._times:
            self._first_s, self._loss, self._batches = time.perf_counter() - began, losses[0], batches
            self._once = max(step_times(self._trainer, 1, self._trainer.device)[0], 1e-3)

    def _repeats(self, batches: int) -> int:
        """Steps of a turn: every batch as often as the others."""
        effort = self._effort
        repeats = min(max(int(effort.measure_ms / self._once), effort.least), effort.most)
        return math.ceil(repeats / self._turns / batches) * batches

    def measured(self) -> Measured:
        """Of all turns so far, of which there must be one."""
        timing = summarise([ms for turn in self._times for ms in turn])
        return Measured(
            timing,
            [median(turn) for turn in self._times],
            self._loss,
            self._peak or None,
            max(self._first_s - self._batches * timing.median_ms / 1e3, 0.0),
            self._graphs if self._trainer.compiled else None,
        )


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
