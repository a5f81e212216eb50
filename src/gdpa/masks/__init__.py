"""Masks: which pairs of a query and a key are visible, where ``causal`` and ``window`` are not enough.

A mask is a function of positions, and of its own tables. It is applied after f, as ``causal`` and ``window`` are, and
is combined with them by "and". The masks below can be combined with ``&``, ``|`` and ``~``. Tables of one entry per
sequence (``counts``, ``lengths``) are data: new values do not compile anything. Too few entries are an error; entries
beyond the number of sequences, as in a buffer for the largest batch, are not read.

>>> out = gdpa.attention_varlen(q, k, v, cu, cu, "silu", causal=True, mask=gdpa.masks.targets(num_targets))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdpa.arguments.integers import as_int
from gdpa.functions.tracing.guards import pinned
from gdpa.masks.mask import Mask

__all__ = [
    "Mask",
    "causal",
    "context",
    "dilated",
    "document",
    "from_flex",
    "full_tail",
    "prefix",
    "targets",
    "window",
]


def causal() -> Mask:
    """Keys up to the query's own position, counted so that both sequences end together: the same as ``causal=True``."""
    return Mask(_causal)


def _causal(q_idx: Tensor, kv_idx: Tensor, q_len: Tensor, kv_len: Tensor) -> Tensor:
    return kv_idx - q_idx <= kv_len - q_len


def window(left: int | None, right: int | None, align: str = "last") -> Mask:
    """Keys with ``-left <= kv_idx - q_idx - shift <= right``; a bound may be negative, and None means no bound.
    ``align``: "last" lets both sequences end together (shift = kv_len - q_len, as ``window=`` does), "first" lets them
    begin together (shift = 0)."""
    left, right = as_int(left), as_int(right)
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise TypeError(f"{name} must be an int or None, got {bound!r}")
        if bound is not None and abs(bound) >= 2**62:
            raise ValueError(f"{name} must be less than 2^62, got {bound}; None means no bound")
    if align not in ("first", "last"):
        raise ValueError(f'align must be "first" or "last", got {align!r}')
    last = align == "last"
    left, right = (None if bound is None else pinned(bound) for bound in (left, right))

    def banded(q_idx: Tensor, kv_idx: Tensor, q_len: Tensor, kv_len: Tensor) -> Tensor:
        distance = kv_idx - q_idx - (kv_len - q_len) if last else kv_idx - q_idx
        if left is None:
            return distance <= right if right is not None else torch.ones_like(distance, dtype=torch.bool)
        return distance >= -left if right is None else (distance >= -left) & (distance <= right)

    return Mask(banded)


def _few(count: Tensor) -> Tensor:
    """A number of rows: bounded, so that kernels can compute with it in 32 bits. The bound is no narrow integer."""
    narrow = count.dtype in (torch.int8, torch.int16, torch.uint8)
    return count.clamp(min=0) if narrow else count.clamp(0, 2**29)


def _one_per_sequence(name: str, numbers: Any) -> None:
    """Refuse what is not a table of one number per sequence, under the name that the caller knows."""
    if not isinstance(numbers, Tensor):
        raise TypeError(f"{name} must be a tensor of one number per sequence, got {type(numbers).__name__}")
    if numbers.dim() != 1:
        raise ValueError(f"{name} must have one number per sequence, shape (B,), got {tuple(numbers.shape)}")


def prefix(lengths: Tensor) -> Mask:
    """The first ``lengths[b]`` keys of sequence b. A prefix that every query sees, with causal attention to the rest,
    is ``prefix(lengths) | causal()``."""
    _one_per_sequence("lengths", lengths)
    return Mask(_prefix, (lengths,))


def _prefix(kv_idx: Tensor, b: Tensor, lengths: Tensor) -> Tensor:
    return kv_idx < _few(lengths[b])


def document(ids_q: Tensor, ids_kv: Tensor | None = None) -> Mask:
    """Rows with equal ids see each other. There is one id per row: (T,) of packed tensors, or (B, L). ``ids_kv`` are
    the ids of the keys, if they are not those of the queries."""
    tables = (ids_q,) if ids_kv is None else (ids_q, ids_kv)
    for name, ids in zip(("ids_q", "ids_kv"), tables, strict=False):
        if not isinstance(ids, Tensor) or ids.dim() not in (1, 2):
            raise ValueError(f"{name} must be a tensor of one id per row, shape (T,) or (B, L)")
        if ids.dtype == torch.float64:  # kernels would have them in float32, and merge ids from 2^24 on
            raise TypeError(f"{name} must be integers, got torch.float64; .long() makes them integers")
    return Mask(_DOCUMENTS[tuple(ids.dim() for ids in tables)], tables)


_DOCUMENTS: dict[tuple[int, ...], Callable[..., Tensor]] = {
    (1,): lambda q_row, kv_row, ids: ids[q_row] == ids[kv_row],
    (2,): lambda b, q_idx, kv_idx, ids: ids[b, q_idx] == ids[b, kv_idx],
    (1, 1): lambda q_row, kv_row, ids_q, ids_kv: ids_q[q_row] == ids_kv[kv_row],
    (1, 2): lambda q_row, b, kv_idx, ids_q, ids_kv: ids_q[q_row] == ids_kv[b, kv_idx],
    (2, 1): lambda b, q_idx, kv_row, ids_q, ids_kv: ids_q[b, q_idx] == ids_kv[kv_row],
    (2, 2): lambda b, q_idx, kv_idx, ids_q, ids_kv: ids_q[b, q_idx] == ids_kv[b, kv_idx],
}


def targets(counts: Tensor, group: int = 1) -> Mask:
    """The last ``counts[b]`` keys are candidates: each is visible to its own ``group`` of consecutive candidates only,
    and the keys before them to everyone. (HSTU's num_targets; usually with causal.)"""
    group = as_int(group)
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise ValueError(f"group must be a positive int, got {group!r}")
    group = pinned(group)
    _one_per_sequence("counts", counts)

    def candidates(q_idx: Tensor, kv_idx: Tensor, q_len: Tensor, kv_len: Tensor, b: Tensor, counts: Tensor) -> Tensor:
        first = kv_len - _few(counts[b])
        same = (kv_idx - first) // group == (q_idx + (kv_len - q_len) - first) // group
        return (kv_idx < first) | same

    return Mask(candidates, (counts,))


def context(counts: Tensor) -> Mask:
    """The first ``counts[b]`` queries see every key, the others see none: combine it with other masks by ``|``."""
    _one_per_sequence("counts", counts)
    return Mask(_context, (counts,))


def _context(q_idx: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    return q_idx < _few(counts[b])


def full_tail(counts: Tensor) -> Mask:
    """The last ``counts[b]`` queries see every key, the others see none: combine it with other masks by ``|``.
    (HSTU's min_full_attn_seq_len is ``full_tail(counts) & causal()`` beside a window.)"""
    _one_per_sequence("counts", counts)
    return Mask(_full_tail, (counts,))


def _full_tail(q_idx: Tensor, q_len: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    return q_idx >= q_len - _few(counts[b])


def dilated(step: int) -> Mask:
    """Keys whose distance from the query (counted so that both sequences end together) is a multiple of ``step``."""
    step = as_int(step)
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"step must be a positive int, got {step!r}")
    step = pinned(step)

    def every(q_idx: Tensor, kv_idx: Tensor, q_len: Tensor, kv_len: Tensor) -> Tensor:
        return (kv_idx - q_idx - (kv_len - q_len)) % step == 0

    return Mask(every)


def from_flex(mask_mod: Callable[..., Any]) -> Mask:
    """A mask_mod of FlexAttention, (b, h, q_idx, kv_idx) -> bool, whatever it calls its arguments. If it captures a
    tensor, write a gdpa.Mask with an argument for that tensor instead:
    ``gdpa.Mask(lambda b, q_idx, kv_idx, ids: ids[b, q_idx] == ids[b, kv_idx], (ids,))``."""
    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function, got {type(mask_mod).__name__}")

    def mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return mask_mod(b, h, q_idx, kv_idx)

    return Mask(mod)
