"""Which of several configurations is best: checked against the default's results, timed in turns, chosen with a margin.

The clock of a GPU drifts by several percent with power and heat. So every round goes through all configurations and
back again, which gives each the same mean time of measurement, and a candidate is compared with the default of the same
round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from gdpa.bench.contenders.contender import in_one_line
from gdpa.bench.timing import Clock

Config = Any  # a frozen dataclass, each backend's own

LEAST_GAIN = 1.02  # a smaller one may be noise
MOST_LOSS = 0.98  # a class has several cases: none may pay for the others


@dataclass(frozen=True)
class Effort:
    """Rounds, and the milliseconds and calls that a configuration gets on either way of each."""

    rounds: int = 5
    turn_ms: float = 10.0
    most: int = 6


QUICK = Effort(rounds=3, turn_ms=5.0, most=3)


@dataclass(frozen=True)
class Job:
    """A case and a function, ready to run with any configuration: ``run`` writes ``results``."""

    case: str
    function: str
    batch: int
    default: Config
    run: Callable[[Config], object]
    results: dict[str, Tensor]
    fits: Callable[[Config], bool] = lambda config: True


@dataclass
class Measured:
    """The milliseconds of every call by configuration and round, and in words why others have none."""

    case: str
    function: str
    batch: int
    default: Config
    times: dict[Config, list[list[float]]] = field(default_factory=dict)
    refused: dict[Config, str] = field(default_factory=dict)

    def gain(self, config: Config) -> float:
        """How much faster than the default: the median of the rounds' own ratios, in which drift cancels."""
        pairs = zip(self.times[self.default], self.times[config], strict=True)
        return median(fmean(before) / fmean(after) for before, after in pairs)


def describe(config: Config, default: Config) -> str:
    """What sets a configuration apart: 'block_n 64, stages 3'."""
    before = asdict(default)
    changes = [f"{name} {value}" for name, value in asdict(config).items() if value != before[name]]
    return ", ".join(changes) or "default"


# ---- checking --------------------------------------------------------------------------------------------------------
def measure(
    job: Job, configs: tuple[Config, ...], clock: Clock, effort: Effort, step: Callable[[str], None]
) -> Measured:
    """Check every configuration, then time those that are right. ``step`` is told of each, and of the timing."""
    found = Measured(job.case, job.function, job.batch, job.default)
    found.refused = refusals(job, [c for c in configs if c != job.default], step)
    right = [job.default, *(c for c in configs if c != job.default and c not in found.refused)]
    step(f"{job.case} {job.function}: timing {len(right)}")
    found.times = in_turns(job.run, right, clock, effort)
    return found


def refusals(job: Job, configs: list[Config], step: Callable[[str], None] = lambda label: None) -> dict[Config, str]:
    """Why configurations may not be chosen: they fail, or their results are not the default's."""
    job.run(job.default)
    expected = {name: t.clone() for name, t in job.results.items()}
    refused: dict[Config, str] = {}
    for config in configs:
        step(f"{job.case} {job.function}: checking {describe(config, job.default)}")
        why = why_refused(job, config, expected)
        if why is not None:
            refused[config] = why
    return refused


def why_refused(job: Job, config: Config, expected: dict[str, Tensor]) -> str | None:
    if not job.fits(config):
        return f"does not fit {job.case}: shared memory, or registers for its masks or function"
    for t in job.results.values():
        t.fill_(torch.nan)  # what a kernel leaves out must show
    try:
        job.run(config)
        return disagreement(job.results, expected)
    except Exception as e:  # whatever the compiler or the launch says: this candidate is out
        why = in_one_line(e)
    try:  # after an illegal access nothing runs any more, and every other candidate would seem to fail as well
        job.run(job.default)
        alive = disagreement(job.results, expected) is None
    except Exception:
        alive = False
    if not alive:
        raise ValueError(f"{describe(config, job.default)} on {job.case} broke the GPU's state ({why}); nothing more "
                         "can be measured in this process, earlier measurements are stored")  # fmt: skip
    return why


def disagreement(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    """How results differ by more than their rounding, in words.

    Sums in another order, rounded to 16 bits, differ by at most a few units in the last place of the largest number,
    and by less than one in the root mean square. A block of keys that is missing or counted twice differs by far more.
    """
    for name, t in found.items():
        if t.numel() == 0:
            continue
        exact, eps = expected[name].float(), torch.finfo(t.dtype).eps
        error = t.float() - exact
        for norm, size, limit in ((torch.inf, "largest", 4 * eps), (2, "rms", eps)):
            whole = float(torch.linalg.vector_norm(exact, norm))
            off = float(torch.linalg.vector_norm(error, norm)) / max(whole, 1e-30)
            if not off <= limit:  # also if it is NaN
                return f"{name} is wrong: {size} error {off:.2g} of the default's, allowed {limit:.2g}"
    return None


# ---- timing ----------------------------------------------------------------------------------------------------------
def in_turns(
    run: Callable[[Config], object], configs: list[Config], clock: Clock, effort: Effort
) -> dict[Config, list[list[float]]]:
    """The milliseconds of every call, by configuration and round."""
    times: dict[Config, list[list[float]]] = {config: [] for config in configs}
    once = median(t for config in configs for t in clock(partial(run, config), 2))  # warms up, too
    calls = min(max(int(effort.turn_ms / max(once, 1e-3)), 1), effort.most)
    for n in range(effort.rounds):
        for config in configs:
            times[config].append(clock(partial(run, config), calls))
        for config in reversed(configs):
            times[config][n] += clock(partial(run, config), calls)
    return times


# ---- choosing --------------------------------------------------------------------------------------------------------
def gains(found: list[Measured]) -> dict[Config, list[float]]:
    """The gain on every job, of those configurations that all jobs could time."""
    shared = set.intersection(*(set(m.times) for m in found))
    return {config: [m.gain(config) for m in found] for m in found[:1] for config in m.times if config in shared}


def mean(values: list[float]) -> float:
    """Of ratios: the geometric one."""
    return math.exp(sum(map(math.log, values)) / len(values))


def ranking(found: list[Measured]) -> list[Config]:
    """Those that may replace the default, best first."""
    worth = {c: mean(g) for c, g in gains(found).items() if mean(g) >= LEAST_GAIN and min(g) >= MOST_LOSS}
    return sorted(worth, key=lambda c: -worth[c])


def choose(found: list[Measured], confirm: Callable[[Config], str | None]) -> tuple[Config | None, dict[Config, str]]:
    """The best configuration that ``confirm`` has nothing against, None for the default, and what it refused."""
    refused: dict[Config, str] = {}
    for config in ranking(found):
        why = confirm(config)
        if why is None:
            return config, refused
        refused[config] = why
    return None, refused
