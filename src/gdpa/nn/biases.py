"""Biases added to scores by position: f(s + bias), with the tables that the biases are looked up in.

A bias is written once, as an expression of positions and tables (docs/positions.md), and becomes part of the function
that a layer attends with: it is looked up inside the kernel, and its tables get their gradients there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gdpa.arguments import checks
from gdpa.nn.linear import positive
from gdpa.problem import sums_dtype

Times = tuple[Tensor, Tensor]
STD = 0.02  # with which tables start, as HSTU's do


class FixedTables(nn.Module):
    """A module whose buffers are data, not weights: they move with it, but ``bfloat16()`` and ``half()`` leave their
    dtype alone, as they do for integers. (Kernels compute with tables in float32, whatever the dtype of q.)"""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FixedTables:
        before = {name: t for name, t in self._buffers.items() if t is not None and t.is_floating_point()}
        super()._apply(fn, recurse)
        for name, table in before.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype.itemsize < min(table.dtype.itemsize, torch.float32.itemsize):
                self._buffers[name] = table.to(moved.device)
        return self


class ScoreBias(FixedTables):
    """The base class of all biases: subclass it to write your own.

    ``tables()`` gives the tensors that ``bias`` looks up, Parameters or buffers of the module (buffers are data, and
    keep their precision when the module is cast to a narrower dtype); ``bias(*tables, ...)`` is the expression, which
    takes the positions it needs as keyword-only arguments, and must not use the module's tensors in another way. With
    ``takes_times`` a layer needs ``times``, and ``tables`` is given those of the rows of the queries and of the keys,
    as int64 (rows,). ``num_heads``: how many heads the tables are for; None for any.

    >>> class Recency(ScoreBias):  # a learned number for each of the last 32 keys
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.zeros(32))
    ...
    ...     def tables(self, times=None):
    ...         return (self.weight,)
    ...
    ...     def bias(self, weight, *, kv_idx, kv_len):
    ...         return weight[(kv_len - 1 - kv_idx).clamp(0, 31)]
    >>> pool = gdpa.nn.SeedPooling(16, 2, num_seeds=1, activation="softmax", score_bias=Recency())
    """

    takes_times: ClassVar[bool] = False
    num_heads: int | None = None

    def tables(self, times: Times | None = None) -> tuple[Tensor, ...]:
        """The tables of ``bias``, in the order of its arguments."""
        raise NotImplementedError(f"{type(self).__name__} has no method tables(self, times=None): see ScoreBias")

    def bias(self, *tables: Any, **positions: Tensor) -> Tensor:
        """The bias of each pair."""
        raise NotImplementedError(f"{type(self).__name__} has no method bias(self, *tables, ...): see ScoreBias")

    def reset_parameters(self) -> None:
        """Restores the initial values. A bias that has any sets its tensors here."""


class ALiBi(ScoreBias):
    """-slope_h |i - j| (arXiv 2108.12409), with slopes 2^(-8 / H), 2^(-16 / H), ...: fixed, or the initial values of
    ``learned`` ones. ``causal``: -slope_h (i - j), the same where no query sees later keys, and faster on GPUs.

    >>> layer = gdpa.nn.SelfAttention(32, 4, "softmax", causal=True, score_bias=ALiBi(4, causal=True))
    """

    def __init__(
        self, num_heads: int, *, learned: bool = False, causal: bool = False, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads = positive("num_heads", num_heads)
        checks.flag("learned", learned)
        checks.flag("causal", causal)
        self.causal = causal
        if learned:
            self.slopes = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        else:  # data, see FixedTables
            wide = sums_dtype(dtype or torch.get_default_dtype())
            self.register_buffer("slopes", torch.empty(num_heads, device=device, dtype=wide), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The slopes above."""
        assert self.num_heads is not None
        with torch.no_grad():
            start = torch.exp2(-8 * torch.arange(1, self.num_heads + 1, dtype=torch.float64) / self.num_heads)
            self.slopes.copy_(start)

    def tables(self, times: Times | None = None) -> tuple[Tensor, ...]:
        return (self.slopes,)

    def bias(self, slopes: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # type: ignore[override]
        return slopes[h] * (kv_idx - q_idx) if self.causal else -slopes[h] * (q_idx - kv_idx).abs()

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, learned={isinstance(self.slopes, nn.Parameter)}, causal={self.causal}"


class _PerHead(ScoreBias):
    """A learned table ``weight`` of (size,) for all heads, or (num_heads, size)."""

    def __init__(self, size: int, num_heads: int | None, device: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.num_heads = None if num_heads is None else positive("num_heads", num_heads)
        shape = (size,) if num_heads is None else (num_heads, size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Normal numbers, of a deviation of 0.02."""
        nn.init.normal_(self.weight, std=STD)

    def _entry(self, weight: Tensor, h: Tensor, index: Tensor) -> Tensor:
        return weight[index] if self.num_heads is None else weight[h, index]


class RelativeBias(_PerHead):
    """A learned number for each distance i - j, up to ``longest`` - 1 on either side; further ones share the last.

        bias_ij = weight[clamp(i - j, -(longest - 1), longest - 1) + longest - 1]          per head with num_heads

    >>> layer = gdpa.nn.SelfAttention(32, 4, "silu", score_bias=RelativeBias(64, num_heads=4))
    """

    def __init__(
        self, longest: int, num_heads: int | None = None, *, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(2 * positive("longest", longest) - 1, num_heads, device, dtype)
        self.longest = longest
        self.reset_parameters()

    def tables(self, times: Times | None = None) -> tuple[Tensor, ...]:
        return (self.weight,)

    def bias(self, weight: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # type: ignore[override]
        most = self.longest - 1
        return self._entry(weight, h, (q_idx - kv_idx).clamp(-most, most) + most)

    def extra_repr(self) -> str:
        return f"longest={self.longest}, num_heads={self.num_heads}"


class T5Bias(_PerHead):
    """T5's bias (arXiv 1910.10683): a learned number for each bucket of distances. Buckets are narrow for small
    distances, and from half of them on grow logarithmically, up to ``max_distance``.

    Args:
        num_heads: each has its own numbers; None for one set for all.
        buckets: how many there are; without ``bidirectional`` all keys after the query share the first.
        bidirectional: half of the buckets for keys after the query (an encoder's); False for causal attention.

    >>> layer = gdpa.nn.SelfAttention(32, 4, "softmax", score_bias=T5Bias(4))
    """

    def __init__(
        self,
        num_heads: int | None,
        buckets: int = 32,
        max_distance: int = 128,
        *,
        bidirectional: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(positive("buckets", buckets), num_heads, device, dtype)
        checks.flag("bidirectional", bidirectional)
        self.max_distance, self.bidirectional = positive("max_distance", max_distance), bidirectional
        self.buckets = buckets
        exact = self._buckets_of_a_side() // 2
        if exact < 1 or max_distance <= exact:
            raise ValueError(
                f"buckets={buckets} with max_distance={max_distance} leave no logarithmic part: at least "
                f"{4 if bidirectional else 2} buckets, and a max_distance above {exact}, are needed"
            )
        bucket = torch.empty(2 * max_distance + 1, dtype=torch.int64, device=device)
        self.register_buffer("bucket", bucket, persistent=False)
        self.bucket: Tensor
        self.reset_parameters()

    def _buckets_of_a_side(self) -> int:
        return self.buckets // 2 if self.bidirectional else self.buckets

    def reset_parameters(self) -> None:
        """Normal numbers with a standard deviation of 0.02; and the buckets."""
        super().reset_parameters()
        behind = torch.arange(-self.max_distance, self.max_distance + 1)  # j - i
        count = self._buckets_of_a_side()
        exact = count // 2
        distance = behind.abs() if self.bidirectional else (-behind).clamp(min=0)
        # Integers divided would be of torch's default dtype, and in bfloat16 some distances of other buckets.
        steps = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact) * (count - exact)
        far = (exact + steps.long()).clamp(max=count - 1)
        near = torch.where(distance < exact, distance, far)
        self.bucket.copy_(near + count * (behind > 0) if self.bidirectional else near)

    def tables(self, times: Times | None = None) -> tuple[Tensor, ...]:
        return self.weight, self.bucket

    def bias(  # type: ignore[override]
        self, weight: Tensor, bucket: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        most = self.max_distance
        return self._entry(weight, h, bucket[(kv_idx - q_idx).clamp(-most, most) + most])

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, buckets={self.buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )


def log_buckets(gap: Tensor) -> Tensor:
    """HSTU's buckets of time: floor(log(max(|gap|, 1)) / 0.301), which grow by about a third."""
    return (gap.abs().clamp(min=1).float().log() / 0.301).long()


class TimeBias(_PerHead):
    """HSTU's bias by time (arXiv 2402.17152): a learned number for each bucket of t_i - t_j.

        bias_ij = weight[clamp(bucket(t_i - t_j), 0, num_buckets)]          per head with num_heads

    A layer that has it takes ``times``: integer time stamps, one per row; or a pair of those, for queries and for keys.

    Args:
        bucket: a function of the difference in torch operations, with int64 results; by default HSTU's logarithm of
            |t_i - t_j|.

    >>> layer = gdpa.nn.SelfAttention(32, 4, "silu", score_bias=TimeBias(128))
    >>> y = layer(torch.randn(2, 5, 32), times=torch.arange(10).view(2, 5) * 3600)
    """

    takes_times = True

    def __init__(
        self,
        num_buckets: int = 128,
        num_heads: int | None = None,
        *,
        bucket: Callable[[Tensor], Tensor] = log_buckets,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(positive("num_buckets", num_buckets) + 1, num_heads, device, dtype)
        if not callable(bucket):
            raise TypeError(f"bucket must be a function of time differences, got {bucket!r}")
        self.num_buckets, self.bucket = num_buckets, bucket
        self.reset_parameters()

    def tables(self, times: Times | None = None) -> tuple[Tensor, ...]:
        assert times is not None  # the layer has asked for them
        return self.weight, *times

    def bias(  # type: ignore[override]
        self, weight: Tensor, times_q: Tensor, times_k: Tensor, *, h: Tensor, q_row: Tensor, kv_row: Tensor
    ) -> Tensor:
        gap = times_q[q_row] - times_k[kv_row]
        return self._entry(weight, h, self.bucket(gap).clamp(0, self.num_buckets))

    def extra_repr(self) -> str:
        return f"num_buckets={self.num_buckets}, num_heads={self.num_heads}"
