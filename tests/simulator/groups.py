"""What a warp asks for in groups, and what is done at any time until it waits for them."""

from __future__ import annotations

from typing import Any


class Groups:
    """``open``: asked for, in no group yet."""

    def __init__(self, warp: Any) -> None:
        self.warp = warp
        self.open: list[Any] = []
        self.groups: list[list[Any]] = []

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []
        if self.warp.program.grid.chance.random() < 0.3:
            self.wait(0)

    def wait(self, n: int) -> None:
        """Do all groups but the last ``n``."""
        while len(self.groups) > n:
            self.do(self.groups.pop(0))

    def do(self, group: list[Any]) -> None:
        raise NotImplementedError
