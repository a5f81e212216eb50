"""`gdpa info`, `check` and `fuzz`: what this machine can run, and whether it is right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

import gdpa
from gdpa.cli.claiming import claim
from gdpa.cli.options import (
    ABOVE_ZERO,
    BACKENDS,
    DTYPES,
    FIRST_SEED,
    SEED,
    Numbers,
    Specs,
    only_with,
    refusals_as_errors,
    together,
)
from gdpa.commands.folding import show_table
from gdpa.commands.terminal import make_console, progress

if TYPE_CHECKING:
    from gdpa.spec import Loaded


@click.command(short_help="Versions, devices, backends, built-in functions.")
def info() -> None:
    """Versions, devices, backends (and why one cannot run here), built-in functions."""
    from gdpa.commands import info

    console = make_console()
    for table in (info.versions_table(), info.devices_table(), info.backends_table(), info.functions_table()):
        console.print(table)
    for line in info.tuning_lines():
        console.print(line, markup=False, soft_wrap=True)


@click.command(short_help="Verify a function on every backend against float64.")
@click.option("--activation", "specs", multiple=True, metavar="SPEC", type=Specs("softmax", "all"),
              help="A built-in's name, softmax, module:function or file.py:function; repeatable; 'all' for every "
                   "built-in. Default: gelu.")  # fmt: skip
@click.option("--params", type=Numbers(), multiple=True, callback=together,
              help="Values of the function's params: 0.5,2 or repeated; 1 for each by default.")  # fmt: skip
@click.option("--normalize", type=click.Choice(["sum", "abs"]),
              help="Divide outputs by the sum of a row's (absolute) weights.")  # fmt: skip
@click.option("--dtype", "dtypes", type=DTYPES, multiple=True, help="Repeatable; all three by default.")
@click.option("--no-interpreter", is_flag=True, help="Without a GPU, do not run the Triton kernels interpreted.")
@click.option("--errors", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT.json",
              help="Instead, write the error of every built-in's device code on a grid to this file.")  # fmt: skip
def check(
    specs: tuple[str, ...], params: tuple[float, ...] | None, normalize: str | None, dtypes: tuple[str, ...],
    no_interpreter: bool, errors: Path | None,
) -> None:  # fmt: skip
    """Verify a function on every backend of this machine against float64: values and gradients, dense and jagged.

    Scores have several means and spreads. Exits with 1 if a 16-bit result has more than 1.15 times the RMS error of the
    definition's own roundings, or more than plain PyTorch's; in float32, more than 2 times (gradients: 3 times) that.
    """
    if errors is not None:
        only_with(click.get_current_context(), "--errors", ())
        return _check_errors(errors)
    from gdpa.commands import verification

    console, failed, empty = make_console(), False, []
    for loaded in load(specs or ("gelu",), params, normalize):
        steps = verification.steps(dtypes or verification.DTYPES, not no_interpreter)
        with progress(console, steps, f"checking {loaded.name}") as step, refusals_as_errors():
            report = verification.check(loaded, dtypes or verification.DTYPES, not no_interpreter, step)
        given = f", params {', '.join(f'{p:g}' for p in loaded.params)} (within 10 % per head)" if loaded.params else ""
        divided = {"sum": " / sum", "abs": " / sum of sizes"}[loaded.normalize] if loaded.normalize else ""
        title = f"{loaded.spec}{divided if loaded.spec != 'softmax' else ''}{given}"
        show_table(console, verification.table(report, title), len(verification.WHICH))
        for row in report.rows:
            for problem in row.problems:
                console.print(f"{row.backend}, {row.dtype}, {row.case}: {problem}", style="red", markup=False)
        for line in verification.not_run(report.not_run):
            console.print(f"not run: {line}", style="dim", markup=False)
        failed |= not report.ok
        empty += [] if report.compared else [loaded.spec]
    for spec in empty:
        console.print(f"{spec}: every result overflows, PyTorch's too: nothing could be compared", style="red",
                      markup=False)  # fmt: skip
    console.print("[red]FAILED[/]" if failed or empty else "[green]everything that was run agrees with float64[/]")
    if failed or empty:
        raise SystemExit(1)


def load(specs: tuple[str, ...], params: tuple[float, ...] | None, normalize: str | None) -> list[Loaded]:
    """The functions named on the command line; a bad name is a usage error."""
    from gdpa.spec import load_normalized

    names = [name for spec in specs for name in (gdpa.activations() if spec == "all" else [spec])]
    try:
        found = [load_normalized(name, normalize) for name in names]
        return [f.with_params(f.params or (1.0,) * f.n_params if params is None else params) for f in found]
    except ValueError as e:
        raise click.UsageError(str(e)) from e


def _check_errors(path: Path) -> None:
    claim("check", path)
    from gdpa.bench import results
    from gdpa.bench.kernels import function_errors

    reason = function_errors.can_measure()
    if reason is not None:
        raise click.ClickException(f"device code cannot be measured here: {reason}")
    console = make_console()
    with progress(console, len(gdpa.activations()), "errors of device code") as step:
        document = function_errors.measure(step)
    results.save(document, path)
    show_table(console, function_errors.table(document))
    console.print(f"written to {path}", markup=False)
    failures = function_errors.failures(document)
    for line in failures:
        console.print(line, style="red", markup=False)
    if failures:
        raise SystemExit(1)


@click.command(short_help="Random calls against float64.")
@click.option("--minutes", type=ABOVE_ZERO, default=None, help="How long; 1 by default, unless --calls is given.")
@click.option("--calls", type=click.IntRange(min=1), default=None, help="Or how many calls.")
@click.option("--seed", type=FIRST_SEED, default=None, help="The first seed; a new one every time by default.")
@click.option("--only-seed", type=SEED, default=None, help="Describe and run this one call.")
@click.option("--backend", type=click.Choice(BACKENDS), help="Default: the one that gdpa chooses.")
@click.option("--dtype", "dtypes", type=DTYPES, multiple=True, help="Repeatable; all that run here by default.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Default: the GPU if there is one.")
@click.option(
    "--limit", type=ABOVE_ZERO, default=120.0, show_default=True, help="Seconds after which a call counts as hung."
)
@click.option("--keep-going", is_flag=True, help="Collect failures instead of stopping at the first.")
def fuzz(
    minutes: float | None, calls: int | None, seed: int | None, only_seed: int | None, backend: str | None,
    dtypes: tuple[str, ...], device: str | None, limit: float, keep_going: bool,
) -> None:  # fmt: skip
    """Random calls, forward and backward, against float64 until one is wrong, crashes or hangs.

    Exits with 1 after a failure and with 3 after a hang; either prints the command that repeats it.
    """
    from gdpa.fuzz import command

    if only_seed is not None:
        only_with(click.get_current_context(), "--only-seed", ("--backend", "--dtype", "--device", "--limit"))
    with refusals_as_errors():
        target = command.make_target(device, backend, dtypes)
    minutes = 1.0 if minutes is None and calls is None else minutes
    if not command.fuzz(make_console(), target, minutes, calls, seed, only_seed, keep_going, limit):
        raise SystemExit(1)
