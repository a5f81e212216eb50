"""The shapes gdpa is tested and timed on: one description, from which inputs are made and the API is called.

``SMALL_CASES`` serves the tests. The benchmark's cases are in gdpa/bench/kernels/suite.py.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import gdpa

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A call of attention() or attention_varlen().

    ``len_q`` and ``len_k`` have one entry per sequence. A side that is not ``packed`` needs equal entries, and is a
    dense tensor. With ``shared`` queries one block of len_q[0] rows serves every sequence.

    Rows that no sequence uses: ``slots`` are the rows that each sequence has, of which it uses the first len_q or len_k
    (equal ones on a side that is not packed), and ``spare`` rows of q, and of k, follow the last slot.
    """

    name: str
    len_q: Lengths
    len_k: Lengths
    heads: int = 4
    heads_k: int | None = None
    d: int = 64
    dv: int | None = None
    packed_q: bool = False
    packed_k: bool = False
    shared: bool = False
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    slots_q: Lengths | None = None
    slots_k: Lengths | None = None
    spare: tuple[int, int] = (0, 0)

    @property
    def rooms_q(self) -> Lengths:
        """The rows that each sequence has, used or not."""
        return self.len_q if self.slots_q is None else self.slots_q

    @property
    def rooms_k(self) -> Lengths:
        return self.len_k if self.slots_k is None else self.slots_k

    @property
    def varlen(self) -> bool:
        return self.packed_q or self.packed_k

    @cached_property
    def pairs(self) -> int:
        """Query-key pairs the band keeps, over all sequences and one head."""
        lengths = Counter(zip(self.len_q, self.len_k, strict=True))  # a dense case has one entry
        return sum(n * kept_pairs(q, k, *self.band) for (q, k), n in lengths.items())

    @property
    def band(self) -> tuple[int | None, int | None]:
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right

    def flops(self, backward: bool = False) -> int:
        """Two products forward, five backward (2.5 times as many for D = Dv)."""
        d, dv = self.d, self.dv or self.d
        return 2 * self.heads * self.pairs * (3 * d + 2 * dv if backward else d + dv)

    def elements(self) -> dict[str, int]:
        """How many numbers q, k, v and out hold."""
        rows_q, rows_k, heads_k, dv = sum(self.len_q), sum(self.len_k), self.heads_k or self.heads, self.dv or self.d
        return {
            "q": (self.len_q[0] if self.shared else rows_q) * self.heads * self.d,
            "k": rows_k * heads_k * self.d,
            "v": rows_k * heads_k * dv,
            "out": rows_q * self.heads * dv,
        }

    def bytes(self, itemsize: int, backward: bool = False) -> int:
        """The least memory traffic: q, k, v read and out written; backward reads those again and writes dq, dk, dv."""
        n = self.elements()
        qkv = n["q"] + n["k"] + n["v"]
        return itemsize * (2 * qkv + n["out"] if backward else qkv + n["out"])


def kept_pairs(len_q: int, len_k: int, left: int | None, right: int | None) -> int:
    """How many (i, j) satisfy -left <= j - i - (len_k - len_q) <= right."""
    if left is None and right is None:
        return len_q * len_k
    i = torch.arange(len_q) + (len_k - len_q)
    low = torch.zeros_like(i) if left is None else (i - left).clamp(0, len_k)
    high = torch.full_like(i, len_k) if right is None else (i + right + 1).clamp(0, len_k)
    return int((high - low).clamp_min(0).sum())


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case; q, k, v require gradients. ``used_q`` and ``used_k``: what seqused is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor | None
    cu_k: Tensor | None
    used_q: Tensor | None = None
    used_k: Tensor | None = None

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same data in another precision, as fresh leaves."""
        q, k, v = (t.detach().to(dtype).requires_grad_() for t in self.leaves)
        return replace(self, q=q, k=k, v=v)

    @property
    def used(self) -> dict[str, Tensor]:
        """seqused_q and seqused_k, as far as they are given."""
        found = {"seqused_q": self.used_q, "seqused_k": self.used_k}
        return {name: t for name, t in found.items() if t is not None}


def make_inputs(
    case: Case,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    spread: float = 2.5,
) -> Inputs:
    """Fresh random inputs of a case whose rows are all used. Default-scaled scores have standard deviation ``spread``:
    2.5 spans about [-8, 8], which exercises the function; tiny scores would make every function linear."""
    rng = torch.Generator(device=device).manual_seed(seed)
    heads_k, dv = case.heads_k or case.heads, case.dv or case.d

    def make(lengths: Lengths, packed: bool, heads: int, d: int, std: float, one_block: bool = False) -> Tensor:
        if packed:
            shape: tuple[int, ...] = (sum(lengths), heads, d)
        elif case.varlen:
            shape = (lengths[0], heads, d) if one_block else (len(lengths), lengths[0], heads, d)
        else:
            shape = (1 if one_block else len(lengths), heads, lengths[0], d)
        return (
            torch.randn(shape, generator=rng, device=device, dtype=torch.float32).mul_(std).to(dtype).requires_grad_()
        )

    std = math.sqrt(spread)
    cu_q = offsets(case.len_q, device) if case.packed_q else None
    cu_k = offsets(case.len_k, device) if case.packed_k else None
    if cu_q is not None and case.packed_k and case.len_q == case.len_k:
        cu_k = cu_q  # one tensor, as callers have it in self-attention
    return Inputs(
        make(case.len_q, case.packed_q, case.heads, case.d, std, one_block=case.shared),
        make(case.len_k, case.packed_k, heads_k, case.d, std),
        make(case.len_k, case.packed_k, heads_k, dv, 1.0),
        cu_q,
        cu_k,
    )


def offsets(lengths: Lengths, device: str | torch.device = "cpu", dtype: torch.dtype = torch.int32) -> Tensor:
    """cu_seqlens of ``lengths``."""
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(dtype).to(device)


def call(case: Case, x: Inputs, activation: Any, **kwargs: Any) -> Any:
    """gdpa's result for ``x``; keyword arguments go to the API."""
    kwargs = {"causal": case.causal, "window": case.window, **x.used, **kwargs}
    if case.varlen:
        return gdpa.attention_varlen(x.q, x.k, x.v, x.cu_q, x.cu_k, activation, **kwargs)
    return gdpa.attention(x.q, x.k, x.v, activation, **kwargs)


def sequence(case: Case, t: Tensor, cu: Tensor | None, b: int, shared: bool = False) -> Tensor:
    """(H, L, D) of sequence b, a view, from any of the layouts of a case."""
    if cu is not None:
        return t[int(cu[b]) : int(cu[b + 1])].transpose(0, 1)
    if not case.varlen:
        return t[0 if shared else b]
    return (t if shared else t[b]).transpose(0, 1)


def dense(name: str, batch: int, len_q: int, len_k: int, **kwargs: Any) -> Case:
    return Case(name, (len_q,) * batch, (len_k,) * batch, **kwargs)


# Every feature of the API at sizes a test can afford; lengths straddle tiles of 16, and some are zero.
SMALL_CASES: tuple[Case, ...] = (
    dense("dense", 2, 37, 45, heads=2, d=16),
    dense("gqa-causal-unequal-d", 2, 37, 45, heads=4, heads_k=2, d=24, dv=40, causal=True),
    dense("window-more-queries-than-keys", 2, 50, 33, heads=2, d=16, window=(5, 3)),
    dense("shared-queries", 3, 20, 33, heads=2, d=16, shared=True),
    Case("packed", (0, 5, 33, 16, 17, 0), (7, 0, 20, 32, 1, 0), heads=2, d=16, packed_q=True, packed_k=True),
    Case(
        "packed-mqa-window", (9, 0, 40, 16), (3, 7, 40, 20), heads=3, heads_k=1, d=16, dv=8,
        packed_q=True, packed_k=True, window=(6, None),
    ),
    Case("packed-dense-keys", (0, 5, 33, 16), (12,) * 4, heads=2, d=16, packed_q=True),
    Case("shared-queries-packed-keys", (9,) * 4, (0, 33, 5, 16), heads=2, heads_k=1, d=16, packed_k=True, shared=True),
)  # fmt: skip
