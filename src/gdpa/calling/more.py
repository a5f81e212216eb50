"""What a direct call may have beyond q, k, v, params and a function of the score: tables, a mask, row sums.

``More.of`` brings them to the form in which the operator takes them, as api.make_call does, and makes the part of a
plan's key that depends on them. It does not repeat the checks that are made when a plan is made: calls that differ in
what was checked have different keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdpa.arguments.checks import MAX_LENGTH
from gdpa.arguments.normalizing import SOFTMAX
from gdpa.calling.marks import UnusualError, address_of
from gdpa.functions.places.names import TableKind
from gdpa.masks.mask import as_mask, kinds_of
from gdpa.problem import sums_dtype

FEW_BITS = 14  # of numbers of rows: so few can be listed behind any mask


def is_nothing(activation: Any, tables: Any, mask: Any, normalize: Any, sink: Any, with_sums: Any) -> bool:
    """Whether a call has none of these."""
    return (
        mask is None and normalize is None and with_sums is False and not tables and isinstance(tables, list | tuple)
        and type(sink) is float and sink == 0.0 and not _has_softmax(activation)
    )  # fmt: skip


def _has_softmax(activation: Any) -> bool:
    kind = type(activation)
    return activation == SOFTMAX if kind is str else kind in (list, tuple) and any(map(_has_softmax, activation))


@dataclass(frozen=True, eq=False, slots=True)
class More:
    """``key``: everything but the tensors' data and the sizes of tables. ``tables`` are those of the function, of these
    ``kinds``, then those of the mask; ``sink`` (Hq,) is None for 0."""

    key: Hashable = None
    activation: Any = None  # where it is not the one that was given
    kinds: tuple[TableKind, ...] = ()
    tables: Sequence[Tensor] = ()
    sink: Tensor | None = None
    with_sums: bool = False  # the caller wants the row sums, too
    masked: bool = False

    @classmethod
    def of(
        cls, activation: Any, like: Tensor, heads: int, tables: Any, mask: Any, normalize: Any, sink: Any,
        with_sums: Any,
    ) -> More:  # fmt: skip
        """``like``: any of q, k and v."""
        if type(with_sums) is not bool or not isinstance(tables, list | tuple):
            raise UnusualError
        wide = sums_dtype(like.dtype)
        given = activation
        if isinstance(activation, list | tuple):
            activation = ["exp" if _is_softmax(one) else one for one in activation]
            softmax: Hashable = tuple(_is_softmax(one) for one in given)
        else:
            softmax = _is_softmax(activation)
            activation = "exp" if softmax else activation
        kinds = kinds_of(tables, "tables")
        own_tables = [_table(t, wide) for t in tables]
        learn = torch.is_grad_enabled() and any([t.requires_grad for t in own_tables])
        own_mask = None if mask is None else as_mask(mask)
        mask_tables = [] if own_mask is None else [_table(t, wide) for t in own_mask.tables]
        key = (
            softmax, repr(normalize), _sink_key(sink), with_sums, learn, None if own_mask is None else own_mask.key,
            tuple([_kind(t) for t in tables]), None if own_mask is None else tuple([_kind(t) for t in own_mask.tables]),
        )  # fmt: skip
        own_sink = _sink(sink, like, heads, wide)
        return cls(key, activation, kinds, [*own_tables, *mask_tables], own_sink, with_sums, own_mask is not None)

    def size_class(self, rows: Sequence[int]) -> Hashable:
        """The class of packed batches with a mask by their numbers of rows: larger ones may have another backend, since
        some take masks up to a limit only (DirectPlan.takes). Small batches are one class; beyond, a class ends where
        rows have doubled."""
        return tuple([(n - 1 >> FEW_BITS).bit_length() for n in rows]) if self.masked else None

    @property
    def learns(self) -> bool:
        """Whether any of these tensors wants a gradient."""
        own = self.tables[: len(self.kinds)]  # a mask has no derivative
        return (self.sink is not None and self.sink.requires_grad) or any([t.requires_grad for t in own])


NO_MORE = More()


def _is_softmax(activation: Any) -> bool:
    return isinstance(activation, str) and activation == SOFTMAX


def _kind(t: Tensor) -> Hashable:
    return t.dim(), t.dtype, t.device


def _table(t: Tensor, wide: torch.dtype) -> Tensor:
    """As checks.tables has it."""
    address_of(t)
    if t.numel() >= MAX_LENGTH:
        raise UnusualError
    if t.dtype is not wide and t.is_floating_point():
        t = t.to(wide)
    return t.contiguous()


def _sink_key(sink: Any) -> Hashable:
    if not isinstance(sink, Tensor):
        return repr(sink)
    address_of(sink)
    return sink.shape, sink.dtype, sink.device


def _sink(sink: Any, like: Tensor, heads: int, wide: torch.dtype) -> Tensor | None:
    """As normalizing.sink_of has it."""
    if isinstance(sink, Tensor):
        return sink.to(wide).expand(heads).contiguous()
    return like.detach().new_full((heads,), sink, dtype=wide) if sink != 0 else None
