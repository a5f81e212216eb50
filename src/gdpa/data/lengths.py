"""Sequence lengths as they occur: each distribution is a function of a count, a maximum and a seed.

Python's own generator is used, whose stream is the same on every platform and version, so a case is the same data
everywhere. Means are those of 1,152 sequences at the full maximum.

    full        every sequence has the maximum length
    uniform     U[1, max], mean max / 2: the protocol of Meta's GDPA benchmark at sparsity 0.5
    lognormal   median * e^(sigma * N(0,1)), cut at max as a system does that keeps a user's newest events;
                sigma 0.85 is KuaiRand's shape, 1.6 that of MovieLens-20M
    zipf        P(length) ~ 1 / length^1.1 on [1, max], and 5 % of the users have no events at all
    bimodal     three quarters U[max/32, max/8], one quarter U[7 max/8, max]: HSTU's stochastic length
"""

from __future__ import annotations

import random
from itertools import accumulate

ZIPF_EXPONENT = 1.1
ZIPF_EMPTY = 0.05


def full(n: int, longest: int) -> tuple[int, ...]:
    return (longest,) * n


def uniform(n: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(f"uniform {seed}")
    return tuple(rng.randint(1, longest) for _ in range(n))


def lognormal(n: int, longest: int, sigma: float, median: float, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(f"lognormal {seed}")
    draws = (median * rng.lognormvariate(0.0, sigma) for _ in range(n))
    return tuple(min(max(round(length), 1), longest) for length in draws)


def zipf(n: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(f"zipf {seed}")
    weights = list(accumulate(length**-ZIPF_EXPONENT for length in range(1, longest + 1)))
    drawn = rng.choices(range(1, longest + 1), cum_weights=weights, k=n)
    return tuple(0 if rng.random() < ZIPF_EMPTY else length for length in drawn)


def bimodal(n: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(f"bimodal {seed}")
    short = (max(longest // 32, 1), max(longest // 8, 1))
    long = (max(longest * 7 // 8, 1), longest)
    return tuple(rng.randint(*(short if rng.random() < 0.75 else long)) for _ in range(n))
