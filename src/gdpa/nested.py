"""Jagged nested tensors, taken apart into rows and offsets and put together again.

A nested (B, H, j, D) holds its rows as (H, T, D), a transposed view of the packed (T, H, D); neither direction copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_jagged(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_nested and t.layout == torch.jagged


def offsets_of(name: str, t: Tensor) -> Tensor | None:
    """The offsets of a jagged tensor, None for a dense one; refuses nested layouts that have no packed form."""
    if not isinstance(t, Tensor) or not t.is_nested:
        return None
    if t.layout != torch.jagged:
        raise TypeError(f"{name} is a nested tensor of layout {t.layout}; make it with layout=torch.jagged")
    if t.dim() != 4 or t._ragged_idx != 2:  # type: ignore[attr-defined]
        raise ValueError(
            f"{name} must be nested as (B, H, j, D), ragged in dimension 2 (from (B, j, H, D): {name}.transpose(1, 2)); "
            f"it has {t.dim()} dimensions and is ragged in {t._ragged_idx}"  # type: ignore[attr-defined]
        )
    if t.lengths() is not None:  # type: ignore[attr-defined]
        raise ValueError(f"{name} is a nested tensor with holes (narrowed); call {name}.contiguous() first")
    return t.offsets()


def rows_of(t: Tensor) -> Tensor:
    """(1, H, T, D), a view of the values of a jagged (B, H, j, D)."""
    return t.values().unsqueeze(0)


def jagged_like(rows: Tensor, like: Tensor) -> Tensor:
    """Packed ``rows`` (T, H, D) as a nested (B, j, H, D) with the lengths of ``like``, which it can be added to."""
    return torch.nested.nested_tensor_from_jagged(rows, like.offsets())
