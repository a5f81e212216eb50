"""Rows without labels, as a prediction needs them: the features of each, and what some columns say, to recognise it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdpa.data.batch import Batch
from gdpa.data.decoding import Decoder
from gdpa.data.decoding.decoded import to_batch
from gdpa.data.errors import DataError
from gdpa.data.schema import Schema
from gdpa.data.sources import open_source
from gdpa.data.vocabulary import Vocabularies, check_names


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """Some rows: their ``batch``, with zeros for labels and groups, and ``ids``, what some columns say of them.
    ``error(row, problem)`` names the place of a row. ``table`` is these columns as a table of pyarrow, with the types
    that they have in the source, the same for all rows; None where they have none, as in a CSV file."""

    batch: Batch
    ids: list[tuple[str, ...]]
    error: Callable[[int, str], DataError]
    table: Any = None


def unlabelled(
    source: Any, schema: Schema, vocabularies: Vocabularies, ids: Sequence[str] = (), batch_size: int = 512
) -> Iterator[Unlabelled]:
    """All rows in their order, at most ``batch_size`` at a time. Neither labels nor groups nor weights need be there;
    ``ids`` may be any columns. A row that cannot be read raises a DataError."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, not {batch_size}")
    opened, names = open_source(source), tuple(dict.fromkeys([*schema.feature_columns, *ids]))
    opened.check(names)
    check_names(vocabularies, schema)
    typed = opened.typed(list(ids)) if hasattr(opened, "typed") else None
    decoder = Decoder(schema, vocabularies)

    def rows() -> Iterator[Unlabelled]:
        for block in opened.blocks(opened.start(), batch_size, names):
            for task in block.tasks(np.arange(len(block))):
                columns = task.columns()
                found = decoder.features(columns)
                if found.bad:
                    raise found.bad[min(found.bad)]
                texts = [columns.texts(name) for name in ids]
                named = [tuple(text[row] for text in texts) for row in range(len(found))]
                table = None if typed is None else typed(columns)
                yield Unlabelled(to_batch([(found, 0, len(found))]), named, columns.error, table)

    return rows()  # so that what is wrong with the source is said here, and not at the first row
