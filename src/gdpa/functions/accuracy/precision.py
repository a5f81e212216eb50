"""Which approximations a function may use, decided by what they would do to attention's results.

Device code exists at four levels, the cheapest first:

    approx    tanh and sigmoid by tanh.approx, one instruction, and erf by that of a polynomial
    short     1 / (1 + 2^x) for them, and an erfc of 3.5e-4
    close     the same, right to 2e-5 in all tails
    accurate  float32 to a few units of the last place

For 16-bit data the cheapest level is taken whose errors cannot be seen in results, for scores of many means and
spreads: each output of the function is compared with float64, relative to its own size over those scores (far to the
left gelu is 1e-5, and so are its sums). The value and the derivatives have levels of their own.

(a) For means of -3 to 3 the error beyond the roundings of the definition is at most half of one rounding in the root
    mean square, and a third of one in the mean: errors of one sign add up over keys, and only the rounding of the
    result hides them.
    Gradients of params are float32 numbers, which no rounding hides: what they are sums of keeps nearly all digits.
(b) For means of -8 to 8 the rounded value is no further off than that of plain PyTorch, which rounds the scores before
    the function and every operation's result; nor is its mean over many keys, but for a third of a rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gdpa.functions.accuracy.hardware import MODELS, emulate
from gdpa.functions.graph import Graph
from gdpa.functions.isolation import isolated
from gdpa.functions.kept import kept_with_activation
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.fold import fold
from gdpa.functions.passes.simplify import value_of
from gdpa.functions.traced import TracedFunction

LEVELS = ("approx", "short", "close", "accurate")
ROUNDING = {torch.bfloat16: 0.0017, torch.float16: 0.00021}  # root mean square of one rounding, relative
RMS, MEAN = 0.5, 0.35  # what an approximation may add, in roundings
NEAR = 3.0  # means up to here are under rule (a)
MEANS = tuple(float(m) for m in range(-8, 9))
SPREADS = (0.1, 0.3, 1.0, 2.0, 4.0)
NARROWEST = 0.3  # of rule (a)
# Params may have any value, and no sample covers them all: twice the margin.
PARAM_MARGIN = 2.0
PARAM_VALUES = (1.0, 0.25, 4.0, -1.0, 2.0, -0.5, 0.7)
PARAM_STEP = 3  # from one param's value to the next one's, so that no two are equal
KEYS = 4096  # over so many of them errors without a mean average out
SMALLEST_RESULT = 1e-14  # where float64 itself may have cancelled
DPARAM = 16 * 2**-24  # what dp/dparam may be off by, relative: half of what gdpa.exactness grants sums in float32
FINE_MEANS = tuple(0.25 * m for m in range(-12, 13))
FINE_SPREADS = (0.3, 0.5, 1.0, 2.0, 4.0)
FINE_POINTS = 481
FINE_EFFECTIVE = 50
ROUNDED = 1.15  # what rounding elsewhere may cost: rule (a)
SLACK = 1.005  # for the points at which the two are compared


@kept_with_activation
def choose_level(act: TracedFunction, dtype: torch.dtype, target: str, derivatives: bool) -> str:
    """The cheapest level that keeps rules (a) and (b) for p (and with ``derivatives`` for dp/ds and dp/dparam too)."""
    if dtype not in ROUNDING or target not in MODELS:
        return "accurate"
    with isolated():
        cases = cases_of(act, dtype, derivatives)
        graph = act.joint if derivatives else value_of(act.joint)
        for level in LEVELS[:-1]:
            if all(passes(graph, level, target, case) for case in cases):
                return level
    return "accurate"


@dataclass(frozen=True)
class Case:
    """Scores of all distributions (distributions, points) with the weight of each point, values of the params, and
    per output what float64, the definition (f in float32, then one rounding) and plain PyTorch make of them."""

    s: Tensor
    weights: Tensor
    near: Tensor  # distributions of rule (a)
    params: tuple[Tensor, ...]
    exact: Tensor
    definition: Tensor
    plain: Tensor
    dtype: torch.dtype

    @property
    def limit(self) -> float:
        return ROUNDING[self.dtype] / (PARAM_MARGIN if self.params else 1.0)

    @cached_property
    def usual(self) -> Usual:
        """Computed once: every code that may be used is compared with it."""
        return Usual(self)


class Usual:
    """What does not depend on the results that are judged: the bounds of a Case, over each distribution."""

    def __init__(self, case: Case) -> None:
        self.finite = case.exact.isfinite() & (case.exact.abs() < torch.finfo(case.dtype).max)
        self.weights = torch.where(self.finite, case.weights, 0.0)
        self.exact = exact = torch.where(self.finite, case.exact, 0.0)
        definition, plain = case.definition - exact, case.plain - exact
        self.beyond_numbers = ~torch.where(self.finite, plain, 0.0).isfinite().all(-1)
        self.exact_rms, plain_rms = self.rms(exact), self.rms(plain)
        unseen = MEAN * case.limit * self.mean(exact.abs())
        self.near_rms = RMS * torch.maximum(case.limit * self.exact_rms, self.rms(definition))
        self.near_bias = torch.maximum(unseen, MEAN * self.mean(definition).abs())
        left_over_keys = self.mean(plain) ** 2 + plain_rms**2 / KEYS
        self.far_rms, self.far_bias = SLACK * plain_rms, (unseen**2 + left_over_keys).sqrt()

    def mean(self, x: Tensor) -> Tensor:
        return (torch.where(self.finite, x, 0.0) * self.weights).sum(-1)

    def rms(self, x: Tensor) -> Tensor:
        return self.mean(x * x).sqrt()


def cases_of(
    act: TracedFunction, dtype: torch.dtype, derivatives: bool,
    means: tuple[float, ...] = MEANS, spreads: tuple[float, ...] = SPREADS, points: int = 121,
    scale: float = 1.0,
) -> list[Case]:  # fmt: skip
    """One for each sample of the params; distributions of all ``means`` and ``spreads``, the mean changes last. Plain
    PyTorch rounds the product of q and k, and then the scaled one."""
    z = torch.linspace(-4.5, 4.5, points, dtype=torch.float64, device="cpu") + 0.0037  # beside steps at round numbers
    mean, spread = (t.flatten()[:, None] for t in torch.meshgrid(_tensor(means), _tensor(spreads), indexing="ij"))
    s = (mean + spread * z).float().double()  # as the kernels have them
    narrow = ((s / scale).to(dtype) * scale).to(dtype)
    weights = torch.exp(-0.5 * z * z)
    near = ((mean.abs() <= NEAR) & (spread >= NARROWEST)).flatten()
    n_outputs = 2 + act.n_params if derivatives else 1
    cases = []
    for sample in range(len(PARAM_VALUES) if act.n_params else 1):
        values = (PARAM_VALUES[(sample + PARAM_STEP * i) % len(PARAM_VALUES)] for i in range(act.n_params))
        params = tuple(torch.full_like(s, v) for v in values)
        exact = torch.stack(act.joint.evaluate(s, *params)[:n_outputs])
        # Params are float32, as people keep them: in PyTorch they make the whole function float32, but for the scores.
        definition = _eager(act, [t.float() for t in (s, *params)], dtype)[:n_outputs]
        plain = _eager(act, [t.float() if params else t for t in (narrow, *params)], dtype)[:n_outputs]
        cases.append(Case(s, weights / weights.sum(), near, params, exact, definition, plain, dtype))
    return cases


@kept_with_activation
def keeps_rounding(act: TracedFunction, dtype: torch.dtype, factor: float, scale: float) -> bool:
    """Whether rounding p / ``factor`` instead of p keeps the rules: it moves the places where p is rounded, and where f
    is flat or the scores are narrow, so that all p are nearly one number, that can be 20 % worse."""
    if dtype not in ROUNDING or abs(math.frexp(factor)[0]) == 0.5:
        return True
    with isolated():
        near = cases_of(act, dtype, False, FINE_MEANS, FINE_SPREADS, FINE_POINTS, scale)
        far = cases_of(act, dtype, False, points=FINE_POINTS, scale=scale)
    return all(_rounds_alike(case, factor) for case in (*near, *far))


def _rounds_alike(case: Case, factor: float) -> bool:
    """Whether p / factor, rounded, has at most ROUNDED times the error of p where rule (a) holds, and elsewhere no more
    than p or plain PyTorch."""
    exact, plain = case.exact[0], case.plain[0]
    finite = exact.isfinite() & (exact.abs() < torch.finfo(case.dtype).max) & plain.isfinite()
    weights, exact = torch.where(finite, case.weights, 0.0), torch.where(finite, exact, 0.0)
    last = (ROUNDING[case.dtype] * exact) ** 2  # the rounding of the result

    def square(rounded: Tensor) -> Tensor:
        return (((torch.where(finite, rounded, 0.0) - exact) ** 2 + last) * weights).sum(-1)

    moved, usual = (square((exact / c).to(case.dtype).double() * c) for c in (factor, 1.0))
    allowed = torch.where(case.near, ROUNDED**2 * usual, SLACK**2 * torch.maximum(usual, square(plain)))
    shares = exact**2 * weights
    a_few_points = (shares**2).sum(-1) > shares.sum(-1) ** 2 / FINE_EFFECTIVE  # whose roundings are luck
    return bool(((moved <= allowed) | a_few_points).all())


def _tensor(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _eager(act: TracedFunction, inputs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """p, dp/ds, dp/dparam by PyTorch, in the dtype of ``inputs`` and then rounded to ``dtype``."""
    with torch.enable_grad():
        leaves = [t.requires_grad_() for t in inputs]
        p = act.eager(*leaves)
        grads = tuple(torch.zeros_like(t) for t in leaves)
        if p.requires_grad:
            grads = torch.autograd.grad(p.sum(), leaves, allow_unused=True, materialize_grads=True)
    return torch.stack([t.detach().to(dtype).double() for t in (p, *grads)])


def passes(graph: Graph, level: str, target: str, case: Case) -> bool:
    """Whether the code of ``graph`` at ``level`` keeps both rules on ``case``, whichever way its instructions err."""
    return all(bool(keeps_rules(found, case).all()) for found in emulated(graph, level, target, case))


def emulated(graph: Graph, level: str, target: str, case: Case) -> list[Tensor]:
    """What the code of ``graph`` at ``level`` makes of the scores, its instructions erring one way and the other."""
    code = fold(expand(graph, level))
    return [torch.stack(emulate(code, level, target, case.s, *case.params, sign=sign)) for sign in (1, -1)]


def keeps_rules(found: Tensor, case: Case) -> Tensor:
    """(outputs, distributions): whether ``found`` (as computed, not rounded) keeps (a) and (b)."""
    return means_keep_rules(means_of(found, case), case)


class Means(NamedTuple):
    """What the rules ask of the errors of some results, over each distribution. Of results that are those of one code
    for a share of the scores, and of another for the rest, they are as much of the one's as of the other's."""

    delta: Tensor  # the mean error
    square: Tensor  # that of its square
    rounded_square: Tensor  # the same of the rounded results
    lost: Tensor  # there is no result where there should be one


def means_of(found: Tensor, case: Case) -> Means:
    usual = case.usual
    delta, rounded = found.double() - usual.exact, found.to(case.dtype).double() - usual.exact
    lost = ~torch.where(usual.finite, delta, 0.0).isfinite().all(-1)
    return Means(usual.mean(delta), usual.mean(delta * delta), usual.mean(rounded * rounded), lost)


def mixed_means(first: Means, second: Means, share: Tensor) -> Means:
    """Of results that are the ``first`` with this ``share``, otherwise the ``second``."""
    delta, square, rounded = (share * a + (1 - share) * b for a, b in zip(first[:3], second[:3], strict=True))
    return Means(delta, square, rounded, first.lost | second.lost)


def means_keep_rules(means: Means, case: Case) -> Tensor:
    """Whether results with these errors keep (a) and (b)."""
    usual = case.usual
    rms, rounded = means.square.sqrt(), means.rounded_square.sqrt()
    bias = means.delta.abs()
    near = (rms <= usual.near_rms) & (bias <= usual.near_bias)
    near[2:] &= (rms <= DPARAM * usual.exact_rms)[2:]
    far = (rounded <= usual.far_rms) & (bias <= usual.far_bias)
    kept = (near | ~case.near) & (far | usual.beyond_numbers) | (usual.exact_rms < SMALLEST_RESULT)
    return ~means.lost & kept
