"""gdpa.Mask: a function that says which pairs are visible, traced once, and the tables that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gdpa.foreign import INSTEAD
from gdpa.functions.mask import MaskFunction, join_masks, mask_from_key, mask_function
from gdpa.functions.places.names import INTEGERS, MAX_TABLES, TableKind, few_tables
from gdpa.functions.tracing.guards import guard_what_mask_reads
from gdpa.functions.tracing.pending import told_of_pending


class Mask:
    """Which pairs are visible: a function of positions and of tables, returning bool.

    Arguments of ``fn`` called b, h, q_idx, kv_idx, q_len, kv_len, q_row or kv_row are positions, in any order; the
    other arguments are its ``tables``, in the order given. Masks are combined with ``&``, ``|`` and ``~``.

    >>> seen = gdpa.Mask(lambda b, q_idx, kv_idx, ids: ids[b, q_idx] == ids[b, kv_idx], tables=(ids,))
    >>> out = gdpa.attention(q, k, v, "silu", mask=seen & gdpa.masks.causal())
    """

    def __init__(self, fn: Callable[..., Any], tables: Sequence[Tensor] = ()) -> None:
        kinds = kinds_of(tables, "tables")
        few_tables("tables", len(kinds))
        self._set(_traced_key(fn, kinds), tuple(tables))
        if torch.compiler.is_compiling():
            guard_what_mask_reads(fn, kinds)

    def _set(self, key: str, tables: tuple[Tensor, ...]) -> None:
        self.key, self.tables = key, tables
        self._held: MaskFunction | None = None if torch.compiler.is_compiling() else mask_from_key(key)

    def with_tables(self, tables: Sequence[Tensor]) -> Mask:
        """The same function with other tables, of the same number and kinds."""
        if kinds_of(tables, "tables") != kinds_of(self.tables, "tables"):
            raise ValueError(f"tables must match those of the mask ({len(self.tables)}) in number and kind")
        other = object.__new__(Mask)
        other._set(self.key, tuple(tables))
        return other

    def _join(self, op: str, *others: Mask) -> Mask:
        joined = object.__new__(Mask)
        parts = (self, *others)
        tables = tuple(t for part in parts for t in part.tables)
        if len(tables) > MAX_TABLES:
            raise ValueError(f"a mask can have at most {MAX_TABLES} tables, the joined one would have {len(tables)}")
        joined._set(_joined_key(op, tuple(part.key for part in parts)), tables)
        return joined

    def __and__(self, other: Any) -> Mask:
        return self._join("and", as_mask(other))

    def __rand__(self, other: Any) -> Mask:
        return as_mask(other) & self

    def __or__(self, other: Any) -> Mask:
        return self._join("or", as_mask(other))

    def __ror__(self, other: Any) -> Mask:
        return as_mask(other) | self

    def __invert__(self) -> Mask:
        return self._join("not")

    def __bool__(self) -> bool:
        """``a and b`` would be b alone, and ``not a`` False, which is a mask of nothing."""
        raise TypeError("masks are joined with &, | and ~, not with and, or, not; to test for a mask use `is not None`")

    def __repr__(self) -> str:
        return f"gdpa.Mask({mask_from_key(self.key).name!r}, {len(self.tables)} tables)"


def as_mask(mask: Any) -> Mask:
    """``mask`` as a Mask: it is one already, or a function of positions alone."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        raise TypeError(f"mask is a tensor of shape {tuple(mask.shape)}. {INSTEAD['attn_mask']}")
    if not callable(mask):
        raise TypeError(f"mask must be a gdpa.Mask, a function of positions or None, got {type(mask).__name__}")
    return Mask(mask)


def kinds_of(tables: Any, name: str) -> tuple[TableKind, ...]:
    """The kinds of ``tables``, which are part of a function's identity; what is no table is refused."""
    if isinstance(tables, Tensor):
        raise TypeError(f"{name} must be a tuple or list of tensors, got one tensor; write {name}=(x,)")
    if not isinstance(tables, tuple | list):
        raise TypeError(f"{name} must be a tuple or list of tensors, got {type(tables).__name__}")
    kinds = []
    for i, t in enumerate(tables):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}[{i}] must be a tensor, got {type(t).__name__}")
        if t.is_nested or t.layout != torch.strided:
            raise TypeError(f"{name}[{i}] must be a dense tensor, but its layout is {t.layout}")
        if not t.is_floating_point() and t.dtype not in INTEGERS:
            raise TypeError(f"{name}[{i}] must have a floating point or integer dtype, got {t.dtype}")
        if not 1 <= t.dim() <= 8:
            raise ValueError(
                f"{name}[{i}] must have 1 to 8 dimensions, got shape {tuple(t.shape)}; a single number is a param"
            )
        kinds.append(TableKind(t.dim(), torch.float32 if t.is_floating_point() else t.dtype))
    return tuple(kinds)


def _traced_key(fn: Any, kinds: tuple[TableKind, ...]) -> str:
    with told_of_pending():
        return mask_function(fn, kinds).key


def _joined_key(op: str, keys: tuple[str, ...]) -> str:
    return join_masks(op, keys).key


# Constants of compiled code, as the keys of activations are (see api.py).
_traced_key._dynamo_marked_constant = True  # type: ignore[attr-defined]
_joined_key._dynamo_marked_constant = True  # type: ignore[attr-defined]
