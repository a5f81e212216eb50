"""Attention, the operator as a module that owns its options and the params of its function; SelfAttention on top."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gdpa import backends, checks, packed
from gdpa.api import ActivationLike, attention, attention_varlen
from gdpa.functions.activation import Activation, resolve_one
from gdpa.nn.jagged import Batch, BatchT, Jagged, batch, count, like, rows
from gdpa.nn.linear import heads_of, positive, xavier_
from gdpa.nn.rotary import Rotary


class Attention(nn.Module):
    """gdpa.attention with its options, its function and the function's learned params: the core of the layers here.

        o_i = out_scale * sum_j f_h(scale * <q_i, k_j>; params_h) v_j

    q (B, Lq, H, D), k (B, Lk, Hk, D), v (B, Lk, Hk, Dv) -> (B, Lq, H, Dv): heads come after positions, as linear
    layers give them. With offsets a side is packed, (T, H, D); a q of shape (Lq, H, D) without offsets is shared by all
    sequences, and the result is (B, Lq, H, Dv) then too. Without v, k is both, (B, Lk, 2, Hk, D), as one projection
    makes them; without k and v, q is all three, (B, L, H / Hk + 2, Hk, D): their gradient is one tensor then as well.

    Args:
        num_heads: H, the heads of the queries.
        activation: a built-in's name, a function f(s, *params), a gdpa.Activation, or a list of those, one per head.
            Functions are traced here, once.
        params: where the params of ``activation`` start; each becomes a Parameter. A number gives every head its own,
            all starting there; a tensor of shape () or (H,) keeps its shape.
        scale, out_scale, causal, window, backend: those of gdpa.attention.

    >>> leaky = Attention(4, lambda s, slope: torch.where(s > 0, s, slope * s), params=(0.1,))
    >>> q, k, v = torch.randn(3, 2, 10, 4, 8).unbind(0)
    >>> leaky(q, k, v).shape, leaky.params[0].shape
    (torch.Size([2, 10, 4, 8]), torch.Size([4]))
    """

    def __init__(
        self,
        num_heads: int,
        activation: ActivationLike = "gelu",
        *,
        params: Sequence[float | Tensor] = (),
        scale: float | None = None,
        out_scale: float = 1.0,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = positive("num_heads", num_heads)
        if isinstance(params, Tensor):
            raise TypeError("params must be a tuple or list of numbers or tensors, got one tensor; write params=(x,)")
        if not isinstance(params, tuple | list):
            raise TypeError(f"params must be a tuple or list of initial values, got {type(params).__name__}")
        self.activation = _resolve(activation, len(params), num_heads)
        self.scale = None if scale is None else checks.number("scale", scale)
        self.out_scale = checks.number("out_scale", out_scale)
        checks.band(causal, window)
        self.causal, self.window = causal, None if window is None else (window[0], window[1])
        backends.check_name(backend)
        self.backend = backend
        self._starts = tuple(_start(i, p, num_heads) for i, p in enumerate(params))
        self.params = nn.ParameterList(torch.empty(s.shape, device=device, dtype=dtype) for s in self._starts)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The params where they started."""
        with torch.no_grad():
            for p, start in zip(self.params, self._starts, strict=True):
                p.copy_(start)

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
    ) -> Tensor:
        heads, activation, params = self._heads()
        if _query_heads(q, k) != heads:
            together = " or, with k and v, (..., heads / kv_heads + 2, kv_heads, D)" if k is None else ""
            raise ValueError(f"q must have shape (..., {heads}, D){together}, got {tuple(q.shape)}")
        shared = cu_seqlens_q is None and q.dim() == 3
        options: dict[str, Any] = {
            "params": params, "scale": self.scale, "out_scale": self.out_scale, "causal": self.causal,
            "window": self.window, "backend": self.backend,
        }  # fmt: skip
        if cu_seqlens_q is None and cu_seqlens_k is None:
            for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
                if bound is not None:
                    raise ValueError(f"{name}={bound} is for packed sequences, and no cu_seqlens are given")
            return self._dense(q[None] if shared else q, k, v, activation, options)
        options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        out = self._varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, activation, options)
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

    def _heads(self) -> tuple[int, ActivationLike, tuple[Tensor, ...]]:
        """How many heads there are, their functions and params: all, or in gdpa.distributed those of this process."""
        return self.num_heads, self.activation, tuple(self.params)

    def _operators(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """What attends, dense and packed. gdpa.distributed has others, for keys that are divided among processes."""
        return attention, attention_varlen

    def extra_repr(self) -> str:
        one = isinstance(self.activation, Activation)
        names = self.activation.name if one else [a.name for a in self.activation]  # type: ignore[union-attr]
        parts = [f"num_heads={self.num_heads}", f"activation={names!r}"]
        for name, usual in (
            ("scale", None),
            ("out_scale", 1.0),
            ("causal", False),
            ("window", None),
            ("backend", None),
        ):
            if getattr(self, name) != usual:
                parts.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(parts)


def _query_heads(q: Tensor, k: Tensor | None) -> int:
    if q.dim() < 3:
        return 0
    return (q.shape[-3] - 2) * q.shape[-2] if k is None else q.shape[-2]


def _one_tensor(q: Tensor, k: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Queries that stand by themselves, and what holds the rest."""
    return (None, q) if k is None else (q, k)


def unpacked(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What Attention is called with, as q, k and v of their own, for cores that take no other: views."""
    if k is None:
        # With one query head for each of k's there is nothing to flatten: that would hold exported programs to T != 1.
        queries = q[..., 0, :, :] if q.shape[-3] == 3 else q[..., :-2, :, :].flatten(-3, -2)
        return queries, q[..., -2, :, :], q[..., -1, :, :]
    return (q, k[..., 0, :, :], k[..., 1, :, :]) if v is None else (q, k, v)


def _resolve(activation: Any, n_params: int, heads: int) -> Activation | list[Activation]:
    """The functions, traced; one, or one per head."""
    if not isinstance(activation, list | tuple):
        return resolve_one(activation, n_params)
    if len(activation) != heads:
        raise ValueError(f"activation is a list of {len(activation)}, it needs one entry per query head ({heads})")
    return [resolve_one(one, n_params) for one in activation]


def _start(i: int, value: Any, heads: int) -> Tensor:
    """The initial value of params[i], on the CPU: shape (heads,) of a number, its own of a tensor."""
    if not isinstance(value, Tensor):
        return torch.full((heads,), checks.number(f"params[{i}]", value), dtype=torch.float64, device="cpu")
    if value.shape != () and value.shape != (heads,):
        raise ValueError(f"params[{i}] must be a number or have shape () or ({heads},), got {tuple(value.shape)}")
    return value.detach().to("cpu", torch.float64, copy=True)


class SelfAttention(nn.Module):
    """Multi-head self-attention with any function in place of softmax, over dense, jagged or nested sequences.

        q, k, v = split(W_qkv x + b)      per head: q, k = RMSNorm(q), RMSNorm(k) if qk_norm, then rotated if rotary
        y = W_out concat_h(out_scale * sum_j f_h(scale * <q_i, k_j>; params_h) v_j) + b

    x (B, L, dim), nested (B, j, dim) or Jagged (T, dim) -> the same form. A sequence may be empty.

    Args:
        dim: C, the width of the input and the output.
        num_heads, activation, params, scale, out_scale, causal, window, backend: see :class:`Attention`. HSTU is "silu"
            with causal=True and out_scale = 1 / the longest length.
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

    def __init__(
        self,
        dim: int,
        num_heads: int,
        activation: ActivationLike = "gelu",
        *,
        params: Sequence[float | Tensor] = (),
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        rotary: float | None = None,
        scale: float | None = None,
        out_scale: float = 1.0,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dim, self.num_heads = positive("dim", dim), positive("num_heads", num_heads)
        self.num_kv_heads = num_heads if num_kv_heads is None else positive("num_kv_heads", num_kv_heads)
        if num_heads % self.num_kv_heads != 0:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        self._heads = [num_heads, self.num_kv_heads, self.num_kv_heads]  # of q, k and v, in this process
        self._banded = causal or window is not None
        self.head_dim = heads_of(dim, num_heads) if head_dim is None else positive("head_dim", head_dim)
        self.qkv = nn.Linear(dim, sum(self._widths), bias=bias, **factory)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **factory) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **factory) if qk_norm else None
        self.rotary = None if rotary is None else Rotary(self.head_dim, rotary)
        self.attention = Attention(
            num_heads, activation, params=params, scale=scale, out_scale=out_scale, causal=causal, window=window,
            backend=backend, **factory,
        )  # fmt: skip
        self.out = nn.Linear(num_heads * self.head_dim, dim, bias=bias, **factory)
        self.reset_parameters()

    @property
    def _widths(self) -> list[int]:
        """How the fused projection's outputs divide into q, k and v."""
        return [self.head_dim * n for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]

    def reset_parameters(self) -> None:
        """Xavier weights (q, k and v each on their own), zero biases, norms of weight 1, params where they started."""
        xavier_(self.qkv, self._widths)
        xavier_(self.out)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()
        self.attention.reset_parameters()

    def forward(self, x: BatchT, positions: Tensor | None = None) -> BatchT:
        """``positions``: of each row, (T,) for jagged and nested ``x``, (B, L) for dense, any real numbers (log(1 + dt)
        for times); only with ``rotary``."""
        if positions is not None and self.rotary is None:
            raise ValueError("positions are given, but the layer was made without rotary")
        b = batch("x", x, self.dim)
        qkv = self.qkv(rows(b)).unflatten(-1, (-1, self._heads[1], self.head_dim))
        if self.q_norm is None and self.rotary is None:
            return like(x, self.out(self._attend(b, qkv).flatten(-2)))
        q, k, v = unpacked(qkv, None, None)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            place = _positions(b, positions)
            q, k = self.rotary(q, place), self.rotary(k, place)
        return like(x, self.out(self._attend(b, q, k, v).flatten(-2)))

    def read(self, x: Jagged, memory: Jagged) -> Jagged:
        """The rows of ``x`` as queries to the keys and values of ``memory``, and not of each other: sequence b of one
        reads sequence b of the other, which may have any number of rows; rotary places are behind memory's last.

            y = W_out concat_h(out_scale * sum_j f_h(scale * <q_i, k_j>; params_h) v_j) + b,   q of x, k and v of memory

        >>> layer, history = SelfAttention(16, 2), Jagged.from_lengths(torch.randn(8, 16), torch.tensor([5, 3]))
        >>> layer.read(Jagged.from_lengths(torch.randn(9, 16), torch.tensor([2, 7])), history).values.shape
        torch.Size([9, 16])
        """
        if self._banded:
            raise ValueError("read is for layers without causal and window: queries from elsewhere have no place there")
        for name, b in (("x", x), ("memory", memory)):
            if not isinstance(b, Jagged):
                raise TypeError(f"{name} must be a Jagged, got {type(b).__name__}")
            batch(name, b, self.dim)
        if count(x) != count(memory):
            raise ValueError(f"x and memory must have as many sequences, they have {count(x)} and {count(memory)}")
        q, _, _ = self._heads_of(x)
        _, k, v = self._heads_of(memory)
        if self.rotary is not None:
            behind = memory.lengths[x.sequence_ids()]
            q, k = self.rotary(q, behind), self.rotary(k, memory.positions())
        bounds = {"max_seqlen_q": x.max_seqlen, "max_seqlen_k": memory.max_seqlen}
        o = self.attention(q, k, v, x.cu_seqlens, memory.cu_seqlens, **bounds)
        return x.with_values(self.out(o.flatten(-2)))

    def _heads_of(self, x: Jagged) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the rows of ``x``, not rotated."""
        q, k, v = unpacked(self.qkv(x.values).unflatten(-1, (-1, self._heads[1], self.head_dim)), None, None)
        return (q, k, v) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k), v)

    def _attend(self, b: Batch, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        if not isinstance(b, Jagged):
            return self.attention(q, k, v)
        cu, longest = b.cu_seqlens, b.max_seqlen
        return self.attention(q, k, v, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest)

    def extra_repr(self) -> str:
        grouped = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"dim={self.dim}, head_dim={self.head_dim}{grouped}"


def _positions(b: Batch, positions: Any) -> Tensor:
    """Those given, one per row, or else the place of each row in its sequence."""
    if positions is None:
        return b.positions() if isinstance(b, Jagged) else torch.arange(b.shape[1], device=b.device)
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions must be a tensor, got {type(positions).__name__}")
    want = rows(b).shape[:-1]
    if positions.shape != want:
        raise ValueError(f"positions must have one entry per row, {tuple(want)}, got shape {tuple(positions.shape)}")
    return positions
