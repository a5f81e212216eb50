"""Figures as SVG inside a page: colours and fonts are the page's own, so that they follow it into the dark.

A figure is drawn in marker colours, which become CSS variables in the SVG; palette.py gives them values.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INK, MUTED, GRID, PAPER = "#010101", "#010102", "#010103", "#010104"
SERIES = tuple(f"#0102{i:02x}" for i in range(8))
PLUS = (37, 99, 235)  # of weights above zero, on any background; below zero
MINUS = (234, 88, 12)
_VARIABLES = {
    INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper",
    **{c: f"--series-{i}" for i, c in enumerate(SERIES)},
}  # fmt: skip
STYLE: Any = {
    "svg.fonttype": "none", "font.size": 9, "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": MUTED,
    "xtick.color": MUTED, "ytick.color": MUTED, "grid.color": GRID, "grid.linewidth": 0.7, "axes.grid": True,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10,
    "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 8.5, "lines.linewidth": 1.8,
}  # fmt: skip


@contextmanager
def drawing(width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """(figure, axes) of that many inches at 72 dots, in the page's style."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots()


def plain_ticks(axis: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers, several of them even where it spans less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 3.0, 5.0, 7.0) if decades < 1 else (1.0, 2.0, 5.0) if decades < 2 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def to_svg(figure: Any, name: str, title: str) -> str:
    """An <svg> element for a page; ``title`` says in words what it shows, ``name`` is unique in the page."""
    import matplotlib

    held = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):  # ids that depend on the figure alone
        figure.savefig(held, format="svg", transparent=True, metadata=nothing)
    text = held.getvalue()
    text = text[text.index("<svg") :]
    inner = text[text.index(">") + 1 :]
    box = re.search(r'viewBox="([^"]+)"', text)
    assert box is not None
    for colour, variable in _VARIABLES.items():
        inner = inner.replace(colour, f"var({variable})")
    inner = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend|\w+Collection)_\d+"', "", inner
    )
    inner = re.sub(r"font-family: [^;\"]+;? ?", "", inner).replace("xlink:href", "href")
    inner = re.sub(r"(font: [^'\";]*?)'DejaVu Sans'[^;\"]*", r"\1sans-serif", inner)
    width = 1.2 * float(box[1].split()[2])  # where a page does not scale it
    head = f'<svg role="img" aria-label="{_escaped(title)}" width="{width:.0f}" viewBox="{box[1]}">'
    return head + f"<title>{_escaped(title)}</title>" + inner


def _escaped(text: str) -> str:
    from markupsafe import escape

    return str(escape(text))
