"""What a few runs with different seeds tell of the mean over all seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """The mean of n runs and where the mean over all seeds is with 95 % confidence; None where one run cannot tell. The
    mean is None, too, where a run has no value: AUC of samples of a single class.

    mean +- t s / sqrt(n)        t: 97.5 % quantile of Student's distribution with n - 1 degrees of freedom
    """

    mean: float | None
    low: float | None
    high: float | None
    n: int

    @property
    def half(self) -> float | None:
        return None if self.high is None or self.mean is None else self.high - self.mean


def interval(values: Sequence[float | None]) -> Interval:
    """Of runs that are independent of each other, and about normally distributed."""
    from scipy import stats

    n = len(values)
    if n == 0:
        raise ValueError("an interval needs at least one value")
    known = [value for value in values if value is not None]
    if len(known) < n:
        return Interval(None, None, None, n)
    mean = statistics.fmean(known)
    if n == 1:
        return Interval(mean, None, None, 1)
    half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(known) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired(values: Sequence[float | None], others: Sequence[float | None]) -> Interval:
    """Of the differences between runs that share seed, samples and starting weights."""
    pairs = zip(values, others, strict=True)
    return interval([None if a is None or b is None else a - b for a, b in pairs])


def shown(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def is_finite(value: float | None) -> bool:
    """Neither inf nor NaN, nor missing."""
    return value is not None and math.isfinite(value)
