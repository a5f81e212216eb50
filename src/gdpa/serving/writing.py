"""Scores as CSV or Parquet, written as they come; the file has its name only when it is whole."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gdpa.serving.scoring import Scores

COLUMNS = ("logit", "probability")
ROW_GROUP = 2**16  # rows of a Parquet file that are compressed together, and wait in memory until they are


class Writer(Protocol):
    def add(self, scores: Scores) -> None: ...


def score_columns(labels: Sequence[str]) -> tuple[str, ...]:
    """Two for each label, named after it where there are several."""
    return COLUMNS if len(labels) == 1 else tuple(f"{column}_{label}" for label in labels for column in COLUMNS)


def write(
    path: Path,
    ids: Sequence[str],
    scores: Iterable[Scores],
    overwrite: bool = False,
    labels: Sequence[str] = ("label",),
) -> int:
    """All ``scores`` into ``path``, whose ending says how; returns the number of rows."""
    if path.suffix not in WRITERS:
        raise ValueError(f"out must end in {' or '.join(WRITERS)}, got {str(path)!r}")
    columns = score_columns(labels)
    if clash := sorted(set(ids) & set(columns)):
        raise ValueError(f"the id column {clash[0]!r} has the same name as a column of the scores")
    if path.exists() and not overwrite:
        raise ValueError(f"{str(path)!r} already exists; --overwrite replaces it")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, partial = 0, path.with_name(path.name + ".partial")
    try:
        with WRITERS[path.suffix](partial, tuple(ids), columns) as writer:
            for some in scores:
                writer.add(some)
                rows += len(some.ids)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return rows


def _columns(scores: Scores) -> list[Tensor]:
    """Logits and probabilities of each label in turn."""
    parts = (scores.logits.reshape(len(scores.ids), -1), scores.probabilities().reshape(len(scores.ids), -1))
    return [column for pair in zip(*(part.unbind(1) for part in parts), strict=True) for column in pair]


class _CsvWriter:
    def __init__(self, file: Any, header: tuple[str, ...]) -> None:
        self._rows = csv.writer(file, lineterminator="\n")
        self._rows.writerow(header)

    def add(self, scores: Scores) -> None:
        """Nine digits are what it takes to tell any two float32 apart."""
        numbers = [[f"{number:.9g}" for number in column.tolist()] for column in _columns(scores)]
        self._rows.writerows((*ids, *own) for ids, own in zip(scores.ids, zip(*numbers, strict=True), strict=True))


@contextmanager
def _csv(path: Path, ids: tuple[str, ...], columns: tuple[str, ...]) -> Iterator[Writer]:
    with path.open("w", newline="", encoding="utf-8") as file:
        yield _CsvWriter(file, (*ids, *columns))


class _ParquetWriter:
    def __init__(self, writer: Any) -> None:
        self._writer, self._held = writer, []  # type: ignore[var-annotated]

    def add(self, scores: Scores) -> None:
        self._held.append(scores)
        if sum(len(some.ids) for some in self._held) >= ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        import pyarrow as pa

        if self._held:
            ids = [row for some in self._held for row in some.ids]
            columns = [pa.array(column, pa.string()) for column in zip(*ids, strict=True)]
            parts = zip(*(_columns(some) for some in self._held), strict=True)
            columns += [pa.array(torch.cat(column).numpy()) for column in parts]
            self._writer.write_table(pa.Table.from_arrays(columns, schema=self._writer.schema))
        self._held = []


@contextmanager
def _parquet(path: Path, ids: tuple[str, ...], columns: tuple[str, ...]) -> Iterator[Writer]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(
            "Parquet needs pyarrow: pip install '.[parquet]' in a clone of gdpa; or write .csv"
        ) from error
    kinds = [(name, pa.string()) for name in ids]
    kinds += [(name, (pa.float32(), pa.float64())[i % 2]) for i, name in enumerate(columns)]
    with pq.ParquetWriter(path, pa.schema(kinds)) as file:
        writer = _ParquetWriter(file)
        yield writer
        writer.flush()


WRITERS = {".csv": _csv, ".parquet": _parquet}
