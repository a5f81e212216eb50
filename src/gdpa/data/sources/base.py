"""The protocol of sources: rows in blocks, from a position that a few numbers describe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from gdpa.data.decoding.rules import Columns


class Task(Protocol):
    """A part of a block, which a worker can be given: a thread where ``threads`` says so, or else a process, for which
    it can be pickled."""

    @property
    def threads(self) -> bool: ...

    def __len__(self) -> int: ...

    def columns(self) -> Columns: ...


class Block(Protocol):
    """Some successive rows. ``end`` is the position behind them."""

    @property
    def end(self) -> dict[str, int]: ...

    def __len__(self) -> int: ...

    def tasks(self, rows: np.ndarray) -> Sequence[Task]:
        """The block's rows of these numbers, in this order, divided into tasks that follow one another."""


class Source(Protocol):
    """Rows of a table. Reading keeps nothing, so that several readers may use one source."""

    def identity(self) -> dict[str, Any]:
        """Plain values that are equal where a position means the same rows."""

    def start(self) -> dict[str, int]:
        """The position of the first row."""

    def blocks(self, position: dict[str, int], rows: int, columns: tuple[str, ...]) -> Iterator[Block]:
        """Blocks of ``rows`` rows, the last of which may be smaller, with these columns."""

    def check(self, columns: tuple[str, ...]) -> None:
        """Refuses a source that lacks one of them, or has no rows, naming the file."""
