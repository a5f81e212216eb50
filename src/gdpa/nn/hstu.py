"""HSTU's layer: the sequential transduction unit of generative recommenders, in one call of the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gdpa import masks
from gdpa.api import ActivationLike
from gdpa.arguments import checks
from gdpa.foreign import layer_points_the_way
from gdpa.nn.attention import Attention, attend_in, per_row
from gdpa.nn.biases import RelativeBias, ScoreBias, TimeBias
from gdpa.nn.jagged import Batch, BatchT, Jagged, batch, count, like, no_mask, rows
from gdpa.nn.linear import heads_of, positive, xavier_
from gdpa.nn.options import FunctionOptions, takes
from gdpa.nn.rowwise import LayerNorm

if TYPE_CHECKING:
    from typing_extensions import Unpack


class HSTU(nn.Module):
    """Hierarchical sequential transduction unit (arXiv 2402.17152), jagged, in one call of gdpa.attention.

        U, Q, K, V = split(silu(W LayerNorm(x) + b))
        A = out_scale * sum_j f(scale * <q_i, k_j> + position_{i-j} + time_{bucket(t_i - t_j)}) v_j     j visible to i
        y = x + W_out (LayerNorm(A) * U) + b

    x (B, L, dim), nested (B, j, dim) or Jagged (T, dim) -> the same form. A row sees itself and the rows before it,
    except where contexts, targets and max_attn_len say otherwise (the mask is that of Meta's open kernels).

    Args:
        dim, num_heads: the width of x, and the heads.
        longest: what sums over a sequence are divided by, and the distance from which on positions share a bias. Longer
            sequences are accepted, too.
        head_dim, value_dim: the widths of q and k, and of u and v, in a head; dim / num_heads by default.
        activation, params, normalize, sink, learn_sink, scale, backend, options: see :class:`Attention`; f is silu by
            default.
        out_scale: 1 / longest by default; 1 if outputs are normalised.
        position_bias: whether there is a learned bias of i - j.
        time_buckets: how many buckets of time differences have a learned bias; None for no bias by time.
        next_time: whether the time of a query is that of the row after it, as published (the last row keeps its own).
        context_len: rows at the start of every sequence that see each other and all rows but the targets. A
            sequence needs as many rows before its targets: with fewer, each of its rows sees itself only.
        target_group: targets that come in groups of this size see those before them in their group.
        max_attn_len: how many rows back a row sees, where all contexts together count as one row, and so do all
            targets; None for no bound.
        full_attn_len: this many rows, the last ones before the targets, and the targets themselves are not bound by
            max_attn_len.

    >>> layer = HSTU(32, 4, longest=64, context_len=2, max_attn_len=16)
    >>> x = Jagged.from_lengths(torch.randn(8, 32), torch.tensor([5, 0, 3]))
    >>> layer(x, times=torch.arange(8) * 3600, num_targets=torch.tensor([2, 0, 1])).values.shape
    torch.Size([8, 32])
    """

    @takes(FunctionOptions)
    def __init__(
        self,
        dim: int,
        num_heads: int,
        longest: int,
        activation: ActivationLike = "silu",
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        out_scale: float | None = None,
        position_bias: bool = True,
        time_buckets: int | None = 128,
        next_time: bool = True,
        context_len: int = 0,
        target_group: int = 1,
        max_attn_len: int | None = None,
        full_attn_len: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[FunctionOptions],
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dim, self.num_heads, self.longest = positive("dim", dim), num_heads, positive("longest", longest)
        self.head_dim = heads_of(dim, num_heads) if head_dim is None else positive("head_dim", head_dim)
        self.value_dim = heads_of(dim, num_heads) if value_dim is None else positive("value_dim", value_dim)
        for name, flag in (("position_bias", position_bias), ("next_time", next_time)):
            checks.flag(name, flag)
        self.next_time, self.context_len = next_time, _length("context_len", context_len)
        self._masks = _masks(
            self.context_len,
            positive("target_group", target_group),
            None if max_attn_len is None else positive("max_attn_len", max_attn_len),
            _length("full_attn_len", full_attn_len),
        )
        biases: list[ScoreBias] = [RelativeBias(longest, **factory)] if position_bias else []
        biases += [] if time_buckets is None else [TimeBias(time_buckets, **factory)]
        self.in_norm = LayerNorm(dim, **factory)
        self.uqkv = nn.Linear(dim, sum(self._widths), **factory)
        self.attention = Attention(
            num_heads, activation, score_bias=biases, causal=self.context_len == 0, **options, **factory
        )
        usual = 1 / longest if self.attention.normalize is None else 1.0
        self.attention.out_scale = usual if out_scale is None else checks.number("out_scale", out_scale)
        self.out_norm = LayerNorm(num_heads * self.value_dim, **factory)
        self.out = nn.Linear(num_heads * self.value_dim, dim, **factory)
        self._start()

    @property
    def _widths(self) -> list[int]:
        """How the fused projection's outputs divide into u, q, k and v: so that q, k and v lie in one tensor."""
        return [self.num_heads * d for d in (self.value_dim, self.head_dim, self.head_dim, self.value_dim)]

    def reset_parameters(self) -> None:
        """Xavier weights (separately for u, q, k and v), zero biases, norms of weight 1, and the initial biases of
        scores."""
        self._start()
        self.attention.reset_parameters()

    def _start(self) -> None:
        xavier_(self.uqkv, self._widths)
        xavier_(self.out)
        self.in_norm.reset_parameters()
        self.out_norm.reset_parameters()

    @layer_points_the_way
    def forward(
        self, x: BatchT, mask: None = None, *, times: Tensor | None = None, num_targets: Tensor | None = None
    ) -> BatchT:
        """``times``: integer time stamps, one per row: (T,), or (B, L) for dense x. ``num_targets``: (B,), how many of
        each sequence's last rows are candidates: each sees the rows before all candidates, and itself."""
        no_mask(mask)
        b = batch("x", x, self.dim)
        values, normed = self.in_norm(rows(b), beside=True)
        uqkv = F.silu(self.uqkv(normed))
        u = uqkv[..., : self._widths[0]]
        options: dict[str, Any] = {"times": self._times(b, times), "mask": self._mask(b, num_targets)}
        if self.head_dim == self.value_dim:
            qkv = uqkv[..., self._widths[0] :].unflatten(-1, (3, self.num_heads, self.head_dim))
            a = attend_in(self.attention, b, qkv, **options)
        else:
            q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in uqkv.split(self._widths, -1)[1:])
            a = attend_in(self.attention, b, q, k, v, **options)
        return like(x, values + self.out(self.out_norm(a.flatten(-2)) * u))

    def _times(self, b: Batch, times: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if times is None:
            return None
        times = per_row("times", b, times)
        return (_next(b, times) if self.next_time else times), times

    def _mask(self, b: Batch, num_targets: Any) -> masks.Mask | None:
        without, with_targets = self._masks
        if num_targets is None:
            return without
        if not isinstance(num_targets, Tensor) or num_targets.is_floating_point():
            raise TypeError(f"num_targets must be a tensor of integers, got {num_targets!r}")
        if num_targets.shape != (count(b),):
            raise ValueError(f"num_targets must have shape ({count(b)},), got {tuple(num_targets.shape)}")
        return with_targets.with_tables((num_targets.long(),))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, longest={self.longest}, head_dim={self.head_dim}, value_dim={self.value_dim}"


def _length(name: str, value: Any) -> int:
    """An int of at least 0."""
    return 0 if value == 0 and isinstance(value, int) and not isinstance(value, bool) else positive(name, value)


def _next(b: Batch, times: Tensor) -> Tensor:
    """The time of the row after each row; the last row of a sequence keeps its own."""
    if not isinstance(b, Jagged):
        return torch.cat([times[:, 1:], times[:, -1:]], dim=1)
    after = torch.arange(1, times.shape[0] + 1, device=times.device)
    end = torch.cat([b.cu_seqlens[1:], b.cu_seqlens[-1:]])  # one more for rows of no sequence
    return times[torch.minimum(after, end[b.sequence_ids()] - 1)]


def _masks(context: int, group: int, window: int | None, full: int) -> tuple[masks.Mask | None, masks.Mask]:
    """The mask without targets (None if causal attention is all that is needed) and the mask with targets, whose table,
    the numbers of targets, is put in at each call.

    Rows are numbered so that all contexts share the first number and all targets the last; windows and order go by
    these numbers.
    """
    shift = max(context - 1, 0)

    def visible(q_idx: Tensor, kv_idx: Tensor, end: Tensor) -> Tensor:
        row, column = (torch.minimum((t - shift).clamp(min=0), end) for t in (q_idx, kv_idx))
        seen = row > column
        if window is not None:
            near = row - column <= window
            seen = seen & (near | (row >= end - full) if full else near)
        if context:
            seen = seen | ((row == 0) & (column < end))
        return seen | (q_idx == kv_idx)

    def without_targets(q_idx: Tensor, kv_idx: Tensor, kv_len: Tensor) -> Tensor:
        return visible(q_idx, kv_idx, kv_len - shift)

    def with_targets(q_idx: Tensor, kv_idx: Tensor, kv_len: Tensor, b: Tensor, counts: Tensor) -> Tensor:
        first = kv_len - counts[b].clamp(0, 2**29)  # bounded, so that kernels can compute in 32 bits
        seen = visible(q_idx, kv_idx, first - shift)
        if group == 1:
            return seen
        same = (kv_idx - first) // group == (q_idx - first) // group
        return seen | ((kv_idx >= first) & (kv_idx <= q_idx) & same)

    plain = context == 0 and window is None
    return None if plain else masks.Mask(without_targets), masks.Mask(with_targets, (torch.zeros(1).long(),))
