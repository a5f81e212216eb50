"""Rows of a log in the order of time, each with what its user did before, and the files that they are written to."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

Row = dict[str, Any]
ENDINGS = (".csv", ".csv.gz", ".parquet")
CHUNK = 20_000  # rows of a Parquet row group


@dataclass(frozen=True)
class Converter:
    """One published data set: which preset its table has, where it comes from, and its rows from a folder."""

    preset: str
    origin: str
    rows: Callable[[Path, int], Iterator[Row]]

    def convert(self, raw: Path, out: Path, max_len: int) -> int:
        """How many rows were written. ``out`` is CSV (also .gz) or Parquet, by its name, and appears when complete."""
        if max_len < 1:
            raise ValueError(f"max_len must be positive, not {max_len}")
        if not out.name.lower().endswith(ENDINGS):
            raise ValueError(f"out must end in .csv, .csv.gz or .parquet, not {out.name!r}")
        partial = out.with_name(f".partial-{out.name}")
        count = 0
        try:
            with _open(partial) as write:
                for row in self.rows(raw, max_len):
                    write(row)
                    count += 1
            if count == 0:  # a table without rows would not even have columns
                raise ValueError(f"there are no rows in {str(raw)!r}")
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
        return count


def find(raw: Path, name: str, what: str, origin: str) -> Path:
    """A file of the data set, in the folder or one below it, as archives unpack."""
    for place in (raw / name, *sorted(raw.glob(f"*/{name}"))):
        if place.is_file():
            return place
    raise FileNotFoundError(f"{what} needs {name}, which is not in {str(raw)!r}; it is in {origin}")


def with_histories(
    events: Iterable[Row], user: str, past: Mapping[str, str], max_len: int, counts: Callable[[Row], bool]
) -> Iterator[Row]:
    """Each event with lists of its user's earlier ones, oldest first: ``past`` says which column each list is of.
    Events for which ``counts`` is false do not become part of histories. Those of one moment do not see each other."""
    seen: dict[Any, deque[Row]] = defaultdict(lambda: deque(maxlen=max_len))
    waiting: list[Row] = []
    for event in events:
        if waiting and event["time"] != waiting[0]["time"]:
            for old in waiting:
                seen[old[user]].append(old)
            waiting = []
        before = seen[event[user]]
        yield {**event, **{name: [old[column] for old in before] for name, column in past.items()}}
        if counts(event):
            waiting.append(event)


class _open:  # noqa: N801 - used as a function
    """A writer of rows, of the kind that the file's name asks for."""

    def __init__(self, path: Path) -> None:
        self._writer: _Csv | _Parquet = _Parquet(path) if path.suffix.lower() == ".parquet" else _Csv(path)

    def __enter__(self) -> Callable[[Row], None]:
        return self._writer.write

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.close()


class _Csv:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = gzip.open if path.suffix.lower() == ".gz" else open
        self._file = cast(TextIO, opened(path, "wt", encoding="utf-8", newline=""))
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._names: Sequence[str] = ()

    def write(self, row: Row) -> None:
        if not self._names:
            self._names = tuple(row)
            self._writer.writerow(self._names)
        self._writer.writerow([self._text(name, row[name]) for name in self._names])

    @staticmethod
    def _text(name: str, value: Any) -> Any:
        """Histories have ^ between their entries, and bags |."""
        if not isinstance(value, list):
            return value
        return ("^" if name.startswith("hist_") else "|").join(map(str, value))

    def close(self) -> None:
        self._file.close()


class _Parquet:
    def __init__(self, path: Path) -> None:
        from gdpa.data.sources.arrow import pa  # says what to install

        path.parent.mkdir(parents=True, exist_ok=True)
        self._pa, self._path, self._writer, self._rows = pa, path, cast(Any, None), cast(list[Row], [])

    def write(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) == CHUNK:
            self._flush()

    def _flush(self) -> None:
        import pyarrow.parquet as pq

        if self._rows:
            schema = None if self._writer is None else self._writer.schema
            table = self._pa.Table.from_pylist(self._rows, schema or self._schema())
            self._writer = self._writer or pq.ParquetWriter(self._path, table.schema)
            self._writer.write_table(table)
            self._rows = []

    def _schema(self) -> Any:
        """Of the first rows; lists that are empty in all of them hold whole numbers."""
        pa = self._pa
        found = pa.Table.from_pylist(self._rows).schema
        return pa.schema([
            pa.field(f.name, pa.list_(pa.int64()) if f.type == pa.list_(pa.null()) else f.type) for f in found
        ])  # fmt: skip

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
