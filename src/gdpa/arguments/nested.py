"""Jagged nested tensors, taken apart into rows and offsets and put together again.

A nested (B, H, j, D) holds its rows as (H, T, D), a transposed view of the packed (T, H, D); neither direction copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdpa.compat import known_lengths, ragged_dim


@dataclass(frozen=True)
class Side:
    """One side of a call: a dense (B, H, L, D), or the rows (1, H, T, D) of a nested tensor with their offsets."""

    t: Any  # checked by the caller
    cu: Tensor | None = None
    longest: int | None = None  # the longest sequence, where the nested tensor knows it already


def is_jagged(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_nested and t.layout == torch.jagged


def unpack(name: str, t: Any) -> Side:
    """The rows and offsets of a jagged tensor, views both; anything else that is not nested as it is."""
    if not isinstance(t, Tensor) or not t.is_nested:
        return Side(t)
    if t.layout != torch.jagged:
        raise TypeError(f"{name} is a nested tensor of layout {t.layout}; make it with layout=torch.jagged")
    if t.dim() != 4 or ragged_dim(t) != 2:
        raise ValueError(
            f"{name} must be nested as (B, H, j, D), ragged in dimension 2 (use transpose(1, 2) on (B, j, H, D)); "
            f"it has {t.dim()} dimensions and is ragged in dimension {ragged_dim(t)}"
        )
    if t.lengths() is not None:  # type: ignore[attr-defined]
        raise ValueError(f"{name} is a nested tensor with holes (it was narrowed); call {name}.contiguous() first")
    return Side(t.values().unsqueeze(0), t.offsets(), known_lengths(t)[1])  # type: ignore[attr-defined]


def same_lengths(k: Any, v: Any) -> None:
    """k and v are both nested with the same offsets, or neither is nested."""
    if is_jagged(k) != is_jagged(v):
        one, other = ("k", "v") if is_jagged(k) else ("v", "k")
        raise TypeError(f"{one} is a jagged nested tensor, so {other} must be one too")
    if is_jagged(k) and k.shape[2] != v.shape[2]:
        raise ValueError(
            f"k and v must share their offsets, but k has {k.shape[2]} and v {v.shape[2]} in dimension 2: "
            "build both with torch.nested.nested_tensor_from_jagged(values, offsets)"
        )


def pack_like(rows: Tensor, like: Tensor) -> Tensor:
    """``rows`` (1, H, T, D) as a nested (B, H, j, D) with the lengths of ``like``, which it can be added to."""
    shortest, longest = known_lengths(like)
    nested = torch.nested.nested_tensor_from_jagged(
        rows[0].transpose(0, 1),
        like.offsets(),  # type: ignore[attr-defined]
        min_seqlen=shortest,
        max_seqlen=longest,
    )
    return nested.transpose(1, 2)
