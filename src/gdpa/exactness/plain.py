"""Eager PyTorch as one writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdpa.exactness.draw import Tensors
from gdpa.exactness.formula import Formula
from gdpa.exactness.layout import Batch, as_rows, batches
from gdpa.exactness.tiles import Results, empty, sink_gradient_of_keyless_rows, sink_of


class _RoundedProduct(torch.autograd.Function):
    """a @ b in float32, rounded once: what torch's own 16-bit product gives on the CPU, 200 times faster."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a.float() @ b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (a, b), do = ctx.saved_tensors, grads[0].float()
        return (do @ b.float().mT).to(a.dtype), (a.float().mT @ do).to(a.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    narrow_on_cpu = a.device.type == "cpu" and a.dtype in (torch.bfloat16, torch.float16)
    return _RoundedProduct.apply(a, b) if narrow_on_cpu else a @ b


def plain(formula: Formula, x: Tensors) -> Results:
    """Everything in the dtype of the inputs, with gradients by autograd."""
    case, dtype = formula.case, x.do.dtype
    found, totals = empty(formula, x, torch.float64)  # sums over sequences cost nothing: shared queries, params
    q, k, v, do = (as_rows(case, t.detach()) for t in (*x.x.leaves, x.do))
    for part in batches(case):
        batch = formula.batch(part, x)
        inputs = {"dq": q[batch.q], "dk": k[batch.k], "dv": v[batch.k]}  # (n, L, H, D)
        leaves = [t.detach().requires_grad_() for t in inputs.values()]
        learned = _Learned.of(formula, x, dtype)
        heads = [t.transpose(1, 2) for t in leaves]
        heads[1:] = [t.repeat_interleave(formula.group, dim=1) for t in heads[1:]]
        p, sums = _weights(formula, _product(heads[0], heads[1].mT) * formula.scale, batch, learned)
        out = (_product(p, heads[2]) * formula.out_scale).transpose(1, 2)
        of, given = [out], [_real(batch, do).to(dtype)]
        if x.dsums is not None:
            of, given = [*of, sums.transpose(1, 2)], [*given, _real(batch, as_rows(case, x.dsums[..., None])).to(dtype)]
        inputs_of = [*leaves, *learned.leaves]
        grads = torch.autograd.grad(of, inputs_of, given, allow_unused=True, materialize_grads=True)
        for name, t in zip(("out", *inputs), (out.detach(), *grads[:3]), strict=True):
            rows, real = batch.rows(name)
            found[name].index_add_(0, rows[real], t[real].double())
        for total, grad in zip((*totals.params, *totals.tables.values(), totals.sink), grads[3:], strict=False):
            total += grad.flatten().double()
    totals.add_sink(sink_gradient_of_keyless_rows(formula, x))
    return x.as_held({name: t.to(dtype) for name, t in {**found, **totals.as_given(x)}.items()})


def _real(batch: Batch, rows: Tensor) -> Tensor:
    """(n, Lq, H, ...) of (rows, H, ...), 0 in padding."""
    return torch.where(batch.real_q[:, :, None, None], rows[batch.out], 0.0)


@dataclass(frozen=True)
class _Learned:
    """Params and a sink (H, 1, 1) and tables, as leaves in the dtype of the inputs."""

    params: list[Tensor]
    tables: list[Tensor]
    sink: Tensor | None

    @classmethod
    def of(cls, formula: Formula, x: Tensors, dtype: torch.dtype) -> _Learned:
        def leaf(t: Tensor) -> Tensor:
            return t.detach().to(dtype).requires_grad_()

        params = [leaf(p.expand(formula.case.heads)[:, None, None]) for p in x.params]
        tables = [leaf(t) if t.is_floating_point() else t for t in x.tables]
        sink = sink_of(formula, x, dtype)
        return cls(params, tables, None if sink is None else leaf(sink[:, None, None]))

    @property
    def leaves(self) -> list[Tensor]:
        """In the order of Totals."""
        sink = [] if self.sink is None else [self.sink]
        return [*self.params, *(t for t in self.tables if t.requires_grad), *sink]


def _weights(formula: Formula, s: Tensor, batch: Batch, learned: _Learned) -> tuple[Tensor, Tensor]:
    """What is multiplied with v, (n, H, Lq, Lk), and the row sums as they are returned, (n, H, Lq, 1). (Not those of
    rows without a denominator, which pass no gradient on.)"""
    soft = formula.heads(s.device, "softmax")
    scores = s.masked_fill(soft, 0.0) if bool(soft.any()) else s  # whose exp may overflow, is not asked for
    p = torch.where(batch.keep, formula.value(scores, learned.params, learned.tables, batch), 0.0)
    found = [_divided(formula, h, s, p, batch.keep, learned.sink) for h in _runs(formula.norms)]
    return torch.cat([w for w, _ in found], dim=1), torch.cat([sums for _, sums in found], dim=1)


def _runs(norms: tuple[str | None, ...]) -> list[slice]:
    """Neighbouring heads that are divided alike."""
    starts = [h for h in range(len(norms)) if h == 0 or norms[h] != norms[h - 1]]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(norms)], strict=True)]


def _divided(
    formula: Formula, h: slice, s: Tensor, p: Tensor, keep: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of heads that are divided alike."""
    norm, s, p, sink = formula.norms[h.start], s[:, h], p[:, h], None if sink is None else sink[h]
    keep = keep if keep.shape[1] == 1 else keep[:, h]
    zero = torch.zeros((), dtype=s.dtype, device=s.device)
    if norm is None:
        return p, torch.ones_like(p[..., :1])
    if norm == "softmax":
        scores = s.masked_fill(~keep, torch.finfo(s.dtype).min)
        if sink is not None:  # one more key
            scores = torch.cat([scores, sink.log().expand_as(s[..., :1])], dim=-1)
        return torch.where(keep, scores.softmax(-1)[..., : s.shape[-1]], zero), scores.logsumexp(-1, keepdim=True)
    d = (p.abs() if norm == "abs" else p).sum(-1, keepdim=True)
    d = d if sink is None else d + sink
    some = d.masked_fill(d == 0, 1.0)
    return torch.where(d == 0, zero, p / some), some.log() if formula.exponential else some
