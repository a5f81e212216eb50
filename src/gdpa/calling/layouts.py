"""How a caller's tensors become a backend's (see problem.py) and back, without autograd's views.

Each public form has a layout. As views made by torch, the tensors of a call would be a node of the autograd graph each,
forward and backward; here they are one ``as_strided`` inside the node of the call, or, where a backend only needs to
know where they begin, none at all (``Given``). A layout takes three tensors: either q, k and v; or q (None if it is
packed with k and v), the tensor that holds all packed parts, and None.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdpa import ops
from gdpa.calling import marks
from gdpa.calling.marks import Marks
from gdpa.problem import Operands

Three = tuple[Tensor, Tensor, Tensor]
AsGiven = tuple[Tensor | None, Tensor, Tensor | None]
Addresses = tuple[int, int, int]  # of q, k and v
ByOperator = tuple[tuple[Any, ...], Tensor | None]


@dataclass(frozen=True, eq=False)  # one object of each kind: see direct.py
class Dense:
    """q, k and v (B, H, L, D), as the operator takes them."""

    heads = 1  # the dimension of q's heads
    packed_q = packed_k = False  # whether rows of many sequences lie end to end

    def is_direct(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the result and the gradients can be written where the caller gets them."""
        return True

    def views(self, q: Tensor, k: Tensor, v: Tensor) -> Three:
        """q, k and v as a backend takes them."""
        return q, k, v

    def starts(self, q: Tensor, k: Tensor, v: Tensor) -> Three:
        """Tensors of any shape that begin where those do."""
        return q, k, v

    def addresses(self, q: Tensor, k: Tensor, v: Tensor) -> Addresses:
        """Where they begin."""
        return q.data_ptr(), k.data_ptr(), v.data_ptr()

    def marks(self, q: Tensor, k: Tensor, v: Tensor) -> Marks:
        """(a key for all that plans may depend on, the numbers of rows of q and k if these are not part of it)."""
        return marks.of_three(q, k, v)

    def output(self, q: Tensor, k: Tensor, v: Tensor, batch: int) -> Tensor:
        """An empty tensor for the result, as the caller gets it."""
        return ops.empty_output(q, v, batch)

    def grad(self, grad: Tensor, batch: int) -> Tensor:
        """The gradient of the result as the operator takes it."""
        return grad

    def gradients(self, q: Tensor, k: Tensor, v: Tensor) -> Three:
        """Empty tensors for the gradients, as the caller gets them."""
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def sums(self, sums: Tensor) -> Tensor:
        """Row sums (B, Hq, L) as the caller gets them."""
        return sums

    def by_operator(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], divided: Any
    ) -> ByOperator:
        """The gradients of q, k, v, params and tables, and that of the sink, through the operator. ``divided`` is None
        without row sums, otherwise (gradient of the sums, output, sums, sink, norms)."""
        return separately(grad, (q, k, v), rest, divided)


@dataclass(frozen=True, eq=False)  # one object of each kind: see direct.py
class Varlen:
    """q (T, Hq, D), k and v (T, Hk, D) -> (T, Hq, Dv). Without ``packed_q`` the queries are shared, and the result is
    (B*T, Hq, Dv); without ``packed_k`` k and v are (B, L, Hk, D)."""

    packed_q: bool
    packed_k: bool
    heads = 1

    def is_direct(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        return rows_outermost(q)

    def views(self, q: Tensor, k: Tensor, v: Tensor) -> Three:
        if self.packed_k:
            return packed(q), packed(k), packed(v)
        return packed(q), k.transpose(1, 2), v.transpose(1, 2)

    def starts(self, q: Tensor, k: Tensor, v: Tensor) -> Three:
        return q, k, v

    def addresses(self, q: Tensor, k: Tensor, v: Tensor) -> Addresses:
        return q.data_ptr(), k.data_ptr(), v.data_ptr()

    def marks(self, q: Tensor, k: Tensor, v: Tensor) -> Marks:
        if self.packed_q and self.packed_k:
            return marks.of_three_packed(q, k, v)
        found = marks.of_any(self.packed_q, self.packed_k, q, k, v)
        return found, (q.shape[0], k.shape[0 if self.packed_k else 1])

    def output(self, q: Tensor, k: Tensor, v: Tensor, batch: int) -> Tensor:
        rows, heads, _ = q.shape
        return torch.empty(batch * rows, heads, v.shape[-1], dtype=q.dtype, device=q.device)

    def grad(self, grad: Tensor, batch: int) -> Tensor:
        return packed(grad) if self.packed_q else unpacked(grad, batch)

    def gradients(self, q: Tensor, k: Tensor, v: Tensor) -> Three:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def sums(self, sums: Tensor) -> Tensor:
        return end_to_end(sums)

    def by_operator(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], divided: Any
    ) -> ByOperator:
        (dq, *both, dparams, flat), dsink = separately(grad, self.views(q, k, v), rest, divided)
        both = [t[0].transpose(0, 1) if self.packed_k else t.transpose(1, 2) for t in both]
        return (dq[0].transpose(0, 1), *both, dparams, flat), dsink


@dataclass(frozen=True, eq=False)  # one object of each kind: see direct.py
class Together:
    """q (B, Lq, Hq, D) or None, rows (B, L, 2 or Hq/Hk + 2, Hk, D) -> (B, Lq, Hq, D); ``varlen``: (T, Hq, D) and
    (T, ..., Hk, D) -> (T, Hq, D), where without ``packed_q`` the queries are shared, without ``packed_k`` rows are
    (B, L, ...)."""

    alone: bool  # q stands by itself
    varlen: bool
    packed_q: bool
    packed_k: bool

    @property
    def heads(self) -> int:
        return -2

    def is_direct(self, q: Tensor | None, rows: Tensor, _: None) -> bool:
        if q is not None:
            return rows_outermost(q)
        row, place, head = rows.stride()[-4:-1]
        return head <= row and (rows.shape[-3] == 3 or place == rows.shape[-2] * head)

    def views(self, q: Tensor | None, rows: Tensor, _: None) -> Three:
        if q is None:
            return parts(rows, rows.shape[-3] - 2)
        _, k, v = parts(rows, 0)
        return packed(q) if self.varlen else q.transpose(1, 2), k, v

    starts = views

    def addresses(self, q: Tensor | None, rows: Tensor, _: None) -> Addresses:
        start, place = rows.data_ptr(), rows.stride(-3) * rows.element_size()
        if q is not None:
            return q.data_ptr(), start, start + place
        k = start + (rows.shape[-3] - 2) * place
        return start, k, k + place

    def marks(self, q: Tensor | None, rows: Tensor, _: None) -> Marks:
        found = marks.of_any(self.packed_q, self.packed_k, q, rows, None)
        n_rows = rows.shape[0 if self.packed_k else 1]
        return found, (n_rows if q is None else q.shape[0 if self.varlen else 1], n_rows)

    def output(self, q: Tensor | None, rows: Tensor, _: None, batch: int) -> Tensor:
        if q is None:
            length, places, heads, d = rows.shape[-4:]
            heads *= places - 2
        else:
            length, heads, d = q.shape[-3:]
        shape = (batch * length, heads, d) if self.varlen else (batch, length, heads, d)
        return torch.empty(shape, dtype=rows.dtype, device=rows.device)

    def grad(self, grad: Tensor, batch: int) -> Tensor:
        if not self.varlen:
            return grad.transpose(1, 2)
        return packed(grad) if self.packed_q else unpacked(grad, batch)

    def gradients(self, q: Tensor | None, rows: Tensor, _: None) -> AsGiven:
        return None if q is None else torch.empty_like(q), ops.empty_drows(q, rows), None

    def sums(self, sums: Tensor) -> Tensor:
        return end_to_end(sums) if self.varlen else sums.transpose(1, 2)

    def by_operator(
        self, grad: Tensor, q: Tensor | None, rows: Tensor, _: None, rest: tuple[Any, ...], divided: Any
    ) -> ByOperator:
        q4 = None if q is None else packed(q) if self.varlen else q.transpose(1, 2)
        rows5 = rows if rows.dim() == 5 else rows[None]
        dsink = None
        if divided is None:
            dq, drows, dparams, flat = torch.ops.gdpa.attention_packed_backward(grad, q4, rows5, *rest)
        else:
            op = torch.ops.gdpa.normalized_packed_backward
            dq, drows, dparams, flat, dsink = op(grad, *divided, q4, rows5, *rest)
        if q is not None:
            dq = dq[0].transpose(0, 1) if self.varlen else dq.transpose(1, 2)
        drows = drows if rows.dim() == 5 else drows[0]
        return (None if q is None else dq, drows, None, dparams, flat), dsink


Layout = Dense | Varlen | Together


class Given(Operands):
    """Operands in the caller's layout. Their views q, k and v are only made when they are asked for: a launch that
    repeats an earlier one of the same ``kind`` needs addresses alone, and takes less time than making views."""

    def __init__(
        self, kind: Hashable, layout: Layout, given: Any, out_batch: int, cu_q: Any, cu_k: Any, params: Any,
        used_q: Any, used_k: Any, tables: Any, sink: Any,
    ) -> None:  # fmt: skip
        self.__dict__.update(  # its base is frozen
            kind=kind, layout=layout, given=given, out_batch=out_batch, cu_q=cu_q, cu_k=cu_k, params=params,
            used_q=used_q, used_k=used_k, tables=tables, sink=sink,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name not in ("q", "k", "v"):
            raise AttributeError(name)
        q, k, v = self.layout.views(*self.given)
        self.__dict__.update(q=q, k=k, v=v)
        return self.__dict__[name]

    @property
    def starts(self) -> tuple[Any, Any, Any]:
        found: tuple[Any, Any, Any] = self.layout.starts(*self.given)
        return found

    def written(self, out: Tensor) -> Tensor:
        found: Tensor = self.layout.grad(out, self.out_batch)
        return found


def separately(grad: Tensor, three: Three, rest: tuple[Any, ...], divided: Any) -> ByOperator:
    """See Dense.by_operator."""
    if divided is None:
        return torch.ops.gdpa.attention_backward(grad, *three, *rest), None
    *found, dsink = torch.ops.gdpa.normalized_backward(grad, *divided, *three, *rest)
    return tuple(found), dsink


def end_to_end(sums: Tensor) -> Tensor:
    """(B, H, L) as (B*L, H)."""
    return sums.transpose(1, 2).flatten(0, 1)


def packed(t: Tensor) -> Tensor:
    """(T, H, D) as (1, H, T, D)."""
    rows, heads, d = t.shape
    row, head, column = t.stride()
    return t.as_strided((1, heads, rows, d), (heads * head, head, row, column))


def unpacked(t: Tensor, batch: int) -> Tensor:
    """(B*L, H, D) as (B, H, L, D)."""
    rows, heads, d = t.shape
    row, head, column = t.stride()
    length = rows // batch if batch else 0
    return t.as_strided((batch, heads, length, d), (length * row, head, row, column))


def parts(rows: Tensor, queries: int) -> tuple[Any, Tensor, Tensor]:
    """q, k and v (B, H, L, D) of rows (B, L, queries + 2, H, D) or (T, queries + 2, H, D); no q if there is none."""
    if rows.dim() == 5:
        batch, length, _, heads, d = rows.shape
        b, row, place, head, column = rows.stride()
    else:
        batch, (length, _, heads, d) = 1, rows.shape
        row, place, head, column = rows.stride()
        b = row
    start, shape, strides = rows.storage_offset(), (batch, heads, length, d), (b, head, row, column)
    k = rows.as_strided(shape, strides, start + queries * place)
    v = rows.as_strided(shape, strides, start + (queries + 1) * place)
    q = rows.as_strided((batch, queries * heads, length, d), strides, start) if queries else None
    return q, k, v


def rows_outermost(t: Tensor) -> bool:
    """Whether t (..., L, H, D) lies so in memory: then so does a result, which the caller gets without a copy."""
    return t.stride(-2) <= t.stride(-3)
