"""What a call should give: the definition and its gradients by the formulas, in any precision, in padded batches.

    s = scale q k^T    p = f(s)    out = out_scale p v
    dp = out_scale do v^T    ds = scale dp f'(s)    dq = ds k    dk = ds^T q    dv = out_scale p^T do

In float64 that is the truth, in the precision of the call it is what plain PyTorch gives. f' comes from autograd on the
Python function, so nothing here has seen gdpa's compiler. ``attention`` also says what the roundings of the definition
may cost each element: the errors of single pairs, added up as independent ones are.

All results have the shape (rows, heads, D), whatever the layout of the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gdpa.bench.cases import Case
from gdpa.fuzz.draw import Call
from gdpa.fuzz.tensors import Tensors

Results = dict[str, Tensor]
MOST_SCORES = 2**25  # in one padded batch: 256 MiB in float64
EPS32 = 2.0**-24  # half a unit in the last place


@dataclass(frozen=True)
class Span:
    """Where a sequence stands in q, in the output, and in k and v."""

    q: int
    out: int
    k: int
    len_q: int
    len_k: int


def spans(case: Case) -> list[Span]:
    found, q, k = [], 0, 0
    for len_q, len_k in zip(case.len_q, case.len_k, strict=True):
        found.append(Span(0 if case.shared else q, q, k, len_q, len_k))
        q, k = q + len_q, k + len_k
    return found


def as_rows(case: Case, t: Tensor) -> Tensor:
    """(rows, heads, D) of a tensor of the API."""
    if t.dim() == 3:
        return t
    return (t if case.varlen else t.transpose(1, 2)).flatten(0, 1)


def batches(case: Case) -> Iterator[list[Span]]:
    """Sequences of similar size together: padding them costs at most a factor of 4."""
    by_size: dict[tuple[int, int], list[Span]] = {}
    for span in spans(case):
        if span.len_q and span.len_k:
            by_size.setdefault((span.len_q.bit_length(), span.len_k.bit_length()), []).append(span)
    for (bits_q, bits_k), found in by_size.items():
        step = max(1, MOST_SCORES // (case.heads << (bits_q + bits_k)))
        for i in range(0, len(found), step):
            yield found[i : i + step]


@dataclass(frozen=True)
class Batch:
    """Row numbers (n, L) of padded sequences, which of them are real, and the pairs (n, 1, Lq, Lk) that count."""

    q: Tensor
    out: Tensor
    k: Tensor
    real_q: Tensor
    real_k: Tensor
    keep: Tensor


def make_batch(case: Case, found: list[Span], device: torch.device) -> Batch:
    start_q, start_out, start_k, len_q, len_k = (
        torch.tensor([getattr(span, name) for span in found], device=device)[:, None]
        for name in ("q", "out", "k", "len_q", "len_k")
    )
    i = torch.arange(max(span.len_q for span in found), device=device)[None]
    j = torch.arange(max(span.len_k for span in found), device=device)[None]
    real_q, real_k = i < len_q, j < len_k
    keep = real_q[:, :, None] & real_k[:, None, :]
    distance = j[:, None, :] - i[:, :, None] - (len_k - len_q)[:, :, None]
    left, right = case.band
    if left is not None:
        keep = keep & (distance >= -left)
    if right is not None:
        keep = keep & (distance <= right)
    last_q, last_k = (len_q - 1).clamp_min(0), (len_k - 1).clamp_min(0)  # padding repeats a row, which nobody reads
    i, j = torch.minimum(i, last_q), torch.minimum(j, last_k)
    return Batch(start_q + i, start_out + i, start_k + j, real_q, real_k, keep[:, None])


def derivatives(call: Call, s: Tensor, params: list[Tensor]) -> list[Tensor]:
    """f, df/ds and df/dparam for every score (n, H, Lq, Lk); params are (H,)."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (s, *(p[:, None, None].expand_as(s) for p in params))]
        p = call.f(*leaves).expand_as(s)
        return [p.detach(), *torch.autograd.grad(p.sum(), leaves, allow_unused=True, materialize_grads=True)]


def attention(
    call: Call, x: Tensors, dtype: torch.dtype, rounded: torch.dtype | None = None
) -> tuple[Results, Results]:
    """out, dq, dk, dv and dparams computed in ``dtype``; and, for results computed in ``rounded``, what its roundings
    may add to each element (see ``Rounding``)."""
    case, device = call.case, x.do.device
    with torch.no_grad():
        q, k, v, do = (as_rows(case, t.detach()).to(dtype) for t in (*x.x.leaves, x.do))
        params = [p.detach().to(dtype).expand(case.heads) for p in x.params]
        found: Results = {"out": torch.zeros_like(do), "dq": torch.zeros_like(q), "dk": torch.zeros_like(k)}
        found["dv"] = torch.zeros_like(v)
        dparams = torch.zeros(len(params), case.heads, dtype=torch.float64, device=device)
        rounding = None if rounded is None else Rounding(call, found, dparams, rounded)
        for part in batches(case):
            batch = make_batch(case, part, device)
            tile = Tile(call, batch, q, k, v, do, params)
            tile.add_to(found, dparams)
            if rounding is not None:
                rounding.add(tile)
        found["dparams"] = _as_given(x, dparams).to(dtype).double()
        return found, {} if rounding is None else rounding.total(found, x)


def _as_given(x: Tensors, dparams: Tensor) -> Tensor:
    """(n_params, H) as the gradients of the params come: one number for a param of shape ()."""
    parts = [row if p.dim() else row.sum(0, keepdim=True) for p, row in zip(x.params, dparams, strict=True)]
    return torch.cat(parts) if parts else dparams.new_zeros(0)


class Tile:
    """One padded batch: q, do (n, Hq, Lq, D), k, v (n, Hq, Lk, D), and s, p, dp, ds (n, Hq, Lq, Lk)."""

    def __init__(
        self, call: Call, batch: Batch, q: Tensor, k: Tensor, v: Tensor, do: Tensor, params: list[Tensor]
    ) -> None:
        group = call.config.group
        self.call, self.batch, self.params = call, batch, params
        self.q, self.do = q[batch.q].transpose(1, 2), do[batch.out].transpose(1, 2)
        self.k, self.v = (t[batch.k].transpose(1, 2).repeat_interleave(group, dim=1) for t in (k, v))
        self.s = (self.q @ self.k.mT) * call.true_scale
        self.p, self.slope, *self.by_params = derivatives(call, self.s, params)
        self.dp = (self.do @ self.v.mT) * call.out_scale

    def masked(self, t: Tensor) -> Tensor:
        return torch.where(self.batch.keep, t, 0.0)

    def add_to(self, found: Results, dparams: Tensor) -> None:
        p, ds = self.masked(self.p), self.masked(self.dp * self.slope * self.call.true_scale)
        self.scatter(found, "out", (p @ self.v) * self.call.out_scale)
        self.scatter(found, "dq", ds @ self.k)
        self.scatter(found, "dk", ds.mT @ self.q)
        self.scatter(found, "dv", (p.mT @ self.do) * self.call.out_scale)
        for total, by_param in zip(dparams, self.by_params, strict=True):
            total += self.masked(self.dp * by_param).sum((0, 2, 3)).double()

    def scatter(self, found: Results, name: str, t: Tensor) -> None:
        """Add (n, Hq, L, D) to the rows it belongs to; key heads sum over their group."""
        rows, real = {"out": (self.batch.out, self.batch.real_q), "dq": (self.batch.q, self.batch.real_q)}.get(
            name, (self.batch.k, self.batch.real_k)
        )
        target = found[name]
        if name in ("dk", "dv"):
            t = t.unflatten(1, (target.shape[1], -1)).sum(2)
        target.index_add_(0, rows[real], t.transpose(1, 2)[real].to(target.dtype))


class Rounding:
    """The error that the definition's own roundings may leave in each element, about two standard deviations of it.

    A pair's p is off by a rounding, by the inaccuracy of f (which may be absolute, and grow with s: device code uses
    approximations as coarse as the dtype), and by what an error h of its float32 score changes: much, at a kink. Errors
    of pairs are independent, so their squares add up, and elements that no pair reaches have none. What overflows the
    dtype, as 1 / s does near 0 in float16, may be anything.
    """

    def __init__(self, call: Call, like: Results, dparams: Tensor, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        self.call, self.unit = call, info.eps / 2
        self.spacing = info.tiny * info.eps  # of the smallest numbers
        self.largest = info.max / 2
        self.squares = {name: torch.zeros_like(t, dtype=torch.float32) for name, t in like.items()}
        self.dparams = torch.zeros_like(dparams)

    def add(self, tile: Tile) -> None:
        call, scale, out_scale = self.call, abs(self.call.true_scale), abs(self.call.out_scale)
        # Sums of n terms in float32, one after the other: about sqrt(n) / 2 roundings.
        unit = self.unit + EPS32 * max(tile.s.shape[-2:]) ** 0.5 / 2
        q2, k2, v2, do2 = (t.float().square() for t in (tile.q, tile.k, tile.v, tile.do))
        h = 8 * EPS32 * (scale * (q2 @ k2.mT).sqrt() + tile.s.abs()).double()
        at_zero = torch.where(tile.s.abs() <= h, 0.0, tile.s)  # which a score may come to, and where f may have a pole
        near = [derivatives(call, s, tile.params) for s in (tile.s + h, tile.s - h, at_zero, tile.s)]
        size = 1 + tile.s.abs()

        def error(i: int, value: Tensor) -> Tensor:
            """Of f or a derivative of it, for every pair."""
            values = torch.stack([found[i] for found in near])
            jump = (values.amax(0) - values.amin(0)).nan_to_num(nan=torch.inf, posinf=torch.inf)
            return (unit * (value.abs() + size) + jump).float()

        def square(error: Tensor, value: Tensor) -> Tensor:
            """Of the error of what is rounded to the dtype, between the two products."""
            return tile.masked((error + self.spacing).masked_fill(value.abs() > self.largest, torch.inf)).square()

        p2 = square(error(0, tile.p), tile.p)
        dp = out_scale * (do2 @ v2.mT).sqrt() + tile.dp.abs().float()
        ds2 = square(scale * dp * error(1, tile.slope), tile.dp * tile.slope * max(scale, 1))
        tile.scatter(self.squares, "out", (p2 @ v2) * out_scale**2)
        tile.scatter(self.squares, "dv", (p2.mT @ do2) * out_scale**2)
        tile.scatter(self.squares, "dq", ds2 @ k2)
        tile.scatter(self.squares, "dk", ds2.mT @ q2)
        for i, (total, by_param) in enumerate(zip(self.dparams, tile.by_params, strict=True)):
            total += tile.masked(dp * error(2 + i, by_param)).double().square().sum((0, 2, 3))

    def total(self, exact: Results, x: Tensors) -> Results:
        """2 sqrt(sum of squares), the rounding of the result, and that of sums which only grow (do all equal)."""
        case = self.call.case
        terms = max((*case.len_q, *case.len_k), default=0) * self.call.config.group
        drift = EPS32 * (terms * (len(case.len_q) if case.shared else 1)) ** 0.5
        squares = {**self.squares, "dparams": _as_given(x, self.dparams)}
        found = {}
        for name, t in squares.items():
            size = exact[name].abs()
            last = ((self.unit + drift) * size + self.spacing * (t > 0)).masked_fill(size > self.largest, torch.inf)
            found[name] = (2 * t.double().sqrt() + last).nan_to_num(nan=torch.inf, posinf=torch.inf)
        return found
