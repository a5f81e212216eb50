"""Products of the tensor cores (wgmma): queued by a warp, computed at any time until it waits for them.

Each of the four warps of a warpgroup computes its 16 of the 64 rows. A is 64 x 16, in shared memory or in registers, B
is 16 x N, in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from simulator.code import BASE
from simulator.copies import swizzled
from simulator.groups import Groups

F4 = np.float32


@dataclass
class Product:
    sums: tuple[int, ...]  # registers
    left: Any  # registers, or indices in shared memory
    right: Any
    keeps: bool  # what is in the registers
    kind: str
    seen: list[Any]  # the registers' contents, by which a change is noticed
    unseen: tuple[Any, Any]  # see Shared.unseen


class Products(Groups):
    """Of one warp."""

    def queue(
        self, sums: tuple[int, ...], left: Any, right: Any, keeps: Any, left_turned: int, right_turned: int, kind: str
    ) -> None:
        warp = self.warp
        seen, unseen = [], None
        if isinstance(left, tuple):
            seen = [warp.registers[n] for n in left]
        else:
            left = operand(int(left), 16, left_turned, 16 * (warp.number % 4))
            unseen = warp.shared.unseen(2 * left)
        right = operand(int(right), 2 * len(sums), right_turned, 0)
        self.open.append(Product(sums, left, right, bool(keeps), kind, seen, (unseen, warp.shared.unseen(2 * right))))

    def do(self, group: list[Product]) -> None:
        registers = self.warp.registers
        for i, product in enumerate(group):
            if i == 0 or group[i - 1].sums != product.sums:
                total = _gathered(registers, product.sums)
            if not product.keeps:
                total = np.zeros_like(total)
            total = total + self._left(product) @ self._numbers(product.right, product.kind, product.unseen[1]).T
            if i + 1 == len(group) or group[i + 1].sums != product.sums:
                _scatter(registers, product.sums, total)

    def _left(self, product: Product) -> Any:
        if not isinstance(product.left, tuple):
            return self._numbers(product.left, product.kind, product.unseen[0])
        found = [self.warp.registers[n] for n in product.left]
        if any(a is not b for a, b in zip(found, product.seen, strict=True)):
            self.warp.fail("a register that a product reads was written before the product was done")
        halves = np.stack([f.view(np.uint16).reshape(8, 4, 2) for f in found])  # (register, row, thread, column)
        rows = halves.reshape(2, 2, 8, 4, 2).transpose(1, 2, 0, 3, 4).reshape(16, 16)
        return _floats(np.ascontiguousarray(rows), product.kind)

    def _numbers(self, index: Any, kind: str, unseen: Any) -> Any:
        found = _floats(self.warp.shared.view(np.uint16)[index], kind)
        return found if unseen is None else np.where(unseen, F4(np.nan), found)


def _floats(bits: Any, kind: str) -> Any:
    if kind == "f16":
        return bits.view(np.float16).astype(F4)
    return (bits.astype(np.uint32) << np.uint32(16)).view(F4)


def _gathered(registers: list[Any], sums: tuple[int, ...]) -> Any:
    """(16, N) of a warp's accumulators: in every 8 columns a thread has two of a row and of the 8th after it."""
    found = np.stack([registers[n].view(F4) for n in sums]).reshape(-1, 2, 2, 8, 4)
    return found.transpose(1, 3, 0, 4, 2).reshape(16, -1)


def _scatter(registers: list[Any], sums: tuple[int, ...], total: Any) -> None:
    parts = total.astype(F4).reshape(2, 8, -1, 4, 2).transpose(2, 0, 4, 1, 3).reshape(len(sums), 32)
    for n, part in zip(sums, np.ascontiguousarray(parts), strict=True):
        registers[n] = part


@lru_cache(maxsize=4096)
def operand(descriptor: int, rows: int, turned: int, first: int) -> Any:
    """(rows, 16) of indices, in 16 bits, of an operand's rows from ``first`` on. ``turned``: columns lie together."""
    start = (descriptor & 0x3FFF) << 4
    leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (16, 32))
    mode = descriptor >> 62
    assert mode != 0, "operands without swizzling"
    swizzle = 4 - mode  # 3 for 128 bytes
    width = 16 << swizzle  # bytes that lie together
    row, k = np.meshgrid(np.arange(first, first + rows), np.arange(16), indexing="ij")
    if turned:
        along = width // 2
        place = k // 8 * stride + k % 8 * width + row // along * leading + row % along * 2
    else:
        place = row // 8 * stride + row % 8 * width + k * 2
    found = (swizzled(start + place, swizzle) - BASE) // 2
    found.setflags(write=False)
    return found
