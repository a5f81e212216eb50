"""Columns of text, as CSV and TSV files have them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np

from gdpa.data.decoding.decoded import kept_entries
from gdpa.data.decoding.groups import groups_of
from gdpa.data.decoding.lookup import Lookup, parse_whole
from gdpa.data.decoding.rules import Mark
from gdpa.data.errors import DataError
from gdpa.data.vocabulary import WORDS

COUNTED = "; True and False count as 1 and 0"  # what else a number may be, for messages
BOOLEANS = {"": math.nan} | {word: float(i) for pair in WORDS for i, word in enumerate(pair)}
NUMBERS = re.compile(r"\s*-?[0-9.]+(\s+-?[0-9.]+)+\s*")
SEPARATORS = r"[|^;,\x01-\x03]|[0-9]\s+[0-9]"
BRACKETS = (
    "a list in brackets would be one entry: in text, entries have {!r} between them, and Parquet holds lists as such"
)
Flat = list[str] | np.ndarray


def is_bracketed(text: str) -> bool:
    """[1, 2], ['a', 'b'] and [1 2]: how pandas and databases write the lists of a column as text."""
    inside = text[1:-1]
    if not (text.startswith("[") and text.endswith("]")) or "[" in inside or "]" in inside:
        return False
    first = inside.lstrip()[:1]
    return not first or first in "'\"{" or "," in inside or NUMBERS.fullmatch(inside) is not None


class TextColumns:
    """``columns`` by name, each a text per row; ``place(row)`` is (file, line) of it."""

    def __init__(
        self,
        rows: int,
        columns: Mapping[str, tuple[str, ...]],
        place: Callable[[int], tuple[Any, int]],
        bad: dict[int, DataError],
    ) -> None:
        self._rows, self._columns, self._place, self._bad = rows, columns, place, bad

    def __len__(self) -> int:
        return self._rows

    def error(self, row: int, problem: str, column: str | None = None, value: Any = None) -> DataError:
        path, line = self._place(row)
        return DataError(problem, path, line, column, value)

    def unreadable(self) -> dict[int, DataError]:
        return dict(self._bad)

    def value(self, column: str, row: int) -> str:
        return self._columns[column][row]

    def texts(self, column: str) -> list[str]:
        return list(self._columns[column])

    def groups(self, column: str, mark: Mark) -> np.ndarray:
        return groups_of(self._columns[column], mark)

    def numbers(self, column: str, mark: Mark) -> np.ndarray:
        return _floats(self._columns[column], mark, lambda i: i, f"not a number{COUNTED}")

    def times(self, column: str, scale: float, mark: Mark) -> np.ndarray:
        return _times(self._columns[column], scale, mark, lambda i: i, "neither a number nor an ISO date")

    def ids(self, column: str, vocabulary: Lookup) -> np.ndarray:
        return vocabulary.texts(self._columns[column])

    def count(self, column: str, separator: str | None, counts: Counter[str]) -> None:
        if separator is None:
            counts.update(self._columns[column])
            return
        for text in self._columns[column]:
            counts.update(text.split(separator))

    def lists(
        self, column: str, separator: str, most: int, newest: bool, gaps: bool, mark: Mark
    ) -> tuple[np.ndarray, Flat]:
        """``flat`` is an array of whole numbers where all entries are, which is several times as fast, else texts."""
        whole = parse_whole(self._columns[column], separator)
        if whole is not None:
            return whole[0], kept_entries(*whole, most, newest)
        flat: list[str] = []
        lengths: list[int] = []
        double = separator * 2
        for row, text in enumerate(self._columns[column]):
            if not text:
                lengths.append(0)
            elif text[0] == "[" and is_bracketed(text):
                mark(row, BRACKETS.format(separator))
                lengths.append(0)
            elif double in text or text.startswith(separator) or text.endswith(separator):
                values = text.split(separator)
                mark(row, f"entry {values.index('') + 1} of {len(values)} between {separator!r} is empty")
                lengths.append(0)
            else:
                n = text.count(separator) + 1
                lengths.append(n)
                if n <= most:
                    flat += text.split(separator)
                elif newest:
                    flat += text.rsplit(separator, most)[1:]
                else:
                    flat += text.split(separator, most)[:-1]
        return np.array(lengths, dtype=np.int64), flat

    def crowded(self, column: str) -> int:
        return sum(1 for text in self._columns[column] if re.search(SEPARATORS, text))

    def list_ids(self, flat: Flat, vocabulary: Lookup) -> np.ndarray:
        if isinstance(flat, np.ndarray):
            return vocabulary.numbers(flat)
        return vocabulary.texts(flat)

    def list_numbers(self, flat: Flat, lengths: np.ndarray, scale: float | None, mark: Mark) -> np.ndarray:
        if isinstance(flat, np.ndarray):
            return flat * (1.0 if scale is None else scale)
        ends = np.cumsum(lengths)

        def row_of(i: int) -> int:
            return int(np.searchsorted(ends, i, side="right"))

        if scale is None:
            return _floats(flat, mark, row_of, f"an entry is not a number{COUNTED}")
        return _times(flat, scale, mark, row_of, "an entry is neither a number nor an ISO date")


Texts = Sequence[str]
RowOf = Callable[[int], int]


def _floats(texts: Texts, mark: Mark, row_of: RowOf, problem: str) -> np.ndarray:
    """Booleans are 1 and 0, as in Parquet. One look tells whether they may be all that there is: numbers are not looked
    up."""
    if texts and texts[0] in BOOLEANS:
        try:
            return np.fromiter(map(BOOLEANS.__getitem__, texts), np.float64, len(texts))
        except KeyError:
            pass
    return _parsed(texts, float, _boolean, mark, row_of, problem)


def _times(texts: Texts, scale: float, mark: Mark, row_of: RowOf, problem: str) -> np.ndarray:
    return _parsed(texts, lambda text: float(text) * scale, _moment, mark, row_of, problem)


def _parsed(
    texts: Texts,
    number: Callable[[str], float],
    other: Callable[[str], float],
    mark: Mark,
    row_of: RowOf,
    problem: str,
) -> np.ndarray:
    """All at once if all are plain numbers, which is nearly always; ``other`` reads what is none."""
    try:
        quick = np.fromiter(map(number, texts), np.float64, len(texts))
        if "_" not in "".join(texts):  # which Python takes in numbers, and nobody else; one search of all is fast
            return quick
    except ValueError:
        pass
    found = np.zeros(len(texts))
    for i, text in enumerate(texts):
        try:
            found[i] = _one(text, number, other)
        except ValueError:
            mark(row_of(i), problem)
    return found


def _one(text: str, number: Callable[[str], float], other: Callable[[str], float]) -> float:
    if not text.strip():
        return math.nan
    try:
        if "_" not in text:
            return number(text)
    except ValueError:
        pass
    return other(text)


def _boolean(text: str) -> float:
    if (found := BOOLEANS.get(text.strip())) is None:
        raise ValueError(text)
    return found


def _moment(text: str) -> float:
    """Seconds since 1970 of a date; one without a time zone is taken as UTC."""
    found = datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
