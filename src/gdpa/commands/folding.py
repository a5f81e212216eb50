"""Tables that are wider than the terminal, as several below each other: rich would leave columns out."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

NO_LIMIT = 100_000  # columns of characters


def show_table(console: Console, table: Table, names: int = 1) -> None:
    """``table`` whole, or in parts as wide as the console, each with the first ``names`` columns, which say what a row
    is; the title is over the first part, the caption under the last."""
    for part in folded(console, table, names):
        console.print(part)


def folded(console: Console, table: Table, names: int) -> list[Table]:
    if _width(console, table) <= console.width:
        return [table]
    groups: list[list[int]] = [[]]
    for i in range(names, len(table.columns)):
        wider = _part(console, table, [*range(names), *groups[-1], i])
        if groups[-1] and _width(console, wider) > console.width:
            groups.append([])
        groups[-1].append(i)
    parts = [_part(console, table, [*range(names), *group]) for group in groups]
    for part in parts[1:]:
        part.title = None
    for part in parts[:-1]:
        part.caption = None
    return parts


def _part(console: Console, table: Table, chosen: Sequence[int]) -> Table:
    """Some columns of ``table``, each as wide as it must be: rich would rather cut the last ones off."""
    part = copy.copy(table)
    part.columns, part.rows = [], []
    columns = [table.columns[i] for i in chosen]
    for c in columns:
        part.add_column(c.header, justify=c.justify, style=c.style, width=_needed(console, c))
    for row, cells in zip(table.rows, zip(*(c.cells for c in columns), strict=True), strict=True):
        part.add_row(*cells, style=row.style, end_section=row.end_section)
    return part


def _needed(console: Console, column: Column) -> int:
    """Headers may be broken between words, values may not."""
    widths = [console.measure(cell).maximum for cell in column.cells]
    return max([console.measure(column.header).minimum, *widths])


def _width(console: Console, table: Table) -> int:
    """Without a line that is broken."""
    return Measurement.get(console, console.options.update_width(NO_LIMIT), table).maximum
