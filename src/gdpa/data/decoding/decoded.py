"""Rows of a table as arrays, from which batches are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
import torch

from gdpa.data.batch import Batch, Events, PackedEvents, Sample, packed
from gdpa.data.errors import DataError


@dataclass
class Tally:
    """How many values were not taken as they are in the table, by column: nothing is changed without being
    counted."""

    replaced: Counter[str] = field(default_factory=Counter)  # numbers that became zero
    unseen: Counter[str] = field(default_factory=Counter)  # values without an id of their own
    cut: Counter[str] = field(default_factory=Counter)  # events beyond max_len, by history or bag
    filled: Counter[str] = field(default_factory=Counter)  # entries added to a history column shorter than the others
    future: Counter[str] = field(default_factory=Counter)  # events later than their row: the data may give labels away
    unordered: Counter[str] = field(default_factory=Counter)  # events older than the one before: the newest come last

    several: Counter[str] = field(default_factory=Counter)  # lists of more than one entry
    crowded: Counter[str] = field(default_factory=Counter)  # lists of one entry that looks like several

    def add(self, other: Tally) -> None:
        for part in fields(self):
            getattr(self, part.name).update(getattr(other, part.name))

    def doubts(self) -> list[str]:
        """What to say of histories and bags that are probably not what they should be."""
        future = "are later than their row: if they are known because of it, they give its label away"
        unordered = (
            "are older than the one before: histories are to be oldest first, and of long ones the last are kept"
        )
        return [
            f"{n} of the events read, by {name}, {what}"
            for counts, what in ((self.future, future), (self.unordered, unordered))
            for name, n in counts.items()
            if n
        ] + [
            f"no list of {name} has more than one entry, and {n} have an entry with one of | ^ ; , in it, or numbers "
            "with spaces between them: is its separator the right one?"
            for name, n in self.crowded.items()
            if n and not self.several[name]
        ]


@dataclass(frozen=True, eq=False)
class Lists:
    """A list for each of N rows, one after another: ids (T, C) int64, values (T, V) float32, lengths (N,) int64."""

    ids: np.ndarray
    values: np.ndarray
    lengths: np.ndarray

    def take(self, rows: np.ndarray) -> Lists:
        lengths = self.lengths[rows]
        index = np.repeat(self.offsets[rows], lengths) + within(lengths)
        return Lists(self.ids[index], self.values[index], lengths)

    @cached_property
    def offsets(self) -> np.ndarray:
        """(N + 1,) where the list of each row begins, and the last one ends."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def part(self, start: int, stop: int) -> Lists:
        held = slice(self.offsets[start], self.offsets[stop])
        return Lists(self.ids[held], self.values[held], self.lengths[start:stop])

    def __getitem__(self, i: int) -> Events:
        own = self.part(i, i + 1)
        return Events(own.ids.copy(), own.values.copy())


def within(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... in each list, of lists one after another."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def kept_entries(lengths: np.ndarray, flat: np.ndarray, most: int, newest: bool) -> np.ndarray:
    """Of each list at most ``most`` entries, its last or its first ones."""
    kept = np.minimum(lengths, most)
    if np.array_equal(kept, lengths):
        return flat
    begin = np.cumsum(lengths) - (kept if newest else lengths)
    return flat[np.repeat(begin, kept) + within(kept)]


@dataclass(frozen=True, eq=False)
class Decoded:
    """N rows: dense (N, F), sparse (N, S), labels (N,) or (N, K), groups (N,), weights and times (N,) or None.

    ``bad`` has for each row that could not be read what is wrong with it; what the arrays hold there means nothing.
    """

    dense: np.ndarray
    sparse: np.ndarray
    sequences: Mapping[str, Lists]
    labels: np.ndarray
    groups: np.ndarray
    weights: np.ndarray | None
    times: np.ndarray | None
    bags: Mapping[str, Lists]
    bad: Mapping[int, DataError] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def __len__(self) -> int:
        return len(self.groups)

    def take(self, rows: np.ndarray) -> Decoded:
        """These rows in this order; the tally stays that of all."""
        places = {int(row): i for i, row in enumerate(rows)} if self.bad else {}
        return replace(
            self,
            dense=self.dense[rows], sparse=self.sparse[rows], labels=self.labels[rows], groups=self.groups[rows],
            weights=None if self.weights is None else self.weights[rows],
            times=None if self.times is None else self.times[rows],
            sequences={name: lists.take(rows) for name, lists in self.sequences.items()},
            bags={name: lists.take(rows) for name, lists in self.bags.items()},
            bad={places[row]: error for row, error in self.bad.items() if row in places},
        )  # fmt: skip

    def sample(self, i: int) -> Sample:
        label = tuple(self.labels[i].tolist()) if self.labels.ndim == 2 else float(self.labels[i])
        return Sample(
            self.dense[i].copy(),
            self.sparse[i].copy(),
            {name: lists[i] for name, lists in self.sequences.items()},
            label,
            int(self.groups[i]),
            None,
            None if self.weights is None else float(self.weights[i]),
            {name: lists[i] for name, lists in self.bags.items()},
        )


Piece = tuple[Decoded, int, int]  # rows from, to


def to_batch(pieces: Sequence[Piece]) -> Batch:
    """Rows of one or several decoded parts as one batch, in memory of its own."""

    def rows(name: str) -> np.ndarray:
        return np.concatenate([getattr(d, name)[start:stop] for d, start, stop in pieces])

    first = pieces[0][0]
    return Batch(
        torch.from_numpy(rows("dense")),
        torch.from_numpy(rows("sparse")),
        {name: _packed([d.sequences[name].part(a, b) for d, a, b in pieces]) for name in first.sequences},
        torch.from_numpy(rows("labels")),
        torch.from_numpy(rows("groups")),
        None,
        None if first.weights is None else torch.from_numpy(rows("weights")),
        bags={name: _packed([d.bags[name].part(a, b) for d, a, b in pieces]) for name in first.bags},
    )


def _packed(parts: Sequence[Lists]) -> PackedEvents:
    ids, values, lengths = (np.concatenate([getattr(p, name) for p in parts]) for name in ("ids", "values", "lengths"))
    return packed(ids, values, lengths)
