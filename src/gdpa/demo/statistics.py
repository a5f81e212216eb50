"""What a few runs with different seeds tell of the mean over all seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """The mean of n runs and where the mean over all seeds is with 95 % confidence; None where one run cannot tell.

    mean +- t s / sqrt(n)        t: 97.5 % quantile of Student's distribution with n - 1 degrees of freedom
    """

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def half(self) -> float | None:
        return None if self.high is None else self.high - self.mean


def interval(values: Sequence[float]) -> Interval:
    """Of runs that are independent of each other, and about normally distributed."""
    from scipy import stats

    n = len(values)
    if n == 0:
        raise ValueError("an interval needs at least one value")
    mean = statistics.fmean(values)
    if n == 1:
        return Interval(mean, None, None, 1)
    half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Of the differences between runs that share seed, samples and starting weights."""
    return interval([a - b for a, b in zip(values, others, strict=True)])
