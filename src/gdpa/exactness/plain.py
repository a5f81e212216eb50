"""Eager PyTorch as one writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdpa.exactness.draw import Tensors
from gdpa.exactness.formula import Formula
from gdpa.exactness.layout import Batch, as_rows, batches
from gdpa.exactness.tiles import Results, empty, sink_of


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
        p = _weights(formula, _product(heads[0], heads[1].mT) * formula.scale, batch, learned)
        out = (_product(p, heads[2]) * formula.out_scale).transpose(1, 2)
        do_rows = torch.where(batch.real_q[:, :, None, None], do[batch.out], 0.0).to(dtype)
        grads = torch.autograd.grad(out, [*leaves, *learned.leaves], do_rows, allow_unused=True, materialize_grads=True)
        for name, t in zip(("out", *inputs), (out.detach(), *grads[:3]), strict=True):
            rows, real = batch.rows(name)
            found[name].index_add_(0, rows[real], t[real].double())
        for total, grad in zip((*totals.params, *totals.tables.values(), totals.sink), grads[3:], strict=False):
            total += grad.flatten().double()
    return {name: t.to(dtype) for name, t in {**found, **totals.as_given(x)}.items()}


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


def _weights(formula: Formula, s: Tensor, batch: Batch, learned: _Learned) -> Tensor:
    zero = torch.zeros((), dtype=s.dtype, device=s.device)
    keep, sink = batch.keep, learned.sink
    if formula.normalize == "softmax":
        scores = s.masked_fill(~keep, torch.finfo(s.dtype).min)
        if sink is not None:  # one more key
            scores = torch.cat([scores, sink.log().expand_as(s[..., :1])], dim=-1)
        return torch.where(keep, scores.softmax(-1)[..., : s.shape[-1]], zero)
    p = torch.where(keep, formula.value(s, learned.params, learned.tables, batch), zero)
    if formula.normalize is None:
        return p
    d = (p.abs() if formula.normalize == "abs" else p).sum(-1, keepdim=True)
    d = d if sink is None else d + sink
    return torch.where(d == 0, zero, p / d.masked_fill(d == 0, 1.0))
