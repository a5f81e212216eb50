"""Guarded code: a cheap level of precision that fails in one tail only, used unless the scores are all in that tail.

gelu_tanh by tanh.approx, far to the left, loses digits of p = 1e-5; beside p of ordinary size that cannot be seen in a
row's result. So Hopper's forward has two codes of such a function, a cheap and a careful one. For each block of scores
a warp votes, and takes the cheap code if every lane finds a sample *before* the threshold (on the side of 0) in each of
its rows (see ptx.assemble_guarded). This module chooses the threshold: the one furthest from 0 for which rules (a) and
(b) of precision.py hold for what then comes out, for a row of any mean and spread, whatever the rows beside it hold.

Where a param stretches the scores, g(a s), the threshold is one of a s (see passes/stretch.py).

A row in the tail gets the cheap code only if each lane that holds a part of it happens to sample a score before the
threshold, and if the other rows of the warp allow it: with a probability between 0 and that of its own samples. Its
errors lie between those of these two extremes, so both are tried.

The shift s + leaves of a function of positions (see places/shift.py) has no known distribution: a bias may put one
score of a row before the threshold, and all others anywhere. There the threshold is the furthest one for which a single
score before it, among those that a lane has of a row, hides the errors that the cheap code makes in all the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gdpa.functions.accuracy.precision import (
    LEVELS,
    Case,
    cases_of,
    choose_level,
    emulated,
    keeps_rules,
    means_keep_rules,
    means_of,
    mixed_means,
)
from gdpa.functions.emission.ptx import GUARDED_LANES, LANES_OF_ROW, PACK, ROW_SAMPLES
from gdpa.functions.graph import Graph
from gdpa.functions.isolation import isolated
from gdpa.functions.kept import kept_with_activation
from gdpa.functions.passes.simplify import value_of
from gdpa.functions.passes.stretch import Stretch, split_stretch
from gdpa.functions.traced import TracedFunction

TARGET = "sm90"
# Finer than those of a level that is used everywhere: near the threshold every mean and spread is another mixture.
MEANS = tuple(0.25 * m for m in range(-36, 37))
SPREADS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0)
THRESHOLDS = tuple(0.25 * t for t in range(4, 33))  # distances from 0
STEP = 0.25  # of margin
ROWS = 16  # of a warp
# The cheap code must be used this often on normal scores of this spread: a warp that takes the careful code has voted
# in vain, and both codes together may be more than the instruction cache keeps (at D 64).
WORTH, WIDE = 0.9, 2.5
WORTH_OF_SUMS, NARROW = 0.95, 1.0  # sums of scores and places, whose careful code costs more
# Of sums: means of what lies beyond the threshold, and by how much the one score may lie before it.
MEANS_OF_SUMS = tuple(0.5 * m for m in range(-60, 61))
SPREADS_OF_SUMS = (0.3, 1.0, 4.0)
BEFORE = (0.0, 0.5, 1.0, 2.0, 4.0)
SHARE = len(ROW_SAMPLES) / GUARDED_LANES  # of one score among those that a lane has of a row


@dataclass(frozen=True)
class Guard:
    """The cheap level, and the threshold beyond which, as seen from 0, the careful one of choose_level is used."""

    cheap: str
    threshold: float


@kept_with_activation
def choose_guard(act: TracedFunction, dtype: torch.dtype, target: str) -> Guard | None:
    """The guard for the value of ``act``, without its derivatives. None if no cheaper level fails in one tail only.
    (Where params do more than stretch a tail, no threshold is safe.)"""
    graph = value_of(act.joint)
    stretch = split_stretch(graph)
    if target != TARGET or dtype not in PACK or (act.n_params and stretch is None):
        return None
    careful = choose_level(act, dtype, target, derivatives=False)
    if careful not in LEVELS[1:-1]:
        return None
    with isolated():
        if stretch is None:
            (case,) = cases_of(act, dtype, False, MEANS, SPREADS)
        else:
            graph, case = stretch.outer, _stretched(cases_of(act, dtype, False, MEANS[::2], SPREADS), stretch)
        for cheap in LEVELS[: LEVELS.index(careful)]:
            threshold = _threshold(graph, cheap, careful, case)
            if threshold is not None:
                return Guard(cheap, threshold)
    return None


@kept_with_activation
def choose_guard_of_sums(outer: TracedFunction, dtype: torch.dtype, target: str) -> Guard | None:
    """The same for ``outer`` of a shift (see places/shift.py); its careful level is that of the whole function."""
    assert outer.part_of is not None
    if target != TARGET or dtype not in PACK:
        return None
    careful = choose_level(outer.part_of, dtype, target, derivatives=False)
    graph = value_of(outer.joint)
    with isolated():
        (case,) = cases_of(outer, dtype, False, MEANS_OF_SUMS, SPREADS_OF_SUMS)
        case = replace(case, near=torch.ones_like(case.near))  # rule (a) is one of scores, whose sums may lie anywhere
        for cheap in LEVELS[: LEVELS.index(careful)]:
            threshold = _threshold_of_sums(graph, cheap, case)
            if threshold is not None:
                return Guard(cheap, threshold)
    return None


def _threshold_of_sums(graph: Graph, cheap: str, case: Case) -> float | None:
    found = emulated(graph, cheap, TARGET, case)
    failing = ~torch.stack([keeps_rules(one, case) for one in found]).all(0).all(0)
    side = _side(case.s[failing])
    for distance in reversed(THRESHOLDS[::2] if side else ()):
        mixed = _one_before(case, side * distance)
        if all(bool(keeps_rules(_mixed(one, *mixed[1:]), mixed[0]).all()) for one in found):
            threshold = side * (distance - STEP)
            return threshold if _chance_of_warp(threshold, NARROW) >= WORTH_OF_SUMS else None
    return None


def _one_before(case: Case, threshold: float) -> tuple[Case, Tensor, Tensor]:
    """Mixtures of two distributions: SHARE of a narrow one at or a little before ``threshold``, the rest of one beyond
    it. Returns the mixtures as a Case, and for each the numbers of its two distributions."""
    side = math.copysign(1.0, threshold)
    mean = torch.tensor(MEANS_OF_SUMS).repeat_interleave(len(SPREADS_OF_SUMS))
    narrow = torch.arange(len(mean)) % len(SPREADS_OF_SUMS) == 0
    before = narrow & torch.isin(side * (threshold - mean), torch.tensor(BEFORE))
    beyond = side * (mean - threshold) > 0
    i, j = (t.flatten() for t in torch.meshgrid(before.nonzero()[:, 0], beyond.nonzero()[:, 0], indexing="ij"))
    mixed = replace(
        case, weights=torch.cat([SHARE * case.weights, (1 - SHARE) * case.weights], -1), near=case.near[i],
        exact=_mixed(case.exact, i, j), definition=_mixed(case.definition, i, j), plain=_mixed(case.plain, i, j),
    )  # fmt: skip
    return mixed, i, j


def _mixed(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.cat([x[:, i], x[:, j]], -1)


def _stretched(cases: list[Case], stretch: Stretch) -> Case:
    """One case of all values of the params, in terms of what ``stretch.outer`` takes."""
    scores, rests = [], []
    for case in cases:
        inputs = [t.float() for t in (case.s, *case.params)]
        scores.append(inputs[0] * (stretch.factor.evaluate(*inputs)[0] if stretch.factor else 1.0))
        rests.append(inputs[0] ** stretch.power * (stretch.rest.evaluate(*inputs)[0] if stretch.rest else 1.0))
    exact, definition, plain = (
        torch.cat(some, 1) for some in zip(*((c.exact, c.definition, c.plain) for c in cases), strict=True)
    )
    rest = () if stretch.rest is None else (torch.cat(rests).double(),)
    near = torch.cat([case.near for case in cases])
    u, weights, dtype = torch.cat(scores).double(), cases[0].weights, cases[0].dtype
    return Case(u, weights, near, rest, exact, definition, plain, dtype)


def _threshold(graph: Graph, cheap: str, careful: str, case: Case) -> float | None:
    """The threshold furthest from 0 with which the rules hold, less a step of margin; None if there is none."""
    first, second = ([means_of(f, case) for f in emulated(graph, level, TARGET, case)] for level in (cheap, careful))
    if not all(means_keep_rules(means, case).all() for means in second):
        return None
    failing = ~torch.stack([means_keep_rules(means, case) for means in first]).all(0).all(0)
    side = _side(case.s[failing])
    for distance in reversed(THRESHOLDS if side else ()):
        share = chance_of_row(case.s, case.weights, side * distance)
        mixed = (mixed_means(one, other, share) for one, other in zip(first, second, strict=True))
        if all(means_keep_rules(means, case).all() for means in mixed):
            threshold = side * (distance - STEP)
            return threshold if _chance_of_warp(threshold, WIDE) >= WORTH else None
    return None


def _side(scores: Tensor) -> int:
    """-1 or 1 where all of the distributions have their means to one side of 0, otherwise 0."""
    means = scores.mean(-1)
    return -1 if (means < 0).all() else 1 if (means > 0).all() else 0


def chance_of_row(s: Tensor, weights: Tensor, threshold: float) -> Tensor:
    """(distributions,): how often all lanes of a row sample a score before the threshold."""
    before = s > threshold if threshold < 0 else s < threshold
    miss = 1 - (before * weights).sum(-1)
    return (1 - miss ** len(ROW_SAMPLES[0])) ** LANES_OF_ROW


def _chance_of_warp(threshold: float, spread: float) -> float:
    miss = 0.5 * math.erfc(abs(threshold) / (spread * math.sqrt(2)))
    return (1 - miss ** len(ROW_SAMPLES[0])) ** (LANES_OF_ROW * ROWS)
