"""What the accuracy contract is tested on: functions, shapes, distributions of scores.

On a GPU, and with GDPA_FULL_GRID=1 (`make test-all`), every function meets every distribution. Elsewhere a few that can
fail for different reasons: centred scores, a mean on either side, the far tail of functions that vanish there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from functions.library import BUILTIN_FUNCTIONS, FUNCTIONS, Function
from gdpa.exactness import results, rules
from gdpa.exactness.draw import Scores, draw
from gdpa.testing.cases import Case, dense
from support import FULL, INTERPRET, Target, skipping_refusals

SMALL = (
    Function("small_sigmoid", lambda s: torch.sigmoid(s - 7)),
    Function("mean_of_squares", lambda s: F.relu(s) ** 2 / 1024),
    Function("narrow_gaussian", lambda s: torch.exp(-(s**2))),
    Function("fourth_power", lambda s: s**4),
)
# Not those that compute in 16 bits themselves: they round where they like. Nor one that does not read the score: all
# its rows are one, so that a single rounding decides.
ALL = tuple(f for f in (*FUNCTIONS, *SMALL) if not f.rounding and f.name != "only_the_param")
SHIPPED = (*BUILTIN_FUNCTIONS, *SMALL)
BY_NAME = {f.name: f for f in ALL}

FEW_SCORES = (Scores(0, 2.5), Scores(-3, 1), Scores(2, 4), Scores(-6, 1))[: 2 if INTERPRET else None]
FULL_SCORES = tuple(
    Scores(mean, spread)
    for mean, spread in [*product((-3, -1.5, 0, 1.5, 3), (0.3, 1, 2.5, 4)), *product((-8, -6, -4, 4, 8), (0.1, 1, 4))]
)
# Of v and do, taking turns: five, so that each meets each spread.
MEANS = ((0.0, 0.0), (1.0, 0.0), (1.0, 0.5), (0.0, 0.5), (-1.0, 0.0))


def medium(target: Target, d: int) -> Case:
    """Enough rows to tell 1.15 from 1, few enough for a CPU; some tiles of a GPU kernel, the last of them ragged."""
    if INTERPRET:
        return dense("tiny", 1, 20, 36, heads=2, heads_k=1, d=16)
    if target.device == "cuda":
        return dense("medium", 2, 300, 420, heads=4, heads_k=2, d=d)
    return dense("medium", 1, 80, 112, heads=2, heads_k=1, d=d)


def broken_rules(
    target: Target,
    f: Function,
    case: Case,
    scores: Iterable[Scores] | None = None,
    means: Sequence[tuple[float, float]] = MEANS,
    activation: object = None,
    out_scale: float = 1.0,
) -> list[str]:
    """What of the contract does not hold for ``f`` on ``target``. ``activation``: what gdpa is given in its place."""
    if scores is None:
        scores = FULL_SCORES if FULL or target.device == "cuda" else FEW_SCORES
    formula = results.Formula.of(case, f.fn, out_scale=out_scale)
    given = f.activation if activation is None else activation
    found = []
    for i, s in enumerate(scores):
        v_mean, do_mean = means[i % len(means)]
        params = f.make_params(case.heads, target.device)
        x = draw(case, s, target.dtype, target.device, params=params, v_mean=v_mean, do_mean=do_mean)
        compute = partial(results.ours, formula, activation=given, backend=target.backend)
        with skipping_refusals(target):
            compared = rules.measure(formula, s, [x], compute)
        found += [f"{f.name} {case.name} D {case.d}: {text}" for text in rules.problems(compared)]
    return found
