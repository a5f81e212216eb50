"""The formulas, one padded batch of sequences at a time, in any precision and with the roundings of the definition.

s = scale q k^T    p = f(s)    out = out_scale p v
dp = out_scale do v^T    ds = scale dp f'(s)    dq = ds k    dk = ds^T q    dv = out_scale p^T do
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gdpa.exactness.draw import Tensors
from gdpa.exactness.formula import Derivatives, Formula
from gdpa.exactness.layout import Batch, as_rows, batches, spans, used_rows

Results = dict[str, Tensor]
EPS32 = 2.0**-24  # half a unit in the last place
NOISE64 = 2.0**-48  # of a number near 1 from which f takes another one: 16 units in the last place of float64


@dataclass(frozen=True)
class Totals:
    """Gradients that sum over all pairs, in float64: of params (n_params, H), of the flat float tables by their number,
    and of a sink (H,). ``squares`` are sums of the squared terms, if anybody wants them."""

    params: Tensor
    tables: dict[int, Tensor]
    sink: Tensor
    squares: Totals | None = None

    @classmethod
    def zeros(cls, formula: Formula, x: Tensors, squares: Totals | None = None) -> Totals:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=x.do.device)

        heads = formula.case.heads
        tables = {i: zeros(t.numel()) for i, t in enumerate(x.tables) if t.is_floating_point()}
        return cls(zeros(len(x.params), heads), tables, zeros(heads), squares)

    def add(self, f: Derivatives, terms: Iterable[Tensor]) -> None:
        """Add (n, H, Lq, Lk) terms of f's params, then of what it reads of tables."""
        found = list(terms)
        for total, term in zip(self.params, found, strict=False):
            total += term.sum((0, 2, 3)).double()
        for read, term in zip(f.reads, found[len(f.by_params) :], strict=True):
            total = self.tables[read.table]
            part = torch.zeros_like(total, dtype=term.dtype)
            total += part.index_add_(0, read.at.flatten(), term.flatten()).double()
        if self.squares is not None:
            self.squares.add(f, [term.square() for term in found])

    def add_sink(self, term: Tensor) -> None:
        """Add a term per row, (n, H, Lq, 1)."""
        self.sink.add_(term.sum((0, 2, 3)).double())
        if self.squares is not None:
            self.squares.add_sink(term.square())

    def as_given(self, x: Tensors) -> Results:
        """One vector for all params, one for all tables and one for the sink, if there are any (dparams always); one
        number for a param or sink of shape ()."""

        def vector(given: tuple[Tensor, ...], rows: Tensor) -> Tensor:
            parts = [row if t.dim() else row.sum(0, keepdim=True) for t, row in zip(given, rows, strict=True)]
            return torch.cat(parts) if parts else rows.new_zeros(0)

        found = {"dparams": vector(x.params, self.params)}
        if "dtables" in x.learned:
            found["dtables"] = torch.cat(list(self.tables.values()))
        if "dsink" in x.learned:
            found["dsink"] = vector(x.learned["dsink"], self.sink[None])
        return found


class Tile:
    """One padded batch: q, do (n, Hq, Lq, D), k, v (n, Hq, Lk, D), and s, p, dp, slope (n, Hq, Lq, Lk)."""

    def __init__(
        self, formula: Formula, batch: Batch, q: Tensor, k: Tensor, v: Tensor, do: Tensor, params: list[Tensor],
        tables: tuple[Tensor, ...] = (), sink: Tensor | None = None, dsums: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.formula, self.batch, self.params, self.tables, self.sink = formula, batch, params, tables, sink
        self.q, self.do = q[batch.q].transpose(1, 2), do[batch.out].transpose(1, 2)
        self.k, self.v = (t[batch.k].transpose(1, 2).repeat_interleave(formula.group, dim=1) for t in (k, v))
        self.s = (self.q @ self.k.mT) * formula.scale
        self.f = self.derivatives(self.s)
        self.p, self.slope = self.f.p, self.f.slope
        self.dp = (self.do @ self.v.mT) * formula.out_scale

    def derivatives(self, s: Tensor) -> Derivatives:
        """Of f, at other scores in place of this tile's."""
        return self.formula.derivatives(s, self.params, self.tables, self.batch)

    def masked(self, t: Tensor) -> Tensor:
        return torch.where(self.batch.keep, t, 0.0)

    def add_to(self, found: Results, totals: Totals, rounded: torch.dtype | None = None) -> None:
        """Add the results of these sequences. ``rounded``: what p and ds are rounded to, if they are."""
        p = _narrow(self.masked(self.p), rounded)
        self.scatter(found, "out", (p @ self.v) * self.formula.out_scale)
        self.scatter(found, "dv", (p.mT @ self.do) * self.formula.out_scale)
        self.add_gradients(found, totals, self.dp, self.slope, rounded)

    def add_gradients(
        self, found: Results, totals: Totals, dp: Tensor, slope: Tensor, rounded: torch.dtype | None
    ) -> None:
        """dq and dk of ds = scale * dp * slope, and what sums over all pairs."""
        boost = 1.0 if rounded is None else self.formula.boost(rounded)
        ds = _narrow(self.masked(dp * slope * (self.formula.scale * boost)), rounded)
        self.scatter(found, "dq", (ds @ self.k) / boost)
        self.scatter(found, "dk", (ds.mT @ self.q) / boost)
        totals.add(self.f, (self.masked(dp * t) for t in self.f.all[2:]))

    def scatter(self, found: Results, name: str, t: Tensor) -> None:
        """Add (n, Hq, L, D) to the rows it belongs to; key heads sum over their group."""
        rows, real = self.batch.rows(name)
        target = found[name]
        if name in ("dk", "dv"):
            t = t.unflatten(1, (target.shape[1], -1)).sum(2)
        target.index_add_(0, rows[real], t.transpose(1, 2)[real].to(target.dtype))

    def score_error(self) -> Tensor:
        """How far a float32 score may be off: some roundings of the size of its terms."""
        terms = (self.q.float().square() @ self.k.float().square().mT).sqrt().to(self.s.dtype)
        return 8 * EPS32 * (abs(self.formula.scale) * terms + self.s.abs())

    def reach(self, at_step: Tensor, above: Tensor, below: Tensor) -> Tensor:
        """The pairs that are changed where some are at a step of f; ``above`` and ``below`` are f beside the score."""
        return at_step

    def noise(self) -> dict[str, float]:
        """What float64 may lose in an element of each result where f or f' is a difference of numbers near s or 1."""
        formula = self.formula
        s, q, k, v, do, dp = (float(t.abs().max()) for t in (self.s, self.q, self.k, self.v, self.do, self.dp))
        len_q, len_k = self.s.shape[-2:]
        unit = NOISE64 * max(s, 1.0)
        per_p, per_ds = unit * abs(formula.out_scale), unit * abs(formula.scale) * dp
        found = {"out": per_p * len_k * v, "dv": per_p * len_q * do, "dq": per_ds * len_k * k, "dk": per_ds * len_q * q}
        return {**found, **dict.fromkeys(("dparams", "dtables", "dsink"), unit * dp * self.s.numel())}


def _narrow(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``t`` rounded to ``dtype``, in the dtype that it has."""
    return t if dtype is None else t.to(dtype).to(t.dtype)


class SummedTile(Tile):
    """With row sums: out = out_scale p v / d and dp' = (dp - n'(p) delta) / d, delta = <do, out>, d = sink + sum n(p).
    Rounded are p before its product with v, p / d before that with do, ds, and what is kept of out.

    ``weights`` are p, or exp(s - m) for softmax, with m the largest score of the row (or the sink's, log sink);
    ``inner`` are their derivatives, ``shift`` is exp(-m) (otherwise 1) and ``inverse`` 1 / d, all in the same units.
    Heads that are not divided (those that are: ``divides``) have d = 1, and n' = delta = 0. ``dsums`` is the gradient
    of the returned sums, d or log d: it is a part of delta.
    """

    def __init__(
        self, formula: Formula, batch: Batch, q: Tensor, k: Tensor, v: Tensor, do: Tensor, params: list[Tensor],
        tables: tuple[Tensor, ...] = (), sink: Tensor | None = None, dsums: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(formula, batch, q, k, v, do, params, tables, sink)
        self.divides, soft, self.absolute = (
            formula.heads(q.device, *norms) for norms in (("sum", "abs", "softmax"), ("softmax",), ("abs",))
        )
        column = None if sink is None else sink[:, None, None]
        m = torch.where(batch.keep, self.s, -torch.inf).amax(-1, keepdim=True)
        m = (m if column is None else torch.maximum(m, column.log())).nan_to_num(neginf=0.0)
        self.top = torch.where(soft, m, 0.0)
        self.shift = (-self.top).exp()
        softened = (self.s - m).exp()
        self.weights = self.masked(torch.where(soft, softened, self.p))
        self.inner = torch.where(soft, self.masked(softened), self.slope)
        d = torch.where(self.absolute, self.weights.abs(), self.weights).sum(-1, keepdim=True)
        self.d = torch.where(self.divides, d if column is None else d + column * self.shift, 1.0)
        self.inverse = torch.where(self.d == 0, 0.0, 1 / self.d)
        real = batch.real_q[:, None, :, None]  # padding has no keys, but a sum: the sink
        self.dsums = None if dsums is None else torch.where(real, dsums[batch.out].transpose(1, 2), 0.0)

    @property
    def sign(self) -> Tensor:
        """n'(p)."""
        return torch.where(self.absolute, self.weights.sign(), 1.0) * self.divides

    def delta(self, out: Tensor) -> Tensor:
        """What every n'(p) of a row takes from dp, (n, H, Lq, 1)."""
        found = (self.do * out).sum(-1, keepdim=True)
        if self.dsums is not None:
            logs = self.formula.in_logarithms(out.device)
            found = found - self.dsums * torch.where(logs, torch.ones_like(self.d), self.d)
        return found * self.divides

    def put_sums(self, sums: Tensor) -> None:
        """Write the row sums of these sequences as they are returned, into (rows, H, 1)."""
        rows, real = self.batch.rows("sums")
        sums[rows[real]] = _as_returned(self.formula, self.d, self.top).transpose(1, 2)[real].to(sums.dtype)

    def add_to(self, found: Results, totals: Totals, rounded: torch.dtype | None = None) -> None:
        out = (_narrow(self.weights, rounded) @ self.v) * self.inverse * self.formula.out_scale
        delta = self.delta(_narrow(out, rounded))
        self.scatter(found, "out", out)
        self.scatter(found, "dv", (_narrow(self.weights * self.inverse, rounded).mT @ self.do) * self.formula.out_scale)
        self.add_gradients(found, totals, (self.dp - self.sign * delta) * self.inverse, self.inner, rounded)
        totals.add_sink(-delta * self.inverse * self.shift)

    def reach(self, at_step: Tensor, above: Tensor, below: Tensor) -> Tensor:
        """All of a row that is divided: the step is in its sum, too. And |p| has a step in its derivative at p = 0."""
        at_step = at_step | ((above.sign() != below.sign()) & self.batch.keep & self.absolute)
        return at_step | (at_step.any(-1, keepdim=True) & self.batch.keep & self.divides)


def first_sums(formula: Formula, x: Tensors) -> Tensor:
    """(rows, H, 1) in float64, as they are returned: those of rows without a key, and 0 in rows of no sequence."""
    rows = used_rows(formula.case, "sums", x.do.device)
    sink = sink_of(formula, x, torch.float64)
    sink = torch.zeros(formula.case.heads, dtype=torch.float64, device=rows.device) if sink is None else sink
    d = torch.where(formula.heads(rows.device, None), 1.0, sink[:, None, None])
    found = d.new_zeros(as_rows(formula.case, x.do).shape[0], formula.case.heads, 1)
    found[rows] = _as_returned(formula, d, torch.zeros_like(d))[:, 0]
    return found


def sink_gradient_of_keyless_rows(formula: Formula, x: Tensors) -> Tensor:
    """(1, H, rows, 1): the row sums of sequences without keys, which are in no tile, are the sink."""
    case, sink = formula.case, sink_of(formula, x, torch.float64)
    if x.dsums is None or sink is None:
        return torch.zeros(1, case.heads, 0, 1, dtype=torch.float64, device=x.do.device)
    rows = [row for span in spans(case) if span.len_k == 0 for row in span.rows("sums")]
    dsums = as_rows(case, x.dsums[..., None])[rows].double().transpose(0, 1)
    column = sink[:, None, None]
    slope = torch.where(formula.in_logarithms(sink.device), 1 / column, 1.0) * ~formula.heads(sink.device, None)
    return (dsums * slope)[None]


def _as_returned(formula: Formula, d: Tensor, top: Tensor) -> Tensor:
    """Row sums d exp(top), or their logarithms; ``top`` is 0 where they are none."""
    return torch.where(formula.in_logarithms(d.device), d.log() + top, d)


def tiles(formula: Formula, x: Tensors, dtype: torch.dtype) -> Iterator[Tile]:
    """Everything, computed in ``dtype``."""
    case = formula.case
    q, k, v, do = (as_rows(case, t.detach()).to(dtype) for t in (*x.x.leaves, x.do))
    params = [p.detach().to(dtype).expand(case.heads) for p in x.params]
    kind = Tile if formula.normalize is None else SummedTile
    sink = sink_of(formula, x, dtype)
    dsums = None if x.dsums is None else as_rows(case, x.dsums[..., None]).to(dtype)
    for part in batches(case):
        yield kind(formula, formula.batch(part, x), q, k, v, do, params, x.tables, sink, dsums)


def sink_of(formula: Formula, x: Tensors, dtype: torch.dtype) -> Tensor | None:
    """(H,), or None if there is none."""
    if not isinstance(x.sink, Tensor):
        return x.do.new_full((formula.case.heads,), x.sink, dtype=dtype) if x.sink else None
    return x.sink.detach().to(dtype).expand(formula.case.heads)


def empty(formula: Formula, x: Tensors, dtype: torch.dtype) -> tuple[Results, Totals]:
    """Zeros: rows of out, dq, dk, dv in ``dtype``, and what sums over all pairs in float64."""
    case = formula.case
    shapes = {"out": x.do, "dq": x.x.q, "dk": x.x.k, "dv": x.x.v}
    found = {name: torch.zeros_like(as_rows(case, t.detach()), dtype=dtype) for name, t in shapes.items()}
    return found, Totals.zeros(formula, x)
