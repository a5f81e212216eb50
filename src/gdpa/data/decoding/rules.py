"""What a schema asks of its columns, whatever they are made of: which values are refused, replaced, cut or counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from gdpa.data.decoding.decoded import Decoded, Lists, Tally, within
from gdpa.data.decoding.lookup import Lookup
from gdpa.data.errors import DataError
from gdpa.data.schema import UNITS, Bag, Categorical, EventColumn, History, Numeric, Schema, Time
from gdpa.data.vocabulary import MISSING, UNSEEN, Vocabularies

FLOAT32_MAX = float(np.finfo(np.float32).max)
DAY = 86400.0
ABSURD = 200 * 365.25
"""Days between an event and its row that only a wrong unit can make: 1.7e12 ms taken as seconds are 54,000 years."""
LATEST = 253_402_300_800.0
"""Seconds until the year 10000, which only a wrong unit leads to."""


class Columns(Protocol):
    """Columns of N rows. Where a value cannot be read, ``mark`` is told the row; what is returned there is ignored.

    ``flat`` is the entries of all rows' lists one after another, in whatever form suits the columns.
    """

    def __len__(self) -> int: ...

    def error(self, row: int, problem: str, column: str | None = None, value: Any = None) -> DataError:
        """Names the file and the line or row."""

    def unreadable(self) -> dict[int, DataError]:
        """Rows that are none, such as lines with too many fields."""

    def value(self, column: str, row: int) -> Any:
        """As it stands there, for messages."""

    def numbers(self, column: str, mark: Mark) -> np.ndarray:
        """(N,) float64, NaN for a missing one; booleans are 1 and 0."""

    def times(self, column: str, scale: float, mark: Mark) -> np.ndarray:
        """(N,) float64 in seconds: numbers times ``scale``, dates since 1970; NaN for a missing one."""

    def texts(self, column: str) -> list[str]:
        """(N,) as CSV would have them, empty for a missing one."""

    def groups(self, column: str, mark: Mark) -> np.ndarray:
        """(N,) int64, see groups.py."""

    def ids(self, column: str, vocabulary: Lookup) -> np.ndarray:
        """(N,) int64, MISSING for a missing one."""

    def count(self, column: str, separator: str | None, counts: Counter[str]) -> None:
        """Adds how often each text occurs, or each entry of its lists."""

    def lists(
        self, column: str, separator: str, most: int, newest: bool, gaps: bool, mark: Mark
    ) -> tuple[np.ndarray, Any]:
        """(N,) lengths, and the ``flat`` entries of which each row has at most ``most``, its last or its first ones.
        An empty entry is marked, other than one that ``gaps`` allows: NaN or null among floats."""

    def crowded(self, column: str) -> int:
        """How many texts have one of the usual separators in them."""

    def list_ids(self, flat: Any, vocabulary: Lookup) -> np.ndarray: ...

    def list_numbers(self, flat: Any, lengths: np.ndarray, scale: float | None, mark: Mark) -> np.ndarray:
        """float64; with a ``scale`` they are times."""


class Mark(Protocol):
    def __call__(self, row: int, problem: str, /) -> None: ...


@dataclass(frozen=True)
class Decoder:
    """Rows by a schema. It is sent to worker processes once, with its vocabularies."""

    schema: Schema
    vocabularies: Vocabularies

    def __call__(self, columns: Columns) -> Decoded:
        return _Reading(self.schema, self.lookups, columns).everything()

    @cached_property
    def lookups(self) -> dict[str, Lookup]:
        return {name: Lookup(ids) for name, ids in self.vocabularies.ids.items()}

    def keys(self, columns: Columns) -> Decoded:
        """Groups and times alone, for splits."""
        s = self.schema
        keys = Schema(s.label, s.group, time=s.time, time_unit=s.time_unit)
        return _Reading(keys, {}, columns).everything(labelled=False)

    def features(self, columns: Columns) -> Decoded:
        """What a prediction needs: zeros for labels and groups, and no weights."""
        return _Reading(self.schema, self.lookups, columns).everything(labelled=False, grouped=False)


class _Reading:
    """One use of a decoder: the first thing that is wrong with a row is kept, and what was replaced is counted."""

    def __init__(self, schema: Schema, lookups: dict[str, Lookup], columns: Columns) -> None:
        self.schema, self.lookups, self.columns = schema, lookups, columns
        self.tally = Tally()
        self.bad = columns.unreadable()
        self.ok = np.ones(len(columns), dtype=bool)
        self.ok[list(self.bad)] = False

    def mark(self, row: int, problem: str, column: str | None = None) -> None:
        if row not in self.bad:
            value = None if column is None else self.columns.value(column, row)
            self.bad[row] = self.columns.error(row, problem, column, value)
            self.ok[row] = False

    def marker(self, column: str) -> Mark:
        return lambda row, problem: self.mark(row, problem, column)

    def everything(self, labelled: bool = True, grouped: bool = True) -> Decoded:
        schema, n = self.schema, len(self.columns)
        timed = schema.time is not None and (grouped or schema.has_ages)
        times = self._times(schema.time) if timed and schema.time is not None else None
        dense = [self._number(feature) for feature in schema.numeric]
        sparse = [self._id(feature) for feature in schema.categorical]
        bags = {bag.name: self._bag(bag) for bag in schema.bags}
        sequences = {history.name: self._events(history, times) for history in schema.histories}
        labels = [self._label(name) if labelled else np.zeros(n, np.float32) for name in schema.labels]
        weights = self._weight(schema.weight) if labelled and schema.weight is not None else None
        return Decoded(
            _stacked(dense, n, np.float32),
            _stacked(sparse, n, np.int64),
            sequences,
            labels[0] if len(labels) == 1 else np.stack(labels, axis=1),
            self.columns.groups(schema.group, self.marker(schema.group)) if grouped else np.zeros(n, np.int64),
            weights,
            times,
            bags,
            self.bad,
            self.tally,
        )

    # ---- one value a row ---------------------------------------------------------------------------------------------
    def _number(self, feature: Numeric) -> np.ndarray:
        x = self.columns.numbers(feature.name, self.marker(feature.name))
        return self._finite(feature, x, lambda at: at).astype(np.float32)

    def _finite(self, feature: Numeric, x: np.ndarray, row_of: Any) -> np.ndarray:
        wrong = ~(np.abs(x) <= FLOAT32_MAX)  # also NaN
        if wrong.any():
            at = wrong.nonzero()[0]
            rows = row_of(at)
            if feature.nonfinite == "error":
                hint = f'Numeric({feature.name!r}, nonfinite="zero") would take it as 0'
                for row in np.unique(rows).tolist():
                    self.mark(row, f"missing, or not a finite float32; {hint}", feature.name)
            else:
                self.tally.replaced[feature.name] += int(self.ok[rows].sum())
            x = np.where(wrong, 0.0, x)
        return np.copysign(np.log1p(np.abs(x)), x) if feature.log1p else x

    def _times(self, column: str) -> np.ndarray:
        t = self.columns.times(column, UNITS[self.schema.time_unit], self.marker(column))
        for row in (~np.isfinite(t)).nonzero()[0].tolist():
            self.mark(row, "the time is missing", column)
        return t

    def _label(self, column: str) -> np.ndarray:
        x = self.columns.numbers(column, lambda row, problem: self.mark(row, f"the label is {problem}", column))
        for row in ((x != 0) & (x != 1)).nonzero()[0].tolist():
            missing = str(self.columns.value(column, row) or "").strip() == "" and np.isnan(x[row])
            self.mark(row, "the label is not a number" if missing else "the label must be 0 or 1", column)
        return x.astype(np.float32)

    def _weight(self, column: str) -> np.ndarray:
        x = self.columns.numbers(column, self.marker(column))
        for row in (~((x >= 0) & (x <= FLOAT32_MAX))).nonzero()[0].tolist():
            self.mark(row, "a weight must be a finite number of at least 0", column)
        return np.where(self.ok, x, 0).astype(np.float32)

    def _id(self, feature: Categorical) -> np.ndarray:
        found = self.columns.ids(feature.name, self.lookups[feature.vocabulary_name])
        if unseen := int((found == UNSEEN)[self.ok].sum()):
            self.tally.unseen[feature.name] += unseen
        return found

    # ---- lists -------------------------------------------------------------------------------------------------------
    def _bag(self, bag: Bag) -> Lists:
        total, flat = self.columns.lists(bag.name, bag.separator, bag.max_len, False, False, self.marker(bag.name))
        self._look_for_separators(bag.name, total)
        ids = self._list_ids(bag, flat)
        kept = np.minimum(total, bag.max_len)
        self.tally.cut[bag.name] += int((total - kept).sum())
        return Lists(ids[:, None], np.empty((len(ids), 0), np.float32), kept)

    def _look_for_separators(self, column: str, lengths: np.ndarray) -> None:
        """Where no list has two entries, the schema may have another separator than the table."""
        if several := int((lengths > 1).sum()):
            self.tally.several[column] += several
        elif (lengths == 1).any() and (crowded := self.columns.crowded(column)):
            self.tally.crowded[column] += crowded

    def _list_ids(self, feature: Categorical | Bag, flat: Any) -> np.ndarray:
        found = self.columns.list_ids(flat, self.lookups[feature.vocabulary_name])
        if unseen := int((found == UNSEEN).sum()):
            self.tally.unseen[feature.name] += unseen
        return found

    def _events(self, history: History, times: np.ndarray | None) -> Lists:
        read = [
            self.columns.lists(
                c.name, history.separator, history.max_len, True, not isinstance(c, Categorical), self.marker(c.name)
            )
            for c in history.columns
        ]
        for c, (total, _) in zip(history.columns, read, strict=True):
            self._look_for_separators(c.name, total)
        totals = np.stack([total for total, _ in read])  # (columns, N)
        length = totals.max(axis=0)
        if history.unequal == "error":
            for row in (totals != length).any(axis=0).nonzero()[0].tolist():
                lengths = ", ".join(f"{c.name} {n}" for c, n in zip(history.columns, totals[:, row], strict=True))
                problem = f'the history {history.name!r} has columns of different lengths ({lengths}); unequal="fill"'
                self.mark(row, f"{problem} would align them at the newest event")
        parts = [
            self._event_column(c, flat, np.minimum(total, history.max_len), times)
            for c, (total, flat) in zip(history.columns, read, strict=True)
        ]
        kept = np.where(self.ok, np.minimum(length, history.max_len), 0)
        self.tally.cut[history.name] += int((length - kept)[self.ok].sum())
        own = np.minimum(totals, history.max_len)
        aligned = [self._aligned(c.name, part, n, kept) for c, part, n in zip(history.columns, parts, own, strict=True)]
        pairs = list(zip(history.columns, aligned, strict=True))
        ids = [part for c, part in pairs if isinstance(c, Categorical)]
        values = [part for c, part in pairs if not isinstance(c, Categorical)]
        events = int(kept.sum())
        return Lists(_stacked(ids, events, np.int64), _stacked(values, events, np.float32), kept)

    def _event_column(self, c: EventColumn, flat: Any, lengths: np.ndarray, times: np.ndarray | None) -> np.ndarray:
        if isinstance(c, Categorical):
            return self._list_ids(c, flat)
        scale = UNITS[c.unit] if isinstance(c, Time) else None
        x = self.columns.list_numbers(flat, lengths, scale, self.marker(c.name))
        ends = np.cumsum(lengths)

        def row_of(at: np.ndarray) -> np.ndarray:
            return np.searchsorted(ends, at, side="right")

        if isinstance(c, Numeric):
            return self._finite(c, x, row_of).astype(np.float32)
        assert times is not None  # Schema sees to it
        age = (np.repeat(times, lengths) - x) / DAY
        for row in np.unique(row_of((~np.isfinite(age)).nonzero()[0])).tolist():
            self.mark(row, "the time of an event is missing", c.name)
        for row in np.unique(row_of((np.abs(age) > ABSURD).nonzero()[0])).tolist():
            units = f"are the row's times in {self.schema.time_unit!r} (Schema.time_unit) and the events' in {c.unit!r}"
            said = f"{units} (Time.unit), and is neither a placeholder?"
            self.mark(row, f"an event is more than 200 years from its row: {said}", c.name)
        self._check_moments(times, lengths)
        if future := int(((age < 0) & np.repeat(self.ok, lengths)).sum()):
            self.tally.future[c.name] += future
        row = np.repeat(np.arange(len(lengths)), lengths)
        if unordered := int(((np.diff(x) < 0) & (np.diff(row) == 0) & self.ok[row[1:]]).sum()):
            self.tally.unordered[c.name] += unordered
        return age.astype(np.float32)

    def _check_moments(self, times: np.ndarray, lengths: np.ndarray) -> None:
        """Of rows that have events: where both are in the same wrong unit, ages would only be wrong by its factor."""
        for row in ((np.abs(times) >= LATEST) & (lengths > 0)).nonzero()[0].tolist():
            units = f"{self.schema.time_unit!r} (Schema.time_unit), and are the events' in theirs (Time.unit)"
            self.mark(row, f"the time is after the year 9999: is it in {units}?", self.schema.time)

    def _aligned(self, name: str, part: np.ndarray, own: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """A column's entries at the newest of the kept events; zeros, which are MISSING, where it has fewer."""
        if np.array_equal(own, kept):
            self.tally.filled[name] += 0
            return part
        own_kept = np.minimum(own, kept)  # 0 for bad rows
        self.tally.filled[name] += int((kept - own_kept).sum())
        whole = np.zeros(int(kept.sum()), dtype=part.dtype)
        source = np.repeat(np.cumsum(own) - own_kept, own_kept) + within(own_kept)
        target = np.repeat(np.cumsum(kept) - own_kept, own_kept) + within(own_kept)
        whole[target] = part[source]
        return whole


def _stacked(columns: list[np.ndarray], rows: int, dtype: Any) -> np.ndarray:
    return np.stack(columns, axis=1) if columns else np.empty((rows, 0), dtype=dtype)


assert MISSING == 0  # _aligned fills with zeros
