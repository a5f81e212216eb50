"""What the roundings of the definition may cost each element: the errors of single pairs, added up as independent ones
are. gdpa.exactness computes what a call should give."""

from __future__ import annotations

import torch
from torch import Tensor

from gdpa.exactness import results
from gdpa.exactness.draw import Tensors
from gdpa.exactness.results import EPS32, Formula, Results, Tile, Truth
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
        self.squares, self.dparams = results.empty(formula, x, torch.float32)

    def add(self, tile: Tile) -> None:
        scale, out_scale = abs(self.formula.scale), abs(self.formula.out_scale)
        # Sums of n terms in float32, one after the other: about sqrt(n) / 2 roundings.
        unit = self.unit + EPS32 * max(tile.s.shape[-2:]) ** 0.5 / 2
        q2, k2, v2, do2 = (t.float().square() for t in (tile.q, tile.k, tile.v, tile.do))
        h = tile.score_error()
        at_zero = torch.where(tile.s.abs() <= h, 0.0, tile.s)  # which a score may come to, and where f may have a pole
        near = [self.formula.derivatives(s, tile.params) for s in (tile.s + h, tile.s - h, at_zero, tile.s)]
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

    def total(self, exact: Results) -> Results:
        """2 sqrt(sum of squares), the rounding of the result, and that of sums which only grow: of equal terms (do all
        equal, scores with a mean) the roundings are alike and add up, others are independent."""
        case = self.formula.case
        terms = max((*case.len_q, *case.len_k), default=0) * self.formula.group
        terms *= len(case.len_q) if case.shared else 1
        drift = EPS32 * max(terms**0.5, terms / 4 if self.repeats else 0)
        squares = {**self.squares, "dparams": results.as_given(self.x, self.dparams)}
        found = {}
        for name, t in squares.items():
            size = exact[name].abs()
            last = ((self.unit + drift) * size + self.spacing * (t > 0)).masked_fill(size > self.largest, torch.inf)
            found[name] = (2 * t.double().sqrt() + last).nan_to_num(nan=torch.inf, posinf=torch.inf)
        return found
