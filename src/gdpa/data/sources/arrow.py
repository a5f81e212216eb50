"""Rows of Parquet and Arrow files, frames and data sets, all by pyarrow: streamed, and only the columns that are asked
for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

try:
    import pyarrow as pa
except ImportError as error:
    raise ImportError("Parquet, Arrow and frames need pyarrow: pip install '.[data]' in a clone of gdpa") from error

from gdpa.data.decoding.arrow import ArrowColumns
from gdpa.data.decoding.forms import has_coded_lists, takeable
from gdpa.data.errors import DataError

READ = 8192  # rows of a file that are read at once
Names = list[str]


class Unit(Protocol):
    """One file or object of rows."""

    @property
    def name(self) -> str: ...

    def columns(self) -> Names: ...

    def schema(self) -> pa.Schema | None:
        """None where the types are not known before everything is read."""

    def identity(self) -> Any:
        """Its own part of what must be equal for a position to mean the same rows."""

    def read(self, names: Names, start: int) -> Iterator[pa.Table]:
        """Its rows from ``start`` on, some at a time."""


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What Arrow says of a file that it cannot read, with the name of the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"this file cannot be read ({str(error).rstrip('.')})", path) from error


@dataclass(frozen=True)
class ParquetFile:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def columns(self) -> Names:
        import pyarrow.parquet as pq

        with _named(self.path):
            return pq.read_schema(self.path).names

    def schema(self) -> pa.Schema:
        import pyarrow.parquet as pq

        with _named(self.path):
            return pq.read_schema(self.path)

    def identity(self) -> Any:
        return [self.path.name, self.path.stat().st_size]

    def read(self, names: Names, start: int) -> Iterator[pa.Table]:
        """Row groups before ``start`` are not read. Nothing is read ahead, so that memory does not depend on the
        file's size."""
        import pyarrow.parquet as pq

        with _named(self.path), pq.ParquetFile(self.path, pre_buffer=False) as file:
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            first = 0
            while first < len(sizes) and start >= sizes[first]:
                start, first = start - sizes[first], first + 1
            groups = list(range(first, len(sizes)))
            # Of lists of dictionaries pyarrow 26 cannot join the row groups of a batch; apart, small ones take longer.
            apart = any(has_coded_lists(file.schema_arrow.field(name).type) for name in names)
            for some in [[group] for group in groups] if apart or not groups else [groups]:
                for batch in file.iter_batches(READ, some, columns=names):
                    yield from _behind(pa.Table.from_batches([batch]), start)
                    start = max(0, start - batch.num_rows)


@dataclass(frozen=True)
class ArrowFile:
    """The file and the stream format, mapped into memory."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def columns(self) -> Names:
        with _named(self.path), pa.memory_map(str(self.path)) as held:
            return _reader(held).schema.names

    def schema(self) -> pa.Schema:
        with _named(self.path), pa.memory_map(str(self.path)) as held:
            return _reader(held).schema

    def identity(self) -> Any:
        return [self.path.name, self.path.stat().st_size]

    def read(self, names: Names, start: int) -> Iterator[pa.Table]:
        with _named(self.path), pa.memory_map(str(self.path)) as held:
            reader = _reader(held)
            streamed = not hasattr(reader, "num_record_batches")
            batches = reader if streamed else (reader.get_batch(i) for i in range(reader.num_record_batches))
            for batch in batches:
                yield from _behind(pa.Table.from_batches([batch]).select(names), start)
                start = max(0, start - batch.num_rows)


def _reader(held: Any) -> Any:
    try:
        return pa.ipc.open_file(held)
    except pa.ArrowInvalid:
        held.seek(0)
        return pa.ipc.open_stream(held)


@dataclass(frozen=True, eq=False)
class InMemory:
    """A table that is there already."""

    name: str
    table: pa.Table

    def columns(self) -> Names:
        return self.table.column_names

    def schema(self) -> pa.Schema:
        return self.table.schema

    def identity(self) -> Any:
        return [self.name, self.table.num_rows]

    def read(self, names: Names, start: int) -> Iterator[pa.Table]:
        yield from _behind(self.table.select(names), start)


@dataclass(frozen=True, eq=False)
class HuggingFace:
    """A ``datasets.Dataset`` or ``IterableDataset``; of the latter a position is reached by reading up to it."""

    name: str
    found: Any

    def columns(self) -> Names:
        names = self.found.column_names
        if names is None:  # a stream that does not know before its first row
            names = list(next(iter(self.found)))
        return list(names)

    def schema(self) -> pa.Schema | None:
        return self.found.features.arrow_schema if hasattr(self.found, "__len__") else None

    def identity(self) -> Any:
        return [self.name, len(self.found) if hasattr(self.found, "__len__") else None]

    def read(self, names: Names, start: int) -> Iterator[pa.Table]:
        if not hasattr(self.found, "__len__"):
            for rows in self.found.select_columns(names).skip(start).iter(READ):
                yield pa.table(rows)
            return
        arrow = self.found.select_columns(names).with_format("arrow")
        for i in range(start, len(arrow), READ):
            yield arrow[i : i + READ]


def _behind(table: pa.Table, start: int) -> Iterator[pa.Table]:
    """In parts, without the first ``start`` rows."""
    for i in range(start, table.num_rows, READ):
        yield table.slice(i, READ)


@dataclass(frozen=True)
class TableTask:
    """Rows of a block. Arrow works without holding Python's lock, so that threads do where text needs processes."""

    block: TableBlock
    rows: np.ndarray
    threads = True

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self) -> ArrowColumns:
        first, table = int(self.rows[0]), self.block.table
        if np.array_equal(self.rows, np.arange(first, first + len(self.rows))):
            return ArrowColumns(table.slice(first, len(self.rows)), self._place)
        return ArrowColumns(self.block.takeable.take(pa.array(self.rows)), self._place)

    def _place(self, row: int) -> tuple[str, int]:
        at = int(self.rows[row])
        begin, name, first = next(origin for origin in reversed(self.block.origins) if origin[0] <= at)
        return name, first + at - begin + 1


@dataclass(frozen=True)
class TableBlock:
    """Rows of one or several units: ``origins`` are (where in the table they begin, the unit's name, the row there)."""

    table: pa.Table
    origins: tuple[tuple[int, str, int], ...]
    end: dict[str, int]

    def __len__(self) -> int:
        return self.table.num_rows

    @cached_property
    def takeable(self) -> pa.Table:
        """For rows in another order."""
        return takeable(self.table)

    def tasks(self, rows: np.ndarray) -> Sequence[TableTask]:
        return [TableTask(self, rows[i : i + READ]) for i in range(0, len(rows), READ)]


class TableSource:
    """Units, one after another. A position is a unit and a row of it."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)

    def identity(self) -> dict[str, Any]:
        return {"tables": [unit.identity() for unit in self.units]}

    def start(self) -> dict[str, int]:
        return {"file": 0, "at": 0}

    def blocks(self, position: dict[str, int], rows: int, columns: tuple[str, ...]) -> Iterator[TableBlock]:
        held: list[tuple[pa.Table, str, int]] = []
        count = 0
        for table, file, at in self._tables(position, columns):
            used = 0
            while count + table.num_rows - used >= rows:
                taken = rows - count
                held.append((table.slice(used, taken), self.units[file].name, at + used))
                used += taken
                yield _block(held, {"file": file, "at": at + used})
                held, count = [], 0
            if used < table.num_rows:
                held.append((table.slice(used), self.units[file].name, at + used))
                count += table.num_rows - used
            end = {"file": file, "at": at + table.num_rows}
        if held:
            yield _block(held, end)

    def typed(self, names: Names) -> Callable[[ArrowColumns], pa.Table] | None:
        """How to have these columns of any rows as they are in the source, always of the same types, which are those
        that all units have together: a unit may hold nothing but nulls. None where the types are not known."""
        known = [schema for unit in self.units if (schema := unit.schema()) is not None]
        if len(known) < len(self.units):
            return None
        own = [pa.schema([schema.field(name) for name in names]) for schema in known]
        if all(schema.equals(own[0]) for schema in own):
            return lambda columns: columns.table.select(names)
        empty = _block([(s.empty_table(), unit.name, 0) for s, unit in zip(own, self.units, strict=True)], {}).table
        return lambda columns: _joined([empty, columns.table.select(names)])

    def _tables(self, position: dict[str, int], columns: tuple[str, ...]) -> Iterator[tuple[pa.Table, int, int]]:
        start = position["at"]
        for file in range(position["file"], len(self.units)):
            for table in self.units[file].read(list(columns), start):
                yield table, file, start
                start += table.num_rows
            start = 0

    def check(self, columns: tuple[str, ...]) -> None:
        for unit in self.units:
            names = unit.columns()
            for name in columns:
                if names.count(name) != 1:
                    problem = "is missing" if name not in names else "occurs more than once"
                    raise DataError(f"this column {problem}; there are {', '.join(names)}", unit.name, column=name)
            if next(iter(unit.read(list(columns[:1]), 0)), None) is None:
                raise DataError("the table has no rows", unit.name)


def _block(held: list[tuple[pa.Table, str, int]], end: dict[str, int]) -> TableBlock:
    origins, begin = [], 0
    for table, name, at in held:
        origins.append((begin, name, at))
        begin += table.num_rows
    try:
        return TableBlock(_joined([table for table, _, _ in held]), tuple(origins), end)
    except pa.ArrowException as error:
        raise _unlike(held, error) from error


def _joined(tables: list[pa.Table]) -> pa.Table:
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive")


def _unlike(held: list[tuple[pa.Table, str, int]], error: Exception) -> DataError:
    """Which column of which unit cannot be joined with those before it."""
    units = [unit for _, unit, _ in held]
    for name in held[0][0].column_names:
        parts = [table.select([name]) for table, _, _ in held]
        if own := _clash(parts):
            at = bisect_left(range(len(parts)), True, key=lambda i: _clash(parts[: i + 1]) is not None)
            other = next((i for i in range(at) if _clash([parts[i], parts[at]])), 0)  # not one whose values are null
            here, there = (parts[i].schema.field(name).type for i in (at, other))
            kinds = f"{here} here, but {there} in {units[other]}"
            return DataError(f"this column is of type {kinds} ({own})", units[at], column=name)
    return DataError(f"these tables cannot be joined ({error})", units[0])


def _clash(tables: list[pa.Table]) -> Exception | None:
    try:
        _joined(tables)
    except pa.ArrowException as error:
        return error
    return None


def open_tables(paths: Sequence[Path]) -> TableSource:
    units: list[Unit] = [
        ParquetFile(path) if path.name.lower().endswith((".parquet", ".pq")) else ArrowFile(path) for path in paths
    ]
    return TableSource(units)


def open_object(found: Any) -> TableSource:
    """By what it can do, so that neither pandas nor polars nor datasets is imported."""
    kind = f"{type(found).__module__.partition('.')[0]}.{type(found).__name__}"
    if isinstance(found, pa.Table):
        return TableSource([InMemory(kind, found)])
    if isinstance(found, pa.RecordBatch):
        return TableSource([InMemory(kind, pa.Table.from_batches([found]))])
    if kind == "pandas.DataFrame":
        return TableSource([InMemory(kind, pa.Table.from_pandas(found, preserve_index=False))])
    if kind == "polars.DataFrame":
        return TableSource([InMemory(kind, found.to_arrow())])
    if kind in ("datasets.Dataset", "datasets.IterableDataset"):
        return TableSource([HuggingFace(kind, found)])
    hint = "; collect() it first" if kind == "polars.LazyFrame" else ""
    raise TypeError(
        "source must be a path or a list of paths, a pandas or polars frame, a pyarrow table, a Hugging Face data set "
        f"or a Source, got {kind}{hint}"
    )
