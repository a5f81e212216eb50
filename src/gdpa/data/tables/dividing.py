"""One table as training, validation and test data: by time, by user, or each user's last rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdpa.data.decoding import Decoder
from gdpa.data.schema import Schema
from gdpa.data.sources.base import Source
from gdpa.data.vocabulary import Vocabularies

TRAIN, VALID, TEST = range(3)
NAMES = ("train", "valid", "test")
WAYS = ("time", "user", "last")
BLOCK = 65536


@dataclass(frozen=True, eq=False)
class Division:
    """Which part each row of a table belongs to, a byte for each. ``about`` says how that was decided."""

    codes: np.ndarray
    about: dict[str, Any]

    def part(self, name: str) -> Part:
        return Part(self, NAMES.index(name))


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of one part."""

    division: Division
    code: int

    def keep(self, first: int, count: int) -> np.ndarray:
        """Which of the rows first, first + 1, ... belong to it, counted from ``first``."""
        return (self.division.codes[first : first + count] == self.code).nonzero()[0]

    def __len__(self) -> int:
        return int((self.division.codes == self.code).sum())

    def identity(self) -> dict[str, Any]:
        return {**self.division.about, "part": NAMES[self.code]}


def divide(source: Source, schema: Schema, by: str, valid: float = 0.1, test: float = 0.1, seed: int = 0) -> Division:
    """Reads the group and time columns once. A row that cannot be read belongs to the training data, which refuse it.

    "time"  the oldest rows are for training, then come ``valid`` of them, the newest ``test`` are for testing; rows
            of one moment stay together
    "user"  ``valid`` and ``test`` are shares of the groups, which ``seed`` draws
    "last"  the last row of each group is for testing, the one before for validation, by time (in the order of the table
            where schema.time is None); groups of fewer than three rows are for training
    """
    if by not in WAYS:
        raise ValueError(f"by must be one of {', '.join(WAYS)}, not {by!r}")
    if not (0 <= valid < 1 and 0 <= test < 1 and valid + test < 1):
        raise ValueError(f"valid and test are shares that must leave some rows to train on, not {valid} and {test}")
    if by == "time" and schema.time is None:
        raise ValueError("a split by time needs Schema.time, the column that says when each row occurred")
    about: dict[str, Any] = {"by": by} if by == "last" else {"by": by, "valid": valid, "test": test}
    if by == "user":
        about["seed"] = seed
    groups, times, good = _keys(source, schema)
    codes = np.full(len(good), TRAIN, dtype=np.uint8)
    groups, times = groups[good], times[good]  # a row without a time would count as the newest
    if not good.any():
        return Division(codes, about)
    if by == "time":
        codes[good] = _by_time(times, valid, test)
    elif by == "user":
        codes[good] = _by_user(groups, valid, test, seed)
    else:
        codes[good] = _by_last(groups, times)
    return Division(codes, about)


def _keys(source: Source, schema: Schema) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    parts = list(_read_keys(source, schema))
    groups, times, good = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return groups, times, good


def _read_keys(source: Source, schema: Schema) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    decoder = Decoder(schema, Vocabularies({}))
    columns = (schema.group,) if schema.time is None else (schema.group, schema.time)
    for block in source.blocks(source.start(), BLOCK, columns):
        for task in block.tasks(np.arange(len(block))):
            found = decoder.keys(task.columns())
            good = np.ones(len(found), dtype=bool)
            good[list(found.bad)] = False
            yield found.groups, np.zeros(len(found)) if found.times is None else found.times, good


def _by_time(times: np.ndarray, valid: float, test: float) -> np.ndarray:
    codes = np.zeros(len(times), dtype=np.uint8)
    ordered = np.sort(times)
    for code, share in ((VALID, valid + test), (TEST, test)):
        if share:
            first = min(round(len(times) * (1 - share)), len(times) - 1)
            codes[times >= ordered[first]] = code
    return codes


def _by_user(groups: np.ndarray, valid: float, test: float, seed: int) -> np.ndarray:
    """By a hash of each group, so that a table with more rows keeps its users where they were."""
    names, inverse = np.unique(groups, return_inverse=True)
    place = np.array([_place(int(group), seed) for group in names])
    codes = np.select([place < test, place < test + valid], [TEST, VALID], TRAIN).astype(np.uint8)
    return codes[inverse]


def _place(group: int, seed: int) -> float:
    """In [0, 1)."""
    digest = hashlib.blake2b(f"{seed} {group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _by_last(groups: np.ndarray, times: np.ndarray) -> np.ndarray:
    codes = np.zeros(len(groups), dtype=np.uint8)
    order = np.lexsort((np.arange(len(groups)), times, groups))
    ordered = groups[order]
    last = np.append(ordered[1:] != ordered[:-1], True).nonzero()[0]
    first = np.append(0, last[:-1] + 1)
    long = last - first >= 2
    codes[order[last[long]]] = TEST
    codes[order[last[long] - 1]] = VALID
    return codes
