"""What the roundings of the definition may cost each element: the errors of single pairs, added up as independent ones
are. gdpa.exactness computes what a call should give."""

from __future__ import annotations

import torch
from torch import Tensor

from gdpa.exactness import results
from gdpa.exactness.draw import Tensors
from gdpa.exactness.formula import Formula
from gdpa.exactness.layout import as_rows, used_rows
from gdpa.exactness.results import Truth
from gdpa.exactness.tiles import EPS32, Results, SummedTile, Tile, Totals, empty, sink_gradient_of_keyless_rows
from gdpa.fuzz.draw import Call


def attention(call: Call, x: Tensors) -> tuple[Truth, Results]:
    """The truth, and what roundings may add to each element."""
    rounding = Rounding(call.formula, x, repeats=not call.independent)
    truth = results.exact(call.formula, x, rounding.add)
    return truth, rounding.total(truth.values)


class Rounding:
    """The error that the definition's own roundings may leave in each element, about two standard deviations of it.

    A pair's p is off by a rounding, by the inaccuracy of f (which may be absolute, and grow with s: device code uses
    approximations as coarse as the dtype), and by what an error h of its float32 score changes: much, at a kink. Errors
    of pairs are independent, so their squares add up, and elements that no pair reaches have none. What overflows the
    dtype, as 1 / s does near 0 in float16, may be anything.
    """

    def __init__(self, formula: Formula, x: Tensors, repeats: bool) -> None:
        info = torch.finfo(x.do.dtype)
        self.formula, self.x, self.repeats, self.unit = formula, x, repeats, info.eps / 2
        self.spacing = info.tiny * info.eps  # of the smallest numbers
        self.largest = info.max / 2
        self.squares, self.totals = empty(formula, x, torch.float32)
        self.together = Totals.zeros(formula, x)  # what errors common to a row may add up to
        if formula.with_sums:
            self.squares["sums"] = _of_logarithms(formula, x)
        self.totals.add_sink((4 * EPS32 * sink_gradient_of_keyless_rows(formula, x)).square())

    def add(self, tile: Tile) -> None:
        pairs = Pairs(self, tile)
        if isinstance(tile, SummedTile):
            self._add_summed(tile, pairs)
            return
        scale, out_scale = abs(self.formula.scale), abs(self.formula.out_scale)
        q2, k2, v2, do2 = (t.float().square() for t in (tile.q, tile.k, tile.v, tile.do))
        p2 = self.square(tile, pairs.error(0), tile.p)
        dp = pairs.size_of_dp
        ds2 = self.square(tile, scale * dp * pairs.error(1), tile.dp * tile.slope * max(scale, 1))
        tile.scatter(self.squares, "out", (p2 @ v2) * out_scale**2)
        tile.scatter(self.squares, "dv", (p2.mT @ do2) * out_scale**2)
        tile.scatter(self.squares, "dq", ds2 @ k2)
        tile.scatter(self.squares, "dk", ds2.mT @ q2)
        self.totals.add(tile.f, (tile.masked(dp * e).double().square() for e in pairs.of_learned))

    def square(self, tile: Tile, error: Tensor, value: Tensor) -> Tensor:
        """Of the error of what is rounded to the dtype, between the two products."""
        return tile.masked((error + self.spacing).masked_fill(value.abs() > self.largest, torch.inf)).square()

    def _add_summed(self, tile: SummedTile, pairs: Pairs) -> None:
        """out = out_scale w v / d, and ds = scale g w' with g = (dp - n' delta) / d: weights w are off pair by pair, d
        and delta for a whole row at once. The latter add up along a row, as the terms that they are factors of do."""
        scale, out_scale = abs(self.formula.scale), abs(self.formula.out_scale)
        q2, k2, v2, do2 = (t.float().square() for t in (tile.q, tile.k, tile.v, tile.do))
        shift, inverse = tile.shift.float(), tile.inverse.float()
        w_error = pairs.error(0) * shift
        w2 = self.square(tile, w_error, tile.weights)
        of_d = (w2.sum(-1, keepdim=True)).sqrt() * inverse * tile.divides  # relative error of d, (n, H, Lq, 1)
        out = ((tile.weights @ tile.v) * tile.inverse * self.formula.out_scale).float()
        out2 = (w2 @ v2) * (inverse * out_scale).square() + (of_d * out).square()
        tile.scatter(self.squares, "out", out2)
        kept = (tile.weights * tile.inverse).float()
        kept2 = self.square(tile, w_error * inverse + self.unit * kept.abs(), kept) + (kept * of_d).square()
        tile.scatter(self.squares, "dv", (kept2.mT @ do2) * out_scale**2)

        delta = tile.delta(out).float()
        of_delta = (do2 * (out2 + (self.unit * out).square())).sum(-1, keepdim=True).sqrt() * inverse * tile.divides
        if tile.dsums is not None:
            of_delta = of_delta + 4 * EPS32 * tile.dsums.abs().float() * self._per_sum(tile) * inverse
        g = ((tile.dp.float() - tile.sign.float() * delta) * inverse).float()
        g_size = (pairs.size_of_dp + delta.abs()) * inverse
        inner = tile.masked(tile.inner).float()
        own = g_size * pairs.error(1) * shift + 2 * delta.abs() * inverse * inner.abs() * pairs.flips
        ds2 = self.square(tile, scale * own, g * inner * max(scale, 1))
        ds = tile.masked(g * inner * scale)
        along = (of_delta * scale * ((tile.sign.float() * inner) @ tile.k.float())).square()
        tile.scatter(self.squares, "dq", ds2 @ k2 + along + (of_d * (ds @ tile.k.float())).square())
        of_row2 = (of_delta * scale * inner).square() + (of_d * ds).square()
        tile.scatter(self.squares, "dk", (ds2 + of_row2).mT @ q2)
        self.totals.add(tile.f, (tile.masked(g_size * e).double().square() for e in pairs.of_learned))
        by_row = of_delta + of_d * g.abs()
        self.together.add(tile.f, (tile.masked(by_row * t.float().abs()) for t in tile.f.all[2:]))
        if self.formula.with_sums:
            tile.scatter(self.squares, "sums", (of_d * self._per_sum(tile)).square())
        self.totals.add_sink((of_delta.square() + (2 * of_d * delta * inverse).square()) * shift.square())

    def _per_sum(self, tile: SummedTile) -> Tensor:
        """By how much a returned sum changes where d does by as much as itself."""
        return torch.where(self.formula.in_logarithms(tile.d.device), 1.0, tile.d.float().abs()) * tile.divides

    def total(self, exact: Results) -> Results:
        """2 sqrt(sum of squares), the rounding of the result, and that of sums which only grow: of equal terms (do all
        equal, scores with a mean) the roundings are alike and add up, others are independent."""
        case = self.formula.case
        terms = max((*case.len_q, *case.len_k), default=0) * self.formula.group
        terms *= len(case.len_q) if case.shared else 1
        drift = EPS32 * max(terms**0.5, terms / 4 if self.repeats else 0)
        squares, together = {**self.squares, **self.totals.as_given(self.x)}, self.together.as_given(self.x)
        found = {}
        for name, t in squares.items():
            size = exact[name].abs()
            last = ((self.unit + drift) * size + self.spacing * (t > 0)).masked_fill(size > self.largest, torch.inf)
            last = self._of_float32(size, drift) if name == "sums" else last + self._of_tables(name, size, t)
            error = 2 * (t.double().sqrt() + together.get(name, 0.0)) + last
            found[name] = error.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return found

    def _of_float32(self, size: Tensor, drift: float) -> Tensor:
        """Of what is not rounded to 16 bits. The logarithm of no sum at all is -inf, and nothing else."""
        return (EPS32 + drift) * size.masked_fill(size == torch.inf, 0.0)

    def _of_tables(self, name: str, size: Tensor, squares: Tensor) -> Tensor | float:
        """The rounding of gradients of tables to the tables' own dtype."""
        if name != "dtables":
            return 0.0
        info = torch.finfo(self.x.learned[name][0].dtype)
        last = info.eps / 2 * size + info.tiny * info.eps * (squares > 0)
        return last.masked_fill(size > info.max / 2, torch.inf)


def _of_logarithms(formula: Formula, x: Tensors) -> Tensor:
    """The squared errors of logarithms near 0, which are not relative ones: (rows, H, 1), 0 in rows of no sequence."""
    rows = used_rows(formula.case, "sums", x.do.device)
    squares = torch.zeros((as_rows(formula.case, x.do).shape[0], formula.case.heads, 1), device=x.do.device)
    squares[rows] = (4 * EPS32) ** 2 * formula.in_logarithms(x.do.device)[:, 0].float()
    return squares


class Pairs:
    """The errors of f and its derivatives for every pair of a tile, (n, H, Lq, Lk)."""

    def __init__(self, rounding: Rounding, tile: Tile) -> None:
        self.tile = tile
        # Sums of n terms in float32, one after the other: about sqrt(n) / 2 roundings.
        self.unit = rounding.unit + EPS32 * max(tile.s.shape[-2:]) ** 0.5 / 2
        h = tile.score_error()
        at_zero = torch.where(tile.s.abs() <= h, 0.0, tile.s)  # which a score may come to, and where f may have a pole
        self.near = [tile.derivatives(s).all for s in (tile.s + h, tile.s - h, at_zero, tile.s)]
        self.size = 1 + tile.s.abs()
        soft = tile.formula.heads(tile.s.device, "softmax")  # whose errors are relative, however small it is
        self.size = torch.where(soft, self.size * tile.p, self.size)

    def error(self, i: int) -> Tensor:
        """Of f, or of derivative number i."""
        values = torch.stack([found[i] for found in self.near])
        jump = (values.amax(0) - values.amin(0)).nan_to_num(nan=torch.inf, posinf=torch.inf)
        return (self.unit * (values[-1].abs() + self.size) + jump).float()

    @property
    def of_learned(self) -> list[Tensor]:
        """Of the derivatives by params and by what is read of tables."""
        return [self.error(i) for i in range(2, len(self.near[0]))]

    @property
    def flips(self) -> Tensor:
        """Where the sign of p, of which normalize="abs" takes the derivative, may be another one."""
        signs = torch.stack([found[0].sign() for found in self.near])
        return ((signs.amax(0) != signs.amin(0)) & self.tile.formula.heads(signs.device, "abs")).float()

    @property
    def size_of_dp(self) -> Tensor:
        """|dp|, and as much as float32 sums may be off by, in roundings."""
        v2, do2 = (t.float().square() for t in (self.tile.v, self.tile.do))
        return abs(self.tile.formula.out_scale) * (do2 @ v2.mT).sqrt() + self.tile.dp.abs().float()
