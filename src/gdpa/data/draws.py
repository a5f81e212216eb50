"""Random numbers that do not depend on the order in which they are asked for."""

from __future__ import annotations

import numpy as np


class Draws:
    """Random numbers that are a pure function of (seed, stream, index): no order of reading can change them.

    Only the raw bits of numpy's Philox are used, which numpy promises never to change; its distributions it may. They
    are drawn ahead, since a sample asks a dozen times for a few, and every call into numpy takes microseconds.
    """

    AHEAD = 128

    def __init__(self, seed: int, stream: int, index: int) -> None:
        key = np.array([seed % 2**64, stream * 2**56 + index], dtype=np.uint64)
        self._bits = np.random.Philox(key=key)
        self._ready, self._next = np.empty(0), 0

    def uniform(self, n: int) -> np.ndarray:
        """(n,) in [0, 1), 53 bits each."""
        if self._next + n > len(self._ready):
            left = self._ready[self._next :]
            raw = self._bits.random_raw(max(n - len(left), self.AHEAD))
            self._ready, self._next = np.concatenate([left, (raw >> np.uint64(11)) * 2.0**-53]), 0
        self._next += n
        return self._ready[self._next - n : self._next]

    def below(self, bound: int, n: int) -> np.ndarray:
        """(n,) integers in [0, bound)."""
        return (self.uniform(n) * bound).astype(np.int64)

    def permutation(self, n: int) -> np.ndarray:
        """(n,) the numbers 0 to n - 1 in random order."""
        return np.argsort(self.uniform(n), kind="stable")

    def normal(self, n: int) -> np.ndarray:
        """(n,) by Box and Muller."""
        radius = np.sqrt(-2.0 * np.log1p(-self.uniform(n)))
        return radius * np.cos(2.0 * np.pi * self.uniform(n))
