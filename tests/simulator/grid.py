"""Programs that run at the same time, and what happens next."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from simulator.barriers import MBarriers, NamedBarriers
from simulator.code import Coder
from simulator.copies import Copy, TensorMap
from simulator.memory import Memory, Shared, SimulationError
from simulator.ptx import UnknownError
from simulator.warp import Warp

PATIENCE = 60  # turns of every warp in which none gets anywhere


class Program:
    def __init__(self, grid: Grid, number: int) -> None:
        x, y, _ = grid.extent
        self.grid, self.place = grid, (number % x, number // x % y, number // (x * y))
        self.shared = Shared(grid.shared)
        self.mbarriers, self.barriers = MBarriers(), NamedBarriers()
        self.warps = [Warp(self, i, grid.coder) for i in range(grid.coder.kernel.threads // 32)]


class Grid:
    """One launch. ``shared``: bytes of shared memory of a program; ``params``: the kernel's arguments as bytes,
    ``maps``: the descriptors among them, by address; ``at_once``: so many programs run at the same time."""

    def __init__(
        self, coder: Coder, extent: tuple[int, int, int], shared: int, params: Any, maps: dict[int, TensorMap],
        memory: Memory, seed: int, at_once: int,
    ) -> None:  # fmt: skip
        self.coder, self.extent, self.shared, self.params, self.maps = coder, extent, shared, params, maps
        self.memory, self.chance, self.at_once = memory, random.Random(seed), at_once
        self.copies: list[Copy] = []
        self.waiting = iter(range(math.prod(extent)))
        self.warps: list[Warp] = []

    def run(self) -> None:
        with np.errstate(all="ignore"):
            self._start(self.at_once)
            idle = 0
            while self.warps:
                idle = 0 if self._turn() else idle + 1
                if idle > PATIENCE * (len(self.warps) + 10) and not self._copy_something():
                    raise SimulationError("\n".join(["nobody gets anywhere:", *map(str, self.warps)]))
            while self._copy_something():
                pass

    def _start(self, n: int) -> None:
        for _, number in zip(range(n), self.waiting, strict=False):
            self.warps += Program(self, number).warps

    def _turn(self) -> bool:
        """Whether anything has happened."""
        if self.copies and self.chance.random() < 0.4:
            return self._copy_something()
        warp = self.chance.choice(self.warps)
        if warp.products.groups and self.chance.random() < 0.1:
            warp.products.wait(len(warp.products.groups) - 1)
        try:
            happened = warp.run(1 + int(self.chance.expovariate(1 / 20)))
        except SimulationError:
            raise
        except Exception as error:
            raise UnknownError(f"{warp}: {error}") from error
        if warp.over:
            self.warps.remove(warp)
            if all(w.program is not warp.program for w in self.warps):
                self._start(1)
        return happened

    def _copy_something(self) -> bool:
        """Let one of the copies go on, whichever; False if there is none."""
        if not self.copies:
            return False
        i = self.chance.randrange(len(self.copies))
        self.copies[i].go_on()
        if self.copies[i].stage == 2:
            self.copies[i] = self.copies[-1]
            self.copies.pop()
        return True
