"""The tensors that the operators return, before anything is written into them; also for fake tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gdpa.problem import Operands


def empty_output(q: Tensor, v: Tensor, out_batch: int) -> Tensor:
    """(out_batch, Hq, rows_q, Dv), its dimensions in memory in the order of q's, so that views stay views."""
    shape = (out_batch, q.shape[1], q.shape[2], v.shape[3])
    rows_outermost = q.stride(1) <= q.stride(2)  # (B, L, H, D) in memory, as projections and packed tensors have it
    return torch.empty_permuted(shape, (0, 2, 1, 3) if rows_outermost else (0, 1, 2, 3), dtype=q.dtype, device=q.device)


def empty_dparams(q: Tensor, params: Tensor | None) -> Tensor:
    """Shaped like params; an op must return a tensor, so without params it is an empty one."""
    return torch.empty_like(params) if params is not None else q.new_empty(0)


def empty_dtables(x: Operands, learn: bool) -> Tensor:
    """The gradients of all differentiable tables end to end, as wide as params; empty if nobody wants them."""
    size = sum(t.numel() for t in x.tables if t.is_floating_point()) if learn else 0
    return x.q.new_empty(size, dtype=torch.promote_types(x.q.dtype, torch.float32))


def table_gradients(flat: Tensor, tables: Sequence[Tensor]) -> list[Tensor | None]:
    """Views of ``flat``, one per table, None for those of integers."""
    sizes = [t.numel() if t.is_floating_point() else 0 for t in tables]
    whole = sum(sizes) == flat.numel() and sum(n > 0 for n in sizes) == 1
    # A table alone is not cut out: of a DTensor, which is sharded as the table is, that would gather it.
    pieces = [flat if n else flat[:0] for n in sizes] if whole else flat[: sum(sizes)].split(sizes)
    return [piece.view(t.shape) if t.is_floating_point() else None for t, piece in zip(tables, pieces, strict=True)]


def empty_dq(q: Tensor | None, rows: Tensor) -> Tensor:
    return torch.empty_like(q) if q is not None else rows.new_empty(0)


def empty_drows(q: Tensor | None, rows: Tensor) -> Tensor:
    """Grouped queries (Hq > Hk) must be a view of it; in a tensor of any strides they need not be one."""
    grouped = q is None and rows.shape[2] > 3
    return torch.empty_like(rows, memory_format=torch.contiguous_format if grouped else torch.preserve_format)


def n_seqs(k: Tensor, cu_k: Tensor | None) -> int:
    return k.shape[0] if cu_k is None else cu_k.shape[0] - 1
