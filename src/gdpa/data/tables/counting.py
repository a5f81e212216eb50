"""A pass over all training rows that counts the values of every column that has ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from gdpa.data.decoding.rules import Columns
from gdpa.data.errors import as_row
from gdpa.data.schema import Bag, Categorical, Schema
from gdpa.data.sources.base import Source

BLOCK = 8192
Keep = Callable[[int, int], np.ndarray]
"""keep(first, count): which of the rows first, first + 1, ... count as training rows, as indices from 0."""


def count_values(
    source: Source, schema: Schema, keep: Keep | None = None, skip_bad: int = 0
) -> dict[str, Counter[str]]:
    """By vocabulary. Empty values may be among them. A row that is none is an error, or one of ``skip_bad``."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in schema.vocabularies}
    names = tuple(dict.fromkeys(column.name for column in schema.id_columns)) or (schema.group,)
    first, bad = 0, 0
    for block in source.blocks(source.start(), BLOCK, names):
        rows = np.arange(len(block)) if keep is None else keep(first, len(block))
        first += len(block)
        for task in block.tasks(rows):
            columns = task.columns()
            for error in columns.unreadable().values():
                bad += 1
                if bad > skip_bad:
                    raise as_row(error)
            _count(columns, schema, counts)
    return counts


def _count(columns: Columns, schema: Schema, counts: dict[str, Counter[str]]) -> None:
    for column in schema.categorical:
        columns.count(column.name, None, counts[column.vocabulary_name])
    lists: list[tuple[Categorical | Bag, str]] = [(bag, bag.separator) for bag in schema.bags]
    lists += [(column, history.separator) for history in schema.histories for column in history.ids]
    for entry, separator in lists:
        columns.count(entry.name, separator, counts[entry.vocabulary_name])
