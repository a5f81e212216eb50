"""A table in eager torch.

An index counts from the end if it is negative, and must be in range for every *visible* pair: a pair that is masked,
or past the end of a sequence, may index anywhere. The same pairs contribute to the table's gradient: a lookup is zero
where it is not visible, and so is its derivative, even where that of the function is infinite.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gdpa.compat import is_functorch_wrapped_tensor
from gdpa.errors import UnsupportedActivationError
from gdpa.functions.places.names import INTEGERS, TableKind

Index = Tensor | int


def checked(device: torch.device) -> bool:
    """Whether bad indices are looked for: on a GPU that waits for the device."""
    return device.type == "cpu" or os.environ.get("GDPA_CHECK", "0") == "1"


class TableView:
    """One table for one tile of scores; ``visible`` (bool, broadcast against the indices) is None if all are."""

    def __init__(self, t: Tensor, name: str, visible: Tensor | None = None) -> None:
        self.t, self.name, self.visible = t, name, visible

    def look_up(self, indices: Sequence[Index]) -> Tensor:
        """t[indices], zero where that is outside or not visible."""
        if self.t.numel() == 0:
            return self._of_nothing(indices)
        placed, inside, refused = [], None, self.visible is None
        for dim, (index, size) in enumerate(zip(indices, self.t.shape, strict=True)):
            index = torch.as_tensor(index, device=self.t.device).long()
            at = torch.where(index < 0, index + size, index)
            within = (at >= 0) & (at < size)
            refused = self._refuse_outside(dim, index, within) and refused
            placed.append(torch.where(within, at, 0))
            inside = within if inside is None else inside & within
        return self._select(self._gather(tuple(placed)), None if refused else inside)

    def _gather(self, placed: tuple[Tensor, ...]) -> Tensor:
        return self.t[placed] if placed else self.t

    def _select(self, value: Tensor, inside: Tensor | None) -> Tensor:
        if inside is not None:
            value = torch.where(inside, value, 0)
        if self.visible is not None and self.t.is_floating_point():
            value = torch.where(self.visible, value, 0)
        return value

    def _refuse_outside(self, dim: int, index: Tensor, within: Tensor) -> bool:
        """Whether anybody looked: not on a GPU, nor at indices of all entries of a vmap at once."""
        if not checked(self.t.device):
            return False
        bad = ~within if self.visible is None else ~within & self.visible
        if is_functorch_wrapped_tensor(bad):
            return False
        if bool(bad.any()):
            first = int(index.expand_as(bad)[bad][0])
            raise IndexError(
                f"index {first} is out of range for dimension {dim} of {self.name}, whose shape is "
                f"{tuple(self.t.shape)}"
            )
        return True

    def _of_nothing(self, indices: Sequence[Index]) -> Tensor:
        """A table without entries: zeros, if no pair is visible."""
        shape = torch.broadcast_shapes(*(torch.as_tensor(i).shape for i in indices))
        anyone = bool(shape.numel()) if self.visible is None else checked(self.t.device) and bool(self.visible.any())
        if checked(self.t.device) and anyone:
            raise IndexError(f"{self.name} has no entries: its shape is {tuple(self.t.shape)}")
        return self.t.new_zeros(shape) + self.t.sum()


class Recorded(TableView):
    """Remembers what was looked up, each a leaf: gradients are then added entry by entry, not table by table."""

    def __init__(self, t: Tensor, name: str, visible: Tensor | None = None) -> None:
        super().__init__(t.detach(), name, visible)
        self.found: list[tuple[Tensor, Tensor]] = []  # places in the flat table, values

    def _gather(self, placed: tuple[Tensor, ...]) -> Tensor:
        value = super()._gather(placed)
        if not value.is_floating_point():
            return value
        value = value.clone() if not placed else value
        flat = torch.zeros((), dtype=torch.int64)
        for index, size in zip(placed, self.t.shape, strict=True):
            flat = flat * size + index
        leaf = value.requires_grad_()
        self.found.append((flat, leaf))
        return leaf


class Wrapped(TableView):
    """Takes every index modulo the table's size: for trying a function out on places that nobody chose."""

    def look_up(self, indices: Sequence[Index]) -> Tensor:
        placed = tuple(torch.as_tensor(i).long() % n for i, n in zip(indices, self.t.shape, strict=True))
        return self.t[placed] if placed else self.t


class Indexed:
    """A table as a Python function sees it while it is traced or tried out: it can be indexed, and nothing else."""

    def __init__(self, number: int, kind: TableKind, look_up: Callable[[list[Index]], Tensor]) -> None:
        self._number, self._kind, self._look_up = number, kind, look_up

    def __getitem__(self, indices: Any) -> Tensor:
        indices = list(indices) if isinstance(indices, tuple) else [indices]
        if len(indices) != self._kind.ndim:
            raise UnsupportedActivationError(
                f"tables[{self._number}] has {self._kind.ndim} dimensions and is indexed with {len(indices)}; one "
                "index per dimension is needed"
            )
        for index in indices:
            self._check(index)
        return self._look_up(indices)

    def __iter__(self) -> Any:
        """Python would index it with 0, 1, 2 ..., and never come to an end."""
        raise UnsupportedActivationError(
            f"the function goes through tables[{self._number}] entry by entry; a table can only be indexed"
        )

    def _check(self, index: Any) -> None:
        if isinstance(index, Tensor) and index.dtype in INTEGERS[:-1] and index.dtype != torch.uint8:
            return
        if isinstance(index, int) and not isinstance(index, bool):
            return
        kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
        if kind in (torch.uint8, torch.bool):
            raise UnsupportedActivationError(
                f"tables[{self._number}] is indexed with {kind}, a mask to PyTorch; .long() makes it an index"
            )
        raise UnsupportedActivationError(
            f"tables[{self._number}] is indexed with {kind}; an index is an integer expression of positions and of "
            "integer tables (.long() makes one of a floating point value that does not depend on the score)"
        )

    @property
    def ndim(self) -> int:
        return self._kind.ndim

    def dim(self) -> int:
        return self._kind.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self._kind.dtype

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedActivationError(
            f"the function uses .{name} of tables[{self._number}]; a table can only be indexed: its sizes "
            "are data, so capture a number that depends on them, or pass it through params"
        )
