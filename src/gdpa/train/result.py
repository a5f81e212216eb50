"""What a run returns to programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from gdpa.models import Features
from gdpa.train.config.reading import read_config
from gdpa.train.run.building import Build, build_own, build_saved
from gdpa.train.storage import checkpoint
from gdpa.train.storage.state import load_model_state


@dataclass(frozen=True)
class Progress:
    """One step, as passed to ``on_step``: ``total`` is None where the number of steps is not known."""

    step: int
    total: int | None
    loss: float
    samples_per_s: float


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one split after ``step`` steps: auc, gauc, logloss, ne, samples."""

    step: int
    split: str
    metrics: dict[str, float | None]


@dataclass(frozen=True)
class History:
    """The loss after each of ``steps``: the mean since the one before."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """A finished run. ``metrics`` has "valid" and "test" of the best weights, which ``model`` holds.

    The best are those of the validation with the best ``config.best``; without validation, the last. ``model`` is in
    evaluation mode; with several ranks it is this rank's part of it.
    """

    steps: int
    history: History
    evaluations: list[Evaluation]
    metrics: dict[str, dict[str, float | None]]
    best_step: int
    best_checkpoint: Path | None
    seconds: float
    samples_per_s: float
    model: nn.Module

    def summary(self) -> dict[str, Any]:
        """Plain values, for a line of JSON."""
        names = ("steps", "metrics", "best_step", "seconds", "samples_per_s")
        path = None if self.best_checkpoint is None else str(self.best_checkpoint)
        return {**{name: getattr(self, name) for name in names}, "best_checkpoint": path}


def load_model(path: str | Path, build: Build | None = None, *, trust: bool = False) -> nn.Module:
    """The model of a checkpoint, on the CPU and in evaluation mode; ``build`` makes it if the run had its own. For a
    run folder it is the best one.

    ``trust``: a checkpoint may name a model or an activation as module:function, which is imported and run only with
    trust=True. The rest of it is plain data.
    """
    path = checkpoint.file_of(path)
    return restore_model(checkpoint.load_own(path), path, build, trust)


def restore_model(state: dict[str, Any], path: Path, build: Build | None, trust: bool) -> nn.Module:
    """That of a checkpoint which is loaded already; ``path`` is where it came from."""
    features = Features.from_dict(state["features"])
    config = read_config(state["config"]).model
    model = build_own(build, features) if build else build_saved(config, features, trust, path)
    load_model_state(model, state["model"])
    return model.eval()
