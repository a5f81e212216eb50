"""Lines of a CSV file, one at a time, with their places: an error can name its line, and reading can go on there.

The file is read as bytes, because only then is a position a number of bytes that one can return to.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gdpa.data.errors import DataError


@dataclass(frozen=True)
class Header:
    """The names of the columns, and where the first row begins."""

    names: tuple[str, ...]
    offset: int
    lines: int


@dataclass(frozen=True)
class Line:
    """A line that is not blank: its number from 1, its bytes, and the offset behind it."""

    number: int
    content: bytes
    end: int


def read_header(path: Path, needed: tuple[str, ...]) -> Header:
    """The first line that is not blank. All ``needed`` columns must be there, once."""
    first = next(read_lines(path, 0, 0), None)
    if first is None:
        raise DataError("the file is empty; the first line should name the columns", path)
    content = first.content.removeprefix(b"\xef\xbb\xbf")  # the byte order mark that some editors write
    names = split(path, Line(first.number, content, first.end))
    for name in needed:
        if names.count(name) != 1:
            problem = "is missing" if name not in names else "is there more than once"
            raise DataError(f"this column {problem}; the file has {', '.join(names)}", path, first.number, name)
    return Header(tuple(names), first.end, first.number)


def read_lines(path: Path, offset: int, lines: int) -> Iterator[Line]:
    """Lines from byte ``offset`` on, before which there are ``lines`` others. Blank ones, without data, are skipped."""
    with path.open("rb") as file:
        file.seek(offset)
        for number, content in enumerate(file, lines + 1):
            offset += len(content)
            if content.strip():
                yield Line(number, content, offset)


def split(path: Path, line: Line) -> list[str]:
    """The fields of a line."""
    try:
        text = line.content.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        bad = line.content[error.start : error.end]
        raise DataError(f"byte {error.start + 1} of the line is not UTF-8", path, line.number, value=bad) from error
    if '"' not in text:  # nearly always, and several times as fast
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise DataError(f"not a line of CSV ({error})", path, line.number, value=text) from error


def fields(path: Path, line: Line, header: Header) -> dict[str, str]:
    """Column name -> field."""
    found = split(path, line)
    if len(found) != len(header.names):
        problem = f"{len(found)} columns, but the header has {len(header.names)}"
        raise DataError(problem, path, line.number, value=",".join(found))
    return dict(zip(header.names, found, strict=True))
