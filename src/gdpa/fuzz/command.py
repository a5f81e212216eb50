"""What `gdpa fuzz` prints around a run."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from rich.console import Console

from gdpa.backends import interpreting
from gdpa.commands.terminal import progress
from gdpa.fuzz import draw, report
from gdpa.fuzz.run import Outcome, Plan, Report, Target
from gdpa.fuzz.run import fuzz as run_fuzz

TICKS = 200  # of the bar; a log gets a tenth of them as lines


def make_target(device: str | None, backend: str | None, dtypes: tuple[str, ...]) -> Target:
    """The GPU if there is one, unless Triton's interpreter is to run instead."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no GPU here")
    on_gpu = torch.cuda.is_available() and not interpreting()
    return Target(torch.device(device or ("cuda" if on_gpu else "cpu")), backend, dtypes)


def fuzz(
    console: Console, target: Target, minutes: float | None, calls: int | None, seed: int | None,
    only_seed: int | None, keep_going: bool, limit_s: float,
) -> bool:  # fmt: skip
    """Run, and print what came of it: True if nothing is wrong."""
    if only_seed is not None:
        console.print(report.describe(draw.draw(only_seed, target.space)), markup=False)
        seed, minutes, calls = only_seed, None, 1
    elif seed is None:
        seed = random.SystemRandom().randrange(10**6) * target.space.session
    console.print(f"seeds from {seed}, on {target.backend or 'the best backend'} ({target.device})", markup=False)
    ticks = TICKS if console.is_terminal else TICKS // 10

    def show(outcome: Outcome) -> None:  # at once: a run that is cut off has said what it found
        console.print(report.describe_failure(outcome, target), style="red", markup=False, soft_wrap=True)

    with progress(console, ticks, "fuzzing") as step:
        found = run_fuzz(Plan(target, seed, minutes, calls, keep_going, limit_s), _ticker(step, ticks), show)
    return _show(console, found)


def _ticker(step: Callable[[str], None], ticks: int) -> Callable[[float, str], None]:
    """Turns shares of the whole into steps of the bar, never more than there are."""
    done = 0

    def tick(share: float, label: str) -> None:
        nonlocal done
        while done <= share * ticks and done < ticks:
            done += 1
            step(label)

    return tick


def _show(console: Console, found: Report) -> bool:
    console.print(report.coverage_table(found))
    console.print(report.error_table(found))
    if found.lost:
        console.print(found.lost, style="red", markup=False)
    if found.failures:
        console.print(f"[red]{len(found.failures)} of {found.calls} calls FAILED[/]")
        return False
    if found.calls == sum(found.skipped.values()):
        console.print("[red]no call could run[/]")
        return False
    console.print("[green]nothing found[/]")
    return True
