"""The definition, in eager torch: what every backend must compute, and the only ground truth.

    s_ij = scale * <q_i, k_j>
    p_ij = f(s_ij; params)  where the band keeps (i, j), else 0;  rounded to the input dtype
    o_i  = out_scale * sum_j p_ij v_j

Sequence by sequence, holding each Lq x Lk matrix; differentiable as often as f is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.autograd import recording
from gdpa.functions.activation import Activation
from gdpa.problem import Band, Operands, Problem


def attention(problem: Problem, x: Operands) -> Tensor:
    """(out_batch, Hq, rows_q, Dv), by the formula above."""
    with _no_autocast(problem):
        outputs = [_one_sequence(problem, x, seq) for seq in _sequences(problem, x)]
    if not outputs:
        nothing = sum(t[..., :0].sum() for t in (x.q, x.k, x.v, x.params) if t is not None)  # keeps gradients: zeros
        return x.q.new_zeros(problem.out_batch, problem.heads_q, problem.rows_q, problem.head_dim_v) + nothing
    return torch.cat(outputs, dim=1)[None] if problem.packed_q else torch.stack(outputs)


def _no_autocast(problem: Problem) -> torch.autocast:
    """Autocast has had its say on q, k and v; here it would undo the wide arithmetic of the definition."""
    return torch.autocast(problem.device.type, enabled=False)


@dataclass(frozen=True)
class _Sequence:
    """Where one sequence stands: a batch entry and a range of rows on each side; and how many rows of no sequence
    follow its queries."""

    batch_q: int
    rows_q: slice
    batch_k: int
    rows_k: slice
    unused: int


def _sequences(problem: Problem, x: Operands) -> Iterator[_Sequence]:
    spans_q = _spans(x.cu_q, x.used_q, problem.rows_q, problem.n_seqs)
    spans_k = _spans(x.cu_k, x.used_k, problem.rows_k, problem.n_seqs)
    for b, (rows_q, rows_k) in enumerate(zip(spans_q, spans_k, strict=True)):
        batch_q, batch_k = b if len(x.q) > 1 else 0, b if len(x.k) > 1 else 0
        following = spans_q[b + 1].start if problem.packed_q and b + 1 < problem.n_seqs else problem.rows_q
        yield _Sequence(batch_q, rows_q, batch_k, rows_k, following - rows_q.stop)


def _spans(cu: Tensor | None, used: Tensor | None, rows: int, n_seqs: int) -> list[slice]:
    """The rows of each sequence."""
    starts, ends = ([0] * n_seqs, [rows] * n_seqs) if cu is None else (cu.tolist()[:-1], cu.tolist()[1:])
    if used is not None:
        ends = [start + length for start, length in zip(starts, used.tolist(), strict=True)]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]


def _one_sequence(problem: Problem, x: Operands, seq: _Sequence) -> Tensor:
    """(Hq, rows, Dv): one sequence, and zeros for the unused rows behind it."""
    wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
    q = x.q[seq.batch_q, :, seq.rows_q].to(wide)
    k = x.k[seq.batch_k, :, seq.rows_k].to(wide).repeat_interleave(problem.group, dim=0)
    v = x.v[seq.batch_k, :, seq.rows_k].to(wide).repeat_interleave(problem.group, dim=0)
    s = problem.scale * (q @ k.mT)
    p = apply(problem.activations, s, x.params)
    p = torch.where(keep(problem.band, s.shape[-2], s.shape[-1], s.device), p, 0.0)
    p = rounded(p, problem.dtype)
    return F.pad((problem.out_scale * (p @ v)).to(problem.dtype), (0, 0, 0, seq.unused))


def rounded(p: Tensor, dtype: torch.dtype) -> Tensor:
    """p rounded to ``dtype``, with the gradient of p: a cast would round dp too, which the definition does not."""
    change = (p.to(dtype).to(p.dtype) - p).detach()
    return p + change.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)  # NaN: inf - inf


def apply(activations: tuple[Activation, ...], s: Tensor, params: Tensor | None) -> Tensor:
    """f(s) for s (Hq, Lq, Lk) and params (n_params, Hq)."""
    columns = [] if params is None else [row[:, None, None].to(s.dtype) for row in params]
    if len(activations) == 1:
        return activations[0].eager(s, *columns)
    heads = [act.eager(s[h], *(c[h] for c in columns)) for h, act in enumerate(activations)]
    return torch.stack(heads)


def keep(band: Band, len_q: int, len_k: int, device: torch.device) -> Tensor:
    """(len_q, len_k) of bool: True where ``-left <= j - i - (len_k - len_q) <= right``."""
    i = torch.arange(len_q, device=device)[:, None]
    j = torch.arange(len_k, device=device)[None, :]
    return band.holds(j - i - (len_k - len_q))


class ReferenceBackend:
    """The definition as a backend. Asked for by name it is called without the operator, to be differentiable twice."""

    name = "reference"

    def supports(self, problem: Problem) -> str | None:
        return None

    def forward(self, problem: Problem, x: Operands, out: Tensor) -> None:
        out.copy_(attention(problem, x))

    def backward(
        self, problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None
    ) -> None:
        inputs = [t for t in (x.q, x.k, x.v, x.params) if t is not None]
        leaves = [t.detach().requires_grad_() for t in inputs]
        with recording(), _no_autocast(problem):
            q, k, v, *params = leaves
            out = attention(problem, replace(x, q=q, k=k, v=v, params=params[0] if params else None))
            grads = torch.autograd.grad(out, leaves, do, allow_unused=True, materialize_grads=True)
        for target, grad in zip((dq, dk, dv, dparams), grads, strict=False):
            assert target is not None
            target.copy_(grad)
