"""Layers that treat each row by itself: rotary positions (RoFormer, arXiv 2104.09864), and nn.LayerNorm with a backward
of one pass. On a GPU they are the operators of gdpa.rowwise, where those are wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gdpa.arguments import checks
from gdpa.nn.linear import positive
from gdpa.ops import transformed
from gdpa.rowwise import computed, norms, rotary, wanted


class Rotary(nn.Module):
    """Rotates pairs of features by angles that grow with the position, so that <q_i, k_j> depends on i - j.

        (x_c, x_{c+D/2}) -> (x_c cos a - x_{c+D/2} sin a, x_{c+D/2} cos a + x_c sin a),   a = position * base^(-2c/D)

    x (..., H, D), positions (...) -> (..., H, D); ``positions`` may lack leading dimensions of ``x`` and may be any
    real numbers, time stamps in seconds among them: angles are reduced to less than a turn in float64. Their cosines
    and sines are float32 (float64 for float64 inputs) whatever the dtype of ``x``, so there is no table and no longest
    position. With ``heads`` only the first heads are turned: for q, k and v in one tensor, those of q and k. On a GPU
    it is one pass over them, forward and backward (for compiled models see gdpa.rowwise).

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

    def forward(self, x: Tensor, positions: Tensor, *, heads: int | None = None) -> Tensor:
        if x.dim() < 2 or x.shape[-1] != self.head_dim:
            raise ValueError(f"x must have head dimension {self.head_dim}, got shape {tuple(x.shape)}")
        if heads is None:
            heads = x.shape[-2]
        elif not 0 <= heads <= x.shape[-2]:
            raise ValueError(f"heads must be between 0 and the {x.shape[-2]} of x, got {heads}")
        # The operator has no gradient of positions, and torch.func takes none that has a registered one.
        if wanted() and rotary.has_kernel(x) and not positions.requires_grad and not transformed():
            return rotary.rotate(x, positions, heads, self.base)
        if heads == x.shape[-2]:
            return rotary.formula(x, positions, self.base)
        return torch.cat([rotary.formula(x[..., :heads, :], positions, self.base), x[..., heads:, :]], dim=-2)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base:g}"


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm; over the last dimension, on a GPU, its backward is one pass, the gradients of weights included.

    With ``beside=True`` it returns (x, norm(x)), for residual connections x + f(norm(x)): backward adds up the
    gradients of both. norm(x) is then in the dtype of autocast, to which the layer after it would have cast it.

    >>> norm = LayerNorm(16)
    >>> x, normed = norm(torch.randn(2, 16), beside=True)
    """

    def forward(self, x: Tensor, *, beside: bool = False) -> Any:
        if x.shape[-1:] != self.normalized_shape or not has_kernel(x, self.weight, self.bias):
            y = super().forward(x)
            return (x, computed(y)) if beside else y
        compute = norms.normed_beside if beside else norms.normed
        return compute(x, self.weight, self.bias, self.eps)


def has_kernel(*tensors: Tensor | None) -> bool:
    """Whether there is a kernel for backward, and somebody who may ask for one."""
    return wanted() and torch.is_grad_enabled() and norms.has_kernel(*tensors) and not transformed()
