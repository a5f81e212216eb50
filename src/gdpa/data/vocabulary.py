"""From the values of a file to ids, counted on the training file alone.

0          MISSING: an empty field
1          UNSEEN: a value that occurs less than min_count times in the training file, or not at all
2, 3, ...  the others, the most frequent first
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gdpa.data.rows import fields, read_header, read_lines
from gdpa.data.schema import Schema

MISSING = 0
"""The id of an empty field, and of a gap in a history."""
UNSEEN = 1
"""The id of a value that is rare in the training file, or not in it."""
FIRST = 2


@dataclass(frozen=True)
class Vocabularies:
    """One mapping from value to id per name. Memory grows with the different values, not with the rows."""

    ids: Mapping[str, Mapping[str, int]]

    @classmethod
    def build(cls, path: str | Path, schema: Schema) -> Vocabularies:
        """Reads the whole training file once. Columns that share a vocabulary are counted together."""
        counts: dict[str, Counter[str]] = {name: Counter() for name in schema.vocabularies}
        for name, values in _values(Path(path), schema):
            counts[name].update(values)
        return cls({name: _number(count, schema.min_count) for name, count in counts.items()})

    def sizes(self) -> dict[str, int]:
        """How many ids there are of each name, MISSING and UNSEEN included, for the embedding tables."""
        return {name: FIRST + len(ids) for name, ids in self.ids.items()}

    def id(self, name: str, value: str) -> int:
        return self.ids[name].get(value, UNSEEN) if value else MISSING

    def save(self, path: str | Path) -> None:
        """As JSON, the values in the order of their ids."""
        Path(path).write_text(json.dumps({name: list(ids) for name, ids in self.ids.items()}), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Vocabularies:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls({name: {value: i for i, value in enumerate(values, FIRST)} for name, values in saved.items()})


def _values(path: Path, schema: Schema) -> Iterator[tuple[str, list[str]]]:
    """(vocabulary, values) of every row and column that has ids. Empty values are not among them."""
    header = read_header(path, schema.columns)
    columns: list[tuple[str, str, str | None]] = [(c.name, c.vocabulary_name, None) for c in schema.categorical]
    columns += [(c.name, c.vocabulary_name, h.separator) for h in schema.histories for c in h.columns]
    for line in read_lines(path, header.offset, header.lines):
        row = fields(path, line, header)
        for column, vocabulary, separator in columns:
            if row[column]:
                yield vocabulary, row[column].split(separator) if separator else [row[column]]


def _number(count: Counter[str], min_count: int) -> dict[str, int]:
    """By falling count, then by value, so that the ids do not depend on the order of the rows."""
    kept = sorted((-n, value) for value, n in count.items() if n >= min_count and value)
    return {value: i for i, (_, value) in enumerate(kept, FIRST)}
