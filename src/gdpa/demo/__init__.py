"""`gdpa demo`: a function, and what becomes of it on this machine.

function.py is the function. __init__.py shows the code that it is compiled to and checks it, contest.py trains models
with it and with others (workers.py: on all cores; attending.py: what their attention does; statistics.py: how sure that
is), measure.py times it. page.py makes one HTML file of all that, with template.py and plot.py; its look is that of
gdpa.pages.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

from gdpa.bench import machine
from gdpa.bench.report.tables import LOOK
from gdpa.bench.results import save
from gdpa.commands import verification
from gdpa.commands.folding import show_table
from gdpa.commands.terminal import progress
from gdpa.demo import measure
from gdpa.demo.function import soft_threshold
from gdpa.demo.statistics import is_finite
from gdpa.spec import Loaded, load

SPEC = f"{soft_threshold.__module__}:{soft_threshold.__name__}"
THRESHOLD = 1.0
AGREEMENT = 1e-4  # of float32 with float64, for the logits of a trained model


def run(console: Console, out: Path, quick: bool = False, loaded: Loaded | None = None) -> bool:
    """The whole demonstration, of soft_threshold or another function; False if a result is wrong."""
    import gdpa.train  # noqa: F401 - says at once what to install, where something is missing

    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    loaded = loaded or load(SPEC).with_params((THRESHOLD,))
    setting = measure.this_machine(quick)
    document: dict[str, Any] = {"kind": "demo", "quick": quick, **machine.describe(setting.device)}
    document["function"] = show_code(console, loaded, out)
    document["check"] = show_errors(console, loaded, quick)
    document["training"] = show_training(console, loaded, quick)
    document["cost"] = show_cost(console, loaded, setting)
    document["failures"] = failures(document)
    document["took_s"] = time.perf_counter() - started
    finish(console, document, out)
    return not document["failures"]


def show_code(console: Console, loaded: Loaded, out: Path) -> dict[str, Any]:
    """What was written, and what runs inside the kernels."""
    act = loaded.compile()
    written, names = loaded.written(), loaded.param_names()
    emitted = act.source(torch.bfloat16)
    (out / "kernel.py").write_text(emitted)
    parts = [part.strip() for part in emitted.split("\n\n\n")[2:]]  # without the loading of params
    shown, scalar = "\n\n\n".join(parts), "\n\n\n".join(parts[:2])  # value, and value and derivatives
    console.rule("1. The function", align="left")
    learned = f"; {', '.join(names)})" if names else ")"
    more = " What comes after the score is learned." if names else ""
    console.print(f"Attention weights p = f(s{learned} in place of softmax.{more} All you write:", markup=False)
    console.print(Panel(Syntax(written, "python"), title="torch", title_align="left"))
    console.print("Compiled, value and derivatives together, common parts once (for bfloat16 on an NVIDIA GPU):")
    console.print(Panel(Syntax(scalar, "python"), title="Triton", title_align="left"))
    console.print(f"With the forms that Hopper's kernels use: {out / 'kernel.py'}", markup=False)
    return {
        "name": loaded.name,
        "params": list(loaded.params),
        "param_names": names,
        "written": written,
        "emitted": shown,
    }


def show_errors(console: Console, loaded: Loaded, quick: bool) -> dict[str, Any]:
    """Values and gradients on every backend against float64."""
    console.rule("2. Is it right?", align="left")
    dtypes = ("float32", "bfloat16") if quick else verification.DTYPES
    with progress(console, verification.steps(dtypes, not quick), "checking against float64") as step:
        report = verification.check(loaded, dtypes, interpret=not quick, step=step)
    show_table(console, verification.table(report, loaded.name + _values(loaded)), len(verification.WHICH))
    for line in verification.not_run(report.not_run):
        console.print(f"not run: {line}", style="dim", markup=False)
    rows = [{**asdict(row), "failed": row.failed} for row in report.rows]
    return {"ok": report.ok, "rows": rows, "not_run": report.not_run}


def _values(loaded: Loaded) -> str:
    found = ", ".join(f"{name} {value:g}" for name, value in zip(loaded.param_names(), loaded.params, strict=True))
    return f", {found} (within 10 % per head)" if found else ""


def show_training(console: Console, loaded: Loaded, quick: bool) -> dict[str, Any]:
    """InterFormer with each function on the synthetic click log."""
    from gdpa.demo import contest, workers

    console.rule("3. Does it learn?", align="left")
    plan = contest.make_plan(loaded.spec, () if loaded.module is not None else loaded.params, quick)
    console.print(
        f"InterFormer with each function, and a model without history, on the synthetic click log: {len(plan.seeds)} "
        f"seed{'s' * (len(plan.seeds) > 1)}, {plan.steps} steps of {plan.batch_size} samples.",
        markup=False,
    )
    found = contest.document(plan, workers.run(plan, console))
    show_table(console, accuracy_table(found))
    return found


def accuracy_table(training: dict[str, Any]) -> Table:
    from gdpa.demo import page

    content = page.accuracy(training, own="")
    shown = Table(title="test samples: mean and 95 % confidence interval over the seeds", **LOOK)
    for i, name in enumerate(content.head):
        shown.add_column(name, justify="left" if i < content.names else "right")
    for row in content.rows:
        shown.add_row(*map(str, row.cells))
    return shown


def show_cost(console: Console, loaded: Loaded, setting: measure.Setting) -> dict[str, Any]:
    """Time and memory over growing lengths."""
    console.rule("4. What does it cost?", align="left")
    console.print(f"Forward and backward, {setting.words()}, beside the same function in eager PyTorch.", markup=False)
    with progress(console, measure.steps(setting), "measuring") as step:
        document = measure.run(setting, loaded, step)
    show_table(console, measure.table(document))
    console.print(measure.verdict(document), markup=False)
    for line in measure.doubts(document):
        console.print(line, style="yellow", markup=False)
    return document


def failures(document: dict[str, Any]) -> list[str]:
    """What is wrong, in words; times and accuracies are never right or wrong."""
    found = [
        f"{row['backend']}, {row['dtype']}, {row['case']}: {', '.join(row['failed'])} too far from float64"
        for row in document["check"]["rows"]
        if row["failed"]
    ]
    if not document["check"]["rows"]:
        found.append("no backend could be checked")
    for name, error in document["training"]["agreement"].items():
        if not error <= AGREEMENT:
            found.append(f"the model trained with {name} is {error:.1e} away from float64, allowed are {AGREEMENT:.0e}")
    for name, model in document["training"]["models"].items():
        for run in model["runs"]:
            if not all(is_finite(run[key]) for key in ("auc", "logloss")):
                found.append(f"{name}, seed {run['seed']}: AUC {run['auc']}, LogLoss {run['logloss']}")
    return found


def finish(console: Console, document: dict[str, Any], out: Path) -> None:
    """The files, and the verdict."""
    from gdpa.demo.page import page

    save(document, out / "demo.json")
    (out / "report.html").write_text(page(document, AGREEMENT), encoding="utf-8")
    console.rule("5. The report", align="left")
    for line in document["failures"]:
        console.print(f"FAILED: {line}", style="red", markup=False)
    if not document["failures"]:
        console.print(f"All checks passed; {document['took_s']:.0f} s.", style="green", markup=False)
    console.print(f"report: {out / 'report.html'} (open it in a browser), numbers: {out / 'demo.json'}", markup=False)
