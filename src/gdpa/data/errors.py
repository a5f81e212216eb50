"""What is wrong with a data file, and where."""

from __future__ import annotations

from pathlib import Path


class DataError(ValueError):
    """A file that is not what its schema says. The message names the file, the line or row, the column and the value.

    Text has lines, the header being one; tables have rows, counted from 1.
    """

    def __init__(
        self,
        problem: str,
        path: str | Path,
        line: int | None = None,
        column: str | None = None,
        value: object = None,
        row: int | None = None,
    ) -> None:
        where = str(path) if line is None else f"{path}:{line}"
        if row is not None:
            where += f", row {row}"
        if column is not None:
            where += f", column {column!r}"
        if value is not None:
            where += f", value {_short(repr(value))}"
        super().__init__(f"{where}: {problem}")
        self.problem, self.path, self.line, self.column, self.value = problem, Path(path), line, column, value
        self.row = row
        self.of_row = False  # whether it is one of those that skip_bad leaves out

    def __reduce__(self) -> tuple[type[DataError], tuple[object, ...]]:
        """Worker processes send their errors to the main process by pickle."""
        return DataError, (self.problem, self.path, self.line, self.column, self.value, self.row)


def as_row(error: DataError) -> DataError:
    """As one that skip_bad would leave out, if it were larger."""
    error.of_row = True
    return error


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[:most] + "..."
