"""The copy engine: boxes of tensors to and from shared memory, at any time after they were asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from simulator.code import BASE
from simulator.groups import Groups
from simulator.memory import LOWEST

UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class TensorMap:
    """What a descriptor says, with dimensions from the outermost to the innermost, strides in elements."""

    address: int
    swizzle: int  # 0 to 3: rows of 16 bytes change places within 32, 64 or 128 bytes
    size: int  # of an element, in bytes
    box: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, made: tuple[Any, ...]) -> TensorMap:
        """``made``: by fake_gpu.encode."""
        _, address, swizzle, size, _, box, shape, strides, _ = made
        return cls(address, swizzle, size, box, shape, strides)

    @property
    def bytes(self) -> int:
        return int(np.prod(self.box)) * self.size

    @cached_property
    def steps(self) -> Any:
        """(elements of the box, dimensions): where each lies in the box."""
        return np.stack(np.meshgrid(*map(np.arange, self.box), indexing="ij"), -1).reshape(-1, len(self.box))

    def elements(self, coordinates: list[int]) -> tuple[Any, Any]:
        """(the addresses of a box's elements, which of them are in the tensor); ``coordinates``: innermost first."""
        at = self.steps + np.array(coordinates[::-1], np.int64)
        inside = ((at >= 0) & (at < np.array(self.shape))).all(-1)
        with np.errstate(over="ignore"):
            places = (at.astype(np.uint64) * np.array(self.strides, np.uint64)).sum(-1, dtype=np.uint64)
            return places * np.uint64(self.size) + np.uint64(self.address), inside

    def in_shared(self, address: int) -> Any:
        """The indices, in bytes, of a box's elements in shared memory, of which the box begins at ``address``."""
        return swizzled(address + np.arange(0, self.bytes, self.size), self.swizzle) - BASE


def swizzled(address: Any, swizzle: int) -> Any:
    """``swizzle``: 3, 2, 1 for 128, 64, 32 bytes."""
    return address ^ ((address >> 7) & ((1 << swizzle) - 1)) << 4


@dataclass
class Copy:
    """``barrier``: in shared memory, of a load; None for a store. ``stage``: 0 asked for, 1 read, 2 done."""

    warp: Any
    map: TensorMap
    coordinates: list[int]
    address: int
    barrier: int | None = None
    adds: bool = False
    stage: int = 0
    held: Any = None
    unseen: Any = None  # see Shared.unseen

    def go_on(self) -> None:
        self.stage += 1
        if self.stage == 1:
            self._read()
        else:
            self._write()

    def _read(self) -> None:
        view = self.warp.shared.view(UNITS[self.map.size])
        if self.barrier is None:
            self.held = view[self.map.in_shared(self.address) // self.map.size]
            if self.unseen is not None:
                self.held = np.where(self.unseen, view.dtype.type(-1 % 2 ** (8 * self.map.size)), self.held)
            return
        addresses, inside = self.map.elements(self.coordinates)
        self.warp.memory.readable(addresses[inside], self.map.size, self.warp)
        held = np.zeros(len(addresses), view.dtype)
        memory = self.warp.memory.view(view.dtype)
        held[inside] = memory[(addresses[inside] - np.uint64(LOWEST)) // np.uint64(self.map.size)]
        self.held = held

    def _write(self) -> None:
        size, warp = self.map.size, self.warp
        if self.barrier is not None:
            index = self.map.in_shared(self.address)
            warp.shared.view(UNITS[size])[index // size] = self.held
            warp.program.mbarriers.complete(warp, self.barrier, self.map.bytes)
            return
        addresses, inside = self.map.elements(self.coordinates)
        warp.memory.readable(addresses[inside], size, warp)
        at = (addresses[inside] - np.uint64(LOWEST)) // np.uint64(size)
        if self.adds:
            assert size == 4, "only float32 is added up"
            warp.memory.view(np.float32)[at] += self.held[inside].view(np.float32)
        else:
            warp.memory.view(UNITS[size])[at] = self.held[inside]


@dataclass
class Copies:
    """Of one warp. Its stores come in groups, for which it can wait."""

    warp: Any
    open: list[Copy] = field(default_factory=list)
    groups: list[list[Copy]] = field(default_factory=list)

    def load(self, address: Any, descriptor: Any, coordinates: list[Any], barrier: Any, where: Any) -> None:
        for lane in _lanes(where):
            self._ask(descriptor, coordinates, address, lane, int(barrier[lane]))

    def store(self, address: Any, descriptor: Any, coordinates: list[Any], adds: bool, where: Any) -> None:
        for lane in _lanes(where):
            copy = self._ask(descriptor, coordinates, address, lane, None, adds)
            copy.unseen = self.warp.shared.unseen(copy.map.in_shared(copy.address))
            self.open.append(copy)

    def _ask(
        self, descriptor: Any, coordinates: list[Any], address: Any, lane: int, barrier: int | None, adds: bool = False
    ) -> Copy:
        map_ = self.warp.program.grid.maps[int(descriptor[lane])]
        at, place = [int(c[lane]) for c in coordinates], int(address[lane])
        # A box whose bytes are swizzled is so by its addresses, which the kernel counts from its beginning.
        if place % (128 if map_.swizzle == 0 else 128 << map_.swizzle):
            self.warp.fail(f"a box of shared memory that begins at {place}")
        copy = Copy(self.warp, map_, at, place, barrier, adds)
        self.warp.program.grid.copies.append(copy)
        return copy

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def passed(self, n: int, read: bool) -> bool:
        """Whether all groups but the last ``n`` are done, or at least read."""
        stage = 1 if read else 2
        return all(c.stage >= stage for group in self.groups[: max(len(self.groups) - n, 0)] for c in group)


class Moves(Groups):
    """Copies by the threads of one warp (cp.async)."""

    def queue(self, to: Any, of: Any, size: int, given: Any, where: Any) -> None:
        self.open.append((to, of, size, given, where))

    def do(self, group: list[tuple[Any, ...]]) -> None:
        for to, of, size, given, where in group:
            active = np.ones(32, bool) if where is None else where
            parts = self.warp.memory.load(of, np.uint32, size // 4, active & (given > 0), self.warp)
            found = [np.where(given > 4 * i, part, np.uint32(0)) for i, part in enumerate(parts)]
            self.warp.shared.store_copied(to, found, where, self.warp)


def _lanes(where: Any) -> Any:
    return range(32) if where is None else np.flatnonzero(where)
