"""Any varlen case as packed rows: for contenders without dense keys beside packed queries or shared queries."""

from __future__ import annotations

from torch import Tensor

from gdpa.testing.cases import Case, Inputs, offsets


def packed_rows(case: Case, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv) of a varlen case, differentiable.

    Dense sides are views. Shared queries are copied once per sequence: part of what such a contender has to do.
    """
    q = x.q.expand(len(case.len_q), -1, -1, -1) if case.shared else x.q
    return _rows(q), _rows(x.k), _rows(x.v)


def _rows(t: Tensor) -> Tensor:
    return t.flatten(0, 1) if t.dim() == 4 else t


def packed_offsets(case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    """(cu_q, cu_k) of those rows."""
    return (
        offsets(case.len_q, x.q.device) if x.cu_q is None else x.cu_q,
        offsets(case.len_k, x.k.device) if x.cu_k is None else x.cu_k,
    )
