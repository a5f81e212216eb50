"""Gradients of embedding tables by row, from backward to the optimizer, as the kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gdpa.rowwise.tables import Column, Sums, sum_by_row


class Read(NamedTuple):
    """A column of ids that was read from the table of number ``table``. The gradients of what it read become those of
    ``leaf``, which holds nothing else."""

    table: int
    ids: Tensor
    leaf: Tensor


class RowGradients:
    """Of the tables of one module, which have ``sizes`` rows: the columns that forward has read since the last
    ``clear``, their gradients once backward has been, and what these add up to when somebody asks for it.

    ``clip``: None, or a scalar on the device, by which an optimizer multiplies them.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.read: list[Read] = []
        self.clip: Tensor | None = None
        self._sums: Sums | None = None

    def clear(self) -> None:
        for read in self.read:
            read.leaf.grad = None  # whoever still holds the leaf
        self.read, self.clip, self._sums = [], None, None

    def expect(self, table: int, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """A leaf (ids, dim) for ``gdpa.rowwise.tables.look_up_beside``, of gradients in ``dtype``. It takes no memory
        until it has them."""
        leaf = torch.empty(1, dtype=dtype, device=ids.device).expand(ids.numel(), dim).requires_grad_()
        self.read.append(Read(table, ids, leaf))
        self._sums = None
        return leaf

    def columns(self) -> list[Column]:
        """Those that have gradients."""
        return [Column(table, ids, leaf.grad) for table, ids, leaf in self.read if leaf.grad is not None]

    def sums(self) -> Sums | None:
        """By row, before ``clip``; they are added up once. None if there are none."""
        if self._sums is None:
            self._sums = sum_by_row(self.columns(), self.sizes)
        return self._sums

    def sparse(self, table: int, like: Tensor) -> Tensor | None:
        """The gradient of one table as a sparse tensor, its rows copied side by side; for ranks that exchange them."""
        mine = [column for column in self.columns() if column.table == table]
        if not mine:
            return None
        ids, rows = torch.cat([c.ids for c in mine]), torch.cat([c.rows for c in mine]).to(like.dtype)
        return torch.sparse_coo_tensor(ids[None], rows, like.shape, check_invariants=False)
