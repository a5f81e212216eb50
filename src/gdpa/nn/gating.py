"""Gates and masks: features multiplied by the output of an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gdpa.nn.jagged import BatchT, features, like
from gdpa.nn.linear import MLP, positive


class Gating(nn.Module):
    """A gate for each feature, computed from all of them (InterFormer's): Y = X * sigmoid(MLP(X)).

    x (..., dim), nested (B, j, dim) or Jagged (T, dim) -> the same form.

    Args:
        hidden: the hidden widths of the MLP; without any it is one linear layer.

    >>> Gating(16, hidden=[8])(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self, dim: int, *, hidden: Sequence[int] = (), device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.dim = positive("dim", dim)
        self.mlp = MLP([dim, *hidden, dim], device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """As in nn.Linear."""
        self.mlp.reset_parameters()

    def forward(self, x: BatchT) -> BatchT:
        values = features("x", x, self.dim)
        return like(x, values * self.mlp(values).sigmoid())

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class MaskNet(nn.Module):
    """Merges what several sequences say about one event, side by side in its features: MLP(S * MLP_mask(S)), as in
    InterFormer.

    x (..., dim), nested (B, j, dim) or Jagged (T, dim) -> the same form with out_dim features.

    Args:
        mask_hidden: the hidden widths of the MLP that makes the mask.
        hidden: those of the MLP after it.

    >>> MaskNet(48, 16, mask_hidden=[8], hidden=[32])(torch.randn(2, 5, 48)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        out_dim: int,
        *,
        mask_hidden: Sequence[int] = (),
        hidden: Sequence[int] = (),
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.out_dim = positive("dim", dim), positive("out_dim", out_dim)
        self.mask = MLP([dim, *mask_hidden, dim], device=device, dtype=dtype)
        self.mlp = MLP([dim, *hidden, out_dim], device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """As in nn.Linear."""
        self.mask.reset_parameters()
        self.mlp.reset_parameters()

    def forward(self, x: BatchT) -> BatchT:
        values = features("x", x, self.dim)
        return like(x, self.mlp(values * self.mask(values)))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, out_dim={self.out_dim}"
