"""One model with each function over seeds; all of a seed share samples, their order and the starting weights."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console

from gdpa.compare.plan import FUNCTION, Trial
from gdpa.demo import contest, workers
from gdpa.demo.statistics import interval, is_finite, paired
from gdpa.train import train
from gdpa.train.config.validating import build_each, open_uncounted
from gdpa.train.data.splits import check_held_out

METRICS = ("auc", "logloss")
BETTER, WORSE, NO_DIFFERENCE, ONE_SEED = "better", "worse", "no difference shown", "one seed cannot tell"
NO_AUC = "no AUC of one class"


def check(trial: Trial) -> None:
    """Refuses what training would refuse, which comes last, before minutes have gone into all else."""
    configs = [trial.config(contestant, trial.seeds[0]) for contestant in trial.contestants]
    check_held_out(configs[0])
    splits = open_uncounted(configs[0])
    if splits.valid is None and splits.test is None:
        raise ValueError("the data have neither test nor validation samples to compare functions on")
    build_each([config.model for config in configs], splits)


def run(trial: Trial, console: Console) -> dict[str, Any]:
    """Every run, and what they say of each function."""
    return document(trial, workers.run(trial, console, run_seed))


def run_seed(trial: Trial, seed: int, tell: contest.Tell) -> dict[str, Any]:
    """All functions with one seed."""
    splits = None if trial.world is None else contest.open_splits(trial.world, seed)
    found: dict[str, Any] = {"runs": []}
    for contestant in trial.contestants:
        name = contestant.name
        config = trial.config(contestant, seed)
        result = train(config, splits=splits, on_step=lambda p, name=name: tell(name, seed, p.step, None))  # type: ignore[misc]
        part = "test" if "test" in result.metrics else "valid"
        metrics = {key: result.metrics[part][key] for key in METRICS}
        run = {
            "name": name, "seed": seed, "part": part, **metrics, "losses": result.history.losses,
            "loss_steps": result.history.steps, "seconds": result.seconds,
        }  # fmt: skip
        found["runs"].append(run)
        tell(name, seed, trial.steps, run)
    if splits is not None and seed == trial.seeds[0]:
        assert splits.test is not None
        found["best"] = contest.best_possible(np.array([sample.probability for sample in splits.test]))
    return found


def document(trial: Trial, answers: list[dict[str, Any]]) -> dict[str, Any]:
    runs = [run for answer in answers for run in answer["runs"]]
    models = {c.name: [run for run in runs if run["name"] == c.name] for c in trial.contestants}
    shown = next(c for c in trial.contestants if c.name == trial.rival)
    return {
        "model": shown.model,
        "options": {k: v for k, v in shown.options.items() if k not in FUNCTION},
        "rival": trial.rival,
        "seeds": list(trial.seeds),
        "steps": trial.steps,
        "batch_size": trial.config(shown, 0).batch_size,
        "synthetic": trial.world is not None,
        "part": runs[0]["part"],
        "best": answers[0].get("best"),
        "models": {name: {"runs": mine, **_summary(mine, models[trial.rival])} for name, mine in models.items()},
    }


def _summary(mine: list[dict[str, Any]], rivals: list[dict[str, Any]]) -> dict[str, Any]:
    found = {key: interval([run[key] for run in mine]) for key in METRICS}
    if mine is not rivals:
        found |= {f"{key}_gain": paired([r[key] for r in mine], [r[key] for r in rivals]) for key in METRICS}
    return {key: asdict(value) for key, value in found.items()}


def failures(training: dict[str, Any]) -> list[str]:
    """Runs without a finite result; an accuracy is never right or wrong, nor is one that the samples do not have."""
    return [
        f"{run['name']}, seed {run['seed']}: AUC {run['auc']}, LogLoss {run['logloss']}"
        for model in training["models"].values()
        for run in model["runs"]
        if not all(run[key] is None or is_finite(run[key]) for key in METRICS)
    ]


def verdict(model: dict[str, Any]) -> str:
    """What the runs say of a function beside the rival; "" for the rival itself."""
    gain = model.get("auc_gain")
    if gain is None:
        return ""
    if gain["mean"] is None:
        return NO_AUC
    if gain["low"] is None:
        return ONE_SEED
    if gain["low"] <= 0 <= gain["high"]:
        return NO_DIFFERENCE
    return BETTER if gain["mean"] > 0 else WORSE
