"""Lengths that kernels get wrong: none, one, a tile more or less than one, a long one among short ones."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Lengths = list[int]


def edge(rng: Random, tiles: tuple[int, ...], longest: int) -> int:
    """A multiple of a tile, or one more or less."""
    tile = rng.choice(tiles)
    return max(0, min(longest, tile * rng.randint(1, 4) + rng.randint(-1, 1)))


def tail(rng: Random, longest: int) -> int:
    """Mostly short, sometimes long: as user histories are."""
    return min(longest, int(rng.paretovariate(0.7) * longest / 60))


def _edges(rng: Random, n: int, tiles: tuple[int, ...], longest: int) -> Lengths:
    return [edge(rng, tiles, longest) for _ in range(n)]


def _tails(rng: Random, n: int, tiles: tuple[int, ...], longest: int) -> Lengths:
    return [tail(rng, longest) for _ in range(n)]


def _short(rng: Random, n: int, tiles: tuple[int, ...], longest: int) -> Lengths:
    return [rng.choice([0, 1, 2, rng.randint(0, tiles[0])]) for _ in range(n)]


def _empty(rng: Random, n: int, tiles: tuple[int, ...], longest: int) -> Lengths:
    return [0] * n


def _giant(rng: Random, n: int, tiles: tuple[int, ...], longest: int) -> Lengths:
    some = [rng.choice([0, 1, rng.randint(1, tiles[0])]) for _ in range(n)]
    if some:
        some[rng.randrange(n)] = rng.randint(longest // 2, longest)
    return some


def _any(rng: Random, n: int, tiles: tuple[int, ...], longest: int) -> Lengths:
    return [rng.randint(0, longest) for _ in range(n)]


def _equal(rng: Random, n: int, tiles: tuple[int, ...], longest: int) -> Lengths:
    return [edge(rng, tiles, longest)] * n


PATTERNS: dict[str, Callable[[Random, int, tuple[int, ...], int], Lengths]] = {
    "edges": _edges, "tails": _tails, "short": _short, "empty": _empty, "giant": _giant, "any": _any, "equal": _equal,
}  # fmt: skip
WEIGHTS = {"edges": 8, "tails": 5, "short": 4, "empty": 1, "giant": 4, "any": 3, "equal": 2}


def settle(lengths: Lengths, rounded: bool) -> Lengths:
    """Make the total a multiple of 16 or not, by the last length: compilers make a kernel for either kind."""
    total = sum(lengths)
    if not lengths or total == 0:
        return lengths
    more = -total % 16 if rounded else int(total % 16 == 0)
    return [*lengths[:-1], lengths[-1] + more]


def fit(len_q: Lengths, len_k: Lengths, pairs: int) -> tuple[Lengths, Lengths]:
    """Fewer sequences, then shorter ones, until they have at most ``pairs`` query-key pairs."""

    def too_many() -> bool:
        return sum(q * k for q, k in zip(len_q, len_k, strict=True)) > pairs

    while too_many() and len(len_q) > 1:
        keep = (len(len_q) + 1) // 2
        len_q, len_k = len_q[-keep:], len_k[-keep:]
    while too_many():
        len_q, len_k = [(n + 1) // 2 for n in len_q], [(n + 1) // 2 for n in len_k]
    return len_q, len_k
