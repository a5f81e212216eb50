"""The contest: one model with several attention functions, and one without history, on the synthetic click log.

Every seed has training samples of its own, drawn from the same world, and starting weights of its own. All models of a
seed see the same samples in the same order, each sample once, and all are tested on the same test samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.special import entr

from gdpa.data import Sample, SyntheticLog, expected_auc
from gdpa.demo import attending
from gdpa.demo.statistics import interval, paired
from gdpa.train import Config, ModelConfig, SyntheticData, train
from gdpa.train.data.splits import Splits

BASELINE, RIVAL = "no sequence", "softmax"
TEST_FIRST = 10_000_000  # far behind the training samples of any seed
Tell = Callable[[str, int, int, dict[str, Any] | None], None]  # contestant, seed, step, the run when it has ended


@dataclass(frozen=True)
class Contestant:
    """``name`` as it is shown."""

    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Small enough for two cores and a minute: a world of 100 items in 8 categories, histories of up to 16 events."""

    contestants: tuple[Contestant, ...]
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    steps: int = 112
    batch_size: int = 256
    test_size: int = 4000
    longest: int = 16
    items: int = 100
    categories: int = 8
    dim: int = 16
    lr: float = 1e-2
    warmup: int = 10

    @property
    def train_size(self) -> int:
        return self.steps * self.batch_size


def make_plan(spec: str, params: tuple[float, ...], quick: bool) -> Plan:
    """softmax, silu (HSTU's) and the function that ``spec`` names; ``quick`` only shows that everything runs."""
    name = spec.rpartition(":")[2]
    functions: dict[str, dict[str, Any]] = {n: {"activation": n} for n in (RIVAL, "silu")}
    functions[name] = {"activation": spec, **({"params": params} if params else {})}
    plan = Plan((Contestant(BASELINE, "dlrm"), *(Contestant(n, "interformer", o) for n, o in functions.items())))
    if not quick:
        return plan
    return Plan(plan.contestants, seeds=(0,), steps=20, batch_size=64, test_size=500, warmup=2)


class Held(SyntheticLog):
    """Keeps its samples: several models read them."""

    def sample(self, index: int) -> Sample:
        held = self.__dict__.setdefault("_held", {})
        if index not in held:
            held[index] = super().sample(index)
        return held[index]


def open_splits(plan: Plan, seed: int) -> Splits:
    world: dict[str, Any] = {"longest": plan.longest, "items": plan.items, "categories": plan.categories}
    first = seed * plan.train_size
    return Splits(
        train=Held(0, plan.train_size, first=first, **world),
        first=Held(0, plan.train_size, first=first, **world),
        test=Held(0, plan.test_size, first=TEST_FIRST, **world),
    )


def config_of(plan: Plan, contestant: Contestant, seed: int) -> Config:
    options: dict[str, Any] = {"dim": plan.dim}
    if contestant.model == "interformer":
        options |= {"num_layers": 1, "hidden_units": 8, "longest": plan.longest}
    return Config(
        seed=seed,
        data=SyntheticData(longest=plan.longest, items=plan.items, categories=plan.categories),
        model=ModelConfig(contestant.model, {**options, **contestant.options}),
        batch_size=plan.batch_size,
        eval_batch_size=500,
        steps=plan.steps,
        lr=plan.lr,
        warmup=plan.warmup,
        schedule="cosine",
        device="cpu",
    )


@contextmanager
def without_onednn() -> Iterator[None]:
    """What oneDNN prepares for a product takes longer than products as small as these: a sixth of all time on ARM."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


@without_onednn()
def run_seed(plan: Plan, seed: int, tell: Tell) -> dict[str, Any]:
    """All contestants with one seed; with the first also what their attention looks like, and whether it is right."""
    splits = open_splits(plan, seed)
    assert isinstance(splits.test, Held)
    leads = seed == plan.seeds[0]
    found: dict[str, Any] = {"runs": [], "attention": {}, "agreement": {}}
    for contestant in plan.contestants:
        name = contestant.name
        config = config_of(plan, contestant, seed)
        result = train(config, splits=splits, on_step=lambda p, name=name: tell(name, seed, p.step, None))  # type: ignore[misc]
        metrics = {key: result.metrics["test"][key] for key in ("auc", "gauc", "logloss", "ne")}
        run = {"name": name, "seed": seed, **metrics, "losses": result.history.losses, "seconds": result.seconds}
        found["runs"].append(run)
        tell(name, seed, plan.steps, run)
        if leads and contestant.model != "dlrm":
            samples = list(splits.test)
            found["attention"][name] = attending.look(result.model, samples)
            found["agreement"][name] = attending.disagreement(result.model, samples)
    if leads:
        found["best"] = best_possible(np.array([sample.probability for sample in splits.test]))
    return found


def best_possible(p: np.ndarray) -> dict[str, float]:
    """What knowing the true probabilities would give on average."""
    return {"auc": expected_auc(p), "logloss": float((entr(p) + entr(1 - p)).mean())}


def document(plan: Plan, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The answers of all seeds as plain values: every run, and what they say of each function."""
    runs = [run for answer in answers for run in answer["runs"]]
    models = {c.name: [run for run in runs if run["name"] == c.name] for c in plan.contestants}
    lead = answers[0]
    return {
        "plan": {**asdict(plan), "train_size": plan.train_size},
        "best": lead["best"],
        "models": {name: {"runs": mine, **_summary(mine, models[RIVAL])} for name, mine in models.items()},
        "attention": lead["attention"],
        "agreement": lead["agreement"],
    }


def _summary(mine: list[dict[str, Any]], rivals: list[dict[str, Any]]) -> dict[str, Any]:
    auc, theirs = [run["auc"] for run in mine], [run["auc"] for run in rivals]
    found = {"auc": interval(auc), "logloss": interval([run["logloss"] for run in mine])}
    if mine is not rivals:
        found["gain"] = paired(auc, theirs)
    return {key: asdict(value) for key, value in found.items()}
