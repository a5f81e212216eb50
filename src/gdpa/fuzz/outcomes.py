"""What is run, what became of a call, and what is counted of all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from gdpa.backends import interpreting
from gdpa.fuzz import draw
from gdpa.fuzz.compare import Finding
from gdpa.fuzz.draw import Call, Space
from gdpa.fuzz.features import features


def command(seed: int, device: str, backend: str | None, dtypes: tuple[str, ...]) -> str:
    """What to type to run one seed again."""
    words = ["gdpa fuzz", f"--only-seed {seed}", f"--device {device}"]
    words += [f"--backend {backend}"] if backend else []
    words += [f"--dtype {dtype}" for dtype in dtypes]
    return " ".join(["TRITON_INTERPRET=1", *words] if interpreting() else words)


@dataclass(frozen=True)
class Target:
    """Where calls run. ``backend`` None is the one that gdpa chooses, no ``dtypes`` are all that run there."""

    device: torch.device
    backend: str | None = None
    dtypes: tuple[str, ...] = ()

    @property
    def space(self) -> Space:
        """What calls are drawn from: it depends on nothing else, so that a seed can be run again by itself."""
        on_cpu = draw.INTERPRETER if interpreting() else draw.CPU
        space = draw.GPU if self.device.type == "cuda" else on_cpu
        return replace(space, dtypes=self.dtypes) if self.dtypes else space

    def command(self, seed: int) -> str:
        return command(seed, self.device.type, self.backend, self.dtypes)


@dataclass(frozen=True)
class Plan:
    """Seeds from ``seed`` on, until ``minutes`` have passed or ``calls`` were made. A call may take ``limit_s``."""

    target: Target
    seed: int = 0
    minutes: float | None = 1.0
    calls: int | None = None
    keep_going: bool = False
    limit_s: float = 120.0

    def progress(self, done: int, elapsed: float) -> float:
        """From 0 to 1."""
        by_time = elapsed / (60 * self.minutes) if self.minutes is not None else 0.0
        return max(by_time, done / self.calls if self.calls is not None else 0.0)


@dataclass(frozen=True)
class Outcome:
    """What became of a call. ``skipped``: why the backend refuses it."""

    call: Call
    backend: str = ""
    findings: tuple[Finding, ...] = ()
    ratios: dict[tuple[str, str], float] = field(default_factory=dict)
    skipped: str | None = None


@dataclass
class Report:
    """What is counted while calls run. ``worst``: (ratio, seed) by dtype, kind of ratio (compare.KINDS) and output."""

    calls: int = 0
    failures: list[Outcome] = field(default_factory=list)
    coverage: dict[str, Counter[str]] = field(default_factory=dict)
    worst: dict[tuple[str, str, str], tuple[float, int]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    lost: str | None = None  # why it had to end early

    def add(self, outcome: Outcome) -> None:
        self.calls += 1
        if outcome.skipped is not None:
            self.skipped[outcome.skipped] += 1
            return
        for group, value in [*features(outcome.call), ("backend", outcome.backend)]:
            self.coverage.setdefault(group, Counter())[value] += 1
        for (kind, name), ratio in outcome.ratios.items():
            key = (outcome.call.config.dtype, kind, name)
            self.worst[key] = max(self.worst.get(key, (0.0, -1)), (ratio, outcome.call.seed))
        if outcome.findings:
            self.failures.append(outcome)
