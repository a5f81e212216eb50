"""Attention as one writes it in PyTorch, in the precision of its inputs: what gdpa is compared with.

    s = scale * q k^T        p = f(s), 0 where the mask says so        out = p v

Each line is a whole Lq x Lk matrix in memory, and autograd keeps most of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gdpa.bench.contenders.contender import Pieces
from gdpa.masks.band import Band
from gdpa.reference import keep
from gdpa.testing.cases import Case, Inputs, sequence

Function = Callable[..., Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor, f: Function, mask: Tensor | None = None) -> Tensor:
    """(..., Lq, Dv) of q (..., Lq, D), k (..., Lk, D), v (..., Lk, Dv); ``mask`` is True where a pair counts."""
    s = q @ k.mT * (1.0 / math.sqrt(q.shape[-1]))
    p = f(s)
    if mask is not None:
        p = torch.where(mask, p, 0.0)
    return p @ v


def by_sequence(case: Case, x: Inputs, f: Function, params: Sequence[Tensor] = ()) -> Tensor:
    """The case's output in the layout of gdpa's, one sequence after the other: no padding to reason about."""
    group = case.heads // (case.heads_k or case.heads)
    columns = [p if p.dim() == 0 else p[:, None, None] for p in params]
    outputs = []
    for b, (len_q, len_k) in enumerate(zip(case.len_q, case.len_k, strict=True)):
        q = sequence(case, x.q, x.cu_q, b, shared=case.shared)
        k, v = (sequence(case, t, x.cu_k, b).repeat_interleave(group, dim=0) for t in (x.k, x.v))
        mask = _band_mask(case, len_q, len_k, q.device)
        outputs.append(attention(q, k, v, lambda s: f(s, *columns), mask))
    if case.varlen:
        return torch.cat([o.transpose(0, 1) for o in outputs])
    return torch.stack(outputs)


def _band_mask(case: Case, len_q: int, len_k: int, device: torch.device) -> Tensor | None:
    band = Band(*case.band)
    return None if band.unbounded else keep(band, len_q, len_k, device)


def padded(case: Case, x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(q, k, v, mask), dense and padded to the longest sequence, as fresh leaves: what eager code would be given."""
    q = _pad(x.q, x.cu_q, case, one_block=case.shared)
    k, v = _pad(x.k, x.cu_k, case), _pad(x.v, x.cu_k, case)
    group = case.heads // (case.heads_k or case.heads)
    mask = _padded_mask(case, q.shape[2], k.shape[2], q.device)
    leaves = [t.contiguous().requires_grad_() for t in (q, *(t.repeat_interleave(group, dim=1) for t in (k, v)))]
    return leaves[0], leaves[1], leaves[2], mask


def _padded_mask(case: Case, longest_q: int, longest_k: int, device: torch.device) -> Tensor | None:
    """(B or 1, 1, Lq or 1, Lk): each sequence's band and real keys; padded queries make rows that nobody reads."""
    if not case.varlen:
        return _band_mask(case, longest_q, longest_k, device)
    len_q, len_k = (torch.tensor(n, device=device)[:, None, None, None] for n in (case.len_q, case.len_k))
    j = torch.arange(longest_k, device=device)
    mask = j < len_k if case.packed_k else None
    band = Band(*case.band)
    if band.unbounded:
        return mask
    inside = band.holds(j - torch.arange(longest_q, device=device)[:, None] - (len_k - len_q))
    return inside if mask is None else mask & inside


def _pad(t: Tensor, cu: Tensor | None, case: Case, one_block: bool = False) -> Tensor:
    """(B, H, L, D)."""
    t = t.detach()
    if cu is not None:
        return pad_sequence(list(t.split(cu.diff().tolist())), batch_first=True).transpose(1, 2)
    if not case.varlen:
        return t
    return (t[None] if one_block else t).transpose(1, 2)


def padded_pieces(case: Case) -> Pieces:
    """Where a sequence is in the results of padded tensors. Gradients of repeated heads add up."""
    heads_k = case.heads_k or case.heads

    def out(t: Tensor, b: int) -> Tensor:
        return t[b, :, : case.len_q[b]]

    def grads(found: Sequence[Tensor], b: int) -> tuple[Tensor, Tensor, Tensor]:
        dq, *rest = found[:3]
        dk, dv = (t[b, :, : case.len_k[b]].unflatten(0, (heads_k, -1)).sum(1) for t in rest)
        return dq[0 if case.shared else b, :, : case.len_q[b]], dk, dv

    return Pieces(out, grads)


def matrix_bytes(case: Case, itemsize: int) -> int:
    """The size of one padded (B, H, Lq, Lk) matrix."""
    return len(case.len_q) * case.heads * max(case.len_q) * max(case.len_k) * itemsize
