"""The planted structure is there: each kind of reading of the data gains what the formula promises."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from gdpa.data import Events, Parts, SyntheticLog, Weights, expected_auc
from gdpa.data.planted import KINDS, NUMBERS, probability

N = 12_000


def auc(scores: Tensor, labels: Tensor) -> float:
    """The share of (clicked, not clicked) pairs in the right order; the scores here have no ties."""
    ranks = torch.arange(1, len(scores) + 1, dtype=scores.dtype)
    ranks = torch.empty_like(scores).scatter_(0, scores.argsort(), ranks)
    clicks = labels.sum()
    return float((ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks)))


def logistic_auc(x: Tensor, y: Tensor) -> float:
    """Test AUC of a logistic regression fitted on the first two thirds, by Newton's method."""
    x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    train = len(x) * 2 // 3
    w = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(8):
        p = torch.sigmoid(x[:train] @ w)
        hessian = (x[:train] * (p * (1 - p))[:, None]).T @ x[:train] + 1e-6 * torch.eye(len(w), dtype=x.dtype)
        w += torch.linalg.solve(hessian, x[:train].T @ (y[:train] - p))
    return auc(x[train:] @ w, y[train:])


def histogram(log: SyntheticLog, events: Events) -> np.ndarray:
    """What a pooled history says without the context: shares of kinds and of the numbers its categories are about."""
    kinds = np.bincount(events.ids[:, 2], minlength=KINDS)
    numbers = np.bincount(log.tables.number[events.ids[:, 1]], minlength=NUMBERS)
    return np.concatenate([kinds, numbers]) / max(len(events), 1)


@dataclass
class Oracle:
    terms: Tensor  # (N, 4) X, T, A, N
    apart: Tensor  # (N, 12) context and pooled history, not crossed
    labels: Tensor
    probabilities: np.ndarray


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    log = SyntheticLog(seed=3, size=N, longest=64)
    drawn = [log.draw(i) for i in range(N)]
    terms = [[p.alone, p.target, p.selected, p.weighed] for _, p in drawn]
    apart = np.stack([np.concatenate([s.dense, histogram(log, s.sequences["history"])]) for s, _ in drawn])
    labels = torch.tensor([s.label for s, _ in drawn], dtype=torch.float64)
    probabilities = np.array([s.probability for s, _ in drawn])
    return Oracle(torch.tensor(terms, dtype=torch.float64), torch.from_numpy(apart), labels, probabilities)


def test_each_reading_of_the_data_wins(oracle: Oracle) -> None:
    """No history < history given the candidate < context selects events < and those select context: the whole."""
    alone, target, selected, whole = (logistic_auc(oracle.terms[:, :n], oracle.labels) for n in (1, 2, 3, 4))
    assert target > alone + 0.05
    assert selected > target + 0.02
    assert whole > selected + 0.05
    best = expected_auc(oracle.probabilities[N * 2 // 3 :])
    assert whole == pytest.approx(best, abs=0.02)  # the standard error of 4,000 test samples is 0.006


def test_the_two_way_part_cannot_be_seen_from_either_side(oracle: Oracle) -> None:
    target = logistic_auc(oracle.terms[:, :2], oracle.labels)
    apart = logistic_auc(torch.cat([oracle.terms[:, :2], oracle.apart], dim=1), oracle.labels)
    assert apart < target + 0.01


def test_probabilities_are_calibrated(oracle: Oracle) -> None:
    """In each tenth of the samples as many clicks as the true probabilities say."""
    order = np.argsort(oracle.probabilities)
    labels = oracle.labels.numpy()
    for tenth in np.array_split(order, 10):
        p = oracle.probabilities[tenth]
        error = np.sqrt((p * (1 - p)).sum()) / len(p)
        assert abs(labels[tenth].mean() - p.mean()) < 4 * error


def test_expected_auc_by_definition() -> None:
    p = np.array([0.1, 0.7, 0.7, 0.4, 0.9, 0.1])
    pairs = [(p[i], p[j]) for i in range(6) for j in range(6) if i != j]
    right = sum(a * (1 - b) * (1.0 if a > b else 0.5 if a == b else 0.0) for a, b in pairs)
    assert expected_auc(p) == pytest.approx(right / sum(a * (1 - b) for a, b in pairs))


def test_expected_auc_is_that_of_the_labels(oracle: Oracle) -> None:
    assert auc(torch.from_numpy(oracle.probabilities), oracle.labels) == pytest.approx(
        expected_auc(oracle.probabilities), abs=0.012
    )


@pytest.mark.parametrize("bad", [[], [0.2, np.nan], [1.5], [1.0, 1.0]])
def test_expected_auc_refuses(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="expected_auc needs"):
        expected_auc(np.array(bad))


def test_terms_by_definition() -> None:
    """Event by event, from what the sample holds."""
    log = SyntheticLog(seed=4, size=300, longest=9, lengths="zipf")
    assert sorted(log.tables.kind) == list(range(KINDS))
    for sample, terms in map(log.draw, range(300)):
        x, (item, category, situation) = sample.dense.astype(float), sample.sparse.tolist()
        events = sample.sequences["history"].ids.tolist()
        chosen = [e for e in events if e[2] == log.tables.kind[situation]]

        def share(some: list[list[int]], category: int = category) -> float:
            return sum(e[1] == category for e in some) / len(some) - 0.25 if some else 0.0

        weighed = sum(x[log.tables.number[e[1]]] for e in chosen) / len(chosen) - x.mean() if chosen else 0.0
        alone = log.tables.quality[item] + log.tables.bias[situation] + log.tables.w @ x
        want = (alone, share(events), share(chosen), weighed)
        assert (terms.alone, terms.target, terms.selected, terms.weighed) == pytest.approx(want)
        assert sample.probability == probability(log.weights, terms)


def test_probability_by_definition() -> None:
    weights = Weights(offset=0.1, alone=2.0, target=3.0, selected=5.0, weighed=7.0, noise=0.1)
    z = 0.1 + 2 * 0.3 + 3 * 0.2 - 5 * 0.1 + 7 * 0.05
    want = 0.05 + 0.9 / (1 + np.exp(-z))
    assert probability(weights, Parts(alone=0.3, target=0.2, selected=-0.1, weighed=0.05)) == pytest.approx(want)


def test_noise_moves_probabilities_to_a_half() -> None:
    terms = Parts(alone=2.0, target=0.5, selected=0.5, weighed=1.0)
    assert probability(Weights(noise=1.0), terms) == 0.5
    assert probability(Weights(noise=0.2), terms) < probability(Weights(noise=0.0), terms) < 1
    with pytest.raises(ValueError, match="noise"):
        Weights(noise=1.5)
