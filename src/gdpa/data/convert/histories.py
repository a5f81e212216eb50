"""The events of a log in the order of time, and where among those of its user the history of each one lies.

Histories overlap: an event is in those of the next fifty. They are never held as such, but as places in one array,
which is in the order of users and times; writing.py makes lists and texts of them as it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdpa.data.errors import DataError

AT_ONCE = 1 << 18  # rows whose histories are looked for together, so that what is needed on the way stays small


@dataclass(frozen=True)
class Coded:
    """A column of texts, or of lists of them, each of which occurs many times: row i has ``values[codes[i]]``."""

    codes: np.ndarray
    values: Sequence[Any]

    def __getitem__(self, rows: Any) -> Coded:
        return Coded(self.codes[rows], self.values)

    def __len__(self) -> int:
        return len(self.codes)


Column = np.ndarray | Coded


@dataclass(frozen=True)
class Log:
    """Row i has ``columns[name][i]`` and the histories ``past[name][first[i]:end[i]]``, oldest first."""

    columns: Mapping[str, Column]
    past: Mapping[str, Column]
    first: np.ndarray
    end: np.ndarray
    notes: tuple[str, ...] = ()  # what whoever converts should know of the data

    def __len__(self) -> int:
        return len(self.first)


def lookup(keys: np.ndarray) -> Callable[[Mapping[int, Any], Any], Coded]:
    """``found(table, missing)``: what a table says of each key."""
    known, codes = np.unique(keys, return_inverse=True)
    listed, places = known.tolist(), narrow(codes)
    return lambda table, missing: Coded(places, [table.get(key, missing) for key in listed])


def unknown(keys: np.ndarray, table: Mapping[int, Any], what: str, path: Path) -> list[str]:
    """What to say of rows of which ``path``, whose rows are ``table``, says nothing. A file that says nothing at all is
    refused."""
    if not table:
        raise DataError(f"the file has no {what}", path)
    of, counts = np.unique(keys, return_counts=True)
    lost = ~np.isin(of, np.fromiter(table, np.int64, len(table)))
    if not lost.any():
        return []
    named = what if lost.sum() > 1 else what.removesuffix("s")
    return [
        f"{counts[lost].sum():,} of {len(keys):,} rows refer to {lost.sum():,} {named} that {path.name} does not have "
        f"(the first is {of[lost][0]}): the columns it would fill are empty"
    ]


def in_order(columns: Mapping[str, np.ndarray], time: str) -> dict[str, np.ndarray]:
    """Rows by time; those of one moment stay in the order of the file."""
    order = np.argsort(columns[time], kind="stable")
    return {name: narrow(column)[order] for name, column in columns.items()}


def with_histories(
    columns: Mapping[str, Column], user: str, past: Mapping[str, str], max_len: int, counts: np.ndarray | None = None,
    notes: Sequence[str] = (),
) -> Log:  # fmt: skip
    """Each event with up to ``max_len`` of its user's earlier ones: ``past`` says which column each list is of.
    Events for which ``counts`` is false do not become part of histories. Those of one moment do not see each other."""
    users, time = columns[user], columns["time"]
    assert isinstance(users, np.ndarray)
    assert isinstance(time, np.ndarray)
    moments = narrow(np.cumsum(np.append(False, time[1:] != time[:-1])[: len(time)]))
    key = np.unique(users, return_inverse=True)[1] * (len(time) + 1)  # by user, and then by time
    key += moments
    counted = np.arange(len(time)) if counts is None else counts.nonzero()[0]
    counted = narrow(counted[np.argsort(key[counted], kind="stable")])
    held = {name: columns[column][counted] for name, column in past.items()}
    return Log(columns, held, *_bounds(key[counted], key, moments, max_len), tuple(notes))


def _bounds(places: np.ndarray, key: np.ndarray, moments: np.ndarray, max_len: int) -> tuple[np.ndarray, np.ndarray]:
    """From where to where among the sorted ``places`` the keys of the same user are that are less than each key."""
    first, end = np.empty((2, len(key)), np.int64 if len(places) >= 2**31 else np.int32)
    for begin in range(0, len(key), AT_ONCE):
        rows = slice(begin, begin + AT_ONCE)
        end[rows] = np.searchsorted(places, key[rows])
        first[rows] = np.maximum(np.searchsorted(places, key[rows] - moments[rows]), end[rows] - max_len)
    return first, end


def narrow(column: np.ndarray) -> np.ndarray:
    """Whole numbers in four bytes, if they are small enough for those."""
    if column.dtype != np.int64 or not len(column):
        return column
    low, high = column.min(), column.max()
    return column.astype(np.int32) if low >= -(2**31) and high < 2**31 else column
