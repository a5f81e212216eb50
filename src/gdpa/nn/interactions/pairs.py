"""Interactions of feature tokens: dot products of pairs (DLRM's DOT), and cross layers (DCN v2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gdpa.nn.linear import positive, xavier_


def tokens(name: str, x: Any, num_tokens: int, dim: int | None) -> None:
    """Refuses an ``x`` that is not (B, num_tokens, dim); a dim of None is any."""
    if not isinstance(x, Tensor) or x.is_nested:
        raise TypeError(f"{name} must be a dense tensor (B, tokens, C), got {type(x).__name__}")
    if x.dim() != 3 or x.shape[1] != num_tokens or (dim is not None and x.shape[2] != dim):
        width = "C" if dim is None else dim
        raise ValueError(f"{name} must have shape (B, {num_tokens}, {width}), got {tuple(x.shape)}")


class DotInteraction(nn.Module):
    """The dot products of all pairs of tokens, DLRM's interaction.

        y = (<x_i, x_j>  for i < j)            and for i = j too with self_interaction

    x (B, n, C) -> (B, n (n - 1) / 2), or n (n + 1) / 2; pairs in the order (0, 1), (0, 2), ... (1, 2), ...

    >>> DotInteraction(4)(torch.randn(2, 4, 16)).shape
    torch.Size([2, 6])
    """

    def __init__(self, num_tokens: int, *, self_interaction: bool = False) -> None:
        super().__init__()
        self.num_tokens, self.self_interaction = positive("num_tokens", num_tokens), self_interaction

    @property
    def out_features(self) -> int:
        """The number of pairs."""
        return self.num_tokens * (self.num_tokens + (1 if self.self_interaction else -1)) // 2

    def forward(self, x: Tensor) -> Tensor:
        tokens("x", x, self.num_tokens, None)
        n = self.num_tokens
        i, j = torch.triu_indices(n, n, 0 if self.self_interaction else 1, device=x.device)
        return (x @ x.mT).flatten(1).index_select(1, i * n + j)

    def extra_repr(self) -> str:
        return f"num_tokens={self.num_tokens}, self_interaction={self.self_interaction}"


class CrossNet(nn.Module):
    """The cross network of DCN v2 (arXiv 2008.13535): each layer multiplies by the input once more.

        x_{l+1} = x_0 * (W_l x_l + b_l) + x_l,      W_l = U_l V_l of the given rank, or full if rank is None

    x (..., dim) -> (..., dim). Layer l has products of up to l + 2 features.

    >>> CrossNet(16, num_layers=2, rank=4)(torch.randn(3, 16)).shape
    torch.Size([3, 16])
    """

    def __init__(
        self,
        dim: int,
        num_layers: int,
        *,
        rank: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dim, self.num_layers = positive("dim", dim), positive("num_layers", num_layers)
        self.rank = None if rank is None else positive("rank", rank)
        inner = dim if rank is None else rank
        narrow = () if rank is None else (nn.Linear(dim, rank, bias=False, **factory) for _ in range(num_layers))
        self.v = nn.ModuleList(narrow)
        self.u = nn.ModuleList(nn.Linear(inner, dim, **factory) for _ in range(num_layers))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier's uniform weights and zero biases."""
        for layer in (*self.v, *self.u):
            assert isinstance(layer, nn.Linear)
            xavier_(layer)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.dim:
            raise ValueError(f"x must have {self.dim} features in its last dimension, got shape {tuple(x.shape)}")
        y = x
        for i, u in enumerate(self.u):
            y = x * u(self.v[i](y) if self.rank is not None else y) + y
        return y

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_layers={self.num_layers}, rank={self.rank}"
