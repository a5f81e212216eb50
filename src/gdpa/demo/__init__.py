"""`gdpa demo`: a function nobody has a kernel for, and what becomes of it on this machine.

Shows the torch code and the Triton code it is compiled to, its error and gradients against float64 on every backend,
then time and peak memory beside eager PyTorch over growing lengths, as a table and a plot.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax

from gdpa import check
from gdpa.bench.results import save
from gdpa.demo import measure, plot
from gdpa.demo.function import soft_threshold
from gdpa.spec import Loaded, load
from gdpa.terminal import progress

SPEC = f"{soft_threshold.__module__}:{soft_threshold.__name__}"
THRESHOLD = 1.0


def run(console: Console, out: Path, quick: bool = False) -> bool:
    """The whole demonstration; False if a result is wrong."""
    out.mkdir(parents=True, exist_ok=True)
    loaded = load(SPEC).with_params((THRESHOLD,))
    show_code(console, loaded, out)
    right = show_errors(console, loaded, quick)
    show_speed(console, loaded, out, quick)
    return right


def show_code(console: Console, loaded: Loaded, out: Path) -> None:
    """What was written, and what runs inside the kernels."""
    act = loaded.compile()
    written = inspect.getsource(loaded.function).strip()
    emitted = act.source(torch.bfloat16)
    (out / "kernel.py").write_text(emitted)
    shown = "\n\n\n".join(part.strip() for part in emitted.split("\n\n\n")[2:])  # without the loading of params
    console.rule("1. The function", align="left")
    console.print("Attention weights p = f(s; threshold) in place of softmax; the threshold is learned. All you write:")
    console.print(Panel(Syntax(written, "python"), title="torch", title_align="left"))
    console.print("Compiled, value and derivatives together, common parts once (for bfloat16 on an NVIDIA GPU):")
    console.print(Panel(Syntax(shown, "python"), title=f"Triton, in {out / 'kernel.py'}", title_align="left"))


def show_errors(console: Console, loaded: Loaded, quick: bool) -> bool:
    """Values and gradients on every backend against float64."""
    console.rule("2. Is it right?", align="left")
    dtypes = ("float32", "bfloat16") if quick else check.DTYPES
    with progress(console, 2 * len(dtypes), "checking against float64") as step:
        report = check.check(loaded, dtypes, interpret=not quick, step=step)
    console.print(check.table(report, f"{loaded.name}, threshold {THRESHOLD:g} (within 10 % per head)"))
    for what, why in report.not_run.items():
        console.print(f"not run: {what}: {why}", style="dim", markup=False)
    return report.ok


def show_speed(console: Console, loaded: Loaded, out: Path, quick: bool) -> None:
    """Time and memory over growing lengths."""
    console.rule("3. What does it cost?", align="left")
    setting = measure.this_machine(quick)
    console.print(f"Forward and backward, {setting.words()}, beside the same function in eager PyTorch.", markup=False)
    with progress(console, measure.steps(setting), "measuring") as step:
        document = measure.run(setting, loaded, step)
    save(document, out / "demo.json")
    console.print(measure.table(document))
    console.print(measure.verdict(document), markup=False)
    console.print(plot.plot(document, out / "demo.png"), markup=False)
    console.print(f"numbers: {out / 'demo.json'}", markup=False)
