"""Tables of a report: words on the left, numbers on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """``under``: in small letters below, such as a spread. ``heat``: from 0 to 1, the strength of its colour."""

    text: str
    under: str = ""
    heat: float | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Row:
    """``kind``: own (of gdpa), quiet (for scale)."""

    cells: Sequence[str | Cell]
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """``names``: how many columns on the left hold words."""

    id: str
    head: Sequence[str]
    rows: Sequence[Row]
    names: int = 1


def heat_scale(value: float, low: float, high: float) -> float:
    """Where ``value`` is between ``low`` and ``high``, from 0 to 1."""
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0
