"""PFFN: a feed-forward layer whose weights are generated for each sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gdpa.api import ActivationLike
from gdpa.foreign import layer_points_the_way
from gdpa.nn.attention import Attention
from gdpa.nn.jagged import BatchT, Jagged, batch, count, like, rows
from gdpa.nn.linear import heads_of, positive
from gdpa.nn.options import ScaledOptions, takes
from gdpa.nn.rowwise import LayerNorm, has_kernel
from gdpa.rowwise.norms import add_normed, add_normed_beside

if TYPE_CHECKING:
    from typing_extensions import Unpack

EPS = 1e-5  # of both norms


class PFFN(nn.Module):
    """Personalised feed-forward network (InterFormer, Kunlun): its weights K and V come from a user's context tokens.

        K, V = split(W flatten(context) + b)                                    (hidden, H, D) each, per sequence
        norm=True:   n = LayerNorm(x)    y = x + RMSNorm(gdpa(n, K, V) + n)     the production block
        norm=False:  y = x + gdpa(x, K, V)                                      Kunlun's formula
        gdpa(q, K, V) = out_scale * sum_j f_h(scale * <q, K_hj>; params_h) V_hj

    x (B, L, dim), nested (B, j, dim) or Jagged (T, dim), context (B, context_tokens, context_dim) -> the form of x.
    Both norms are over all dim features with eps 1e-5; LayerNorm has no weights, RMSNorm has one per feature.

    Args:
        dim: C, the width of the sequence; num_heads divides it.
        hidden: the hidden units of each head, the length of K and V.
        context_tokens, context_dim: the shape of the context of one sequence.
        activation, params, normalize, sink, learn_sink, scale, out_scale, backend, options: see :class:`Attention`.
            Kunlun divides by the longest length: scale = 1 / length.
        norm: whether to use the production block.
        bias: whether the generator of the weights has a bias.

    >>> layer = PFFN(32, 4, hidden=16, context_tokens=2, context_dim=8, activation=["gelu", "silu", "gelu", "relu"])
    >>> x = Jagged.from_lengths(torch.randn(8, 32), torch.tensor([5, 0, 3]))
    >>> layer(x, torch.randn(3, 2, 8)).values.shape
    torch.Size([8, 32])
    """

    @takes(ScaledOptions)
    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden: int,
        context_tokens: int,
        context_dim: int,
        activation: ActivationLike = "gelu",
        *,
        norm: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[ScaledOptions],
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dim, self.head_dim, self.hidden = dim, heads_of(dim, num_heads), positive("hidden", hidden)
        self.context_tokens = positive("context_tokens", context_tokens)
        self.context_dim = positive("context_dim", context_dim)
        self.generate = nn.Linear(context_tokens * context_dim, 2 * hidden * dim, bias=bias, **factory)
        self.attention = Attention(num_heads, activation, **options, **factory)
        self.in_norm = nn.LayerNorm(dim, eps=EPS, elementwise_affine=False) if norm else None
        self.out_norm = nn.RMSNorm(dim, eps=EPS, **factory) if norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform, so that a context of variance 1 gives K of variance 1 and V of variance 1 / hidden; zero bias."""
        bound = math.sqrt(3 / self.generate.in_features)
        with torch.no_grad():
            k, v = self.generate.weight.chunk(2)
            nn.init.uniform_(k, -bound, bound)
            nn.init.uniform_(v, -bound / math.sqrt(self.hidden), bound / math.sqrt(self.hidden))
            if self.generate.bias is not None:
                nn.init.zeros_(self.generate.bias)
        if self.out_norm is not None:
            self.out_norm.reset_parameters()
        self.attention.reset_parameters()

    @layer_points_the_way
    def forward(self, x: BatchT, context: Tensor, *, then: LayerNorm | None = None) -> Any:
        """y in the form of ``x``. With ``then``, the norm that the next layer begins with, both y and ``then(y)``: the
        same as ``then(y, beside=True)``, but on a GPU the backward is one pass, together with this layer's own
        norms."""
        b = batch("x", x, self.dim)
        want = (count(b), self.context_tokens, self.context_dim)
        if not isinstance(context, Tensor) or context.is_nested:
            raise TypeError(f"context must be a dense tensor (B, N, C), got {type(context).__name__}")
        if context.dim() != 3 or context.shape != want:
            raise ValueError(f"context must have shape {want}, got {tuple(context.shape)}")
        weights = self.generate(context.flatten(1)).unflatten(-1, (2, self.hidden, -1, self.head_dim))
        values = rows(b)
        normed = values if self.in_norm is None else self.in_norm(values)
        q, kv = normed.unflatten(-1, (-1, self.head_dim)), weights.transpose(1, 2)
        if isinstance(b, Jagged):
            o = self.attention(q, kv, None, b.cu_seqlens, max_seqlen_q=b.max_seqlen)
        else:
            o = self.attention(q, kv)
        found = self._finish(values, normed, o.flatten(-2), then)
        return like(x, found[0]) if then is None else tuple(like(x, t) for t in found)

    def _finish(self, x: Tensor, n: Tensor, o: Tensor, then: LayerNorm | None) -> tuple[Tensor, ...]:
        if self.out_norm is None:
            y = x + o
        elif not has_kernel(x, o, self.out_norm.weight):
            y = x + self.out_norm(o + n)
        elif then is None or not _joins(then, x, self.out_norm.weight):
            y = add_normed(x, o, n, self.out_norm.weight, EPS, EPS)
        else:
            w, after = self.out_norm.weight, (then.weight, then.bias, then.eps)
            return add_normed_beside(x, o, n, w, EPS, EPS, *after)
        return (y,) if then is None else then(y, beside=True)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, head_dim={self.head_dim}, hidden={self.hidden}, context_tokens={self.context_tokens}, "
            f"context_dim={self.context_dim}"
        )


def _joins(then: LayerNorm, x: Tensor, weight: Tensor) -> bool:
    """Whether the norm of y can be part of the pass that computes y, which has y only in the dtype of x."""
    has_both = then.weight is not None and then.bias is not None
    return has_both and x.dtype == weight.dtype and has_kernel(x, then.weight, then.bias)
