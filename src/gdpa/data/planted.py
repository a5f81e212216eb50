"""The structure planted in the synthetic log: who likes what, and the formula of a click.

An event has an item, the item's category, a kind (view, cart, ...) and an age. The context has dense numbers x, a
situation s and a candidate item of category c. Tables drawn once from the seed say which kind of event a situation is
about, kind(s), and which of the numbers x a category is about, number(c). With the events that the situation selects,
M = {j : kind_j = kind(s)},

    target     T = mean over all events j of [category_j = c]          history, given the candidate
    selected   A = mean over j in M of [category_j = c]                context decides which events matter
    weighed    N = mean over j in M of x[number(category_j)] - mean x  and those decide which context counts
    alone      X = quality[item] + bias[s] + <w, x>                    no history needed

    z = offset + alone X + target (T - 1/4) + selected (A - 1/4) + weighed N
    P(label = 1) = noise / 2 + (1 - noise) sigmoid(z)

where a mean over no events makes its whole term zero. A user prefers one category for each kind of event, so that A
cannot be read off the mixture T. N has mean zero over the contexts, whatever the history, and over the users, whatever
the context (but for what the candidate tells of the user): only who reads the history in the light of the context, and
then the context in the light of that history, sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gdpa.data.draws import Draws

KINDS = 4
NUMBERS = 4  # dense features
SITUATIONS = 4
FAITHFUL = 0.8  # of a user's events of one kind, the share in the category preferred for that kind
LIKED = 0.7  # of the candidates, the share from one of the user's preferred categories; the others are random


@dataclass(frozen=True)
class Weights:
    """The sizes of the terms of z. With the defaults each adds 0.02 to 0.1 of AUC (tests/data/test_planted.py)."""

    offset: float = -0.6
    alone: float = 0.7
    target: float = 5.0
    selected: float = 2.5
    weighed: float = 1.8
    noise: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise is a share of the labels, in [0, 1], not {self.noise}")


@dataclass(frozen=True, eq=False)
class Tables:
    """Drawn once from the seed."""

    category: np.ndarray  # (items,) of an item
    quality: np.ndarray  # (items,)
    kind: np.ndarray  # (SITUATIONS,) that the situation is about
    number: np.ndarray  # (categories,) which of x the category is about
    bias: np.ndarray  # (SITUATIONS,)
    w: np.ndarray  # (NUMBERS,)


@dataclass(frozen=True)
class Parts:
    """The four terms before they are weighted: what an all-knowing feature engineer would compute."""

    alone: float
    target: float
    selected: float
    weighed: float


def make_tables(draws: Draws, items: int, categories: int) -> Tables:
    """Item i is of category i mod categories, so that every category has items, and about equally many."""
    return Tables(
        category=np.arange(items, dtype=np.int64) % categories,
        quality=draws.normal(items),
        kind=draws.permutation(SITUATIONS) % KINDS,
        number=np.arange(categories, dtype=np.int64) % NUMBERS,
        bias=draws.normal(SITUATIONS) * 0.5,
        w=draws.normal(NUMBERS) * 0.5,
    )


def parts(tables: Tables, x: np.ndarray, item: int, situation: int, history: np.ndarray, kinds: np.ndarray) -> Parts:
    """X, T - 1/4, A - 1/4 and N of one sample; ``history`` (L,) are the items, ``kinds`` (L,) their kinds."""
    of_category = tables.category[history]
    selected = of_category[kinds == tables.kind[situation]]
    candidate = tables.category[item]
    return Parts(
        alone=float(tables.quality[item] + tables.bias[situation] + tables.w @ x),
        target=float((of_category == candidate).mean() - 0.25) if len(history) else 0.0,
        selected=float((selected == candidate).mean() - 0.25) if len(selected) else 0.0,
        weighed=float(x[tables.number[selected]].mean() - x.mean()) if len(selected) else 0.0,
    )


def probability(weights: Weights, p: Parts) -> float:
    """The true P(label = 1)."""
    z = weights.offset + weights.alone * p.alone + weights.target * p.target
    z += weights.selected * p.selected + weights.weighed * p.weighed
    return float(weights.noise / 2 + (1 - weights.noise) / (1 + np.exp(-z)))


def expected_auc(probabilities: np.ndarray) -> float:
    """The AUC that ranking by the true probabilities has on average over the labels: no model can have more.

        sum over i, j of p_i (1 - p_j) ([p_i > p_j] + [p_i = p_j] / 2)  /  (sum p_i * sum (1 - p_j))

    over pairs i != j. Two samples of equal probability count half, as in the AUC itself.
    """
    p = np.sort(np.asarray(probabilities, dtype=np.float64))
    if len(p) == 0 or not ((p >= 0) & (p <= 1)).all():
        raise ValueError("expected_auc needs probabilities in [0, 1], at least one")
    values, first, count = np.unique(p, return_index=True, return_counts=True)
    below = np.concatenate([[0.0], np.cumsum(1 - p)])[first]  # sum of 1 - p_j over p_j < value
    ordered = (count * values * below).sum() + (count * (count - 1) * values * (1 - values)).sum() / 2
    pairs = p.sum() * (1 - p).sum() - (p * (1 - p)).sum()
    if pairs <= 0:
        raise ValueError("expected_auc needs samples of both labels")
    return float(ordered / pairs)
