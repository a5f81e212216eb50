"""Pooling by attention: learned seeds, shared by the batch, summarise each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gdpa.api import ActivationLike
from gdpa.foreign import layer_points_the_way
from gdpa.nn.attention import Attention
from gdpa.nn.interactions.kron import SumKronLinear
from gdpa.nn.jagged import Batch, Jagged, batch, no_mask, rows
from gdpa.nn.linear import heads_of, positive, xavier_
from gdpa.nn.options import PlacedOptions, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Seeds(nn.Module):
    """What the poolings share: seeds, their projection to queries, that of the sequence to keys and values, and the
    attention between them."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_seeds: int,
        activation: ActivationLike,
        bias: bool,
        options: PlacedOptions,
        factory: dict[str, Any],
    ) -> None:
        super().__init__()
        self.dim, self.num_seeds = dim, positive("num_seeds", num_seeds)
        self.head_dim = heads_of(dim, num_heads)
        self.seeds = nn.Parameter(torch.empty(num_seeds, dim, **factory))
        self.q = nn.Linear(dim, dim, bias=bias, **factory)
        self.kv = nn.Linear(dim, 2 * dim, bias=bias, **factory)
        self.attention = Attention(num_heads, activation, **options, **factory)
        if self.attention.needs_times:
            raise ValueError("score_bias takes times, and seeds have none: give a bias by position or by row")

    def reset_parameters(self) -> None:
        """Xavier seeds and weights, zero biases, norms of weight 1, params where they started."""
        self._start()
        self.attention.reset_parameters()

    def _start(self) -> None:
        nn.init.xavier_uniform_(self.seeds)
        xavier_(self.q)
        xavier_(self.kv, [self.dim, self.dim])

    def _attend(self, q: Tensor, x: Batch) -> Tensor:
        """(B, num_seeds, dim) of queries (num_seeds, dim)."""
        b = batch("x", x, self.dim)
        q = q.unflatten(-1, (-1, self.head_dim))
        kv = self.kv(rows(b)).unflatten(-1, (2, -1, self.head_dim))
        if isinstance(b, Jagged):
            return self.attention(q, kv, None, None, b.cu_seqlens, max_seqlen_k=b.max_seqlen).flatten(-2)
        return self.attention(q, kv).flatten(-2)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_seeds={self.num_seeds}, head_dim={self.head_dim}"


class SeedPooling(_Seeds):
    """Plain pooling: multi-head attention of learned seeds S to the sequence X, as InterFormer and Kunlun pool.

        Y = W_out attention(W_q S, W_k X, W_v X)         (LayerNorm(S) for S if seed_norm)

    x (B, L, dim), nested (B, j, dim) or Jagged (T, dim) -> (B, num_seeds, dim), always dense. The attention of an empty
    sequence is zero. The gradient of the seeds is one block, not one per sequence.

    Args:
        dim: C, the width of the seeds, the input and the output; num_heads divides it.
        num_seeds: how many queries there are.
        activation, params, normalize, sink, learn_sink, score_bias, mask, scale, out_scale, backend, options: see
            :class:`Attention`. To biases and masks q_idx is the number of a seed, kv_idx the place of a row.
        seed_norm: whether the seeds pass a LayerNorm first.
        bias: whether the projections have biases.

    >>> pool = SeedPooling(32, 4, num_seeds=2)
    >>> pool(Jagged.from_lengths(torch.randn(8, 32), torch.tensor([5, 0, 3]))).shape
    torch.Size([3, 2, 32])
    """

    @takes(PlacedOptions)
    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_seeds: int,
        activation: ActivationLike = "gelu",
        *,
        seed_norm: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[PlacedOptions],
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(dim, num_heads, num_seeds, activation, bias, options, factory)
        self.seed_norm = nn.LayerNorm(dim, **factory) if seed_norm else None
        self.out = nn.Linear(dim, dim, bias=bias, **factory)
        self._start()

    def _start(self) -> None:
        super()._start()
        xavier_(self.out)
        if self.seed_norm is not None:
            self.seed_norm.reset_parameters()

    @layer_points_the_way
    def forward(self, x: Batch, mask: None = None) -> Tensor:
        no_mask(mask)
        seeds = self.seeds if self.seed_norm is None else self.seed_norm(self.seeds)
        return self.out(self._attend(self.q(seeds), x))


class PMA(_Seeds):
    """Pooling by multi-head attention, the block of Set Transformer (arXiv 1810.00825): PMA_k(X) = MAB(S, X).

        Q = W_q S      O = norm(Q + attention(Q, W_k X, W_v X))      Y = norm(O + relu(W_o O))

    x (B, L, dim), nested (B, j, dim) or Jagged (T, dim) -> (B, num_seeds, dim), always dense. The gradient of the seeds
    is one block, not one per sequence. For attention alone see :class:`SeedPooling`.

    Args:
        dim: C, the width of the seeds, the input and the output; num_heads divides it.
        num_seeds: k, how many queries there are.
        activation, params, normalize, sink, learn_sink, score_bias, mask, scale, out_scale, backend, options: see
            :class:`Attention`. To biases and masks q_idx is the number of a seed, kv_idx the place of a row.
        norm: whether the two norms are LayerNorms; without, they are the identity.
        bias: whether the projections have biases.

    >>> pool = PMA(32, 4, num_seeds=2, norm=True)
    >>> pool(Jagged.from_lengths(torch.randn(8, 32), torch.tensor([5, 0, 3]))).shape
    torch.Size([3, 2, 32])
    """

    @takes(PlacedOptions)
    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_seeds: int,
        activation: ActivationLike = "gelu",
        *,
        norm: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[PlacedOptions],
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(dim, num_heads, num_seeds, activation, bias, options, factory)
        self.ffn = nn.Linear(dim, dim, bias=bias, **factory)
        self.attention_norm = nn.LayerNorm(dim, **factory) if norm else None
        self.ffn_norm = nn.LayerNorm(dim, **factory) if norm else None
        self._start()

    def _start(self) -> None:
        super()._start()
        xavier_(self.ffn)
        for norm in (self.attention_norm, self.ffn_norm):
            if norm is not None:
                norm.reset_parameters()

    @layer_points_the_way
    def forward(self, x: Batch, mask: None = None) -> Tensor:
        no_mask(mask)
        q = self.q(self.seeds)
        o = q + self._attend(q, x)
        if self.attention_norm is not None:
            o = self.attention_norm(o)
        y = o + F.relu(self.ffn(o))
        return y if self.ffn_norm is None else self.ffn_norm(y)


class HierarchicalSeedPooling(nn.Module):
    """Kunlun's pooling (arXiv 2602.10016): more seeds than tokens, then a sum of Kronecker products down to the tokens.

        H = MHA(LayerNorm(S), X, X)        Y = sum_i Z_i^T H W_i

    x (B, L, dim), nested (B, j, dim) or Jagged (T, dim) -> (B, num_tokens, dim), always dense. MHA is a
    :class:`SeedPooling`, the sum a :class:`SumKronLinear` of ``rank`` terms; the paper has 256 seeds, 32 tokens
    and rank 8.

    >>> pool = HierarchicalSeedPooling(32, 4, num_seeds=16, num_tokens=4, rank=2)
    >>> pool(torch.randn(3, 10, 32)).shape
    torch.Size([3, 4, 32])
    """

    @takes(PlacedOptions)
    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_seeds: int,
        num_tokens: int,
        rank: int,
        activation: ActivationLike = "gelu",
        *,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[PlacedOptions],
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.pool = SeedPooling(dim, num_heads, num_seeds, activation, seed_norm=True, bias=bias, **options, **factory)
        self.compress = SumKronLinear(num_seeds, num_tokens, dim, dim, rank, **factory)

    def reset_parameters(self) -> None:
        """As its two parts start."""
        self.pool.reset_parameters()
        self.compress.reset_parameters()

    @layer_points_the_way
    def forward(self, x: Batch, mask: None = None) -> Tensor:
        no_mask(mask)
        return self.compress(self.pool(x))
