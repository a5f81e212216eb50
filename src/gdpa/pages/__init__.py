"""The one look of every HTML report: palette.py has the colours, frame.py the layout, tables.py what a table is.

A report is a Jinja template of sections; ``render`` puts it into the frame and makes the contents from its headings.
Everything is inline, so that a file can be mailed.
"""

from __future__ import annotations

from gdpa.pages.frame import render, write
from gdpa.pages.tables import Cell, Row, Table, heat_scale

__all__ = ["Cell", "Row", "Table", "heat_scale", "render", "write"]
