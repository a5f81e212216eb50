"""A run from its config to its result: steps, validations, checkpoints, and where it begins again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gdpa.data import Stream, Tally
from gdpa.models import Features
from gdpa.train.config import MAY_MOVE, Config, SyntheticData
from gdpa.train.config.reading import differences, read_config, to_dict
from gdpa.train.data.reader import Portion, Reader, per_rank, spare_batch
from gdpa.train.data.splits import Splits
from gdpa.train.errors import NonFiniteError, RunFolderError, Stopped
from gdpa.train.parallel.ranks import Ranks
from gdpa.train.parallel.sharing import Shared
from gdpa.train.reporting.recorder import Recorder
from gdpa.train.result import Progress, Result
from gdpa.train.run import nonfinite
from gdpa.train.run.building import Build, adapt, build_model, build_own, make_optimizer, make_schedule, names_code
from gdpa.train.run.evaluate import evaluate
from gdpa.train.run.metrics import better
from gdpa.train.run.signals import Signals
from gdpa.train.run.step import Outcome, compute_gradients
from gdpa.train.storage import checkpoint, parts, random_state, state
from gdpa.train.storage.folder import CONFIG, RunFolder

PROGRESS = ("best", "latest", "evaluated", "pending", "records")  # what a checkpoint holds of a Run's own fields


class Run:
    """Everything that changes while training, on one rank."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        splits: Splits,
        build: Build | None,
        signals: Signals,
        on_step: Callable[[Progress], None] | None,
    ) -> None:
        self.config, self.ranks, self.splits = config, ranks, splits
        self.folder: RunFolder | None = None  # of rank 0, once everything else is known to be right
        self.signals, self.on_step = signals, on_step
        self.features = Features.of(splits.train)
        self.spare = spare_batch(splits.first)
        size = per_rank(config.batch_size, ranks, config.accumulate)
        self.eval_size = per_rank(config.eval_batch_size or config.batch_size, ranks, 1, "eval_batch_size")

        random_state.seed_all(config.seed)
        module = build_own(build, self.features) if build else build_model(config.model, self.features)
        adapt(module, config, ranks)
        self.model = Shared(module, config, ranks, self.spare)
        if ranks.shard:  # the same weights on all ranks, but dropout of its own for each share of the batch
            random_state.seed_all(config.seed + ranks.shard)
        self.optimizer = make_optimizer(config, self.model.module, self.model.mixed)
        self.schedule = make_schedule(config, self.optimizer)
        self.reader = Reader(splits.train, size, config.accumulate, ranks, self.spare, config.epoch_limit)

        self.step, self.evaluated, self.saved = 0, -1, -1
        self.best: dict[str, Any] | None = None  # step, value and metrics
        self.latest: dict[str, float | None] | None = None  # metrics of the last validation
        self.best_weights: dict[str, Any] | None = None  # where no file holds them
        self.pending: list[float] = [0.0, 0]  # loss, steps since the last record
        self.records = 0  # in the journal, when the checkpoint was made
        self.doubted = False  # whether something was said of the histories

    # ---- the whole run -----------------------------------------------------------------------------------------------
    def train(self, recorder: Recorder) -> Result:
        self.recorder = recorder
        recorder.begin(self.config, self.ranks, self.model.module, self.total_steps(), self.step)
        self._tell_of_ignored()
        self.model.module.train()
        recorder.clock.start()
        while not self.reader.finished and self.step != self.config.steps:
            portion = self.reader.next()
            if portion is not None:
                self._train_on(portion)
            elif not self.config.eval_every and self.evaluated != self.step:  # a shorter run may have ended here
                self._validate()
                self._save()
        recorder.clock.stop()
        if self.evaluated != self.step:
            self._validate()
            self._save()
        if self.saved != self.step:
            self._save()
        return self._finish()

    def _tell_of_ignored(self) -> None:
        """Columns that were read from the data for nothing should not surprise anyone after the run, nor should a
        vocabulary that is misspelt."""
        model, name, tell = self.model.module, self.config.model.name, self.recorder.reporter.message
        ignored: tuple[str, ...] = getattr(model, "ignored", tuple)()
        if ignored:
            tell(f"{name} does not read {', '.join(ignored)}")
        alone: tuple[str, ...] = getattr(model, "without_candidate", tuple)()
        if alone:
            tell(f"{name} has no candidate for {', '.join(alone)}: no sparse column has a vocabulary of theirs")

    def _tell_of_doubts(self) -> None:
        """Of the histories read so far, once: at the first validation, or at the end."""
        doubts = getattr(self.splits.train, "tally", Tally()).doubts()
        if doubts and not self.doubted:
            self.doubted = True
            for said in doubts:
                self.recorder.reporter.message(said)

    def _finish(self) -> Result:
        """The best weights again, and their metrics."""
        self._tell_of_doubts()
        if skipped := getattr(self.splits.train, "skipped", 0):
            self.recorder.reporter.message(f"{skipped} rows of the last pass could not be read and were left out")
        best_step = self.step if self.best is None else self.best["step"]
        self._load_best()
        metrics = {}
        if self.latest is not None:
            metrics["valid"] = self.latest if self.best is None else self.best["metrics"]
        if self.splits.test is not None:
            metrics["test"] = self._evaluate(self.splits.test, "test", best_step)
        self.model.module.eval()
        return self.recorder.result(self.step, self.model.module, metrics, best_step, self._best_path())

    # ---- steps -------------------------------------------------------------------------------------------------------
    def _train_on(self, portion: Portion) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        outcome = compute_gradients(self.model, portion, self.config.dtype, self.config.clip)
        problems, wishes = self.ranks.sum([outcome.problem is not None, self.signals.received is not None])
        if problems:
            self._stop_nonfinite(outcome, portion)
        lr = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.recorder.clock.count(portion.total)
        self._record(outcome, lr)
        self._keep()
        if wishes:
            self._stop_on_signal()

    def _keep(self) -> None:
        """Validations and checkpoints that are due after a step; a new best is always kept."""
        validate, save = self.config.eval_every, self.config.checkpoint_every
        due = bool(validate) and self.step % validate == 0
        if due:
            self._validate()
        is_best = self.best is not None and self.best["step"] == self.step
        if is_best or (self.step % save == 0 if save else due):
            self._save()

    def _record(self, outcome: Outcome, lr: float) -> None:
        self.pending = [self.pending[0] + outcome.loss, self.pending[1] + 1]
        speed = self.recorder.clock.speed()
        if self.step % self.config.log_every == 0:
            mean = self.pending[0] / self.pending[1]
            self.recorder.trained(self.step, mean, lr, outcome.gradient_norm, speed)
            self.pending = [0.0, 0]
        self.recorder.reporter.step({"step": self.step, "loss": outcome.loss, "samples_per_s": speed})
        if self.on_step is not None:
            self.on_step(Progress(self.step, self.total_steps(), outcome.loss, speed))

    def total_steps(self) -> int | None:
        config = self.config
        if config.steps is not None or not isinstance(config.data, SyntheticData):
            return config.steps
        return -(-config.data.size // config.batch_size) * (config.epoch_limit or 1)

    # ---- validation and checkpoints ----------------------------------------------------------------------------------
    def _validate(self) -> None:
        self._tell_of_doubts()
        self.evaluated = self.step
        if self.splits.valid is None:
            return
        with self.recorder.clock.paused():
            self.latest = self._evaluate(self.splits.valid, "valid", self.step)
            value = self.latest[self.config.best]
            if value is None and self.best is None:
                self._tell_of_undefined()
            if self.best is None or better(self.config.best, value, self.best["value"]):
                self.best = {"step": self.step, "value": value, "metrics": self.latest}
                if self.config.out is None:
                    self.best_weights = state.model_state(self.model.module)

    def _tell_of_undefined(self) -> None:
        why = "no group has both labels" if self.config.best == "gauc" else "all have the same label"
        self.recorder.reporter.message(
            f"best={self.config.best!r} is not defined on the validation samples ({why}): until it is, the "
            "last weights count as the best"
        )

    def _evaluate(self, stream: Stream, split: str, step: int) -> dict[str, float | None]:
        started = time.perf_counter()
        dtype, each = self.config.dtype, self.recorder.reporter.validating
        try:
            found = evaluate(
                self.model.call, stream, self.eval_size, self.ranks, self.spare, dtype, each, f"the {split} data"
            )
        except ArithmeticError as error:
            raise NonFiniteError(f"{split} after step {step}: {error}", step) from error
        metrics = found.to_dict(self.features.labels)
        self.recorder.evaluated(step, split, metrics, time.perf_counter() - started)
        return metrics

    def _save(self) -> None:
        """All ranks take part, rank 0 writes."""
        self.saved = self.step
        if self.config.out is None:
            return
        with self.recorder.clock.paused():
            self.records = len(self.recorder.journal.records)
            found = {**self._state(), **self._tensors()}
            if self.folder is not None:
                self.recorder.flush()
                is_best = self.best is None or self.best["step"] == self.step
                self.folder.checkpoints.save(found, self.step, is_best)

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "config": to_dict(self.config),
            "features": self.features.to_dict(),
            "schedule": self.schedule.state_dict(),
            "reader": self.reader.state_dict(),
            "random": state.random_states(self.ranks),
            "progress": {name: getattr(self, name) for name in PROGRESS},
        }

    def _tensors(self) -> dict[str, Any]:
        """Gathered on rank 0, or written by the ranks that hold them."""
        keep, module = self.ranks.leads, self.model.module
        if self.config.sharded_checkpoints:
            folder = self.ranks.from_lead(self._new_parts)
            parts.save(folder, module, self.optimizer)
            return {checkpoint.PARTS: folder.name}
        return {
            "model": state.model_state(module, keep),
            "optimizer": state.optimizer_state(module, self.optimizer, keep),
        }

    def _new_parts(self) -> Path:
        assert self.folder is not None
        return self.folder.checkpoints.new_parts(self.step)

    def resume(self, path: Path) -> None:
        found = checkpoint.read(path)
        if changed := differences(read_config(found["config"]), self.config, MAY_MOVE):
            raise RunFolderError(
                f"{str(path)!r} was made with settings that differ from those in {CONFIG} now, old -> new: "
                f"{'; '.join(changed)}"
            )
        self.step = self.saved = found["step"]
        state.load(found, path.parent, self.model.module, self.optimizer)
        self.schedule.load_state_dict(found["schedule"])
        for group, lr in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = lr
        self.reader.load_state_dict(found["reader"])
        state.restore_random_state(found["random"], self.ranks, self.config.seed, self.step)
        for name in PROGRESS:
            setattr(self, name, found["progress"][name])

    def _best_path(self) -> Path | None:
        if self.config.out is None:
            return None
        return Path(self.config.out) / "checkpoints" / checkpoint.BEST

    def _load_best(self) -> None:
        if self.best is None or self.best["step"] == self.step:
            return
        path = self._best_path()
        found = {"model": self.best_weights} if path is None else checkpoint.read(path)
        state.load(found, Path() if path is None else path.parent, self.model.module)

    # ---- ends before the end -----------------------------------------------------------------------------------------
    def _stop_on_signal(self) -> None:
        if self.saved != self.step:
            self._save()
        number = self.ranks.from_lead(lambda: self.signals.received) or 15
        where = (
            f"saved; --resume continues from step {self.step}" if self.config.out else "nothing is saved without out"
        )
        raise Stopped(f"stopped by signal {number} after step {self.step}: {where}", number)

    def _stop_nonfinite(self, outcome: Outcome, portion: Portion) -> None:
        problem, step = outcome.problem or "not finite on another rank", self.step + 1
        message, saved = f"step {step}: {problem}", None
        if self.config.out is not None:
            saved = nonfinite.folder_of(Path(self.config.out), step)
            nonfinite.save_batches(saved, self.ranks.rank, portion.parts)
            weights = state.model_state(self.model.module, self.ranks.leads)
            facts = {"step": step, "problem": problem, "config": to_dict(self.config), "model": weights}
            if self.folder is not None:
                self.recorder.flush()
                nonfinite.save_model(saved, {**facts, "features": self.features.to_dict()})
            message += f"; the batch and the weights before it are saved: gdpa train --replay {saved}"
            message += " --trust" if names_code(self.config.model) else ""
        raise NonFiniteError(message, step, saved)
