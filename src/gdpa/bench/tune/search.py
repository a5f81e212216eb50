"""`gdpa tune`: the best configuration of every class of shapes on this machine, measured and stored.

This is the only place where configurations are measured. Kernels look up what is stored (backends/tuning.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gdpa.backends import interpreting, tuning
from gdpa.backends.tuning import Document, ShapeClass
from gdpa.bench import machine
from gdpa.bench.contenders.everybody import why_not
from gdpa.bench.functions import benchmark_function
from gdpa.bench.kernels import suite
from gdpa.bench.timing import Clock, clock_of, summarise
from gdpa.bench.tune.jobs import NAMES, Tunable, edges_job, fitting, make_job, tunable
from gdpa.bench.tune.select import QUICK, Config, Effort, Measured, choose, gains, mean, measure, refusals
from gdpa.spec import Loaded

# Two for each class of key lengths, the first also with --quick.
REPRESENTATIVES = {
    "short": ("kv256-q1024", "self-256"),
    "medium": ("self-512", "jagged-1024"),
    "long": ("self-2048", "lognormal085"),
}
DTYPES = (torch.bfloat16, torch.float16)
FUNCTION = "gelu_tanh"


@dataclass(frozen=True)
class Target:
    """A class and the names of the cases it is measured on."""

    shape: ShapeClass
    dtype: torch.dtype
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    backend: Tunable
    targets: tuple[Target, ...]
    functions: tuple[Loaded, ...]
    device: torch.device
    effort: Effort
    clock: Clock

    @property
    def steps(self) -> int:
        """A check for every candidate but the default, and the timing, of every job."""
        jobs = len(self.functions)
        return sum(jobs * len(t.cases) * len(self.backend.candidates(t.shape)) for t in self.targets)


def make_plan(
    patterns: tuple[str, ...] = (), functions: tuple[str, ...] = (), name: str | None = None, quick: bool = False
) -> Plan:
    """What to measure on this machine's GPU; ValueError if it has none."""
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here, and nothing to tune on a CPU: its backend has no configurations")
    if interpreting():
        raise ValueError("TRITON_INTERPRET=1: interpreted kernels have no speed to tune")
    device = torch.device("cuda", torch.cuda.current_device())
    backend = tunable(name or preferred(device), torch.cuda.get_device_capability(device))
    reason = why_not(backend.name, device, DTYPES[0])
    if reason is not None:
        raise ValueError(f"--backend {backend.name} cannot run here: {reason}")
    loaded = tuple(benchmark_function(spec) for spec in functions or (FUNCTION,))
    found = targets(backend, patterns, quick)
    return Plan(backend, found, loaded, device, QUICK if quick else Effort(), clock_of(device))


def preferred(device: torch.device) -> str:
    """The backend that gdpa chooses here."""
    return next((name for name in NAMES if why_not(name, device, DTYPES[0]) is None), NAMES[-1])


def targets(backend: Tunable, patterns: tuple[str, ...], quick: bool) -> tuple[Target, ...]:
    """Classes in the order of their first case, each with all of its cases."""
    if patterns:
        cases = suite.find(patterns, suite.FULL_SCALE)
    else:
        names = [name for both in REPRESENTATIVES.values() for name in (both[:1] if quick else both)]
        cases = [suite.make(name + suffix) for suffix in ("", "-d64") for name in names]
    grouped: dict[tuple[ShapeClass, torch.dtype], list[str]] = {}
    for dtype in DTYPES[:1] if quick else DTYPES:
        for which in tuning.PASSES:
            for case in cases:
                grouped.setdefault((backend.class_of(case, which, dtype), dtype), []).append(case.name)
    return tuple(Target(shape, dtype, tuple(names)) for (shape, dtype), names in grouped.items())


def run(plan: Plan, file: Path, step: Callable[[str], None] = lambda label: None) -> tuple[str, list[str]]:
    """Measure everything into ``file``, after every class, so that a run that is cut short has not been in vain.

    Returns the machine's key and the classes that were measured.
    """
    document = read(file) or tuning.new()
    key = tuning.machine_key(torch.cuda.get_device_name(plan.device))
    about = machine.describe(plan.device)
    for target in plan.targets:
        tuning.put(document, key, target.shape, {**tune_class(plan, target, step), **about})
        tuning.write(document, file)
    return key, [str(target.shape) for target in plan.targets]


def tune_class(plan: Plan, target: Target, step: Callable[[str], None]) -> dict[str, Any]:
    """The entry of one class."""
    shape, configs = target.shape, plan.backend.candidates(target.shape)
    found = []
    for name in target.cases:
        for function in plan.functions:
            case = fitting(name, target.dtype.itemsize, machine.free_memory(plan.device))
            job = make_job(plan.backend, shape.which, case, function, target.dtype, plan.device)
            found.append(measure(job, configs, plan.clock, plan.effort, lambda label: step(f"{shape}, {label}")))
            del job
            torch.cuda.empty_cache()

    def confirm(config: Config) -> str | None:
        job = edges_job(plan.backend, shape, plan.functions[0], target.dtype, plan.device)
        # The kernels that a problem does not fit get the default there, too.
        return refusals(job, [config]).get(config) if job.fits(config) else None

    chosen, unconfirmed = choose(found, confirm)
    return entry(found, chosen, unconfirmed)


def entry(found: list[Measured], chosen: Config | None, unconfirmed: dict[Config, str]) -> dict[str, Any]:
    """What is stored of a class: the choice, and every number behind it."""
    by_config = gains(found)
    refused = [(c, why) for m in found for c, why in m.refused.items()] + list(unconfirmed.items())
    return {
        "config": None if chosen is None else asdict(chosen),
        "gain": 1.0 if chosen is None else mean(by_config[chosen]),
        "default": asdict(found[0].default),
        "measurements": [measurement(m, config) for m in found for config in m.times],
        "refused": [{"config": asdict(config), "why": why} for config, why in refused],
    }


def measurement(m: Measured, config: Config) -> dict[str, Any]:
    timing = summarise([t for calls in m.times[config] for t in calls])
    return {
        "case": m.case, "function": m.function, "batch": m.batch, "config": asdict(config), **asdict(timing),
        "gain": m.gain(config),
    }  # fmt: skip


def read(file: Path) -> Document | None:
    """A stored document, None if there is none; ValueError that names the file if it is not one."""
    try:
        return tuning.read(file)
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise ValueError(f"{file}: {e}; `gdpa tune --reset` removes it") from e
