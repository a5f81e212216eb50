"""Rotary positions (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

from math import log2

import torch
from torch import Tensor, nn

from gdpa.arguments import checks
from gdpa.nn.linear import positive


class Rotary(nn.Module):
    """Rotates pairs of features by angles that grow with the position, so that <q_i, k_j> depends on i - j.

        (x_c, x_{c+D/2}) -> (x_c cos a - x_{c+D/2} sin a, x_{c+D/2} cos a + x_c sin a),   a = position * base^(-2c/D)

    x (..., H, D), positions (...) -> (..., H, D); ``positions`` may lack leading dimensions of ``x`` and may be any
    real numbers. Angles are float32 (float64 for float64 inputs) whatever the dtype of ``x``, so there is no table and
    no longest position.

    >>> x = torch.randn(5, 2, 8)
    >>> y = Rotary(8)(x, torch.arange(5))
    >>> torch.equal(y[0], x[0]), torch.allclose(y.norm(dim=-1), x.norm(dim=-1))
    (True, True)
    """

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        if positive("head_dim", head_dim) % 2 != 0:
            raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
        if checks.number("base", base) <= 0:
            raise ValueError(f"base must be positive, got {base}")
        self.head_dim, self.base = head_dim, float(base)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"x must have head dimension {self.head_dim}, got shape {tuple(x.shape)}")
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        # A compiled kernel computes all of this anew for every element: powers of 2 are cheap, and with the halves as a
        # dimension, one read backwards, it needs one sine and one cosine where joining two results would need two each.
        exponents = torch.arange(0, self.head_dim, 2, device=x.device, dtype=wide) * (-log2(self.base) / self.head_dim)
        signs = torch.arange(-1, 2, 2, device=x.device, dtype=wide)
        angles = (positions.to(wide)[..., None] * exponents.exp2())[..., None, None, :]  # (..., 1, 1, D/2)
        halves = x.to(wide).unflatten(-1, (2, -1))
        turned = torch.addcmul(halves * angles.cos(), halves.flip(-2), angles.sin() * signs[:, None])
        return turned.flatten(-2).to(x.dtype)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base:g}"
