"""How q, k and v lie in memory, as callers have them, and which of gdpa's functions takes them.

heads           (B, H, L, D)
rows            (B, L, H, D), seen as (B, H, L, D): what a projection writes
packed          (T, H, D) with cu_seqlens and max_seqlen
packed-nohint   the same without max_seqlen
qkv             packed, from one projection: (T, 3, H, D), or q and (T, 2, H, D) where queries have other rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import gdpa
from gdpa.bench.contenders.contender import Pieces, native_pieces
from gdpa.testing.cases import Case, Inputs, call, offsets

LAYOUTS = ("heads", "rows", "packed", "packed-nohint", "qkv")


@dataclass(frozen=True)
class Arranged:
    """A case in one layout: ``call(activation, **kwargs)`` is gdpa's output, ``leaves`` are what it differentiates."""

    leaves: tuple[Tensor, ...]
    call: Callable[..., Tensor]
    pieces: Pieces


def native(case: Case) -> str:
    """The layout in which inputs are made."""
    return "packed" if case.varlen else "heads"


def why_not(case: Case, layout: str) -> str | None:
    """Why a case has no such layout; None if it has."""
    if layout in ("heads", "rows"):
        return f"layout {layout} is for dense cases" if case.varlen else None
    if case.shared and not case.varlen:
        return f"layout {layout} is not made for dense cases of shared queries"
    if layout == "qkv" and (case.packed_q != case.packed_k or case.shared):
        return "layout qkv is not made for dense tensors beside packed ones"
    if layout == "qkv" and case.dv not in (None, case.d):
        return f"layout qkv needs values as wide as keys, here {case.dv} beside {case.d}"
    return None


def available(case: Case) -> tuple[str, ...]:
    """Every layout the case has, the native one first."""
    found = [layout for layout in LAYOUTS if why_not(case, layout) is None]
    return tuple(sorted(found, key=lambda layout: layout != native(case)))


def arrange(case: Case, x: Inputs, layout: str) -> Arranged:
    """The inputs in another layout, as fresh leaves; in the native one, as they are."""
    if layout == "heads":
        return _plain(case, x)
    if layout == "rows":
        return _plain(case, _leaves(case, x, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)))
    if not case.varlen:
        x = _leaves(case, x, lambda t: t.transpose(1, 2).flatten(0, 1).contiguous())
        case = replace(case, packed_q=True, packed_k=True)
        x = replace(x, cu_q=offsets(case.len_q, x.q.device), cu_k=offsets(case.len_k, x.q.device))
    longest = {"max_seqlen_q": max(case.len_q), "max_seqlen_k": max(case.len_k)}
    if layout == "qkv":
        same_rows = case.len_q == case.len_k and case.heads_k in (None, case.heads)
        return _fused_qkv(case, x, longest) if same_rows else _fused_kv(case, x, longest)
    return _plain(case, x, **(longest if layout == "packed" else {}))


def _leaves(case: Case, x: Inputs, move: Callable[[Tensor], Tensor]) -> Inputs:
    q, k, v = (move(t.detach()).requires_grad_() for t in x.leaves)
    return replace(x, q=q, k=k, v=v)


def _plain(case: Case, x: Inputs, **hints: int) -> Arranged:
    def forward(activation: Any, **kwargs: Any) -> Tensor:
        return call(case, x, activation, **hints, **kwargs)

    return Arranged(x.leaves, forward, native_pieces(case, x))


def _fused_qkv(case: Case, x: Inputs, longest: dict[str, int]) -> Arranged:
    qkv, cu = torch.stack([t.detach() for t in x.leaves], 1).requires_grad_(), x.cu_q  # (T, 3, H, D)
    assert cu is not None

    def forward(activation: Any, **kwargs: Any) -> Tensor:
        kwargs = {"causal": case.causal, "window": case.window, "max_seqlen": longest["max_seqlen_q"], **kwargs}
        return gdpa.attention_varlen_qkvpacked(qkv, cu, activation, **kwargs)

    return Arranged((qkv,), forward, _split(case, x, lambda grads: grads[0].unbind(1)))


def _fused_kv(case: Case, x: Inputs, longest: dict[str, int]) -> Arranged:
    q, kv = x.q, torch.stack([t.detach() for t in (x.k, x.v)], 1).requires_grad_()  # (T, 2, H, D)

    def forward(activation: Any, **kwargs: Any) -> Tensor:
        kwargs = {"causal": case.causal, "window": case.window, **longest, **kwargs}
        return gdpa.attention_varlen_kvpacked(q, kv, x.cu_q, x.cu_k, activation, **kwargs)

    return Arranged((q, kv), forward, _split(case, x, lambda grads: (grads[0], *grads[1].unbind(1))))


def _split(case: Case, x: Inputs, parts: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> Pieces:
    """Pieces of leaves that hold several operands."""
    plain = native_pieces(case, x)
    return replace(plain, grads=lambda grads, b: plain.grads(parts(grads), b))
