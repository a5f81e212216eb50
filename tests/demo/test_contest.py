"""The contest of the demonstration: its statistics, its fairness, and that cores and order change nothing."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from gdpa import demo
from gdpa.data import SyntheticLog
from gdpa.demo import attending, contest, workers
from gdpa.demo.statistics import interval, paired
from gdpa.models import Features, build
from gdpa.nn.attention import unpacked
from gdpa.train import ConfigError, train
from gdpa.train.data.splits import Splits

CONTESTANTS = contest.make_plan(demo.SPEC, (1.0,), quick=True).contestants
SMALL = contest.Plan(CONTESTANTS[:2] + CONTESTANTS[-1:], seeds=(0, 1), steps=3, batch_size=16, test_size=60, warmup=1)


def untold(*_: Any) -> None:
    pass


# ---- statistics ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "t"),
    [((1.0, 2.0, 3.0), 4.302653), ((0.1, 0.3), 12.706205), ((5.0, 5.5, 4.0, 7.0, 6.0), 2.776445)],  # from a table
)
def test_interval_by_hand(values: Sequence[float], t: float) -> None:
    n = len(values)
    mean = sum(values) / n
    deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1))
    found = interval(values)
    assert found.n == n
    assert found.mean == pytest.approx(mean)
    assert found.low == pytest.approx(mean - t * deviation / math.sqrt(n), rel=1e-5)
    assert found.high == pytest.approx(mean + t * deviation / math.sqrt(n), rel=1e-5)


def test_one_run_has_no_interval_and_none_no_mean() -> None:
    assert interval([0.7]) == interval([0.7])
    assert (interval([0.7]).mean, interval([0.7]).low, interval([0.7]).half) == (0.7, None, None)
    with pytest.raises(ValueError, match="at least one"):
        interval([])


def test_a_run_without_a_value_leaves_none_to_all() -> None:
    """AUC of samples of a single class."""
    for found in (interval([0.5, None]), paired([0.5, None], [0.25, 0.25]), paired([0.5], [None])):
        assert (found.mean, found.low, found.high, found.half) == (None,) * 4


def test_paired_differences_do_not_see_what_pairs_share() -> None:
    shared = [0.0, 5.0, -3.0]
    found = paired([x + 1 for x in shared], shared)
    assert (found.mean, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired([1.0], [1.0, 2.0])


def test_best_possible_by_hand() -> None:
    found = contest.best_possible(torch.tensor([0.25, 0.25, 0.75, 0.75], dtype=torch.float64).numpy())
    assert found["logloss"] == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
    assert 0.5 < found["auc"] < 1


# ---- fairness --------------------------------------------------------------------------------------------------------
def test_seeds_have_samples_of_their_own_and_one_test_set() -> None:
    first, second = contest.open_splits(SMALL, 0), contest.open_splits(SMALL, 1)
    world = {"longest": SMALL.longest, "items": SMALL.items, "categories": SMALL.categories}
    plain = list(SyntheticLog(0, 2 * SMALL.train_size, **world))
    for want, have in zip(plain, [*first.train, *second.train], strict=True):
        assert (want.dense == have.dense).all()
        assert want.label == have.label
    assert first.test is not None
    assert second.test is not None
    assert [s.probability for s in first.test] == [s.probability for s in second.test]
    assert next(iter(first.train)) is next(iter(first.train))  # kept, not drawn again


def test_quick_and_full_plans() -> None:
    full, quick = (contest.make_plan(demo.SPEC, (1.0,), quick) for quick in (False, True))
    assert [c.name for c in full.contestants] == ["no sequence", "softmax", "silu", "soft_threshold"]
    assert len(full.seeds) >= 3
    assert len(quick.seeds) == 1
    assert quick.train_size < full.train_size


@pytest.mark.usefixtures("spawned_by_forking")
def test_processes_and_threads_change_nothing() -> None:
    console = Console(file=io.StringIO(), width=140)
    here = workers._here(SMALL, untold)
    with workers.board(SMALL, console) as tell:
        apart = workers._apart(SMALL, 2, tell)
    for one, other in zip(here, apart, strict=True):
        for mine, theirs in zip(one["runs"], other["runs"], strict=True):
            assert mine["name"] == theirs["name"]
            assert (mine["losses"], mine["auc"]) == (theirs["losses"], theirs["auc"])
    assert console.file.getvalue().count("LogLoss") == 6  # type: ignore[attr-defined]
    assert "[6/6]" in console.file.getvalue()  # type: ignore[attr-defined]
    found = contest.document(SMALL, apart)
    aucs = [run["auc"] for run in found["models"]["no sequence"]["runs"]]
    assert found["models"]["no sequence"]["auc"]["mean"] == pytest.approx(sum(aucs) / 2)
    assert set(found["attention"]) == {"softmax", "soft_threshold"}
    assert set(found["agreement"]) == {"softmax", "soft_threshold"}


@pytest.mark.usefixtures("spawned_by_forking")
def test_a_worker_that_fails_is_an_error() -> None:
    wrong = contest.Plan(
        (contest.Contestant("x", "interformer", {"activation": "nonsense"}),), seeds=(0,), steps=2, warmup=1
    )
    with pytest.raises(ValueError, match="nonsense"):
        workers._apart(wrong, 1, untold)


def test_onednn_is_off_for_the_contest_alone() -> None:
    seen: list[bool] = []
    before = torch.backends.mkldnn.enabled
    plan = replace(SMALL, contestants=SMALL.contestants[:1], steps=1, warmup=0)
    contest.run_seed(plan, 1, lambda *_: seen.append(bool(torch.backends.mkldnn.enabled)))
    assert set(seen) == {False}
    assert torch.backends.mkldnn.enabled == before


def test_bars_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    run = {"name": "no sequence", "seed": 0, "auc": 0.625, "logloss": 0.5}
    with workers.board(SMALL, console) as tell:
        tell("no sequence", 0, 1, None)
        tell("no sequence", 0, 3, run)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "soft_threshold" in text
    assert "AUC 0.6250" in text


# ---- pictures --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("activation", ["softmax", "gelu", "silu"])
def test_weights_are_those_of_the_model(activation: str) -> None:
    torch.manual_seed(0)
    log = SyntheticLog(0, 60, longest=16, items=100, categories=8)
    samples = list(log)
    model = build("interformer", Features.of(log), activation=activation, dim=16, num_layers=1, longest=16).eval()
    seen = attending.look(model, samples)
    weights = torch.tensor(seen["weights"])
    assert len(seen["labels"]) == len(weights) == weights.shape[1]
    assert any(label.startswith("★") for label in seen["labels"])

    shown = next(s for s in samples if 9 <= len(s.sequences["history"]) <= 12 and s.label)
    core, held = attending._core(model), []
    with core.register_forward_hook(lambda _, args, out: held.append((args, out))), torch.no_grad():
        model(attending.collate([shown]))
    (((*qkv, _, _), out),) = held
    q, k, v = unpacked(*qkv)
    head = seen["head"]
    assert torch.allclose(core.out_scale * weights @ v[:, head], out[:, head], atol=1e-5)
    scores = q[:, head] @ k[:, head].T / math.sqrt(q.shape[-1])
    want = scores.softmax(-1) if activation == "softmax" else getattr(F, activation)(scores)
    assert torch.allclose(weights, want, atol=1e-5)
    assert sum(seen["scores"]["counts"]) > 0


def test_disagreement_sees_a_wrong_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    log = SyntheticLog(0, 40, longest=16, items=100, categories=8)
    model = build("interformer", Features.of(log), activation="gelu", dim=16, num_layers=1, longest=16).eval()
    assert attending.disagreement(model, list(log)) < 1e-5
    core: Any = attending._core(model)
    monkeypatch.setattr(core, "forward", lambda *args, **kwargs: 1.01 * unpacked(*args[:3])[2])
    assert attending.disagreement(model, list(log)) > demo.AGREEMENT


# ---- streams of one's own --------------------------------------------------------------------------------------------
def test_training_on_given_streams_is_training_on_the_same_log() -> None:
    world = {"size": 64, "valid_size": 0, "test_size": 60, "longest": 8, "items": 40, "categories": 4}
    settings = {"model": {"name": "dlrm", "options": {"dim": 8}}, "steps": 3, "batch_size": 16, "data": world}
    log = {"longest": 8, "items": 40, "categories": 4}
    held = Splits(*(contest.Held(0, 64, **log) for _ in range(2)), test=contest.Held(0, 60, first=64, **log))
    want, have = train(settings), train(settings, splits=held)
    assert want.history.losses == have.history.losses
    assert want.metrics == have.metrics


def test_given_streams_are_refused_where_the_config_must_say_what_was_read(tmp_path: Path) -> None:
    splits = contest.open_splits(SMALL, 0)
    for settings in ({"epochs": 1}, {"steps": 2, "out": str(tmp_path)}):
        with pytest.raises(ConfigError, match="splits need steps and no out"):
            train(settings, splits=splits)
