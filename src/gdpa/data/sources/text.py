"""Lines of CSV and TSV files, with their places: an error can name its line, and reading can go on there.

Files are read as bytes, because only then is a position a number of bytes that one can return to. In a compressed file
it is a position in what was compressed; going there reads what lies before.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from gdpa.data.decoding.text import TextColumns
from gdpa.data.errors import DataError

# Rows and bytes that are decoded at once: more save nothing, and need more memory.
PART = 4096
PART_BYTES = 1 << 22
# What a blank line is made of. Tabs are not among it: in a TSV file they are fields, if empty ones.
_BLANK = b" \r\n"


class Header(NamedTuple):
    """The names of the columns, and where the first row begins."""

    names: tuple[str, ...]
    offset: int
    lines: int


Line = tuple[int, bytes, int, int]
"""A line that is not blank: its number from 1, its bytes, the offset behind it, and which of the files it is in.
A plain tuple, since to make a named one takes as long as all the rest of reading."""


def open_bytes(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else path.open("rb")


def delimiter_of(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")  # in capitals too, as some systems write them
    return "\t" if name.endswith((".tsv", ".tab")) else ","


def read_header(path: Path, delimiter: str) -> Header:
    """The first line that is not blank."""
    first = next(read_lines(path, 0, 0), None)
    if first is None:
        raise DataError("the file is empty; the first line should name the columns", path)
    number, content, end, _ = first
    content = content.removeprefix(b"\xef\xbb\xbf")  # the byte order mark that some editors write
    return Header(tuple(split(path, number, content, delimiter)), end, number)


def read_lines(path: Path, offset: int, lines: int, file: int = 0) -> Iterator[Line]:
    """Lines from byte ``offset`` on, before which there are ``lines`` others. Blank ones, without data, are skipped."""
    with open_bytes(path) as stream:
        number = lines
        try:
            stream.seek(offset)
            for number, content in enumerate(stream, lines + 1):
                offset += len(content)
                if content.strip(_BLANK):
                    yield number, content, offset, file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"the compressed file is damaged or cut short ({error})", path, number + 1) from error


def split(path: Path, number: int, content: bytes, delimiter: str) -> list[str]:
    """The fields of line ``number``."""
    try:
        text = content.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        bad = content[error.start : error.end]
        raise DataError(f"byte {error.start + 1} of the line is not UTF-8", path, number, value=bad) from error
    if '"' not in text:  # nearly always, and several times as fast
        return text.split(delimiter)
    try:
        return next(csv.reader([text], strict=True, delimiter=delimiter))
    except csv.Error as error:
        # An odd number of quotes: either one is missing, or the field goes on in the next line.
        hint = "; a field in quotes must end in the line that it begins in" if text.count('"') % 2 else ""
        raise DataError(f"not a valid line of CSV ({error}{hint})", path, number, value=text) from error


@dataclass(frozen=True)
class TextTask:
    """Lines of one or several files."""

    lines: Sequence[Line]
    paths: tuple[Path, ...]
    headers: tuple[Header, ...]
    delimiters: tuple[str, ...]
    names: tuple[str, ...]
    threads = False

    def __len__(self) -> int:
        return len(self.lines)

    def __reduce__(self) -> tuple[Any, ...]:
        """Lines in one piece, and where they are: pickling thousands of tuples takes longer than decoding."""
        numbers, contents, ends, files = zip(*self.lines, strict=True)
        places = np.array([numbers, ends, files, [len(content) for content in contents]], dtype=np.int64)
        return _unpickled, (b"".join(contents), places, self.paths, self.headers, self.delimiters, self.names)

    def columns(self) -> TextColumns:
        bad: dict[int, DataError] = {}
        rows: list[Sequence[str]] = []
        widths = [len(header.names) for header in self.headers]
        for row, (number, content, _, file) in enumerate(self.lines):
            try:
                found = split(self.paths[file], number, content, self.delimiters[file])
            except DataError as error:
                bad[row], found = error, []
            if len(found) != widths[file]:
                problem = f"{len(found)} columns, but the header has {widths[file]}"
                value = self.delimiters[file].join(found)
                bad.setdefault(row, DataError(problem, self.paths[file], number, value=value))
                found = [""] * widths[file]
            rows.append(found)
        return TextColumns(len(rows), self._by_name(rows), self._place, bad)

    def _by_name(self, rows: list[Sequence[str]]) -> dict[str, tuple[str, ...]]:
        files = {file for _, _, _, file in self.lines}
        orders = {file: [self.headers[file].names.index(name) for name in self.names] for file in files}
        if len({tuple(order) for order in orders.values()}) > 1:  # files with their columns in another order
            rows = [[row[i] for i in orders[line[3]]] for row, line in zip(rows, self.lines, strict=True)]
            orders = {0: list(range(len(self.names)))}
        columns = list(zip(*rows, strict=True)) if rows else []
        return {name: columns[i] for name, i in zip(self.names, next(iter(orders.values()), ()), strict=False)}

    def _place(self, row: int) -> tuple[Path, int]:
        number, _, _, file = self.lines[row]
        return self.paths[file], number


def _unpickled(contents: bytes, places: np.ndarray, *rest: Any) -> TextTask:
    stops = np.cumsum(places[3]).tolist()
    pieces = [contents[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    numbers, ends, files = places[:3].tolist()
    return TextTask(list(zip(numbers, pieces, ends, files, strict=True)), *rest)


@dataclass(frozen=True)
class TextBlock:
    lines: Sequence[Line]
    end: dict[str, int]
    source: TextSource
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.lines)

    def tasks(self, rows: np.ndarray) -> Sequence[TextTask]:
        lines = [self.lines[row] for row in rows.tolist()]
        found, begin, size = [], 0, 0
        for i, line in enumerate(lines, 1):
            size += len(line[1])
            if i - begin == PART or size > PART_BYTES or i == len(lines):
                found.append(self._task(lines[begin:i]))
                begin, size = i, 0
        return found

    def _task(self, lines: Sequence[Line]) -> TextTask:
        source = self.source
        return TextTask(lines, source.paths, source.headers, source.delimiters, self.names)


class TextSource:
    """CSV and TSV files, one after another; each has a header of its own."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self.delimiters = tuple(delimiter_of(path) for path in paths)
        self.headers = tuple(read_header(p, d) for p, d in zip(self.paths, self.delimiters, strict=True))

    def identity(self) -> dict[str, Any]:
        """Names and sizes: the folder may differ where a run is continued."""
        return {"files": [path.name for path in self.paths], "bytes": [path.stat().st_size for path in self.paths]}

    def start(self) -> dict[str, int]:
        return {"file": 0, "offset": self.headers[0].offset, "lines": self.headers[0].lines}

    def blocks(self, position: dict[str, int], rows: int, columns: tuple[str, ...]) -> Iterator[TextBlock]:
        lines = self._lines(position)
        while held := list(islice(lines, rows)):
            number, _, offset, file = held[-1]
            end = {"file": file, "offset": offset, "lines": number}
            yield TextBlock(held, end, self, columns)

    def _lines(self, position: dict[str, int]) -> Iterator[Line]:
        first = position.get("file", 0)
        yield from read_lines(self.paths[first], position["offset"], position["lines"], first)
        for file in range(first + 1, len(self.paths)):
            header = self.headers[file]
            yield from read_lines(self.paths[file], header.offset, header.lines, file)

    def check(self, columns: tuple[str, ...]) -> None:
        for path, header in zip(self.paths, self.headers, strict=True):
            for name in columns:
                if header.names.count(name) != 1:
                    problem = "is missing" if name not in header.names else "occurs more than once"
                    listed = ", ".join(header.names)
                    raise DataError(f"this column {problem}; the file has {listed}", path, header.lines, name)
            if next(read_lines(path, header.offset, header.lines), None) is None:
                raise DataError("the file has a header, but no rows", path)
