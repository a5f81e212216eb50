"""The command: each part shown as it is done, then the files."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gdpa.bench import machine
from gdpa.bench.report.tables import LOOK
from gdpa.bench.results import save
from gdpa.bench.timing import QUICK
from gdpa.commands import verification as check
from gdpa.commands.folding import show_table
from gdpa.commands.terminal import progress
from gdpa.compare import page, plot, speed, training
from gdpa.compare.plan import Trial
from gdpa.pages import Cell
from gdpa.spec import Loaded

DTYPES = ("float32", "bfloat16")


def run(console: Console, functions: list[Loaded], trial: Trial, out: Path, quick: bool = False) -> bool:
    """The whole comparison; False if a result is wrong."""
    started = time.perf_counter()
    training.check(trial)
    out.mkdir(parents=True, exist_ok=True)
    setting = speed.setting_of(quick)
    document: dict[str, Any] = {"kind": "compare", "quick": quick, **machine.describe(setting.device)}
    document["functions"] = [describe(f, out) for f in functions]
    document["checks"] = show_checks(console, functions, quick)
    document["speed"] = show_speed(console, functions, trial.rival, setting, quick)
    document["training"] = show_training(console, trial)
    document["failures"] = failures(document)
    document["took_s"] = time.perf_counter() - started
    finish(console, document, out)
    return not document["failures"]


def describe(loaded: Loaded, out: Path) -> dict[str, Any]:
    """What was written, what runs inside the kernels, and the curve."""
    act = loaded.compile()
    emitted = act.source(torch.bfloat16)
    file = out / f"kernel_{loaded.name}.py"
    file.write_text(emitted, encoding="utf-8")
    return {
        "name": loaded.name, "spec": loaded.spec, "params": list(loaded.params), "normalize": loaded.normalize,
        "written": loaded.written(), "emitted": emitted.strip(), "file": file.name,
        "curve": plot.curve_points(act.eager, loaded.params),
    }  # fmt: skip


def show_checks(console: Console, functions: list[Loaded], quick: bool) -> dict[str, Any]:
    console.rule("1. Are they right?", align="left")
    found = {}
    for loaded in functions:
        with progress(console, check.steps(DTYPES, not quick), f"checking {loaded.name} against float64") as step:
            report = check.check(loaded, DTYPES, interpret=not quick, step=step)
        rows = [{**asdict(row), "failed": row.failed} for row in report.rows]
        failed = [row for row in rows if row["failed"]]
        verdict = f"{len(failed)} of {len(rows)} wrong" if failed else f"all {len(rows)} results right"
        if not report.compared:
            verdict = "every result overflows, PyTorch's too"
        console.print(f"{loaded.name}: {verdict}", style="red" if failed else "", markup=False)
        found[loaded.name] = {
            "ok": report.ok and report.compared, "compared": report.compared, "rows": rows, "not_run": report.not_run,
        }  # fmt: skip
    return found


def show_speed(console: Console, functions: list[Loaded], rival: str, setting: Any, quick: bool) -> dict[str, Any]:
    console.rule("2. What do they cost?", align="left")
    console.print(f"{setting.words()}; the functions take turns.", markup=False)
    with progress(console, len(setting.lengths), "timing") as step:
        found = speed.run(setting, functions, rival, QUICK if quick else speed.EFFORT, step)
    show_table(console, _shown(page.speeds(found), "time of one call"))
    for line in speed.warnings(found):
        console.print(line, style="dim", markup=False)
    return found


def show_training(console: Console, trial: Trial) -> dict[str, Any]:
    console.rule("3. How does a model learn with them?", align="left")
    found = training.run(trial, console)
    console.print(page.about(found), markup=False)
    show_table(console, _shown(page.accuracy(found), "mean and 95 % confidence interval over the seeds"))
    return found


def _shown(content: Any, title: str) -> Table:
    table = Table(title=title, **LOOK)
    for i, name in enumerate(content.head):
        table.add_column(name, justify="left" if i < content.names else "right")
    for row in content.rows:
        table.add_row(*(f"{cell} ({cell.under})" if isinstance(cell, Cell) else cell for cell in row.cells))
    return table


def failures(document: dict[str, Any]) -> list[str]:
    """What is wrong, in words."""
    found = []
    for name, checked in document["checks"].items():
        found += [
            f"{name}, {row['backend']}, {row['dtype']}, {row['case']}: {', '.join(row['failed'])} too far from float64"
            for row in checked["rows"]
            if row["failed"]
        ]
        if not checked["compared"]:
            found.append(f"{name}: nothing could be compared, every result overflows")
    return found + training.failures(document["training"])


def finish(console: Console, document: dict[str, Any], out: Path) -> None:
    save(document, out / "compare.json")
    (out / "report.html").write_text(page.page(document), encoding="utf-8")
    console.rule("4. The report", align="left")
    for line in page.conclusions(document):
        console.print(line, markup=False)
    for line in document["failures"]:
        console.print(f"FAILED: {line}", style="red", markup=False)
    if not document["failures"]:
        console.print(f"All checks passed; {document['took_s']:.0f} s.", style="green", markup=False)
    console.print(
        f"report: {out / 'report.html'} (open it in a browser), numbers: {out / 'compare.json'}", markup=False
    )
