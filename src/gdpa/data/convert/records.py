"""Lines of published files as records: what is wrong with one is said with its file, line, column and value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpa.data.errors import DataError
from gdpa.data.sources.text import read_header, read_lines, split

Kind = Callable[[str], Any]


def finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def flag(text: str) -> int:
    return ("0", "1").index(text)


PROBLEMS: dict[Kind, str] = {int: "not a whole number", finite: "not a finite number", flag: "neither 0 nor 1"}


@dataclass(frozen=True)
class Records:
    """``lines`` are (number from 1, fields) of those that are not blank; ``names`` are the names of the fields."""

    path: Path
    names: Sequence[str]
    lines: Iterator[tuple[int, list[str]]]

    def read(self, kinds: Mapping[str, Kind]) -> Iterator[tuple[Any, ...]]:
        """These columns of each line, each as its kind, a function of the text, makes it."""
        for name in kinds:
            if name not in self.names:
                raise DataError(f"this column is missing; the file has {', '.join(self.names)}", self.path, 1, name)
        columns = [(self.names.index(name), kind) for name, kind in kinds.items()]
        for number, fields in self.lines:
            if len(fields) != len(self.names):
                some = f"{len(fields)} field{'' if len(fields) == 1 else 's'}"
                problem = f"{some}, not the {len(self.names)} of {', '.join(self.names)}"
                raise DataError(problem, self.path, number, value=fields)
            try:
                yield tuple([kind(fields[i]) for i, kind in columns])
            except ValueError as error:
                raise self._wrong(kinds, number, fields) from error

    def _wrong(self, kinds: Mapping[str, Kind], number: int, fields: list[str]) -> DataError:
        for name, kind in kinds.items():
            text = fields[self.names.index(name)]
            try:
                kind(text)
            except ValueError:
                return DataError(PROBLEMS[kind], self.path, number, name, text)
        raise AssertionError("every field can be read")


def separated(path: Path, separator: str, names: Sequence[str]) -> Records:
    """A file without a header, in Latin-1."""
    lines = read_lines(path, 0, 0)
    split_lines = ((n, content.decode("latin-1").rstrip("\r\n").split(separator)) for n, content, _, _ in lines)
    return Records(path, names, split_lines)


def with_header(path: Path) -> Records:
    """A file of CSV, in UTF-8."""
    header = read_header(path, ",")
    lines = read_lines(path, header.offset, header.lines)
    return Records(path, header.names, ((n, split(path, n, content, ",")) for n, content, _, _ in lines))
