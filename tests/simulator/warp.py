"""32 threads. Where they part at a branch, those with the lower block go first, until they meet the others again."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from simulator.code import BLOCKED, OVER, Coder
from simulator.copies import Copies, Moves
from simulator.memory import Local, SimulationError
from simulator.products import Products
from simulator.ptx import APART, WIDTHS

PARAMS = 1 << 60  # an address that nothing else has
# Blocks that all threads of a warp must enter together.
TOGETHER = tuple(a for a in APART if a.startswith(("bar", "shfl", "vote", "redux", "elect", "wgmma", "stm", "ldm")))
UNSET = {1: np.zeros(32, bool), 8: np.full(32, 0xFF, np.uint8), 16: np.full(32, 0xFFFF, np.uint16),
         32: np.full(32, 0xFFFFFFFF, np.uint32), 64: np.full(32, 2**64 - 1, np.uint64)}  # fmt: skip
assert set(UNSET) == set(WIDTHS.values())


class Warp:
    """``paths``: (block, threads) of those that wait while others go on; ``mask``: who goes on, None for all."""

    def __init__(self, program: Any, number: int, coder: Coder) -> None:
        self.program, self.number, self.coder = program, number, coder
        self.shared, self.memory = program.shared, program.grid.memory
        self.registers = [UNSET[w] for w in coder.kernel.widths]
        self.lanes = np.arange(32, dtype=np.uint32)
        self.threads = self.lanes + np.uint32(32 * number)
        self.place = [np.full(32, n, np.uint32) for n in program.place]
        self.extent = [np.full(32, n, np.uint32) for n in program.grid.extent]
        self.products, self.copies, self.moves = Products(self), Copies(self), Moves(self)
        self.local = Local(coder.kernel.local_bytes)
        self.pc = self.at = 0
        self.mask: Any = None
        self.paths: list[tuple[int, Any]] = []
        self.over = self.spins = False

    def run(self, blocks: int) -> bool:
        """Up to so many blocks; whether the warp has got anywhere."""
        self.spins = False
        for done in range(blocks):
            block = self.coder.block(self.pc, self.mask is not None)
            after = block(self, self.registers, self.mask)
            if after == BLOCKED:
                return done > 0
            self.spins |= after == self.pc and self.coder.looks(self.pc)  # once more
            if after == OVER:
                if self.mask is not None:
                    self.fail("some threads of a warp end before the others")
                self.over = True
                return True
            self.pc = after
            if self.paths:
                self._meet()
            if self.spins:
                return done > 2  # the loop's own blocks
        return True

    def _meet(self) -> None:
        paths: dict[int, Any] = {}
        for pc, mask in [(self.pc, self.mask), *self.paths]:
            paths[pc] = paths[pc] | mask if pc in paths else mask
        if len(paths) == 1:
            ((self.pc, mask),) = paths.items()
            assert mask.all()
            self.mask, self.paths = None, []
            return
        ready = [pc for pc in sorted(paths) if not self._needs_all(pc)]
        if not ready:
            self.fail("threads of a warp wait for each other at different places")
        self.pc = ready[0]
        self.mask = paths.pop(self.pc)
        self.paths = list(paths.items())

    def _needs_all(self, pc: int) -> bool:
        block = self.coder.kernel.blocks[pc]
        return bool(block) and block[0].name.startswith(TOGETHER)

    def fork(self, condition: Any, target: int, other: int, mask: Any) -> int:
        taken = condition if mask is None else condition & mask
        left = ~condition if mask is None else mask & ~condition
        if not left.any():
            return target
        if not taken.any():
            return other
        self.paths.append((other, left))
        self.mask = taken
        return target

    def only(self, index: Any, mask: Any, targets: tuple[int, ...]) -> int:
        return targets[int(self.one(index if mask is None else index[mask]))]

    def leave(self, where: Any) -> int:
        return self.fail("some threads of a warp end before the others")

    def one(self, values: Any) -> Any:
        """What is the same for all threads."""
        if (values != values[0]).any():
            self.fail("a value that must be the same for all threads of a warp is not")
        return values[0]

    def fail(self, why: str) -> NoReturn:
        raise SimulationError(f"{why}; {self}")

    def __str__(self) -> str:
        return f"program {self.program.place}, warp {self.number}: {self.coder.where(self.at)}"

    # ---- instructions ------------------------------------------------------------------------------------------------
    def param(self, offset: int, dtype: Any) -> Any:
        size = np.dtype(dtype).itemsize
        return np.full(32, self.program.grid.params[offset : offset + size].view(dtype)[0])

    def address_of_param(self, offset: int) -> Any:
        return np.full(32, PARAMS + offset, np.uint64)

    def tried(self, address: Any, parity: Any, where: Any) -> Any:
        active = range(32) if where is None else np.flatnonzero(where)
        found = np.zeros(32, bool)
        for at, phase in {(int(address[i]), int(parity[i])) for i in active}:
            passed = self.program.mbarriers.has_passed(self, at, phase)
            found |= passed & (address == at) & (parity == phase)
            self.spins |= not passed
        return found

    def shuffled(self, mode: str, values: Any, by: Any, clamp: Any) -> Any:
        segments, end = self.one(clamp) >> 8 & 31, self.one(clamp) & 31
        lanes, by = self.lanes.astype(np.int64), by.astype(np.int64)
        lowest, highest = lanes & segments, lanes & segments | end & ~segments
        other = {"idx": lowest | by & ~int(segments), "bfly": lanes ^ by, "down": lanes + by, "up": lanes - by}[mode]
        inside = other >= end if mode == "up" else other <= highest
        return values[np.where(inside, other, lanes)]

    def ballot(self, asked: Any) -> Any:
        return np.full(32, np.bitwise_or.reduce(np.where(asked, np.uint32(1) << self.lanes, np.uint32(0))))

    def _matrix_rows(self, address: Any, i: int) -> Any:
        """Indices, in 16 bits, of the eight rows of the i-th matrix, whose addresses eight threads have."""
        rows = address[8 * i : 8 * i + 8]
        bytes_ = np.resize(rows, 32)
        self.shared.check(bytes_, 16, self, write=False)
        return ((rows.astype(np.int64) - self.shared.first) // 2)[:, None] + np.arange(8)

    def store_matrices(self, address: Any, values: list[Any], turned: bool) -> None:
        view = self.shared.view(np.uint16)
        for i, value in enumerate(values):
            tile = np.ascontiguousarray(value).view(np.uint16).reshape(8, 8)
            view[self._matrix_rows(address, i)] = tile.T if turned else tile
            self.shared.check(np.resize(address[8 * i : 8 * i + 8], 32), 16, self, write=True)

    def load_matrices(self, address: Any, n: int, turned: bool) -> list[Any]:
        view = self.shared.view(np.uint16)
        tiles = [view[self._matrix_rows(address, i)] for i in range(n)]
        return [np.ascontiguousarray(t.T if turned else t).view(np.uint32).reshape(32) for t in tiles]
