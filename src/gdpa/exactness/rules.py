"""The two rules, on the results of one or several draws of a case.

Errors of few rows are a matter of luck, and so is an RMS that a few rows dominate. So RMS errors are compared row by
row, and a limit counts as exceeded only if the rows agree on it beyond chance (``_allowance``). Two computations whose
roundings are the same pass, whatever the rows; an error 3 % above a limit is found from some hundred rows on. Nothing
is asked below a few float32 roundings, which the sums cost in any order.

The largest error is that of one element and, where few large terms make it, of one or two roundings, each of which may
cost half a unit in the last place, or nothing. Two computations whose errors have the same distribution, but of which
one rounds ds before its factor and one after it, differ in it by more than a factor of 2 in one draw of 160 of a call
with 16 keys (12 of 2000). For calls of few keys (``few_terms``) the definition's so counts as no less than half a
unit in the last place of the largest value: of 30,720 results (7,680 draws with 3 to 300 keys, ds rounded at another
factor) that leaves one above the limit, where 168 were. The half unit is 0.7 to 1.6 times the largest error that the
definition has (medians of such draws).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gdpa.exactness import results
from gdpa.exactness.draw import Scores, Tensors
from gdpa.exactness.results import Formula, Results, Truth
from gdpa.exactness.tiles import EPS32

RMS_TO_DEFINITION = 1.15
LARGEST_TO_DEFINITION = 2.0
RMS_TO_PLAIN = 1.0
DEVIATIONS = 3.5  # of a mean over rows: thousands of them are compared
LUCK = 4.0  # rows of ordinary size that a mean over very few rows may be off by
SAME = 0.01  # of a squared error: where plain PyTorch makes our roundings and no others, ratios scatter around 1
FEW = 1000  # elements, of which the largest error is a matter of luck
# Float32 roundings, relative to the RMS of a result. The last three are float32 numbers, and sums over all pairs; an
# entry of a table is added to from everywhere, in any order.
ROUNDINGS = {"out": 8, "dq": 8, "dk": 8, "dv": 8, "dparams": 32, "dtables": 256, "dsink": 32}


@dataclass(frozen=True)
class Errors:
    """Of one result, relative to the RMS of the exact one: the mean square of each row, the largest of all, and how
    many there are, other than 0, with their RMS."""

    rows: Tensor
    largest: float
    count: int
    usual: float

    @classmethod
    def of(cls, name: str, found: Sequence[Results], exact: Sequence[Truth]) -> Errors:
        """Of result ``name`` over some draws, of the rows that are decided. What should be all zero and is not has an
        infinite error."""
        parts = []
        for have, truth in zip(found, exact, strict=True):
            want = truth.values[name]
            d = want.shape[-1] if want.dim() > 1 else 1
            error = (have[name].double() - want).reshape(-1, d)[truth.decided[name].flatten()]
            error = torch.where(error.abs() <= truth.noise[name], 0.0, error / want.square().mean().sqrt())
            parts.append(error.abs().nan_to_num(nan=torch.inf, posinf=torch.inf))
        error = torch.cat(parts)
        some = error[error > 0]
        usual = float(some.square().mean().sqrt()) if some.numel() else 0.0
        return cls(error.square().mean(1), float(error.max()) if error.numel() else 0.0, some.numel(), usual)

    @property
    def rms(self) -> float:
        return float(self.rows.mean().sqrt()) if len(self.rows) else 0.0

    @property
    def usual_largest(self) -> float:
        """The largest error, or that of as many normal numbers where there are too few to tell."""
        if self.count >= FEW:
            return self.largest
        return max(self.largest, self.usual * math.sqrt(2 * math.log(self.count + 1)))


@dataclass(frozen=True)
class Comparison:
    """The errors of one result (``name``) of gdpa's, of the definition's and of plain PyTorch's."""

    name: str
    scores: Scores
    ours: Errors
    definition: Errors
    plain: Errors
    top: float  # the largest exact value, relative to the RMS
    terms: float = 1.0  # how large the terms of a sum over all pairs are where they cancel, relative to the RMS

    @property
    def floor(self) -> float:
        return ROUNDINGS[self.name] * EPS32 * max(self.terms, 1.0)

    @property
    def to_definition(self) -> float:
        """RMS error divided by what rule (a) is about; 0 where it is within float32's roundings, or that overflows."""
        return self._ratio(self.ours.rms, self.definition.rms)

    @property
    def largest_to_definition(self) -> float:
        return self._ratio(self.ours.largest, self.definition.largest)

    @property
    def to_plain(self) -> float:
        """RMS error divided by what rule (b) is about."""
        return self._ratio(self.ours.rms, self.plain.rms)

    def _ratio(self, ours: float, theirs: float) -> float:
        if ours <= self.floor or math.isinf(theirs):
            return 0.0
        return ours / theirs if theirs else math.inf

    @property
    def problems(self) -> list[str]:
        """What breaks the contract, in words."""
        found = []
        if self.scores.near and not self._rms_within(RMS_TO_DEFINITION, self.definition):
            found.append(self._words("rms", self.ours.rms, self.definition.rms, "the definition's", RMS_TO_DEFINITION))
        largest = self.definition.usual_largest
        allowed = max(LARGEST_TO_DEFINITION * largest, self.floor * (4 + self.top))
        if self.scores.near and not self.ours.largest <= allowed:
            found.append(self._words("largest", self.ours.largest, largest, "the definition's", LARGEST_TO_DEFINITION))
        # A narrow distribution where f is flat has one p, and one rounding of it: where plain PyTorch's, of more steps,
        # are luckier than the definition's, the definition still holds.
        lucky = self.plain.rms < self.definition.rms < math.inf
        if self.scores.far and not self._rms_within(RMS_TO_PLAIN, self.definition if lucky else self.plain):
            found.append(self._words("rms", self.ours.rms, self.plain.rms, "plain PyTorch's", RMS_TO_PLAIN))
        return found

    def _rms_within(self, factor: float, theirs: Errors) -> bool:
        """Whether our RMS error is at most ``factor`` times theirs, or below the floor, or theirs overflows."""
        if not len(theirs.rows) or self.ours.rms <= self.floor or math.isinf(theirs.rms):
            return True
        excess = self.ours.rows - factor**2 * theirs.rows
        return float(excess.mean()) <= _allowance(excess, theirs.rows)

    def _words(self, what: str, ours: float, theirs: float, whose: str, factor: float) -> str:
        ratio = ours / theirs if theirs else math.inf
        return (
            f"{self.name}: {what} error {ours:.3g} is {ratio:.3g} times {whose} ({theirs:.3g}), allowed {factor:g} "
            f"({self.scores})"
        )


def _allowance(excess: Tensor, usual: Tensor) -> float:
    """What the mean of ``excess`` over rows may be by chance, where ``usual`` are the squared errors of the rows."""
    n, mean = len(excess), float(usual.mean())
    by_chance = DEVIATIONS * float(excess.std(correction=0)) / math.sqrt(n)
    return min(by_chance, 3 * mean) + (LUCK / n + SAME) * mean  # a few wrong rows must not vouch for themselves


def compare(
    scores: Scores, found: Sequence[Results], exact: Sequence[Truth], definition: Sequence[Results],
    plain: Sequence[Results], few_terms: bool = False,
) -> list[Comparison]:  # fmt: skip
    """Every result, over the draws. What is not finite in float64 is not compared. ``few_terms``: some results may be
    sums of so few that a single rounding decides the largest error, which is luck: the definition's then counts as no
    less than half a unit in the last place of the largest value."""
    comparisons = []
    for name in exact[0].values:
        truth = [draw.values[name] for draw in exact]
        if not truth[0].numel() or not all(bool(t.isfinite().all()) for t in truth):
            continue
        mine, least, eager = (Errors.of(name, some, exact) for some in (found, definition, plain))
        top = max(_relative(t.abs().max(), t) for t in truth)
        last = torch.finfo(definition[0][name].dtype).eps / 2 * top
        if few_terms:
            least = replace(least, largest=max(least.largest, last))
        terms = max(_relative(draw.terms[name].square().mean().sqrt(), draw.values[name]) if name in draw.terms else 1.0
                    for draw in exact)  # fmt: skip
        comparisons.append(Comparison(name, scores, mine, least, eager, top, terms))
    return comparisons


def _relative(size: Tensor, t: Tensor) -> float:
    return float(size / t.square().mean().sqrt().clamp_min(1e-300))


def measure(
    formula: Formula, scores: Scores, draws: Sequence[Tensors], compute: Callable[[Tensors], Results]
) -> list[Comparison]:
    """Compare what ``compute`` gives for some draws of inputs with those scores."""
    return compare(
        scores,
        [compute(x) for x in draws],
        [results.exact(formula, x) for x in draws],
        [results.definition(formula, x) for x in draws],
        [results.plain(formula, x) for x in draws],
    )


def problems(comparisons: Sequence[Comparison]) -> list[str]:
    return [text for comparison in comparisons for text in comparison.problems]
