"""What `gdpa tune` prints around a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from gdpa.backends import tuning
from gdpa.bench.tune import report, search
from gdpa.commands.terminal import progress


def file_of(out: Path | None) -> Path:
    """The file that --out names, or else the one that gdpa reads."""
    file = out or tuning.path()
    if file is None:
        raise ValueError(f"{tuning.VARIABLE}=off, so there is no file: unset it, or pass one with --out")
    return file


def measure(
    console: Console, cases: tuple[str, ...], functions: tuple[str, ...], backend: str | None, quick: bool,
    out: Path | None,
) -> None:  # fmt: skip
    file = file_of(out)
    plan = search.make_plan(cases, functions, backend, quick)
    search.read(file)  # a file that cannot be added to is an error now, not after the first class
    with progress(console, plan.steps, "tuning") as step:
        key, names = search.run(plan, file, step)
    stored = tuning.read(file)["machines"][key]["classes"]
    show_machine(console, key, {name: stored[name] for name in names})
    console.print(f"stored in {file}", markup=False, soft_wrap=True)
    if file != tuning.path():
        console.print(f"gdpa reads it where {tuning.VARIABLE}={file} is set", markup=False, soft_wrap=True)


def show(console: Console, out: Path | None) -> None:
    file = file_of(out)
    document = search.read(file)
    if document is None:
        console.print(f"there is no {file}: using the built-in configurations", markup=False, soft_wrap=True)
        return
    for key, stored in document["machines"].items():
        show_machine(console, key, stored["classes"])
    console.print(f"stored in {file}", markup=False, soft_wrap=True)


def reset(console: Console, out: Path | None) -> None:
    file = file_of(out)
    if out is not None and file.exists():  # the usual file is removed even if it is damaged, a named one is looked at
        try:
            tuning.read(file)
        except ValueError as e:
            raise ValueError(f"{file} was not removed: {e}") from e
    if file.exists():
        file.unlink()
        console.print(f"removed {file}: using the built-in configurations from now on", markup=False, soft_wrap=True)
    else:
        console.print(f"there is no {file}", markup=False, soft_wrap=True)


def show_machine(console: Console, key: str, classes: dict[str, Any]) -> None:
    console.print(report.table(key, classes))
    for line in report.refused(classes):
        console.print(line, style="dim", markup=False)
