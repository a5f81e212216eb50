"""The batches on which functions of positions and masks are measured: dense sequences of one length, or packed ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gdpa
from gdpa.data import lengths

DENSE, JAGGED = "dense", "jagged"


@dataclass(frozen=True)
class Scale:
    """``dense`` and ``jagged``: numbers of sequences; ``rows``: of the dense ones, and of the longest jagged one."""

    dense: int
    jagged: int
    rows: int
    heads: int
    d: int


GPU_SCALE = Scale(dense=128, jagged=512, rows=1024, heads=4, d=128)
CPU_SCALE = Scale(dense=2, jagged=3, rows=24, heads=2, d=8)  # tells that the command runs
CHECKED = 8  # sequences whose results are held against float64


@dataclass(frozen=True, eq=False)
class Batch:
    """q, k and v: (B, H, L, D), or, with offsets ``cu``, (rows, H, D). ``times`` (rows,) never decrease within a
    sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu: Tensor | None
    lengths: tuple[int, ...]
    longest: int
    times: Tensor

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def pairs(self) -> int:
        return sum(n * n for n in self.lengths)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, activation: Any, **more: Any) -> Tensor:
        if self.cu is None:
            return gdpa.attention(q, k, v, activation, **more)
        if more.get("backend") != "reference":  # which has no use for hints
            more = {"max_seqlen_q": self.longest, "max_seqlen_k": self.longest, **more}
        return gdpa.attention_varlen(q, k, v, self.cu, self.cu, activation, **more)

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [t.detach().to(dtype or t.dtype).requires_grad_() for t in (self.q, self.k, self.v)]

    def first(self, n: int) -> Batch:
        """Its first sequences."""
        n = min(n, len(self.lengths))
        some, rows = self.lengths[:n], sum(self.lengths[:n])
        if self.cu is None:
            return Batch(self.q[:n], self.k[:n], self.v[:n], None, some, self.longest, self.times[:rows])
        cu = self.cu[: n + 1]
        return Batch(self.q[:rows], self.k[:rows], self.v[:rows], cu, some, self.longest, self.times[:rows])


def make_batch(layout: str, scale: Scale, device: torch.device, dtype: torch.dtype) -> Batch:
    g = torch.Generator().manual_seed(0)
    jagged = layout == JAGGED
    drawn = lengths.uniform(scale.jagged, scale.rows, 0) if jagged else (scale.rows,) * scale.dense
    total = sum(drawn)
    shape = (total, scale.heads, scale.d) if jagged else (scale.dense, scale.heads, scale.rows, scale.d)
    q, k, v = (torch.randn(shape, generator=g).to(device, dtype) for _ in range(3))
    ends = torch.tensor(drawn).cumsum(0)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int().to(device) if jagged else None
    times = torch.randint(0, 3, (total,), generator=g).cumsum(0)  # gaps between events; sequences follow each other
    return Batch(q, k, v, cu, tuple(drawn), scale.rows, times.int().to(device))
