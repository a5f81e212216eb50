"""The band of visible pairs that causal attention and windows are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

NO_BOUND = 2**31  # nothing is so far apart


@dataclass(frozen=True)
class Band:
    """Key j is visible to query i iff ``-left <= j - i - (Lk - Lq) <= right``; None is unbounded."""

    left: int | None = None
    right: int | None = None

    @property
    def unbounded(self) -> bool:
        return self.left is None and self.right is None

    def narrowed(self, least: int | None, most: int | None) -> Band | None:
        """The part of it where least <= j - i - (Lk - Lq) <= most. None if that has a negative bound, which only a mask
        may have."""
        left = self.left if least is None else -least if self.left is None else min(self.left, -least)
        right = self.right if most is None else most if self.right is None else min(self.right, most)
        if min(left or 0, right or 0) < 0:
            return None
        return Band(*(None if b is None or b >= NO_BOUND else b for b in (left, right)))

    def holds(self, distance: Tensor) -> Tensor:
        """Where ``distance``, j - i - (Lk - Lq), lies inside; True everywhere if nothing bounds it."""
        bounds = [distance >= -self.left] if self.left is not None else []
        bounds += [distance <= self.right] if self.right is not None else []
        return reduce(torch.logical_and, bounds) if bounds else torch.ones_like(distance, dtype=torch.bool)
