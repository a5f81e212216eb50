"""Barriers in shared memory, which copies and threads complete, and named ones, at which warps wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class _Phase:
    count: int
    missing: int
    bytes: int = 0  # that were announced, less those that have come
    number: int = 0


class MBarriers:
    """Of one program, by their addresses."""

    def __init__(self) -> None:
        self.found: dict[int, _Phase] = {}

    def init(self, warp: Any, address: Any, count: int, where: Any) -> None:
        for at in _each(address, where):
            self.found[at] = _Phase(count, count)

    def arrive(self, warp: Any, address: Any, count: int, where: Any) -> None:
        for at in _each(address, where):
            phase = self._of(warp, at)
            if phase.missing < count:
                warp.fail(f"more arrivals at a barrier than it has room for ({phase.count})")
            phase.missing -= count
            _advance(phase)

    def arrive_expecting(self, warp: Any, address: Any, size: int, where: Any) -> None:
        for at in _each(address, where):
            self._of(warp, at).bytes += size
        self.arrive(warp, address, 1, where)

    def complete(self, warp: Any, address: int, size: int) -> None:
        phase = self._of(warp, address)
        phase.bytes -= size
        _advance(phase)

    def has_passed(self, warp: Any, address: int, parity: int) -> bool:
        return self._of(warp, address).number & 1 != parity

    def _of(self, warp: Any, address: int) -> _Phase:
        if address not in self.found:
            warp.fail(f"no barrier at address {address} of shared memory")
        return self.found[address]


def _advance(phase: _Phase) -> None:
    if phase.missing == 0 and phase.bytes == 0:
        phase.missing = phase.count
        phase.number += 1


def _each(address: Any, where: Any) -> list[int]:
    return [int(a) for a in (address if where is None else address[np.asarray(where)])]


class NamedBarriers:
    """Of one program. A warp that waits is remembered with the round it waits for."""

    def __init__(self) -> None:
        self.arrived: dict[int, int] = {}
        self.rounds: dict[int, int] = {}
        self.waiting: dict[int, tuple[int, int]] = {}  # by warps

    def arrive(self, warp: Any, barrier: int, count: int) -> None:
        self.arrived[barrier] = self.arrived.get(barrier, 0) + 32
        if self.arrived[barrier] > count:
            warp.fail(f"more than {count} threads at barrier {barrier}")
        if self.arrived[barrier] == count:
            self.arrived[barrier] = 0
            self.rounds[barrier] = self.rounds.get(barrier, 0) + 1

    def passed(self, warp: Any, barrier: int, count: int) -> bool:
        """Whether all have come; the first time that a warp asks, it comes itself."""
        waits = self.waiting.get(warp.number)
        if waits is None:
            waits = self.waiting[warp.number] = (barrier, self.rounds.get(barrier, 0))
            self.arrive(warp, barrier, count)
        elif waits[0] != barrier:
            warp.fail(f"at barrier {barrier} while waiting at {waits[0]}")
        if self.rounds.get(barrier, 0) == waits[1]:
            return False
        del self.waiting[warp.number]
        return True
