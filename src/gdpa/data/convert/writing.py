"""A log as CSV or Parquet, a block of rows at a time."""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from gdpa.data.convert.histories import Coded, Column, Log, narrow

ENDINGS = (".csv", ".csv.gz", ".parquet")
BLOCK = 20_000  # rows that are written at once, in Parquet as a row group
GZIP = 6  # effort: 9, the usual one, takes 1.7 times as long for files that are 1.5 % smaller
REPORTS = 20  # how often a long conversion tells how far it is
Write = Callable[[slice], None]
Watch = Callable[[int, str], AbstractContextManager[Callable[[str], None]]]
"""``with watch(steps, title) as step``: ``step(label)`` is called before each of the steps."""


@contextmanager
def unwatched(steps: int, title: str) -> Iterator[Callable[[str], None]]:
    yield lambda label: None


@dataclass(frozen=True)
class Converter:
    """One published data set: which preset its table has, where it comes from, its events, with histories of at most
    so many, from a folder, and the names of the files there that it reads."""

    preset: str
    origin: str
    read: Callable[[Path, int], Log]
    files: tuple[str, ...] = ()

    def convert(
        self, raw: Path, out: Path, max_len: int, watch: Watch = unwatched, tell: Callable[[str], None] = warnings.warn
    ) -> int:
        """How many rows were written. ``out`` is CSV (also .gz) or Parquet, by its name, and appears when complete.
        ``tell`` is called with what should be known of the data."""
        if max_len < 1:
            raise ValueError(f"max_len must be positive, not {max_len}")
        if not out.name.lower().endswith(ENDINGS):
            raise ValueError(f"out must end in .csv, .csv.gz or .parquet, not {out.name!r}")
        if out.exists() and any(out.samefile(place) for name in self.files for place in _places(raw, name)):
            raise ValueError(f"out must not be {str(out)!r}, a file of the data set itself, which would be overwritten")
        if out.suffix.lower() == ".parquet":
            import gdpa.data.sources.arrow  # noqa: F401 - says what to install, before a long reading
        with watch(1, "reading") as step:
            step(f"reading {raw}")
            log = self.read(raw, max_len)
        if not len(log):  # a table without rows would be of no use
            raise ValueError(f"there are no rows in {str(raw)!r}")
        for note in log.notes:
            tell(note)
        partial = out.with_name(f".partial-{out.name}")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with _open(partial, log) as write:
                _write_all(write, len(log), watch)
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
        return len(log)


def _write_all(write: Write, rows: int, watch: Watch) -> None:
    each = max(1, -(-rows // (REPORTS * BLOCK))) * BLOCK  # rows between two reports
    with watch(-(-rows // each), "writing") as step:
        for begin in range(0, rows, each):
            end = min(begin + each, rows)
            step(f"writing rows up to {end:,} of {rows:,}")
            for first in range(begin, end, BLOCK):
                write(slice(first, min(first + BLOCK, end)))


def find(raw: Path, name: str, what: str, origin: str) -> Path:
    """A file of the data set, in the folder or one below it, as archives unpack."""
    for place in _places(raw, name):
        return place
    raise FileNotFoundError(f"{what} needs {name}, which is not in {str(raw)!r}; it is in {origin}")


def _places(raw: Path, name: str) -> list[Path]:
    return [place for place in (raw / name, *sorted(raw.glob(f"*/{name}"))) if place.is_file()]


def _open(path: Path, log: Log) -> AbstractContextManager[Write]:
    return _parquet(path, log) if path.suffix.lower() == ".parquet" else _csv(path, log)


# ---- CSV -------------------------------------------------------------------------------------------------------------
@contextmanager
def _csv(path: Path, log: Log) -> Iterator[Write]:
    """Histories have ^ between their entries, and bags |. Lines are put together here: Python's csv looks at every
    letter of the histories, which takes ten times as long as all the rest."""
    columns = {name: _as_text(column) for name, column in log.columns.items()}
    past = {name: _Joined(column) for name, column in log.past.items()}
    with _text_file(path) as file:
        file.write(",".join([*columns, *past]) + "\n")

        def write(rows: slice) -> None:
            plain = (_texts(column[rows]) for column in columns.values())
            lists = (joined.texts(log.first[rows], log.end[rows]) for joined in past.values())
            file.writelines(f"{line}\n" for line in map(",".join, zip(*plain, *lists, strict=True)))

        yield write


def _text_file(path: Path) -> TextIO:
    if path.suffix.lower() != ".gz":
        return path.open("w", encoding="utf-8", newline="")
    return cast(TextIO, gzip.open(path, "wt", GZIP, "utf-8", newline=""))


def _as_text(column: Column) -> Column:
    if not isinstance(column, Coded):
        return column
    texts = ("|".join(value) if isinstance(value, list) else value for value in column.values)
    return Coded(column.codes, [_quoted(text) for text in texts])


def _texts(column: Column) -> list[str]:
    if isinstance(column, Coded):
        return [column.values[code] for code in column.codes.tolist()]
    return [str(value) for value in column.tolist()]


def _quoted(text: str) -> str:
    """As csv.QUOTE_MINIMAL."""
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\r\n') else text


class _Joined:
    """All values of a column in one text, of which every history is a piece: the histories of a user's rows overlap,
    and to join the values of each would take fifty times as long."""

    def __init__(self, column: Column) -> None:
        parts, lengths = [], []
        for first in range(0, len(column), BLOCK):
            texts = _texts(column[first : first + BLOCK])
            parts.append("^".join([*texts, ""]))
            lengths.append(np.fromiter(map(len, texts), np.int64, len(texts)) + 1)
        self._text = "".join(parts)
        self._offsets = narrow(np.concatenate([[0], *lengths]).cumsum())
        self._plain = _quoted(self._text) is self._text

    def texts(self, first: np.ndarray, end: np.ndarray) -> list[str]:
        begins = self._offsets[first]
        ends = np.maximum(self._offsets[end] - 1, begins)  # without the ^ behind the last
        found = [self._text[begin:stop] for begin, stop in zip(begins.tolist(), ends.tolist(), strict=True)]
        return found if self._plain else [_quoted(text) for text in found]


# ---- Parquet ---------------------------------------------------------------------------------------------------------
@contextmanager
def _parquet(path: Path, log: Log) -> Iterator[Write]:
    from gdpa.data.sources.arrow import pa  # says what to install

    import pyarrow.parquet as pq  # isort: skip

    def table(rows: slice) -> Any:
        plain = {name: _array(column[rows]) for name, column in log.columns.items()}
        first, end = log.first[rows].astype(np.int64), log.end[rows].astype(np.int64)
        offsets = np.concatenate([[0], (end - first).cumsum()])
        places = np.repeat(first - offsets[:-1], end - first) + np.arange(offsets[-1])
        bounds = pa.array(offsets, pa.int32())
        lists = {name: pa.ListArray.from_arrays(bounds, _array(held[places])) for name, held in log.past.items()}
        return pa.table({**plain, **lists})

    with pq.ParquetWriter(path, table(slice(0, 0)).schema, compression="zstd") as writer:
        yield lambda rows: writer.write_table(table(rows))


def _array(column: Column) -> Any:
    from gdpa.data.sources.arrow import pa

    if not isinstance(column, Coded):
        return pa.array(column.astype(np.int64) if column.dtype.kind in "bi" else column)
    lists = any(isinstance(value, list) for value in column.values)
    return pa.array(column.values, pa.list_(pa.string()) if lists else pa.string()).take(pa.array(column.codes))
