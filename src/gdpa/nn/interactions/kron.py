"""SumKronLinear: a linear map of token matrices with few weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gdpa.nn.linear import mix, positive


class SumKronLinear(nn.Module):
    """A linear map from (in_tokens, in_features) to (out_tokens, out_features), a sum of Kronecker products.

        Y = sum_i Z_i^T H W_i,      i = 1 ... rank

    h (..., in_tokens, in_features) -> (..., out_tokens, out_features). The parameter ``z`` holds Z_i[s, t] as
    (out_tokens, rank, in_tokens), so that one product makes all Z_i^T H; ``w`` holds W_i as
    (rank, in_features, out_features). A full map has in_tokens * out_tokens * in_features * out_features weights,
    this one rank * (in_tokens * out_tokens + in_features * out_features).

    >>> SumKronLinear(16, 4, 32, 32, rank=2)(torch.randn(3, 16, 32)).shape
    torch.Size([3, 4, 32])
    """

    def __init__(
        self,
        in_tokens: int,
        out_tokens: int,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_tokens, self.out_tokens = positive("in_tokens", in_tokens), positive("out_tokens", out_tokens)
        self.in_features, self.out_features = (
            positive("in_features", in_features),
            positive("out_features", out_features),
        )
        self.rank = positive("rank", rank)
        self.z = nn.Parameter(torch.empty(out_tokens, rank, in_tokens, device=device, dtype=dtype))
        self.w = nn.Parameter(torch.empty(rank, in_features, out_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform, so that independent inputs of variance 1 give outputs of variance 1."""
        for p, terms in ((self.z, self.in_tokens), (self.w, self.rank * self.in_features)):
            bound = math.sqrt(3 / terms)
            nn.init.uniform_(p, -bound, bound)

    def forward(self, h: Tensor) -> Tensor:
        if h.dim() < 2 or h.shape[-2:] != (self.in_tokens, self.in_features):
            raise ValueError(f"h must have shape (..., {self.in_tokens}, {self.in_features}), got {tuple(h.shape)}")
        zh = mix(self.z.flatten(0, 1), h.reshape(-1, self.in_tokens, self.in_features))
        zh = zh.reshape(*h.shape[:-2], self.out_tokens, self.rank * self.in_features)
        return zh @ self.w.flatten(0, 1)

    def extra_repr(self) -> str:
        return (
            f"in_tokens={self.in_tokens}, out_tokens={self.out_tokens}, in_features={self.in_features}, "
            f"out_features={self.out_features}, rank={self.rank}"
        )
