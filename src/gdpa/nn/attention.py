"""Attention: the operator as a module, with its options and its function's params; and SelfAttention, built on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gdpa import packed
from gdpa.api import ActivationLike, MaskLike, attention, attention_varlen
from gdpa.foreign import PADDING, layer_points_the_way
from gdpa.nn.jagged import Batch, BatchT, Jagged, batch, count, like, no_mask, rows
from gdpa.nn.linear import heads_of, positive, xavier_
from gdpa.nn.options import EveryOption, Options, TimesLike, takes
from gdpa.nn.rowwise import Rotary

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Attention(Options):
    """gdpa.attention as a module, with its options, its function and the function's learned params. All layers use it.

        o_i = out_scale * sum_j p_ij v_j [/ (sink + sum_j n(p_ij))]      p_ij = f_h(scale * <q_i, k_j> + bias; params_h)

    q (B, Lq, H, D), k (B, Lk, Hk, D), v (B, Lk, Hk, Dv) -> (B, Lq, H, Dv): heads come after positions, as linear layers
    give them. A side with offsets is packed, (T, H, D). A q of shape (Lq, H, D) without offsets is shared by all
    sequences, and the result is (B, Lq, H, Dv) again. Without v, k holds keys and values, (B, Lk, 2, Hk, D), as one
    projection computes them; without k and v, q holds all three, (B, L, H / Hk + 2, Hk, D). Their gradient is then one
    tensor, too.

    Args:
        num_heads: H, the heads of the queries.
        activation: a built-in's name, "softmax", a function f(s, *params), a gdpa.Activation, or a list of those, one
            per head. Functions are traced here, once. An nn.Module becomes a part of the layer, as ``function``, and
            every call uses its current state. Its parameters, each one number or one per head, are further params
            (docs/functions.md).
        params: the initial values of the params of ``activation``; each becomes a Parameter. A number gives every head
            a param of its own with this value; a tensor of shape () or (H,) keeps its shape.
        normalize: "sum" divides outputs by the sum of the weights, "abs" by that of their absolute values; or a list,
            one per head (docs/rowsums.md).
        sink: a number that is added to that sum. With ``learn_sink`` each head has its own, exp of a Parameter that
            starts at log(sink); for softmax that is a learned sink's logit.
        score_bias: a :class:`ScoreBias` (ALiBi, RelativeBias, T5Bias, TimeBias, or your own), or several, which are
            added up. It is added to the scores; a function with a keyword-only argument ``bias`` receives it instead,
            to use as it likes: ``lambda s, *, bias: F.silu(s) * torch.sigmoid(bias)``.
        mask: a gdpa.Mask or a function of positions, for all calls. A mask of one batch is an argument of ``forward``;
            the two are joined by "and". Tables of a mask move with the module, and
            keep their precision in any dtype.
        scale, out_scale, causal, window, backend: those of gdpa.attention.
        options: all arguments from ``params`` on as one :class:`AttentionOptions`; arguments given beside it take
            precedence.

    >>> leaky = Attention(4, lambda s, slope: torch.where(s > 0, s, slope * s), params=(0.1,))
    >>> q, k, v = torch.randn(3, 2, 10, 4, 8).unbind(0)
    >>> leaky(q, k, v).shape, leaky.params[0].shape
    (torch.Size([2, 10, 4, 8]), torch.Size([4]))
    """

    @layer_points_the_way
    def forward(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        *,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        times: TimesLike = None,
        mask: MaskLike = None,
    ) -> Tensor:
        """``times``: integer time stamps of the rows, for biases that take them: one tensor if queries and keys are
        the same rows, else a pair. ``mask``: a mask of this batch, joined with the layer's by "and"."""
        if k is None and v is not None:
            raise TypeError("v was given without k: pass both, or one tensor that holds keys and values as k")
        mine = self._heads()
        if _query_heads(q, k) != mine.count:
            together = " or, with k and v, (..., heads / kv_heads + 2, kv_heads, D)" if k is None else ""
            raise ValueError(f"q must have shape (..., {mine.count}, D){together}, got {tuple(q.shape)}")
        shared = cu_seqlens_q is None and q.dim() == 3
        options: dict[str, Any] = {
            "params": mine.params, "normalize": mine.normalize, "sink": mine.sink, "scale": self.scale,
            "out_scale": self.out_scale, "causal": self.causal, "window": self.window, "backend": self.backend,
        }  # fmt: skip
        stamps = self._times(times, lambda: row_counts(q, k, v, cu_seqlens_q, cu_seqlens_k))
        options |= {"tables": self._tables(stamps), "mask": self._mask(mask)}
        if cu_seqlens_q is None and cu_seqlens_k is None:
            for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
                if bound is not None:
                    raise ValueError(f"{name}={bound} is for packed sequences, but no cu_seqlens were given")
            return self._dense(q[None] if shared else q, k, v, mine.activation, options)
        options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        out = self._varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, mine.activation, options)
        if not shared:
            return out
        assert cu_seqlens_k is not None  # attention_varlen has refused it
        return out.view(cu_seqlens_k.shape[0] - 1, q.shape[0], *out.shape[1:])

    def _dense(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, activation: ActivationLike, options: dict[str, Any]
    ) -> Tensor:
        if v is None:
            return packed.attend(*_one_tensor(q, k), activation, grouped=True, **options)
        assert k is not None
        q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
        return self._operators()[0](q, k, v, activation, **options).transpose(1, 2)

    def _varlen(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
        activation: ActivationLike, options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        if v is None:
            return packed.attend_varlen(*_one_tensor(q, k), cu_q, cu_k, activation, grouped=True, **options)
        return self._operators()[1](q, k, v, cu_q, cu_k, activation, **options)

    def _operators(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """What attends, dense and packed. gdpa.distributed has others, for keys that are divided among processes."""
        return attention, attention_varlen


def _query_heads(q: Tensor, k: Tensor | None) -> int:
    if q.dim() < 3:
        return 0
    return (q.shape[-3] - 2) * q.shape[-2] if k is None else q.shape[-2]


def _one_tensor(q: Tensor, k: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Queries that stand by themselves, and what holds the rest."""
    return (None, q) if k is None else (q, k)


def unpacked(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of Attention as separate q, k and v (views), for cores that do not take packed tensors."""
    if k is None:
        # With one query head for each of k's there is nothing to flatten: that would hold exported programs to T != 1.
        queries = q[..., 0, :, :] if q.shape[-3] == 3 else q[..., :-2, :, :].flatten(-3, -2)
        return queries, q[..., -2, :, :], q[..., -1, :, :]
    return (q, k[..., 0, :, :], k[..., 1, :, :]) if v is None else (q, k, v)


def row_counts(
    q: Tensor, k: Tensor | None, v: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None
) -> tuple[int, int]:
    """How many rows queries and keys have; queries shared by all sequences count once per sequence."""
    q, k, _ = unpacked(q, k, v)
    if cu_k is not None:
        rows_k, sequences = k.shape[0], cu_k.shape[0] - 1
    else:
        rows_k, sequences = k.shape[0] * k.shape[1], k.shape[0]
    return (q.shape[0] if cu_q is not None else q.shape[-3] * sequences), rows_k


class SelfAttention(nn.Module):
    """Multi-head self-attention with any function in place of softmax, over dense, jagged or nested sequences.

        q, k, v = split(W_qkv x + b)      per head: q, k = RMSNorm(q), RMSNorm(k) if qk_norm, then rotated if rotary
        y = W_out concat_h(attention_h(q, k, v)) + b                     see :class:`Attention`

    x (B, L, dim), nested (B, j, dim) or Jagged (T, dim) -> the same form. A sequence may be empty.

    Args:
        dim: C, the width of the input and the output.
        num_heads, activation, params, normalize, sink, learn_sink, score_bias, mask, scale, out_scale, causal, window,
            backend, options: see :class:`Attention`. (HSTU's layer is :class:`HSTU`.)
        num_kv_heads: heads of k and v, a divisor of num_heads (grouped queries); num_heads by default.
        head_dim: the width of a head; dim / num_heads by default.
        bias: whether the two projections have biases.
        qk_norm: normalise q and k in each head by their root mean square (eps 1e-6), with a learned weight.
        rotary: the base of rotary positions (10000.0 is usual); None for none. Positions start at 0 in each sequence.

    >>> layer = SelfAttention(32, 4, "silu", causal=True, rotary=10000.0, out_scale=1 / 64)
    >>> x = Jagged.from_lengths(torch.randn(8, 32), torch.tensor([5, 0, 3]))
    >>> layer(x).values.shape, layer(torch.randn(2, 7, 32)).shape
    (torch.Size([8, 32]), torch.Size([2, 7, 32]))
    """

    @takes(EveryOption)
    def __init__(
        self,
        dim: int,
        num_heads: int,
        activation: ActivationLike = "gelu",
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        rotary: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[EveryOption],
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dim, self.num_heads = positive("dim", dim), positive("num_heads", num_heads)
        self.num_kv_heads = num_heads if num_kv_heads is None else positive("num_kv_heads", num_kv_heads)
        if num_heads % self.num_kv_heads != 0:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        self._heads = [num_heads, self.num_kv_heads, self.num_kv_heads]  # of q, k and v, in this process
        self.head_dim = heads_of(dim, num_heads) if head_dim is None else positive("head_dim", head_dim)
        self.qkv = nn.Linear(dim, sum(self._widths), bias=bias, **factory)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **factory) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **factory) if qk_norm else None
        self.rotary = None if rotary is None else Rotary(self.head_dim, rotary)
        self.attention = Attention(num_heads, activation, **options, **factory)
        self._banded = self.attention.causal or self.attention.window is not None
        self.out = nn.Linear(num_heads * self.head_dim, dim, bias=bias, **factory)
        self._start()

    @property
    def _widths(self) -> list[int]:
        """How the fused projection's outputs divide into q, k and v."""
        return [self.head_dim * n for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]

    def reset_parameters(self) -> None:
        """Xavier weights (separately for q, k and v), zero biases, norms of weight 1, params at their initial
        values."""
        self._start()
        self.attention.reset_parameters()

    def _start(self) -> None:
        xavier_(self.qkv, self._widths)
        xavier_(self.out)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    @layer_points_the_way
    def forward(
        self, x: BatchT, positions: Tensor | None = None, *, times: Tensor | None = None, mask: MaskLike = None
    ) -> BatchT:
        """``positions``: one per row, (T,) for jagged and nested ``x``, (B, L) for dense; any real numbers, such as
        log(1 + dt) of times; only with ``rotary``. ``times``: integers of the same shape, for a bias by time. ``mask``:
        a mask of this batch, joined with the layer's by "and"."""
        if isinstance(positions, Tensor) and positions.dtype == torch.bool:
            no_mask(positions)
        if positions is not None and self.rotary is None:
            raise ValueError(
                "positions were given, but the layer was made without rotary; layer(x) takes its queries, keys and "
                f"values from x. If they are a padding mask: {PADDING}"
            )
        b = batch("x", x, self.dim)
        if times is not None:
            times = per_row("times", b, times)
        more: dict[str, Any] = {"times": times, "mask": mask}
        heads = self.qkv(rows(b)).unflatten(-1, (-1, self.head_dim))  # of q, k and v, one after another
        place = None if self.rotary is None else _positions(b, positions)
        if self.q_norm is None or self.k_norm is None:
            if self.rotary is not None:
                heads = self.rotary(heads, place, heads=self._heads[0] + self._heads[1])
            qkv = heads.unflatten(-2, (-1, self._heads[1]))
            return like(x, self.out(attend_in(self.attention, b, qkv, **more).flatten(-2)))
        q, k, v = unpacked(heads.unflatten(-2, (-1, self._heads[1])), None, None)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q, place), self.rotary(k, place)
        return like(x, self.out(attend_in(self.attention, b, q, k, v, **more).flatten(-2)))

    def read(self, x: Jagged, memory: Jagged) -> Jagged:
        """Cross-attention: the rows of ``x`` are queries to the keys and values of ``memory``, and do not see each
        other. Sequence b of one reads sequence b of the other, which may have any number of rows; the rotary
        position of every row of ``x`` is the one after memory's last.

            y = W_out concat_h(out_scale * sum_j f_h(scale * <q_i, k_j>; params_h) v_j) + b,   q of x, k and v of memory

        >>> layer, history = SelfAttention(16, 2), Jagged.from_lengths(torch.randn(8, 16), torch.tensor([5, 3]))
        >>> layer.read(Jagged.from_lengths(torch.randn(9, 16), torch.tensor([2, 7])), history).values.shape
        torch.Size([9, 16])
        """
        mine = self.attention
        if self._banded or mine.mask is not None or len(mine.score_bias):
            raise ValueError(
                "read is for layers without causal, window, mask and score_bias: "
                "queries from elsewhere have no positions among the keys"
            )
        for name, b in (("x", x), ("memory", memory)):
            if not isinstance(b, Jagged):
                raise TypeError(f"{name} must be a Jagged, got {type(b).__name__}")
            batch(name, b, self.dim)
        if count(x) != count(memory):
            raise ValueError(f"x and memory must have the same number of sequences, got {count(x)} and {count(memory)}")
        q, _, _ = self._heads_of(x)
        _, k, v = self._heads_of(memory)
        if self.rotary is not None:
            behind = F.pad(memory.lengths, (0, 1))[x.sequence_ids()]  # 0 of rows of no sequence
            q, k = self.rotary(q, behind), self.rotary(k, memory.positions())
        bounds = {"max_seqlen_q": x.max_seqlen, "max_seqlen_k": memory.max_seqlen}
        o = self.attention(q, k, v, x.cu_seqlens, memory.cu_seqlens, **bounds)
        return x.with_values(self.out(o.flatten(-2)))

    def _heads_of(self, x: Jagged) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the rows of ``x``, not rotated."""
        q, k, v = unpacked(self.qkv(x.values).unflatten(-1, (-1, self._heads[1], self.head_dim)), None, None)
        return (q, k, v) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k), v)

    def extra_repr(self) -> str:
        grouped = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"dim={self.dim}, head_dim={self.head_dim}{grouped}"


def attend_in(
    attention: nn.Module, b: Batch, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, **options: Any
) -> Tensor:
    """``attention`` of the rows of ``b`` to each other."""
    if not isinstance(b, Jagged):
        found: Tensor = attention(q, k, v, **options)
        return found
    cu, longest = b.cu_seqlens, b.max_seqlen
    found = attention(q, k, v, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest, **options)
    return found


def _positions(b: Batch, positions: Any) -> Tensor:
    """Those given, one per row, or else the place of each row in its sequence."""
    if positions is None:
        return b.positions() if isinstance(b, Jagged) else torch.arange(b.shape[1], device=b.device)
    return per_row("positions", b, positions)


def per_row(name: str, b: Batch, given: Any) -> Tensor:
    """``given``, an argument called ``name``, if it is a tensor of one entry per row of ``b``."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(given).__name__}")
    if given.is_complex():
        raise TypeError(f"{name} must be real numbers, got {given.dtype}")
    want = rows(b).shape[:-1]
    if given.shape != want:
        raise ValueError(f"{name} must have one entry per row, {tuple(want)}, got shape {tuple(given.shape)}")
    return given
