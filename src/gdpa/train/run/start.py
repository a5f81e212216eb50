"""train(): opens what a run needs, runs it, and closes everything whatever happens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from gdpa.data import Vocabularies
from gdpa.train.config import Config
from gdpa.train.config.reading import make_config
from gdpa.train.data.splits import Splits, check_held_out, held_out_in_vain, open_splits, read_again
from gdpa.train.errors import ConfigError
from gdpa.train.parallel.ranks import Ranks, join, lost_ranks
from gdpa.train.reporting import scalars
from gdpa.train.reporting.recorder import Recorder
from gdpa.train.reporting.report import Silent, make_reporter
from gdpa.train.result import Progress, Result
from gdpa.train.run.building import Build
from gdpa.train.run.loop import Run
from gdpa.train.run.signals import Signals
from gdpa.train.storage import random_state
from gdpa.train.storage.checkpoint import PARTIAL
from gdpa.train.storage.folder import VOCABULARIES, RunFolder, examine


def train(
    config: Config | Mapping[str, Any],
    *,
    console: Console | None = None,
    build: Build | None = None,
    on_step: Callable[[Progress], None] | None = None,
    splits: Splits | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Result:
    """Train as ``config`` says; a dictionary is read as a config file would be.

        result = gdpa.train.train({"model": {"name": "din"}, "steps": 200, "eval_every": 50})
        result.metrics["test"]["auc"], result.history.losses

    Without ``out`` nothing is written. ``console`` shows progress: a bar on a terminal, JSON lines elsewhere.
    ``build(features)`` makes the model in place of config.model. ``on_step`` is called after every step. ``splits`` are
    streams to read in place of config.data, for a number of steps, and without ``out``, whose config would not say what
    was read. ``resume`` continues the run in ``out`` (or starts it, if there is none), ``overwrite`` starts over.
    """
    config = config if isinstance(config, Config) else make_config(config)
    if splits is not None and (config.out is not None or config.steps is None):
        raise ConfigError(f"splits need steps and no out, not steps={config.steps} and out={config.out!r}")
    if (resume or overwrite) and config.out is None:
        raise ConfigError(f"{'resume' if resume else 'overwrite'} needs out, the folder of the run")
    if not resume:
        check_held_out(config)
    with ExitStack() as stack:
        ranks = stack.enter_context(join(config))
        stack.enter_context(random_state.apart(ranks.device))
        signals = stack.enter_context(Signals())
        reporter = make_reporter(console if ranks.leads else None)
        where = _Where()
        stack.enter_context(lost_ranks(ranks, where))
        if config.out is not None:
            ranks.from_lead(lambda: examine(config, resume, overwrite))
            if config.tensorboard:
                scalars.writer()
        own = splits is None  # splits that are given take the place of config.data
        splits = splits or _splits(config, ranks, resume)
        for said in [*held_out_in_vain(config.data, splits), *(read_again(config.data) if own else ())]:
            reporter.message(said)
        for stream in (splits.train, splits.valid, splits.test):
            stack.callback(getattr(stream, "close", lambda: None))
        run = Run(config, ranks, splits, build, signals, on_step)
        where.run = run
        # Only now, when nothing is left to refuse: a folder that is claimed holds a run.
        folder = run.folder = _folder(config, ranks, resume, overwrite, stack)
        _keep_vocabularies(folder, splits.vocabularies)
        if resume:
            _resume(run, reporter)
        recorder = Recorder(reporter, folder, config.tensorboard, run.step, run.records)
        stack.callback(recorder.close)
        if resume:  # all ranks return the whole history
            recorder.journal.records = ranks.from_lead(lambda: recorder.journal.records)
        try:
            result = run.train(recorder)
        except BaseException:
            reporter.end({})
            raise
        reporter.end(result.summary())
        return result


class _Where:
    """How far this rank was, for the message of a lost one."""

    run: Run | None = None

    def __str__(self) -> str:
        return "before the first step" if self.run is None else f"after step {self.run.step}"


def _folder(config: Config, ranks: Ranks, resume: bool, overwrite: bool, stack: ExitStack) -> RunFolder | None:
    """On rank 0. A refusal there is one on every rank."""
    held: list[RunFolder] = []
    if config.out is not None:
        ranks.from_lead(lambda: held.append(RunFolder(config, resume, overwrite)))
    for folder in held:
        stack.callback(folder.release)
    return held[0] if held else None


def _splits(config: Config, ranks: Ranks, resume: bool) -> Splits:
    """Rank 0 counts the training data, or has the vocabularies of the run that is continued; the others get them."""

    def stored() -> Vocabularies | None:
        path = Path(config.out) / VOCABULARIES if resume and config.out is not None else None
        return Vocabularies.load(path) if path is not None and path.is_file() else None

    vocabularies = ranks.from_lead(stored)
    if ranks.world > 1 and vocabularies is None:
        vocabularies = ranks.from_lead(lambda: open_splits(config).vocabularies)
    return open_splits(config, ranks.shard, ranks.shards, vocabularies)


def _keep_vocabularies(folder: RunFolder | None, vocabularies: Vocabularies | None) -> None:
    if folder is None or vocabularies is None or (folder.path / VOCABULARIES).is_file():
        return
    partial = folder.path / (VOCABULARIES + PARTIAL)
    vocabularies.save(partial)
    os.replace(partial, folder.path / VOCABULARIES)


def _resume(run: Run, reporter: Silent) -> None:
    def newest() -> tuple[Path | None, bool]:
        assert run.folder is not None
        held = run.folder.checkpoints
        found = held.newest(reporter.message)
        return None if found is None else found[0], bool(held.paths())

    path, damaged = run.ranks.from_lead(newest)
    if path is None:
        none = "no checkpoint in {} can be read" if damaged else "there is no checkpoint in {} yet"
        reporter.message(f"{none.format(run.config.out)}: starting at the first step")
        return
    run.resume(path)
    reporter.message(f"continuing from step {run.step} ({path.name})")
