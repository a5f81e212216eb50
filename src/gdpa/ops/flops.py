"""FLOP formulas of the operators, for torch.utils.flop_counter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gdpa.compat import FakeTensor
from gdpa.ops.results import n_seqs
from gdpa.ops.schema import records, together
from gdpa.problem import Operands


def _pairs(x: Operands) -> int:
    """sum over sequences of Lq * Lk. A band does not lower it, by the convention of SDPA's own formulas."""
    given = [t for t in (x.cu_q, x.cu_k, x.used_q, x.used_k) if t is not None]
    if given and not any(isinstance(t, FakeTensor) or t.is_meta for t in given):
        sides = ((x.cu_q, x.used_q, x.q), (x.cu_k, x.used_k, x.k))
        lengths_q, lengths_k = (_lengths(cu, used, t.shape[2]) for cu, used, t in sides)
        return int((lengths_q * lengths_k).sum())
    n = n_seqs(x.k, x.cu_k) if x.cu_q is None else x.cu_q.shape[0] - 1  # no data: as if all lengths were equal
    rows_q, rows_k = (t.shape[2] * (n if cu is None else 1) for t, cu in ((x.q, x.cu_q), (x.k, x.cu_k)))
    return rows_q * rows_k // max(n, 1)


def _lengths(cu: Tensor | None, used: Tensor | None, rows: int) -> Any:
    if used is not None:
        return used.long()
    return rows if cu is None else cu.long().diff()


def _products(*args: Any) -> tuple[int, int]:
    """FLOPs of one product over the head dimension of q and k, and of one over that of v."""
    x, _ = records(args)
    pairs = 2 * x.q.shape[1] * _pairs(x)
    return pairs * x.q.shape[3], pairs * x.v.shape[3]


@register_flop_formula(torch.ops.gdpa.attention, get_raw=True)
def forward_flops(*args: Any, **kwargs: Any) -> int:
    """s = q k^T, o = p v."""
    qk, pv = _products(*args)
    return qk + pv


@register_flop_formula(torch.ops.gdpa.attention_backward, get_raw=True)
def backward_flops(grad: Tensor, *args: Any, **kwargs: Any) -> int:
    """s, dq and dk over D; dp and dv over Dv."""
    qk, pv = _products(*args)
    return 3 * qk + 2 * pv


@register_flop_formula(torch.ops.gdpa.attention_packed, get_raw=True)
def packed_forward_flops(*args: Any, **kwargs: Any) -> int:
    return forward_flops(*together(*args))


@register_flop_formula(torch.ops.gdpa.attention_packed_backward, get_raw=True)
def packed_backward_flops(grad: Tensor, *args: Any, **kwargs: Any) -> int:
    return backward_flops(grad, *together(*args))
