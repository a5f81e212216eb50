"""Scores as CSV or Parquet, written as they come; the file has its name only when it is whole."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from gdpa.serving.scoring import Scores

COLUMNS = ("logit", "probability")
ROW_GROUP = 2**16  # rows of a Parquet file that are compressed together, and wait in memory until they are


class Writer(Protocol):
    def add(self, scores: Scores) -> None: ...


def write(path: Path, ids: Sequence[str], scores: Iterable[Scores], overwrite: bool = False) -> int:
    """All ``scores`` into ``path``, whose ending says how; returns the number of rows."""
    if path.suffix not in WRITERS:
        raise ValueError(f"out must end in {' or '.join(WRITERS)}, got {str(path)!r}")
    if clash := sorted(set(ids) & set(COLUMNS)):
        raise ValueError(f"the id column {clash[0]!r} has the name of a column of the scores")
    if path.exists() and not overwrite:
        raise ValueError(f"{str(path)!r} is there already; --overwrite replaces it")
    rows, partial = 0, path.with_name(path.name + ".partial")
    try:
        with WRITERS[path.suffix](partial, tuple(ids)) as writer:
            for some in scores:
                writer.add(some)
                rows += len(some.ids)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return rows


class _CsvWriter:
    def __init__(self, file: Any, ids: tuple[str, ...]) -> None:
        self._rows = csv.writer(file, lineterminator="\n")
        self._rows.writerow([*ids, *COLUMNS])

    def add(self, scores: Scores) -> None:
        """Nine digits are what it takes to tell any two float32 apart."""
        numbers = zip(scores.logits.tolist(), scores.probabilities().tolist(), strict=True)
        self._rows.writerows(
            (*ids, f"{logit:.9g}", f"{p:.9g}") for ids, (logit, p) in zip(scores.ids, numbers, strict=True)
        )


@contextmanager
def _csv(path: Path, ids: tuple[str, ...]) -> Iterator[Writer]:
    with path.open("w", newline="", encoding="utf-8") as file:
        yield _CsvWriter(file, ids)


class _ParquetWriter:
    def __init__(self, writer: Any, ids: tuple[str, ...]) -> None:
        self._writer, self._ids, self._held = writer, ids, []  # type: ignore[var-annotated]

    def add(self, scores: Scores) -> None:
        self._held.append(scores)
        if sum(len(some.ids) for some in self._held) >= ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        import pyarrow as pa
        import torch

        if self._held:
            ids = [row for some in self._held for row in some.ids]
            columns = [pa.array(column, pa.string()) for column in zip(*ids, strict=True)]
            logits = torch.cat([some.logits for some in self._held]).numpy()
            probabilities = torch.cat([some.probabilities() for some in self._held]).numpy()
            self._writer.write_table(
                pa.Table.from_arrays([*columns, pa.array(logits), pa.array(probabilities)], schema=self._writer.schema)
            )
        self._held = []


@contextmanager
def _parquet(path: Path, ids: tuple[str, ...]) -> Iterator[Writer]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(
            "Parquet needs pyarrow: pip install '.[parquet]' in a clone of gdpa; or write .csv"
        ) from error
    kinds = [*((name, pa.string()) for name in ids), ("logit", pa.float32()), ("probability", pa.float64())]
    with pq.ParquetWriter(path, pa.schema(kinds)) as file:
        writer = _ParquetWriter(file, ids)
        yield writer
        writer.flush()


WRITERS = {".csv": _csv, ".parquet": _parquet}
