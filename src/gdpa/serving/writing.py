"""Scores as CSV or Parquet, written as they come; the file has its name only when it is whole."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

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
    """The first scores tell the types of the ids, so that ``start`` opens the file for them."""

    def __init__(self, start: Callable[[Any], Any], ids: tuple[str, ...], columns: tuple[str, ...]) -> None:
        self._start, self._ids, self._columns = start, ids, columns
        self._writer: Any = None
        self._as_text: set[int] = set()
        self._held: list[Any] = []

    def add(self, scores: Scores) -> None:
        if self._writer is None:
            self._open(scores.table)
        self._held.append(self._table(scores))
        if sum(some.num_rows for some in self._held) >= ROW_GROUP:
            self.flush()

    def _open(self, table: Any) -> None:
        import pyarrow as pa

        places = range(len(self._ids))
        self._as_text = {i for i in places if table is None or not _storable(table.select([i]))}
        kinds = [pa.string() if i in self._as_text else table.schema.field(i).type for i in places]
        kinds += [(pa.float32(), pa.float64())[i % 2] for i in range(len(self._columns))]
        self._writer = self._start(pa.schema(list(zip((*self._ids, *self._columns), kinds, strict=True))))

    def _table(self, scores: Scores) -> Any:
        import pyarrow as pa

        ids = [_texts(scores, i) if i in self._as_text else scores.table.column(i) for i in range(len(self._ids))]
        numbers = [pa.array(column.numpy()) for column in _columns(scores)]
        return pa.Table.from_arrays([*ids, *numbers], schema=self._writer.schema)

    def flush(self) -> None:
        import pyarrow as pa

        if self._held:
            for part in _readable(pa.concat_tables(self._held)):
                self._writer.write_table(part)
        self._held = []

    def close(self) -> None:
        if self._writer is None:  # no row at all
            self._open(None)
        self.flush()


def _storable(column: Any) -> bool:
    """Whether Parquet has such a type: it has neither unions nor intervals nor dictionaries of views."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.write_table(column.slice(0, 1), sink := pa.BufferOutputStream())
        pq.ParquetFile(pa.BufferReader(sink.getvalue())).read()
    except pa.ArrowException:
        return False
    return True


def _texts(scores: Scores, i: int) -> Any:
    """Column ``i`` of the ids as text; null where the file says so, which a CSV file cannot."""
    import pyarrow as pa

    texts = [row[i] for row in scores.ids]
    if scores.table is None:
        return pa.array(texts, pa.string())
    values = scores.table.column(i).to_pylist()
    return pa.array([None if v is None else text for v, text in zip(values, texts, strict=True)], pa.string())


def _readable(table: Any) -> Iterator[Any]:
    """Parts with no more values in a dictionary than its indices can count: of an 8-bit one that changes from batch to
    batch, pyarrow would write all values into one row group, and could not read it."""
    import pyarrow as pa

    try:
        yield table.unify_dictionaries()
    except pa.ArrowInvalid:
        half = table.num_rows // 2
        yield from _readable(table.slice(0, half))
        yield from _readable(table.slice(half))


@contextmanager
def _parquet(path: Path, ids: tuple[str, ...], columns: tuple[str, ...]) -> Iterator[Writer]:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install '.[data]' in a clone of gdpa; or write .csv") from error
    with ExitStack() as opened:
        writer = _ParquetWriter(lambda schema: opened.enter_context(pq.ParquetWriter(path, schema)), ids, columns)
        yield writer
        writer.close()


WRITERS = {".csv": _csv, ".parquet": _parquet}
