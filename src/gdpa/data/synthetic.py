"""A click log without a file: streaming, seeded, endless if wanted, with a planted structure to learn.

planted.py has the formula of the labels and the structure to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from gdpa.data import lengths, planted
from gdpa.data.batch import Events, Sample
from gdpa.data.draws import Draws
from gdpa.data.planted import Parts, Weights
from gdpa.data.stream import Stream

# As in the benchmark, whose lognormal histories have medians of 1024 and 256 events at a maximum of 4096.
LENGTHS: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "full": lambda n, longest, seed: lengths.full(n, longest),
    "uniform": lengths.uniform,
    "lognormal085": lambda n, longest, seed: lengths.lognormal(n, longest, 0.85, longest / 4, seed),
    "lognormal16": lambda n, longest, seed: lengths.lognormal(n, longest, 1.6, longest / 16, seed),
    "zipf": lengths.zipf,
    "bimodal": lengths.bimodal,
}
"""How long histories are, by name: f(number, longest, seed) -> lengths."""
BLOCK = 1024  # lengths are drawn this many at a time: zipf's table costs as much as 1,000 draws
_TABLES, _USERS, _SAMPLES = range(3)  # independent streams of random numbers


class SyntheticLog(Stream):
    """Samples 0, 1, 2, ... of a click log; sample i is a pure function of the arguments, whoever reads it and when.

        log = SyntheticLog(seed=1, size=100_000, lengths="lognormal085", longest=200)
        log.sample(17)                        # any sample, in any order
        for batch in batches(log, 512): ...   # all of them

    ``size`` None never ends. Different ``first`` make disjoint logs of the same world, to train on and to test on:
    sample i of the stream is sample first + i of the world.

    dense (4,): the numbers x. sparse (3,): the candidate item, its category, the situation. sequences["history"]: ids
    (L, 3) of item, category, kind, oldest first, and values (L, 1), the age of the event in days. group: the user.
    """

    dense_names = ("x0", "x1", "x2", "x3")
    sparse_names = ("item", "category", "situation")
    sequence_names = (("history", ("item", "category", "kind")),)
    value_names = (("history", ("age",)),)

    def __init__(
        self,
        seed: int = 0,
        size: int | None = None,
        *,
        first: int = 0,
        lengths: str = "lognormal085",
        longest: int = 200,
        items: int = 1000,
        categories: int = 20,
        users: int = 2000,
        weights: Weights | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if lengths not in LENGTHS:
            raise ValueError(f"lengths must be one of {sorted(LENGTHS)}, not {lengths!r}")
        if not planted.NUMBERS <= categories <= items:
            raise ValueError(f"categories must be in [{planted.NUMBERS}, items={items}], not {categories}")
        for name, value in (("longest", longest), ("users", users), ("first", first), ("size", size or 0)):
            if not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        for name, value in (("longest", longest), ("users", users)):
            if value < 1:
                raise ValueError(f"{name} must be positive, not {value}")
        for name, value in (("first", first), ("size", size or 0)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, not {value}")
        super().__init__(rank, world)
        self.seed, self.size, self.first = seed, size, first
        self.lengths, self.longest = lengths, longest
        self.items, self.categories, self.users = items, categories, users
        self.weights = weights or Weights()
        self.tables = planted.make_tables(Draws(seed, _TABLES, 0), items, categories)

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        return {
            "item": self.items,
            "category": self.categories,
            "situation": planted.SITUATIONS,
            "kind": planted.KINDS,
        }

    def __iter__(self) -> Iterator[Sample]:
        start = self._begin()["next"]
        shard, shards = self._shard()
        index, read = start + shard, 0
        while self.size is None or index < self.size:
            sample = self.sample(index)
            index, read = index + shards, read + 1
            self._position = {"next": start + read * shards}
            yield sample

    def sample(self, index: int) -> Sample:
        """Sample ``index``, the same whatever was read before."""
        return self.draw(index)[0]

    def draw(self, index: int) -> tuple[Sample, Parts]:
        """Sample ``index`` with the terms of its label's formula: oracle features, which only the generator knows."""
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(f"sample {index} is out of range for a log of {self.size}")
        index += self.first
        draws = Draws(self.seed, _SAMPLES, index)
        user, situation = int(draws.below(self.users, 1)[0]), int(draws.below(planted.SITUATIONS, 1)[0])
        liked = _liked(self.seed, user, self.categories)
        x = draws.normal(planted.NUMBERS)
        preferred, random = liked[draws.below(planted.KINDS, 1)], draws.below(self.categories, 1)
        item = int(self._items(draws, preferred if draws.uniform(1)[0] < planted.LIKED else random)[0])
        history, kinds, age = self._history(draws, liked, self._length(index))
        # The features as a model gets them, in float32, are those that the label depends on.
        dense = x.astype(np.float32)
        terms = planted.parts(self.tables, dense.astype(np.float64), item, situation, history, kinds)
        p = planted.probability(self.weights, terms)
        ids = np.stack([history, self.tables.category[history], kinds], axis=1)
        sample = Sample(
            dense,
            np.array([item, self.tables.category[item], situation], dtype=np.int64),
            {"history": Events(ids, age[:, None].astype(np.float32))},
            float(draws.uniform(1)[0] < p),
            user,
            p,
        )
        return sample, terms

    def _history(self, draws: Draws, liked: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Items (n,), kinds (n,) and ages (n,) in days, oldest first: exponential waits of half a day on average."""
        kinds = draws.below(planted.KINDS, n)
        random = draws.below(self.categories, n)
        category = np.where(draws.uniform(n) < planted.FAITHFUL, liked[kinds], random)
        waits = -0.5 * np.log1p(-draws.uniform(n))
        return self._items(draws, category), kinds, np.cumsum(waits)[::-1]

    def _items(self, draws: Draws, category: np.ndarray) -> np.ndarray:
        """An item of each category: category, category + categories, ... (see make_tables)."""
        members = (self.items - 1 - category) // self.categories + 1
        return category + self.categories * (draws.uniform(len(category)) * members).astype(np.int64)

    def _length(self, index: int) -> int:
        return _length_block(self.lengths, self.longest, self.seed, index // BLOCK)[index % BLOCK]

    def _identity(self) -> dict[str, Any]:
        """Not the size: a log may be made longer and continued."""
        names = ("seed", "first", "lengths", "longest", "items", "categories", "users")
        found = {name: getattr(self, name) for name in names}
        return {"kind": "SyntheticLog", **found, "weights": vars(self.weights).copy()}


@lru_cache(maxsize=10_000)
def _liked(seed: int, user: int, categories: int) -> np.ndarray:
    """(KINDS,): the category that a user likes of each kind."""
    return Draws(seed, _USERS, user).below(categories, planted.KINDS)


@lru_cache(maxsize=64)  # enough for shards and workers that run apart
def _length_block(name: str, longest: int, seed: int, number: int) -> tuple[int, ...]:
    """The lengths of samples BLOCK * number and on, by the benchmark's own functions."""
    return LENGTHS[name](BLOCK, longest, (seed % 2**64) * 2**64 + number)
