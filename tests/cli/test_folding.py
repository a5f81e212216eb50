"""Wide tables on narrow terminals: every column is there, and every value whole."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from gdpa.bench.report import tables
from gdpa.bench.results import read
from gdpa.commands.folding import folded, show_table

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu.json"


def console(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False)


def shown(table: Table, names: int, width: int) -> str:
    on = console(width)
    show_table(on, table, names)
    return on.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_benchmark_has_all_columns_on_a_narrow_terminal(width: int) -> None:
    document = read(RESULT)
    for table, names in ((tables.table(document), 3), (tables.comparison(document, document), 4)):
        text = shown(table, names, width)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
        for column in table.columns:
            assert all(word in text for word in str(column.header).split())
            assert all(str(cell) in text for cell in column.cells)


def test_parts_repeat_the_names_and_share_title_and_caption() -> None:
    table = Table("name", "first", "second", title="The title", caption="The caption")
    table.add_row("row", "1" * 20, "2" * 20, style="red", end_section=True)
    parts = folded(console(40), table, 1)
    assert [[str(c.header) for c in part.columns] for part in parts] == [["name", "first"], ["name", "second"]]
    assert [(part.title, part.caption) for part in parts] == [("The title", None), (None, "The caption")]
    assert [(part.rows[0].style, part.rows[0].end_section) for part in parts] == [("red", True)] * 2


def test_what_fits_stays_as_it_is() -> None:
    table = tables.table(read(RESULT))
    assert folded(console(160), table, 3) == [table]
    plain = console(160)
    plain.print(table)
    assert shown(table, 3, 160) == plain.file.getvalue()  # type: ignore[attr-defined]
