"""Columns of pyarrow, as Parquet, Arrow files and frames have them.

Values are known by the text that a CSV file would have, so that vocabularies serve both: 7 is "7", and so is 7.0; a
boolean is "True" or "False", as pandas writes it, and a float has the digits of its own precision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from gdpa.data.decoding.decoded import within
from gdpa.data.decoding.forms import is_a, plain
from gdpa.data.decoding.groups import groups_of
from gdpa.data.decoding.lookup import Lookup
from gdpa.data.decoding.rules import Mark
from gdpa.data.decoding.text import BRACKETS, SEPARATORS, TextColumns, is_bracketed
from gdpa.data.errors import DataError
from gdpa.data.vocabulary import MISSING, known_as


class ArrowColumns:
    """A table's columns; ``place(row)`` is (file or name, number of the row from 1) of it."""

    def __init__(self, table: pa.Table, place: Callable[[int], tuple[Any, int]]) -> None:
        self._rows, self._place = table.num_rows, place
        self.table = table
        """As it is in the source."""
        self._columns: dict[str, pa.Array] = {}
        self._bad: dict[int, DataError] = {}
        for name in table.column_names:
            self._columns[name], wrong = plain(table.column(name))
            for row in wrong:
                self._bad.setdefault(row, self.error(row, "not UTF-8", name, table.column(name)[row].as_py()))

    def __len__(self) -> int:
        return self._rows

    def error(self, row: int, problem: str, column: str | None = None, value: Any = None) -> DataError:
        path, number = self._place(row)
        return DataError(problem, path, None, column, value, number)

    def unreadable(self) -> dict[int, DataError]:
        return dict(self._bad)

    def value(self, column: str, row: int) -> Any:
        return self._columns[column][row].as_py()

    def texts(self, column: str) -> list[str]:
        return texts_of(self._columns[column])

    def groups(self, column: str, mark: Mark) -> np.ndarray:
        found = self._flat(column, self._columns[column], "be groups")
        if types.is_integer(found.type) and found.type != pa.uint64() and not found.null_count:
            return found.cast(pa.int64()).to_numpy()
        return groups_of(self.texts(column), mark)

    def numbers(self, column: str, mark: Mark) -> np.ndarray:
        return _numbers(self._columns[column], None, lambda i: i, mark)

    def times(self, column: str, scale: float, mark: Mark) -> np.ndarray:
        return _numbers(self._columns[column], scale, lambda i: i, mark)

    def ids(self, column: str, vocabulary: Lookup) -> np.ndarray:
        return _ids(self._flat(column, self._columns[column]), vocabulary)

    def count(self, column: str, separator: str | None, counts: Counter[str]) -> None:
        found = self._columns[column]
        if separator is not None:
            found = self._lists(column, separator).flatten()
        counted = pc.value_counts(self._flat(column, found))
        for text, n in zip(texts_of(counted.field("values")), counted.field("counts").to_pylist(), strict=True):
            counts[text] += n

    def _flat(self, column: str, found: pa.Array, what: str = "have ids") -> pa.Array:
        """The values as they are; those that have parts have no text."""
        if types.is_nested(found.type):
            raise DataError(f"values of type {found.type} cannot {what}", self._place(0)[0], column=column)
        return found

    def _lists(self, column: str, separator: str) -> pa.Array:
        """Lists as they are; text is cut at the separator, the empty one being an empty list."""
        found = self._columns[column]
        if is_a(found.type, "list", "large_list"):
            return found
        if types.is_null(found.type):
            return found.cast(pa.list_(pa.int64()))
        if not is_a(found.type, "string", "large_string"):
            found = pa.array(texts_of(self._flat(column, found)), pa.string())
        filled = pc.if_else(pc.equal(found, ""), pa.scalar(None, found.type), found)
        return pc.split_pattern(filled, separator)

    def lists(
        self, column: str, separator: str, most: int, newest: bool, gaps: bool, mark: Mark
    ) -> tuple[np.ndarray, pa.Array]:
        self._mark_bracketed(column, separator, mark)
        found = self._lists(column, separator)
        lengths = pc.fill_null(pc.list_value_length(found), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        flat = self._flat(column, found.flatten())
        if not (gaps and types.is_floating(flat.type)):
            flat, lengths = self._without_gaps(flat, lengths, mark)
        kept = np.minimum(lengths, most)
        if (kept < lengths).any():
            begin = np.cumsum(lengths) - (kept if newest else lengths)
            flat = flat.take(pa.array(np.repeat(begin, kept) + within(kept)))
        return lengths, flat

    def _mark_bracketed(self, column: str, separator: str, mark: Mark) -> None:
        """Text in which a list is written as no list is, as in a CSV file."""
        found = self._columns[column]
        if is_a(found.type, "string", "large_string"):
            rows = pc.fill_null(pc.starts_with(found, "["), False).to_numpy(zero_copy_only=False).nonzero()[0]
            for row in rows.tolist():
                if is_bracketed(found[row].as_py()):
                    mark(row, BRACKETS.format(separator))

    def _without_gaps(self, flat: pa.Array, lengths: np.ndarray, mark: Mark) -> tuple[pa.Array, np.ndarray]:
        """A list with an entry that is null, NaN or empty text is refused, as in a CSV file."""
        gaps = flat.is_null(nan_is_null=True)
        if is_a(flat.type, "string", "large_string"):
            gaps = pc.or_kleene(gaps, pc.fill_null(pc.equal(flat, ""), True))
        if not pc.any(gaps).as_py():
            return flat, lengths
        row = np.repeat(np.arange(len(lengths)), lengths)
        at = gaps.to_numpy(zero_copy_only=False).nonzero()[0]
        first = np.cumsum(lengths) - lengths
        for i in at.tolist():
            mark(int(row[i]), f"entry {i - first[row[i]] + 1} of {lengths[row[i]]} is empty")
        wrong = np.isin(np.arange(len(lengths)), row[at])
        return flat.filter(pa.array(~wrong[row])), np.where(wrong, 0, lengths)

    def crowded(self, column: str) -> int:
        found = self._columns[column]
        if not is_a(found.type, "string", "large_string"):
            return 0
        return pc.sum(pc.match_substring_regex(found, SEPARATORS)).as_py() or 0

    def list_ids(self, flat: pa.Array, vocabulary: Lookup) -> np.ndarray:
        return _ids(flat, vocabulary)

    def list_numbers(self, flat: pa.Array, lengths: np.ndarray, scale: float | None, mark: Mark) -> np.ndarray:
        ends = np.cumsum(lengths)
        return _numbers(flat, scale, lambda i: int(np.searchsorted(ends, i, side="right")), mark)


def texts_of(found: pa.Array) -> list[str]:
    """As CSV would have them; empty for a missing value."""
    if types.is_floating(found.type):
        values = found.to_numpy(zero_copy_only=False)  # not Python's floats, which show a float32 of 0.1 in 17 digits
        return ["" if value != value else known_as(str(value)) for value in values]
    return [_text(value) for value in found.to_pylist()]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None or value != value else str(value)


def _ids(found: pa.Array, vocabulary: Lookup) -> np.ndarray:
    """Whole numbers as they are; of other values each different one is looked up once."""
    if types.is_integer(found.type) and found.type != pa.uint64():
        whole = vocabulary.numbers(pc.fill_null(found.cast(pa.int64()), 0).to_numpy(zero_copy_only=False))
        missing = found.is_null().to_numpy(zero_copy_only=False) if found.null_count else None
        return whole if missing is None else np.where(missing, MISSING, whole)
    coded = found.dictionary_encode()
    texts = texts_of(coded.dictionary)
    table = vocabulary.texts(texts)
    codes = pc.fill_null(coded.indices, len(texts)) if coded.indices.null_count else coded.indices
    return np.append(table, MISSING)[codes.to_numpy(zero_copy_only=False)]


def _numbers(found: pa.Array, scale: float | None, row_of: Callable[[int], int], mark: Mark) -> np.ndarray:
    kind = found.type
    if scale is not None and (types.is_timestamp(kind) or types.is_date(kind)):
        micro = found.cast(pa.timestamp("us"), safe=False).cast(pa.int64()).cast(pa.float64(), safe=False)
        return micro.to_numpy(zero_copy_only=False) * 1e-6
    flags = types.is_boolean(kind) and scale is None  # which are no times
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or flags:
        x = found.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return x if scale is None else x * scale
    texts = tuple(texts_of(found))
    columns = TextColumns(len(texts), {"": texts}, lambda row: ("", 0), {})

    def marked(i: int, problem: str) -> None:
        mark(row_of(i), problem)

    return columns.numbers("", marked) if scale is None else columns.times("", scale, marked)
