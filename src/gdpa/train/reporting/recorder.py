"""What a run tells the world: its journal, TensorBoard and the screen; on most ranks the journal in memory alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from gdpa.train.config import Config
from gdpa.train.parallel.ranks import Ranks
from gdpa.train.reporting.journal import Journal
from gdpa.train.reporting.report import Silent
from gdpa.train.reporting.scalars import Scalars
from gdpa.train.result import Evaluation, History, Result
from gdpa.train.storage.folder import JOURNAL, TENSORBOARD, RunFolder


class Clock:
    """Seconds and samples of training, without validations and checkpoints."""

    def __init__(self) -> None:
        self.seconds, self.samples = 0.0, 0
        self._started: float | None = None
        self._mark = (0.0, 0)

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
        self._started = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        running = self._started is not None
        self.stop()
        yield
        if running:
            self.start()

    def count(self, samples: int) -> None:
        self.samples += samples

    def speed(self) -> float:
        """Samples per second over about the last second."""
        self.stop()
        self.start()
        seconds, samples = self.seconds - self._mark[0], self.samples - self._mark[1]
        if seconds > 1 or not self._mark[1]:
            self._mark = (self.seconds, self.samples) if seconds > 1 else self._mark
            self._speed = samples / max(seconds, 1e-9)
        return self._speed

    _speed = 0.0


class Recorder:
    """``step`` and ``records`` are those of the checkpoint that the run continues from, or 0."""

    def __init__(self, reporter: Silent, folder: RunFolder | None, tensorboard: bool, step: int, records: int) -> None:
        self.reporter, self.clock = reporter, Clock()
        self.journal = Journal(None if folder is None else folder.path / JOURNAL, records)
        wanted = tensorboard and folder is not None
        self._scalars = Scalars(folder.path / TENSORBOARD, step) if wanted and folder is not None else None

    def begin(self, config: Config, ranks: Ranks, module: nn.Module, total: int | None, step: int) -> None:
        parameters = sum(p.numel() for p in module.parameters())
        shape = f"{ranks.world} x {ranks.parallel}" if ranks.parallel else "1"
        facts = {"model": config.model.name, "parameters": parameters, "device": str(ranks.device)}
        self.reporter.begin(total, step, **facts, ranks=shape, out=config.out)

    def trained(self, step: int, loss: float, lr: float, gradient_norm: float, samples_per_s: float) -> None:
        record = self.journal.add(
            "train", step, loss=loss, lr=lr, gradient_norm=gradient_norm, samples_per_s=samples_per_s
        )
        if self._scalars is not None:
            self._scalars.add(record)

    def evaluated(self, step: int, split: str, metrics: dict[str, float | None], seconds: float) -> None:
        record = self.journal.add("eval", step, split=split, **metrics, seconds=seconds)
        if self._scalars is not None:
            self._scalars.add(record)
        self.reporter.evaluation(record)

    def evaluations(self) -> list[Evaluation]:
        rest = ("event", "step", "split", "seconds")
        return [
            Evaluation(r["step"], r["split"], {k: v for k, v in r.items() if k not in rest})
            for r in self.journal.of("eval")
        ]

    def flush(self) -> None:
        self.journal.flush()

    def result(
        self, steps: int, module: nn.Module, metrics: dict[str, Any], best_step: int, best: Path | None
    ) -> Result:
        trained = self.journal.of("train")
        return Result(
            steps=steps,
            history=History([r["step"] for r in trained], [r["loss"] for r in trained]),
            evaluations=self.evaluations(),
            metrics=metrics,
            best_step=best_step,
            best_checkpoint=best,
            seconds=self.clock.seconds,
            samples_per_s=self.clock.samples / self.clock.seconds if self.clock.seconds else 0.0,
            model=module,
        )

    def close(self) -> None:
        self.journal.close()
        if self._scalars is not None:
            self._scalars.close()
