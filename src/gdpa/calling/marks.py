"""Marks: keys made of the properties of a call's tensors that a plan may depend on, read as quickly as possible.

Every eager call does this (see direct.py): reading a property twice, or slicing, already costs microseconds. The number
of rows of packed tensors is not part of the key, and is returned beside it. A tensor that only the operator can handle
raises UnusualError; anything that is not a tensor of the expected form raises some exception, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

PLAIN = frozenset((Tensor, Parameter))  # subclasses have a say of their own
MOST_ROWS = 2**29  # of packed sequences: from there on backends begin to refuse
RowCounts = tuple[int, int]  # of queries and of keys
Marks = tuple[Hashable, RowCounts | None]


class UnusualError(Exception):
    """A call that has to go through the operator."""


def address_of(t: Tensor) -> int:
    """The address of ``t``. UnusualError if it is empty, of a subclass, or lazily negated."""
    address = t.data_ptr()
    if address == 0 or type(t) not in PLAIN or t.is_neg():
        raise UnusualError
    return address


def of_three(q: Tensor, k: Tensor, v: Tensor) -> Marks:
    at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if not (at_q and at_k and at_v and {type(q), type(k), type(v)} <= PLAIN) or q.is_neg() or k.is_neg() or v.is_neg():
        raise UnusualError  # see address_of
    aligned = (at_q | at_k | at_v) & 15 == 0 or (at_q & 15 == 0, at_k & 15 == 0, at_v & 15 == 0)
    return (
        aligned, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device,
        k.device, v.device,
    ), None  # fmt: skip


def of_three_packed(q: Tensor, k: Tensor, v: Tensor) -> Marks:
    at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if not (at_q and at_k and at_v and {type(q), type(k), type(v)} <= PLAIN) or q.is_neg() or k.is_neg() or v.is_neg():
        raise UnusualError  # see address_of
    rows_q, heads_q, d_q = q.shape
    rows_k, heads_k, d_k = k.shape
    rows_v, heads_v, d_v = v.shape
    # The stride of a single row means nothing, and empty_like would keep it.
    if rows_k != rows_v or not 1 < rows_q < MOST_ROWS or not 1 < rows_k < MOST_ROWS:
        raise UnusualError
    aligned = (at_q | at_k | at_v) & 15 == 0 or (at_q & 15 == 0, at_k & 15 == 0, at_v & 15 == 0)
    return (
        aligned, heads_q, d_q, heads_k, d_k, heads_v, d_v, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype,
        v.dtype, q.device, k.device, v.device,
    ), (rows_q, rows_k)  # fmt: skip


def of_any(packed_q: bool, packed_k: bool, a: Any, b: Any, c: Any) -> Hashable:
    """Of three tensors of any layout, of which the first and the last may be None."""
    mark_a = None if a is None else _packed_mark(a)[1] if packed_q else mark(a)
    if not packed_k:
        return mark_a, mark(b), None if c is None else mark(c)
    rows, mark_b = _packed_mark(b)
    if c is None:
        return mark_a, mark_b, None
    rows_c, mark_c = _packed_mark(c)
    if rows_c != rows:
        raise UnusualError
    return mark_a, mark_b, mark_c


def mark(t: Tensor) -> Hashable:
    return address_of(t) & 15 == 0, t.shape, t.stride(), t.dtype, t.device


def _packed_mark(t: Tensor) -> tuple[int, Hashable]:
    """The number of rows, and the mark."""
    address, (rows, *others) = address_of(t), t.shape
    if not 1 < rows < MOST_ROWS:  # see of_three_packed
        raise UnusualError
    return rows, (address & 15 == 0, tuple(others), t.stride(), t.dtype, t.device)


def of_offsets(cu_q: Tensor | None, cu_k: Tensor | None, used_q: Tensor | None, used_k: Tensor | None) -> Hashable:
    if cu_k is cu_q and used_q is None and used_k is None:  # as most calls have it
        return None if cu_q is None else _offsets(cu_q)
    return tuple([None if t is None else _offsets(t) for t in (cu_q, cu_k, used_q, used_k)])


def _offsets(t: Tensor) -> Hashable:
    if type(t) not in PLAIN:
        raise UnusualError
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15 == 0
