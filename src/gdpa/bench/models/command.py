"""What `gdpa bench --model` prints around a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from gdpa.bench import results
from gdpa.bench.functions import benchmark_function
from gdpa.bench.models import cases as model_cases
from gdpa.bench.models import contenders, page, report, run
from gdpa.commands.folding import show_table
from gdpa.commands.terminal import progress


def measure(
    console: Console,
    out: Path,
    cases: tuple[str, ...],
    functions: tuple[str, ...],
    params: tuple[float, ...],
    only: tuple[str, ...],
    device: str | None,
    dtype: str | None,
    compiled: bool | None,
    quick: bool,
) -> None:
    """Run, write, show. Exits with 1 if gdpa failed somewhere, or the device was lost."""
    if len(functions) > 1:
        raise ValueError(f"--model trains with one function, got {', '.join(functions)}")
    if params and not functions:
        raise ValueError("--params needs --function: the default function has none")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here")
    plan = run.make_plan(
        cases, only, benchmark_function(functions[0], params) if functions else None,
        torch.device(device) if device else None, getattr(torch, dtype) if dtype else None, compiled, quick,
    )  # fmt: skip
    try:
        with progress(console, run.steps(plan), "whole models") as step:
            document = run.run(plan, step, lambda so_far: results.save(so_far, out))
    except run.DeviceLostError as e:
        raise click.ClickException(f"{e}; earlier measurements are in {out}") from e
    results.save(document, out)
    show(console, document, out)
    failed = run.failures(document)
    for line in failed:
        console.print(line, style="red", markup=False)
    if failed:
        raise SystemExit(1)


def show(console: Console, document: dict[str, Any], path: Path) -> None:
    """The result in ``path`` on the terminal, and its report beside it."""
    show_table(console, report.table(document), 3)
    for case, entries in report.by_case(document).items():
        if entries:
            show_table(console, report.profile_table(document, case))
    for line in report.lines(document):
        console.print(line, markup=False)
    console.print(f"result: {path}", markup=False)
    console.print(page.write_page(document, path.with_suffix(".html")), markup=False)


def list_all(console: Console) -> None:
    """The cases and the contenders."""
    console.print(model_cases.__doc__, markup=False)
    console.print("cases: " + " ".join(model_cases.names()), markup=False)
    console.print(contenders.__doc__, markup=False)
    console.print("contenders: " + " ".join(contenders.known()), markup=False)
