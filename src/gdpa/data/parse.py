"""A row of a CSV file as a sample, or an error that says which column is wrong and how."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np

from gdpa.data.batch import Events, Sample
from gdpa.data.errors import DataError
from gdpa.data.rows import Header, Line, fields
from gdpa.data.schema import Categorical, History, Numeric, Schema
from gdpa.data.vocabulary import MISSING, UNSEEN, Vocabularies

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass
class Tally:
    """What was not taken as it stands in the file, by column: nothing is changed without being counted."""

    replaced: Counter[str] = field(default_factory=Counter)  # numbers that became zero
    unseen: Counter[str] = field(default_factory=Counter)  # values without an id of their own
    cut: Counter[str] = field(default_factory=Counter)  # events beyond max_len, by history
    filled: Counter[str] = field(default_factory=Counter)  # entries added to a history column shorter than the others


class RowParser:
    """Rows of one file. ``tally`` counts while it reads."""

    def __init__(self, path: Path, header: Header, schema: Schema, vocabularies: Vocabularies) -> None:
        self.path, self.header, self.schema, self.vocabularies = path, header, schema, vocabularies
        self.tally = Tally()

    def __call__(self, line: Line) -> Sample:
        row, number = fields(self.path, line, self.header), line.number
        label = self._label(row[self.schema.label], number)
        return self.sample(row, number, label, self._group(row[self.schema.group], number))

    def sample(self, row: dict[str, str], number: int, label: float = 0.0, group: int = 0) -> Sample:
        """The features of a row whose fields are read already; its label and group play no part in predictions."""
        dense = [self._number(row[feature.name], feature, number) for feature in self.schema.numeric]
        sparse = [self._id(row[feature.name], feature) for feature in self.schema.categorical]
        return Sample(
            np.array(dense, dtype=np.float32),
            np.array(sparse, dtype=np.int64),
            {history.name: self._events(row, history, number) for history in self.schema.histories},
            label,
            group,
        )

    def _refuse(self, problem: str, line: int, column: str, value: str) -> NoReturn:
        raise DataError(problem, self.path, line, column, value)

    def _label(self, text: str, line: int) -> float:
        try:
            label = float(text)
        except ValueError:
            self._refuse("the label is not a number", line, self.schema.label, text)
        if label not in (0.0, 1.0):
            self._refuse("the label must be 0 or 1", line, self.schema.label, text)
        return label

    def _group(self, text: str, line: int) -> int:
        """A whole number is itself; any other text is a hash of 63 bits, the same in every process."""
        if not text:
            self._refuse("the group is empty", line, self.schema.group, text)
        plain = len(text) <= 20 and text.isascii() and text.removeprefix("-").isdecimal()  # int() limits the length
        if plain and str(number := int(text)) == text and -(2**63) <= number < 2**63:
            return number
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def _number(self, text: str, feature: Numeric, line: int) -> float:
        try:
            x = float(text) if text.strip() else math.nan
        except ValueError:
            self._refuse("not a number", line, feature.name, text)
        if not abs(x) <= FLOAT32_MAX:  # also if it is NaN
            if feature.nonfinite == "error":
                hint = f'Numeric({feature.name!r}, nonfinite="zero") would take it as 0'
                self._refuse(f"missing, or not a finite float32; {hint}", line, feature.name, text)
            self.tally.replaced[feature.name] += 1
            return 0.0
        return math.copysign(math.log1p(abs(x)), x) if feature.log1p else x

    def _id(self, text: str, feature: Categorical) -> int:
        found = self.vocabularies.id(feature.vocabulary_name, text)
        if found == UNSEEN:
            self.tally.unseen[feature.name] += 1
        return found

    def _events(self, row: dict[str, str], history: History, line: int) -> Events:
        columns = [self._items(row[c.name], history, c, line) for c in history.columns]
        length = max(len(column) for column in columns)
        if history.unequal == "error" and any(len(column) != length for column in columns):
            lengths = ", ".join(f"{c.name} {len(v)}" for c, v in zip(history.columns, columns, strict=True))
            problem = f'the history {history.name!r} has columns of different lengths ({lengths}); unequal="fill"'
            raise DataError(f"{problem} would align them at the newest event", self.path, line)
        kept = min(length, history.max_len)
        self.tally.cut[history.name] += length - kept
        ids = np.full((kept, len(columns)), MISSING, dtype=np.int64)
        for i, (feature, values) in enumerate(zip(history.columns, columns, strict=True)):
            newest = values[-kept:] if kept else []
            self.tally.filled[feature.name] += kept - len(newest)
            lookup = self.vocabularies.ids[feature.vocabulary_name].get
            found = [lookup(value, UNSEEN) for value in newest]  # none is empty: see _items
            self.tally.unseen[feature.name] += found.count(UNSEEN)
            ids[kept - len(newest) :, i] = found
        return Events(ids, np.empty((kept, 0), dtype=np.float32))

    def _items(self, text: str, history: History, column: Categorical, line: int) -> list[str]:
        values = text.split(history.separator) if text else []
        if "" in values:
            problem = f"entry {values.index('') + 1} of {len(values)} between {history.separator!r} is empty"
            self._refuse(problem, line, column.name, text)
        return values
