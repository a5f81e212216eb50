"""Lines of published files as records: what is wrong with one is said with its file, line, column and value."""

from __future__ import annotations

import io
import math
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gdpa.data.convert.histories import narrow
from gdpa.data.errors import DataError
from gdpa.data.sources.text import Header, read_header, read_lines, split

Kind = Callable[[str], Any]
AT_ONCE = 200_000  # lines that are parsed together


def finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def flag(text: str) -> int:
    return ("0", "1").index(text)


def whole(text: str) -> int:
    """Of 64 bits."""
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise ValueError(text)
    return number


PROBLEMS: dict[Kind, str] = {whole: "not a whole number", finite: "not a finite number", flag: "neither 0 nor 1"}
DTYPES: dict[Kind, str] = {whole: "q", finite: "d", flag: "b"}  # of array and of numpy


@dataclass(frozen=True)
class Records:
    """Lines that are not blank, below ``header``, whose ``names`` are those of their fields. ``quoted``: as in CSV, and
    in UTF-8; or else plain, in Latin-1."""

    path: Path
    header: Header
    separator: str
    quoted: bool

    def columns(self, kinds: Mapping[str, Kind]) -> dict[str, np.ndarray]:
        """These columns, which are numbers. Parsed by numpy; line by line where that does not understand a file, to say
        what is wrong with it."""
        self._check(kinds)
        parsed = self._parsed(kinds) if len(self.separator) == 1 else None
        if parsed is not None:
            return parsed
        held = [array(DTYPES[kind]) for kind in kinds.values()]
        for record in self.read(kinds):
            for column, value in zip(held, record, strict=True):
                column.append(value)
        return {name: np.array(column) for name, column in zip(kinds, held, strict=True)}

    def _parsed(self, kinds: Mapping[str, Kind]) -> dict[str, np.ndarray] | None:
        """None if a line is not what it should be. Columns nobody asks for may be anything, but must be there."""
        names = self.header.names
        fields = np.dtype([(f"f{i}", DTYPES[kinds[name]] if name in kinds else "S1") for i, name in enumerate(names)])
        parts: dict[str, list[np.ndarray]] = {name: [] for name in kinds}
        with self.path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("error")  # a whole number that is written as a float
            file.seek(self.header.offset)
            text = io.TextIOWrapper(file, "latin-1")
            try:
                while lines := list(islice(text, AT_ONCE)):
                    found = np.loadtxt(lines, fields, delimiter=self.separator, comments=None, ndmin=1)
                    for name, kind in kinds.items():
                        parts[name].append(narrow(_checked(kind, found[f"f{names.index(name)}"])))
            except (ValueError, Warning):
                return None
        return {name: np.concatenate(part) for name, part in parts.items()} if all(parts.values()) else None

    def read(self, kinds: Mapping[str, Kind]) -> Iterator[tuple[Any, ...]]:
        """These columns of each line, each as its kind, a function of the text, makes it."""
        self._check(kinds)
        names = self.header.names
        columns = [(names.index(name), kind) for name, kind in kinds.items()]
        for number, fields in self._lines():
            if len(fields) != len(names):
                some = f"{len(fields)} field{'' if len(fields) == 1 else 's'}"
                problem = f"{some}, not the {len(names)} of {', '.join(names)}"
                raise DataError(problem, self.path, number, value=fields)
            try:
                yield tuple([kind(fields[i]) for i, kind in columns])
            except ValueError as error:
                raise self._wrong(kinds, number, fields) from error

    def _check(self, kinds: Mapping[str, Kind]) -> None:
        for name in kinds:
            if name not in self.header.names:
                problem = f"this column is missing; the file has {', '.join(self.header.names)}"
                raise DataError(problem, self.path, 1, name)

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        for number, content, _, _ in read_lines(self.path, self.header.offset, self.header.lines):
            if self.quoted:
                yield number, split(self.path, number, content, self.separator)
            else:
                yield number, content.decode("latin-1").rstrip("\r\n").split(self.separator)

    def _wrong(self, kinds: Mapping[str, Kind], number: int, fields: list[str]) -> DataError:
        for name, kind in kinds.items():
            text = fields[self.header.names.index(name)]
            try:
                kind(text)
            except ValueError:
                return DataError(PROBLEMS[kind], self.path, number, name, text)
        raise AssertionError("every field can be read")


def _checked(kind: Kind, column: np.ndarray) -> np.ndarray:
    """Refuses what numpy reads, and the kind does not."""
    if kind is finite and not np.isfinite(column).all():
        raise ValueError("inf or NaN")
    if kind is flag and ((column != 0) & (column != 1)).any():
        raise ValueError("no flag")
    return column.copy()  # the lines' other fields need not be kept


def separated(path: Path, separator: str, names: Sequence[str]) -> Records:
    """A file without a header, in Latin-1."""
    return Records(path, Header(tuple(names), 0, 0), separator, quoted=False)


def with_header(path: Path) -> Records:
    """A file of CSV, in UTF-8."""
    return Records(path, read_header(path, ","), ",", quoted=True)
