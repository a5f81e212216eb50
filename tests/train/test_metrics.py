"""AUC, gAUC, LogLoss and NE against scikit-learn group by group, and where they are not defined."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from gdpa.train.run.evaluate import interleaved
from gdpa.train.run.metrics import better, compute, gauc


def sample(n: int, groups: int, levels: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores with ties, labels, and groups of which many have a single class."""
    rng = np.random.default_rng(seed)
    scores = (rng.integers(0, levels, n) / 3 - 2).astype(np.float32)
    return scores, (rng.random(n) < 0.3).astype(np.float32), rng.integers(-groups, groups, n) * 10**12


def gauc_by_groups(scores: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> float | None:
    total, weight = 0.0, 0
    for group in np.unique(groups):
        of = groups == group
        if labels[of].min() != labels[of].max():
            total += of.sum() * roc_auc_score(labels[of], scores[of])
            weight += int(of.sum())
    return total / weight if weight else None


@pytest.mark.parametrize(("n", "groups", "levels"), [(400, 20, 7), (300, 100, 1000), (200, 1, 3), (50, 5, 1)])
def test_against_scikit_learn(n: int, groups: int, levels: int) -> None:
    scores, labels, of = sample(n, groups, levels, n)
    found = compute(scores, labels, of)
    p = 1 / (1 + np.exp(-scores.astype(np.float64)))
    base = labels.mean()
    entropy = -(base * np.log(base) + (1 - base) * np.log(1 - base))
    assert found.auc == pytest.approx(roc_auc_score(labels, scores), rel=1e-12)
    assert found.gauc == pytest.approx(gauc_by_groups(scores, labels, of), rel=1e-12)
    assert found.logloss == pytest.approx(log_loss(labels, p), rel=1e-12)
    assert found.ne == pytest.approx(log_loss(labels, p) / entropy, rel=1e-6)
    assert found.samples == n


def test_groups_are_weighted_by_impressions_and_single_classes_skipped() -> None:
    scores = np.array([0.1, 0.9, 0.9, 0.1, 0.2, 0.3, 0.5, 0.5])
    labels = np.array([0, 1, 0, 1, 1, 1, 0, 0])
    groups = np.array([1, 1, 2, 2, 2, 2, 3, 3])  # AUC 1, 0 (of 4), and one of a single class
    assert gauc(scores, labels, groups) == pytest.approx((2 * 1 + 4 * 0) / 6)


def test_not_defined() -> None:
    scores, groups = np.array([0.5, -1.0, 2.0]), np.array([1, 2, 2])
    one_class = compute(scores, np.ones(3), groups)
    assert (one_class.auc, one_class.gauc, one_class.ne) == (None, None, None)
    assert one_class.logloss > 0
    pure_groups = compute(scores, np.array([1.0, 0.0, 0.0]), groups)
    assert pure_groups.gauc is None
    assert pure_groups.auc == 0.5
    with pytest.raises(ValueError, match="at least one sample"):
        compute(scores[:0], scores[:0], groups[:0])


def test_confident_predictions_are_not_rounded_to_certainty() -> None:
    """In float32 sigmoid(30) is 1, and the LogLoss of a wrong one infinite or clipped."""
    found = compute(np.array([30.0, -30.0], np.float32), np.array([0.0, 0.0]), np.array([0, 0]))
    assert found.logloss == pytest.approx(15.0, rel=1e-3)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shards_are_put_back_in_order(world: int) -> None:
    whole = np.arange(11)
    assert (interleaved([whole[r::world] for r in range(world)]) == whole).all()


def test_better() -> None:
    assert better("auc", 0.7, 0.6)
    assert not better("auc", 0.6, 0.6)
    assert better("logloss", 0.5, 0.6)
    assert better("ne", 0.9, None)
    assert better("auc", None, None)  # the last ones, as without validation
    assert not better("auc", None, 0.5)
