"""The error of a contender on a case: relative RMS against float64, of the function that it computes.

The very call that is timed is compared, on the part of it that float64 affords: the longest sequence, as many of its
heads as fit, and if not even one does, queries spread over its length. The gradient of the output is zero elsewhere, so
that dk, dv and a dq of shared queries come from that part alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gdpa.bench.contenders import eager
from gdpa.bench.contenders.contender import Prepared
from gdpa.bench.results import SOFTMAX
from gdpa.masks.band import Band
from gdpa.spec import Loaded
from gdpa.testing.cases import Case, Inputs, sequence

# Pairs of the part, and of a block of it: some tenths of a second on an H200 and on two cores, and 0.5 GiB a matrix.
PAIRS = {"cuda": 2**30, "cpu": 2**22}
BLOCK_PAIRS = {"cuda": 2**26, "cpu": 2**20}
RESULTS = ("out", "dq", "dk", "dv")
SAME = 1e-3  # summing dq in another order changes its error by less

Errors = dict[str, float]


@dataclass(frozen=True)
class Part:
    """What is compared: ``rows`` of the first ``heads`` of sequence ``b``."""

    b: int
    heads: int
    rows: Tensor


def part_of(case: Case, device: torch.device) -> Part:
    """The longest sequence, cut to what float64 affords on ``device``."""
    pairs = [q * k for q, k in zip(case.len_q, case.len_k, strict=True)]
    b, budget = max(range(len(pairs)), key=pairs.__getitem__), PAIRS[device.type]
    len_q, len_k = case.len_q[b], case.len_k[b]
    heads = min(case.heads, max(budget // max(pairs[b], 1), 1))
    rows = min(len_q, max(budget // max(heads * len_k, 1), 1))
    return Part(b, heads, torch.linspace(0, max(len_q - 1, 0), rows, device=device, dtype=torch.float64).long())


class Truth:
    """Exact results of a case's inputs, made once for each function and kept."""

    def __init__(self, case: Case, x: Inputs) -> None:
        self.case, self.part = case, part_of(case, x.q.device)
        self._group = case.heads // (case.heads_k or case.heads)
        heads_k = -(-self.part.heads // self._group)
        q = sequence(case, x.q, x.cu_q, self.part.b, shared=case.shared)
        self._q = q.detach()[: self.part.heads, self.part.rows].double()
        self._k, self._v = (sequence(case, t, x.cu_k, self.part.b).detach()[:heads_k].double() for t in (x.k, x.v))
        rng = torch.Generator(device=x.q.device).manual_seed(1)
        shape = (*self._q.shape[:2], self._v.shape[-1])
        self.dout = torch.randn(shape, generator=rng, device=x.q.device).to(x.q.dtype)
        self._found: dict[tuple[str, tuple[float, ...]], tuple[Tensor, ...]] = {}

    def results(self, computes: str, function: Loaded) -> tuple[Tensor, ...]:
        """out, dq (heads, rows, .), dk, dv (heads_k, Lk, .) of ``function``, or of softmax if ``computes`` says so."""
        key, f = (function.spec, function.params), _elementwise(function)
        if computes == SOFTMAX:
            key, f = (SOFTMAX, ()), _softmax
        if key not in self._found:
            self._found[key] = self._compute(f)
        return self._found[key]

    def _compute(self, f: Callable[[Tensor, Tensor | None], Tensor]) -> tuple[Tensor, ...]:
        k, v = (t.clone().requires_grad_() for t in (self._k, self._v))
        outs, dqs, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
        step = max(BLOCK_PAIRS[k.device.type] // max(self.part.heads * k.shape[1], 1), 1)
        for start in range(0, len(self.part.rows), step):
            block = slice(start, start + step)
            q, mask = self._q[:, block].clone().requires_grad_(), self._mask(self.part.rows[block])
            with torch.enable_grad():
                keys, values = (t.repeat_interleave(self._group, 0)[: self.part.heads] for t in (k, v))
                out = eager.attention(q, keys, values, lambda s, mask=mask: f(s, mask))
                parts = torch.autograd.grad(out, (q, k, v), self.dout[:, block].double())
            outs.append(out.detach())
            dqs.append(parts[0])
            dk += parts[1]
            dv += parts[2]
        return torch.cat(outs, 1), torch.cat(dqs, 1), dk, dv

    def _mask(self, rows: Tensor) -> Tensor | None:
        band, b = Band(*self.case.band), self.part.b
        if band.unbounded:
            return None
        j = torch.arange(self.case.len_k[b], device=rows.device)
        return band.holds(j - rows[:, None] - (self.case.len_k[b] - self.case.len_q[b]))


def _elementwise(function: Loaded) -> Callable[[Tensor, Tensor | None], Tensor]:
    params = [torch.tensor(p, dtype=torch.float64) for p in function.params]

    def f(s: Tensor, mask: Tensor | None) -> Tensor:
        p = function.function(s, *(param.to(s.device) for param in params))
        return p if mask is None else torch.where(mask, p, 0.0)

    return f


def _softmax(s: Tensor, mask: Tensor | None) -> Tensor:
    """Queries without keys are zero."""
    if mask is None:
        return s.softmax(-1)
    return torch.where(mask.any(-1, keepdim=True), s.masked_fill(~mask, -1e300).softmax(-1), 0.0)


def errors(prepared: Prepared, truth: Truth, computes: str, function: Loaded) -> Errors | None:
    """Relative RMS errors of out, dq, dk and dv; None if the contender does not say where they are."""
    pieces, part = prepared.pieces, truth.part
    if pieces is None:
        return None
    out = prepared.forward()
    dout = torch.zeros_like(out)
    pieces.out(dout, part.b)[: part.heads, part.rows] = truth.dout
    grads = torch.autograd.grad(out, prepared.leaves, dout)
    dq, dk, dv = pieces.grads(grads, part.b)
    exact = truth.results(computes, function)
    found = [t[: part.heads, part.rows] for t in (pieces.out(out.detach(), part.b), dq)]
    found += [t[: len(exact[2])] for t in (dk, dv)]
    return {name: relative_rms(a, b) for name, a, b in zip(RESULTS, found, exact, strict=True)}


def relative_rms(found: Tensor, exact: Tensor) -> float:
    """RMS of the error over RMS of the exact result."""
    return float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def same(a: Errors, b: Errors) -> bool:
    """Whether two results come from the same arithmetic, as far as their errors tell."""
    return all(math.isclose(a[name], b[name], rel_tol=SAME) for name in RESULTS)


def of_pass(found: Errors | None, which: str) -> dict[str, object]:
    """The fields of a record: each result's error, and the largest of them."""
    names = {"fwd": RESULTS[:1], "bwd": RESULTS[1:], "both": RESULTS}[which]
    parts = {name: found[name] for name in names} if found else None
    return {"rms_error": max(parts.values()) if parts else None, "rms_errors": parts}
