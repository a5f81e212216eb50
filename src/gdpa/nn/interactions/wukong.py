"""The interaction block of Wukong (arXiv 2403.02545), as Kunlun uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gdpa.nn.interactions.pairs import tokens
from gdpa.nn.linear import MLP, mix, positive


class FactorizationMachine(nn.Module):
    """Wukong's FMB: products of all pairs of tokens, compressed to rank columns, through an MLP to new tokens.

        F = reshape(MLP(LayerNorm(flatten(X (X^T Y)))))

    x (B, num_tokens, dim) -> (B, out_tokens, dim). Y (num_tokens, rank) is learned; X^T Y first costs less than X X^T.

    >>> FactorizationMachine(16, num_tokens=6, out_tokens=4, rank=3, hidden=[32])(torch.randn(2, 6, 16)).shape
    torch.Size([2, 4, 16])
    """

    def __init__(
        self,
        dim: int,
        num_tokens: int,
        out_tokens: int,
        rank: int,
        hidden: Sequence[int],
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dim, self.num_tokens = positive("dim", dim), positive("num_tokens", num_tokens)
        self.out_tokens, self.rank = positive("out_tokens", out_tokens), positive("rank", rank)
        self.y = nn.Parameter(torch.empty(num_tokens, rank, **factory))
        self.norm = nn.LayerNorm(num_tokens * rank, **factory)
        self.mlp = MLP([num_tokens * rank, *hidden, out_tokens * dim], **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier's Y; the norm and the MLP as they start in PyTorch."""
        nn.init.xavier_uniform_(self.y)
        self.norm.reset_parameters()
        self.mlp.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        tokens("x", x, self.num_tokens, self.dim)
        products = torch.bmm(x, mix(self.y.mT, x).mT)  # (B, num_tokens, rank)
        return self.mlp(self.norm(products.flatten(1))).unflatten(-1, (self.out_tokens, self.dim))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_tokens={self.num_tokens}, out_tokens={self.out_tokens}, rank={self.rank}"


class TokenLinear(nn.Module):
    """A linear map of the token axis, Wukong's LCB: Y = W X. x (B, num_tokens, dim) -> (B, out_tokens, dim).

    >>> TokenLinear(6, 2)(torch.randn(3, 6, 16)).shape
    torch.Size([3, 2, 16])
    """

    def __init__(
        self, num_tokens: int, out_tokens: int, *, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.num_tokens, self.out_tokens = positive("num_tokens", num_tokens), positive("out_tokens", out_tokens)
        self.weight = nn.Parameter(torch.empty(out_tokens, num_tokens, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier's uniform weights."""
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        tokens("x", x, self.num_tokens, None)
        return mix(self.weight, x)

    def extra_repr(self) -> str:
        return f"num_tokens={self.num_tokens}, out_tokens={self.out_tokens}"


class WukongBlock(nn.Module):
    """One layer of Wukong: second-order products and a linear compression of tokens, side by side.

        X' = LayerNorm(concat(FMB(X), LCB(X)) + R X)

    x (B, num_tokens, dim) -> (B, fm_tokens + lc_tokens, dim). FMB is a :class:`FactorizationMachine`, LCB a
    :class:`TokenLinear`; R is the identity where the number of tokens stays, else a third learned TokenLinear. Stacked,
    n layers see products of up to 2^n tokens.

    Args:
        fm_tokens, lc_tokens: how many tokens each of the two parts makes.
        rank: the columns of Y in the FMB.
        hidden: the hidden widths of the FMB's MLP.

    >>> WukongBlock(16, num_tokens=6, fm_tokens=4, lc_tokens=2, rank=3, hidden=[32])(torch.randn(2, 6, 16)).shape
    torch.Size([2, 6, 16])
    """

    def __init__(
        self,
        dim: int,
        num_tokens: int,
        fm_tokens: int,
        lc_tokens: int,
        rank: int,
        hidden: Sequence[int],
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fm = FactorizationMachine(dim, num_tokens, fm_tokens, rank, hidden, **factory)
        self.lc = TokenLinear(num_tokens, lc_tokens, **factory)
        same = fm_tokens + lc_tokens == num_tokens
        self.residual = None if same else TokenLinear(num_tokens, fm_tokens + lc_tokens, **factory)
        self.norm = nn.LayerNorm(dim, **factory)

    def reset_parameters(self) -> None:
        """As its parts start."""
        for part in (self.fm, self.lc, self.residual, self.norm):
            if part is not None:
                part.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.cat([self.fm(x), self.lc(x)], dim=1)
        return self.norm(mixed + (x if self.residual is None else self.residual(x)))
