"""The memory of a program and of the GPU. Tensors are on the CPU: an address of the GPU is one of this process."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from typing import Any

import numpy as np

from simulator.code import BASE

LOWEST = 1 << 16
GRANULE = 16  # bytes that are fenced together


class SimulationError(Exception):
    """A kernel did what it must not do."""


class _Bytes:
    """Loads and stores of 32 threads, in views of one array of bytes that begins at address ``first``."""

    def __init__(self, data: Any, first: int) -> None:
        self.data, self.first = data, first
        self.views: dict[Any, Any] = {}

    def view(self, dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        found = self.views.get(dtype)
        if found is None:
            whole = len(self.data) // dtype.itemsize * dtype.itemsize
            found = self.views[dtype] = self.data[:whole].view(dtype)
        return found

    def places(self, address: Any, size: int, count: int, where: Any, warp: Any, write: bool) -> Any:
        """Indices of what is at ``address``, in units of ``size`` bytes; inactive threads share an active one's."""
        if where is not None:
            active = np.flatnonzero(where)
            if not len(active):
                return None
            address = np.where(where, address, address[active[0]])
        if (address % (size * count)).any():
            warp.fail(f"an address that is no multiple of {size * count}")
        self.check(address, size * count, warp, write)
        return ((address - address.dtype.type(self.first)) // address.dtype.type(size)).astype(np.int64)

    def check(self, address: Any, size: int, warp: Any, write: bool) -> None:
        raise NotImplementedError

    def load(self, address: Any, dtype: Any, count: int, where: Any, warp: Any) -> list[Any]:
        at = self.places(address, np.dtype(dtype).itemsize, count, where, warp, write=False)
        view = self.view(dtype)
        return [np.zeros(32, dtype) if at is None else view[at + i] for i in range(count)]

    def store(self, address: Any, values: list[Any], where: Any, warp: Any) -> None:
        dtype = values[0].dtype
        at = self.places(address, dtype.itemsize, len(values), where, warp, write=True)
        if at is None:
            return
        view = self.view(dtype)
        for i, value in enumerate(values):
            if where is None:
                view[at + i] = value
            else:
                view[at[where] + i] = value[where]

    def update(self, address: Any, action: str, values: list[Any], where: Any, warp: Any) -> Any:
        """One thread after the other; returns what was there."""
        dtype = values[0].dtype
        at = self.places(address, dtype.itemsize, 1, where, warp, write=True)
        before = np.zeros(32, dtype)
        view = self.view(dtype)
        for lane in range(32) if where is None else np.flatnonzero(where):
            before[lane] = old = view[at[lane]]
            new = values[0][lane]
            if action == "cas":
                new = values[1][lane] if old == new else old
            elif action != "exch":
                new = ACTIONS[action](old, new)
            view[at[lane]] = new
        return before

    def add(self, address: Any, action: str, values: list[Any], where: Any, warp: Any) -> None:
        dtype = values[0].dtype
        at = self.places(address, dtype.itemsize, len(values), where, warp, write=True)
        if at is None:
            return
        view, do = self.view(dtype), ACTIONS[action]
        for lane in range(32) if where is None else np.flatnonzero(where):
            for i, value in enumerate(values):
                view[at[lane] + i] = do(view[at[lane] + i], value[lane])


ACTIONS: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip


class Shared(_Bytes):
    """The shared memory of a program, full of NaN at first.

    What threads write there is for threads. The copy engine and the tensor cores see it only once the thread that wrote
    it has made a fence, and NaN before; ``unfenced`` remembers who has not.
    """

    def __init__(self, size: int) -> None:
        size += -size % GRANULE
        super().__init__(np.full(size, 0xFF, np.uint8), BASE)
        self.unfenced = np.zeros(size // GRANULE, np.uint8)  # the number of the warp, from 1 on
        self.writers: set[int] = set()

    def check(self, address: Any, size: int, warp: Any, write: bool) -> None:
        if int(address.min()) < BASE or int(address.max()) + size > BASE + len(self.data):
            warp.fail(f"shared memory outside of the program's {len(self.data)} bytes")
        if write:
            self.writers.add(warp.number)
            self.unfenced[(address - np.uint32(BASE)) // np.uint32(GRANULE)] = warp.number + 1

    def store_copied(self, address: Any, values: list[Any], where: Any, warp: Any) -> None:
        """By cp.async: Triton itself makes no fence between such copies and products that read them."""
        self.store(address, values, where, warp)
        some = address if where is None else address[where]
        self.unfenced[(some - np.uint32(BASE)) // np.uint32(GRANULE)] = 0

    def fence(self, warp: Any) -> None:
        if warp.number in self.writers:
            self.writers.discard(warp.number)
            self.unfenced[self.unfenced == warp.number + 1] = 0

    def unseen(self, index: Any) -> Any:
        """Which of the bytes at ``index`` the copy engine and the tensor cores need not see yet; None if none."""
        if not self.writers:
            return None
        found = self.unfenced[index // GRANULE] != 0
        return found if found.any() else None


class Local:
    """Bytes of each thread's own."""

    def __init__(self, size: int) -> None:
        self.data = np.zeros((32, size), np.uint8)
        self.lanes = np.arange(32)[:, None]

    def _places(self, address: Any, size: int) -> Any:
        return address.astype(np.int64)[:, None] + np.arange(size)

    def load(self, address: Any, dtype: Any, count: int, where: Any, warp: Any) -> list[Any]:
        size = np.dtype(dtype).itemsize
        at = self._places(address if where is None else np.where(where, address, 0), size * count)
        found = np.ascontiguousarray(self.data[self.lanes, at]).view(dtype)
        return [found[:, i].copy() for i in range(count)]

    def store(self, address: Any, values: list[Any], where: Any, warp: Any) -> None:
        bytes_ = np.ascontiguousarray(np.stack(values, -1)).view(np.uint8)
        at, threads = self._places(address, bytes_.shape[1]), slice(None) if where is None else where
        self.data[self.lanes[threads], at[threads]] = bytes_[threads]


class Memory(_Bytes):
    """All of the process's memory, of which only ``ranges`` may be used."""

    def __init__(self) -> None:
        everything = (ctypes.c_uint8 * ((1 << 47) - LOWEST)).from_address(LOWEST)
        super().__init__(np.frombuffer(everything, np.uint8), LOWEST)
        self.starts: list[int] = []
        self.ends: list[int] = []

    def allow(self, ranges: list[tuple[int, int]]) -> None:
        """(first address, one behind the last); they may overlap."""
        merged: list[list[int]] = []
        for start, end in sorted(ranges):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self.starts, self.ends = [s for s, _ in merged], [e for _, e in merged]

    def check(self, address: Any, size: int, warp: Any, write: bool) -> None:
        first, last = int(address.min()), int(address.max()) + size
        at = bisect_right(self.starts, first) - 1
        if at >= 0 and last <= self.ends[at]:
            return
        for one in map(int, address):
            at = bisect_right(self.starts, one) - 1
            if at < 0 or one + size > self.ends[at]:
                warp.fail(f"a {'write' if write else 'read'} of {size} bytes outside of all tensors")

    def readable(self, first: Any, size: int, warp: Any) -> None:
        """``first``: addresses of runs of ``size`` bytes."""
        if len(first):
            self.check(first, size, warp, write=False)
