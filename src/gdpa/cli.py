"""The `gdpa` command. Each subcommand reads its options, calls one module and prints what that returns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gdpa
from gdpa.errors import UnsupportedActivationError
from gdpa.paths import check_spec
from gdpa.terminal import make_console, progress

if TYPE_CHECKING:
    import torch

    from gdpa.bench.run import Plan
    from gdpa.spec import Loaded

BACKENDS = ("hopper", "triton", "cpu", "reference")  # gdpa.backends.BACKENDS, which needs torch
BENCH = Path("gdpa-bench")  # where results go unless --out says otherwise
DTYPES = click.Choice(["float32", "bfloat16", "float16"])


class Numbers(click.ParamType):
    """Comma-separated numbers: 0.5 or 0.5,1,2."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in value.split(",")) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 0.5 or 0.5,1,2", param, ctx)


class AboveZero(click.FloatRange):
    """A positive number, neither inf nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number", param, ctx)


class Specs(click.ParamType):
    """A function; a file that is not there is refused at once, before torch is imported."""

    name = "spec"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            check_spec(value)
        except FileNotFoundError as e:
            self.fail(str(e), param, ctx)
        return value


def _together(ctx: click.Context, param: click.Parameter, value: tuple[tuple[float, ...], ...]) -> Any:
    """Repeated --params add up: --params 1 --params 2,3 is --params 1,2,3. None if there is none."""
    return tuple(number for numbers in value for number in numbers) if value else None


ABOVE_ZERO = AboveZero(min=0, min_open=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(gdpa.__version__, prog_name="gdpa")
def main() -> None:
    """Attention in which softmax is replaced by any function: what this machine can run, whether it is right, how fast
    it is; and training of recommendation models with it."""


@main.command(short_help="Versions, devices, backends, built-in functions.")
def info() -> None:
    """Versions, devices, backends (and why one cannot run here), built-in functions."""
    from gdpa import info

    console = make_console()
    for table in (info.versions_table(), info.devices_table(), info.backends_table(), info.functions_table()):
        console.print(table)
    for line in info.tuning_lines():
        console.print(line, markup=False, soft_wrap=True)


@main.command(short_help="Verify a function on every backend against float64.")
@click.option("--activation", "specs", multiple=True, metavar="SPEC", type=Specs(),
              help="A built-in's name, softmax, module:function or file.py:function; repeatable; 'all' for every "
                   "built-in. Default: gelu.")  # fmt: skip
@click.option("--params", type=Numbers(), multiple=True, callback=_together,
              help="Values of the function's params: 0.5,2 or repeated; 1 for each by default.")  # fmt: skip
@click.option("--normalize", type=click.Choice(["sum", "abs"]),
              help="Divide outputs by the sum of a row's weights, or of their sizes.")  # fmt: skip
@click.option("--dtype", "dtypes", type=DTYPES, multiple=True, help="Repeatable; all three by default.")
@click.option("--no-interpreter", is_flag=True, help="Without a GPU, do not run the Triton kernels interpreted.")
@click.option("--errors", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT.json",
              help="Instead: measure the error of every built-in's device code on a grid, into this file.")  # fmt: skip
def check(
    specs: tuple[str, ...], params: tuple[float, ...] | None, normalize: str | None, dtypes: tuple[str, ...],
    no_interpreter: bool, errors: Path | None,
) -> None:  # fmt: skip
    """Verify a function on every backend of this machine against float64: values and gradients, dense and jagged.

    Scores have several means and spreads. Exits with 1 if a 16-bit result has more than 1.15 times the RMS error of the
    definition's own roundings, or more than plain PyTorch's; in float32, more than 2 times (gradients: 3 times) that.
    """
    from gdpa import check

    if errors is not None:
        _only_with(click.get_current_context(), "--errors", ())
        return _check_errors(errors)
    console, failed, empty = make_console(), False, []
    for loaded in _load(specs or ("gelu",), params, normalize):
        steps = check.steps(dtypes or check.DTYPES, not no_interpreter)
        with progress(console, steps, f"checking {loaded.name}") as step, _refusals_as_errors():
            report = check.check(loaded, dtypes or check.DTYPES, not no_interpreter, step)
        given = f", params {', '.join(f'{p:g}' for p in loaded.params)} (within 10 % per head)" if loaded.params else ""
        divided = {"sum": " / sum", "abs": " / sum of sizes"}[loaded.normalize] if loaded.normalize else ""
        console.print(check.table(report, f"{loaded.spec}{divided if loaded.spec != 'softmax' else ''}{given}"))
        for row in report.rows:
            for problem in row.problems:
                console.print(f"{row.backend}, {row.dtype}, {row.case}: {problem}", style="red", markup=False)
        for what, why in report.not_run.items():
            console.print(f"not run: {what}: {why}", style="dim", markup=False)
        failed |= not report.ok
        empty += [] if report.compared else [loaded.spec]
    for spec in empty:
        console.print(f"{spec}: every result overflows, PyTorch's too: nothing could be compared", style="red",
                      markup=False)  # fmt: skip
    console.print("[red]FAILED[/]" if failed or empty else "[green]everything agrees with float64[/]")
    if failed or empty:
        raise SystemExit(1)


def _load(specs: tuple[str, ...], params: tuple[float, ...] | None, normalize: str | None) -> list[Loaded]:
    """The functions named on the command line; a bad name is a usage error."""
    from gdpa.spec import load_normalized

    names = [name for spec in specs for name in (gdpa.activations() if spec == "all" else [spec])]
    try:
        found = [load_normalized(name, normalize) for name in names]
        return [f.with_params(f.params or (1.0,) * f.n_params if params is None else params) for f in found]
    except ValueError as e:
        raise click.UsageError(str(e)) from e


@contextmanager
def _refusals_as_errors() -> Iterator[None]:
    """What is refused in words is printed as such, without a traceback."""
    try:
        yield
    except UnsupportedActivationError as e:
        raise click.ClickException(f"this function cannot be compiled: {e}") from e
    except (ValueError, TypeError, FileNotFoundError) as e:
        raise click.ClickException(str(e)) from e


def _check_errors(path: Path) -> None:
    from gdpa.bench import function_errors, results

    reason = function_errors.can_measure()
    if reason is not None:
        raise click.ClickException(f"device code cannot be measured here: {reason}")
    console = make_console()
    with progress(console, len(gdpa.activations()), "errors of device code") as step:
        document = function_errors.measure(step)
    results.save(document, path)
    console.print(function_errors.table(document))
    console.print(f"written to {path}", markup=False)
    failures = function_errors.failures(document)
    for line in failures:
        console.print(line, style="red", markup=False)
    if failures:
        raise SystemExit(1)


@main.command(short_help="Random calls against float64.")
@click.option("--minutes", type=ABOVE_ZERO, default=None, help="How long; 1 by default, unless --calls is given.")
@click.option("--calls", type=click.IntRange(min=1), default=None, help="Or how many calls.")
@click.option("--seed", type=int, default=None, help="The first seed; a new one every time by default.")
@click.option("--only-seed", type=int, default=None, help="Describe and run this one call.")
@click.option("--backend", type=click.Choice(BACKENDS), help="Default: the one that gdpa chooses.")
@click.option("--dtype", "dtypes", type=DTYPES, multiple=True, help="Repeatable; all that run here by default.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Default: the GPU if there is one.")
@click.option(
    "--limit", type=ABOVE_ZERO, default=120.0, show_default=True, help="Seconds after which a call is a hang."
)
@click.option("--keep-going", is_flag=True, help="Collect failures instead of ending at the first.")
def fuzz(
    minutes: float | None, calls: int | None, seed: int | None, only_seed: int | None, backend: str | None,
    dtypes: tuple[str, ...], device: str | None, limit: float, keep_going: bool,
) -> None:  # fmt: skip
    """Random calls, forward and backward, against float64 until one is wrong, crashes or hangs.

    Exits with 1 after a failure and with 3 after a hang; either prints the command that repeats it.
    """
    from gdpa.fuzz import command

    if only_seed is not None:
        _only_with(click.get_current_context(), "--only-seed", ("--backend", "--dtype", "--device", "--limit"))
    with _refusals_as_errors():
        target = command.make_target(device, backend, dtypes)
    minutes = 1.0 if minutes is None and calls is None else minutes
    if not command.fuzz(make_console(), target, minutes, calls, seed, only_seed, keep_going, limit):
        raise SystemExit(1)


@main.command(short_help="A function of our own: kernel, error, training, cost.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("gdpa-demo"), show_default=True,
              help="Where report.html, the numbers and the emitted code go.")  # fmt: skip
@click.option("--activation", "spec", metavar="SPEC", type=Specs(),
              help="Another function than the one of the demonstration: a built-in's name, module:function or "
                   "file.py:function.")  # fmt: skip
@click.option("--params", type=Numbers(), multiple=True, callback=_together,
              help="Where its params start; 1 for each by default.")  # fmt: skip
@click.option(
    "--quick", is_flag=True, help="One seed, few steps and lengths, no interpreter: a minute or two on two cores."
)
def demo(out: Path, spec: str | None, params: tuple[float, ...] | None, quick: bool) -> None:
    """A function of our own: the kernel it becomes, its error, how it learns beside softmax, its time and memory.

    Writes a report for the browser. Exits with 1 if a result is wrong.
    """
    from gdpa import demo

    if spec is None and params is not None:
        raise click.UsageError("--params goes with --activation")
    try:
        with _refusals_as_errors():
            right = demo.run(make_console(), out, quick, _load((spec,), params, None)[0] if spec else None)
    except (ImportError, ArithmeticError) as e:  # what gdpa.train needs, or a loss that is inf or NaN
        raise click.ClickException(str(e)) from e
    if not right:
        raise SystemExit(1)


class Named(click.ParamType):
    """Something of one of several functions: gate=0.5,2 or gate=sum."""

    name = "name=value"

    def __init__(self, kind: click.ParamType, example: str) -> None:
        self.kind, self.example = kind, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name, _, given = value.partition("=")
        if not (name and given):
            self.fail(f"{value!r} does not look like {self.example}", param, ctx)
        return name, self.kind.convert(given, param, ctx)


@main.command(short_help="Functions side by side: errors, kernels, speed, training.")
@click.option("--activation", "specs", multiple=True, required=True, metavar="SPEC", type=Specs(),
              help="A built-in's name, softmax, module:function or file.py:function (or an nn.Module there); at least "
                   "two.")  # fmt: skip
@click.option("--params", multiple=True, type=Named(Numbers(), "gate=0.5 or gate=0.5,2"), metavar="NAME=NUMBERS",
              help="Where the params of a function start; 1 for each by default.")  # fmt: skip
@click.option("--normalize", multiple=True, type=Named(click.Choice(["sum", "abs"]), "gate=sum"),
              metavar="NAME=sum|abs",
              help="Divide a function's outputs by the sum of a row's weights, or of their sizes.")  # fmt: skip
@click.option("--model", metavar="NAME", help="What is trained with each: interformer (the default), transformer, "
              "hstu, kunlun, or as in gdpa train.")  # fmt: skip
@click.option("--set", "assignments", multiple=True, metavar="OPTION=VALUE", help="An option of the model, repeatable.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.toml",
              help="Settings of gdpa train, with your data; without, the synthetic click log.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each function.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps of each run.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("gdpa-compare"),
              show_default=True, help="Where report.html, the numbers and the emitted code go.")  # fmt: skip
@click.option("--quick", is_flag=True, help="One seed, few steps and lengths, no interpreter.")
def compare(
    specs: tuple[str, ...], params: tuple[tuple[str, tuple[float, ...]], ...],
    normalize: tuple[tuple[str, str], ...], model: str | None, assignments: tuple[str, ...],
    config: Path | None, seeds: int, steps: int | None, out: Path, quick: bool,
) -> None:  # fmt: skip
    """Attention functions side by side, in one report: their errors against float64, the kernels that they become, what
    they cost, and how a model learns with each over several seeds, with intervals of the differences.

    Others are compared with softmax if it is among them, else with the first. Exits with 1 if a result is wrong.
    """
    try:
        from gdpa.compare import command, plan
        from gdpa.train.flags import assigned

        functions = plan.load_functions(specs, dict(params), dict(normalize))
        trial = plan.make_trial(
            functions, model=model, options=assigned(assignments), file=config, seeds=seeds, steps=steps, quick=quick
        )
        with _refusals_as_errors():
            right = command.run(make_console(), functions, trial, out, quick)
    except (ImportError, ArithmeticError, ValueError) as e:
        raise click.ClickException(str(e)) from e
    if not right:
        raise SystemExit(1)


@main.command(short_help="A published data set as a table with histories.")
@click.argument("name", metavar="NAME")
@click.argument("raw", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="CSV (.csv, .csv.gz) or Parquet (.parquet), by its name. Default: NAME.csv.")  # fmt: skip
@click.option("--max-len", type=click.IntRange(min=1), default=50, show_default=True, help="Events of a history.")
def convert(name: str, raw: Path, out: Path | None, max_len: int) -> None:
    """Make a table for `gdpa train` of the files of a data set as they are published, unpacked in FOLDER.

    NAME: movielens-100k, movielens-1m, movielens-20m, kuairand-pure, kuairand-1k, kuairand-27k. Rows are in the order
    of time, each with what its user did before.
    """
    from gdpa.data.convert import CONVERTERS

    if name not in CONVERTERS:
        raise click.UsageError(f"NAME must be one of {', '.join(CONVERTERS)}, not {name!r}")
    out = out or Path(f"{name}.csv")
    if out.exists():
        raise click.UsageError(f"{out} is there already, and stays as it is: remove it, or say --out")
    with _refusals_as_errors():
        rows = CONVERTERS[name].convert(raw, out, max_len)
    click.echo(f"{out}: {rows:,} rows")
    click.echo(f"gdpa train --data files --data-train {out} --data-preset {CONVERTERS[name].preset} --data-split last")


class TrainCommand(click.Command):
    """Its other flags are the settings of a run, which are only imported when the command is used."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        try:
            from gdpa.train.flags import options
        except ImportError as e:
            raise click.ClickException(str(e)) from e
        own = super().get_params(ctx)
        return [*own[:-1], *options(), own[-1]]  # --help stays last


@main.command(cls=TrainCommand, short_help="Train a model of click logs.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.toml",
              help="Settings; flags win over them.")  # fmt: skip
@click.option("--model", metavar="NAME", help="dlrm, din, transformer, hstu, interformer (the default), kunlun, or "
              "module:function or file.py:function that makes one.")  # fmt: skip
@click.option("--set", "assignments", multiple=True, metavar="OPTION=VALUE",
              help="An option of the model, repeatable: num_layers=2, activation=silu, "
                   "activation=module:function or activation=file.py:function.")  # fmt: skip
@click.option("--print-config", is_flag=True, help="Print all settings as TOML and end.")
@click.option("--resume", is_flag=True,
              help="Continue the run in --out where its last checkpoint is; begin it if there is none.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Remove the run in --out and start over.")
@click.option("--replay", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
              help="Instead: compute the step again that stopped a run with inf or NaN.")  # fmt: skip
@click.option("--trust", is_flag=True,
              help="With --replay: import and run what DIR names as module:function or file.py:function.")  # fmt: skip
def train(**values: Any) -> None:
    """Train a model of click logs, with checkpoints, validation and exact resume; with torchrun, on several ranks.

    Exits with 3 if the loss becomes inf or NaN, with 4 if another rank is lost, with 128 + n after signal n.
    """
    from gdpa.train import command

    command.run(values)


CHECKPOINT_OPTIONS = (
    click.option("--batch-size", type=click.IntRange(min=1), default=512, show_default=True,
                 help="Rows that are computed together."),
    click.option("--vocabularies", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.json",
                 help="Which value has which id. Default: vocabularies.json of the checkpoint's run folder."),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
                 help="auto: a GPU if there is one."),
    click.option("--trust", is_flag=True,
                 help="Import and run what the checkpoint names as module:function or file.py:function."),
)  # fmt: skip


def _checkpoint_options(command: Any) -> Any:
    for option in reversed(CHECKPOINT_OPTIONS):
        command = option(command)
    return command


@main.command(short_help="Score the rows of a file with a trained model.")
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, metavar="FILE",
              help="Where the scores go: .csv, or .parquet (needs pyarrow).")  # fmt: skip
@click.option("--id", "ids", multiple=True, metavar="COLUMN",
              help="A column of FILE to write beside the scores, repeatable. Default: the group's.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@_checkpoint_options
def predict(**options: Any) -> None:
    """Score every row of FILE with CHECKPOINT (a file, or a run folder, whose best one is taken).

    Rows are read, scored and written in the file's order, a batch at a time, so that memory does not grow with the
    file. It is a table (CSV, TSV, Parquet, Arrow) like those of the training; the label column may be missing.
    """
    with _refusals_as_errors(), _missing_as_errors():
        from gdpa.serving import command

        make_console().print(command.predict(**options), markup=False, soft_wrap=True)


@main.command(short_help="The metrics of a trained model on a file.")
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--split", type=click.Choice(["valid", "test"]), default="test", show_default=True,
              help="Without FILE: which samples of the run's own.")  # fmt: skip
@_checkpoint_options
@click.pass_context
def evaluate(ctx: click.Context, /, **options: Any) -> None:
    """AUC, gAUC, LogLoss and NE of CHECKPOINT (a file, or a run folder, whose best one is taken) on the table FILE,
    or on the run's own samples, as a line of JSON."""
    if options["file"] is not None and ctx.get_parameter_source("split") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--split has no meaning with FILE")
    with _refusals_as_errors(), _missing_as_errors():
        from gdpa.serving import command

        click.echo(command.evaluate(**options))


@contextmanager
def _missing_as_errors() -> Iterator[None]:
    """What is not installed, and predictions that are no numbers, in words."""
    try:
        yield
    except (ImportError, ArithmeticError) as e:
        raise click.ClickException(str(e)) from e


@main.command(short_help="Time and memory of all contenders, beside the floor.")
@click.option("--case", "cases", multiple=True, metavar="GLOB", help="Names or globs, repeatable; --list shows them.")
@click.option("--function", "functions", multiple=True, metavar="SPEC", type=Specs(),
              help="Built-in, softplus_squared, module:function or file.py:function; repeatable. Default: gelu_tanh, "
                   "and others on a few cases (--list).")  # fmt: skip
@click.option("--params", type=Numbers(), multiple=True, callback=_together,
              help="Values of the functions' params: 0.5,2 or repeated; with --function.")  # fmt: skip
@click.option("--backend", "only", multiple=True, metavar="NAME",
              help="Contenders, repeatable: a backend of gdpa, eager, eager-compiled, flex-log, gdpa-softmax, "
                   "sdpa-cudnn, sdpa-flash, flash-attn. With --model: see --model --list.")  # fmt: skip
@click.option("--layout", "layouts", multiple=True, metavar="NAME",
              help="How gdpa is given q, k, v: heads, rows, packed, packed-nohint, qkv; repeatable. Default: the "
                   "case's own, and all on a few cases (--list).")  # fmt: skip
@click.option("--precision", "precisions", multiple=True, metavar="NAME",
              help="gdpa's: exact, fast; repeatable. Default: exact, and fast where it differs.")  # fmt: skip
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Default: the GPU if there is one.")
@click.option("--dtype", type=DTYPES, help="Default: bfloat16 on a GPU, float32 on a CPU.")
@click.option("--quick", is_flag=True,
              help="A handful of cases (unless --case names some), one function (unless --function does), few "
                   "repeats: minutes rather than an hour.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=BENCH / "bench.json",
              show_default="gdpa-bench/bench.json, with --model model.json, --host host.json, --data data.json",
              help="The result as JSON; the plots and the HTML report go beside it.")  # fmt: skip
@click.option("--from", "stored", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              metavar="FILE.json", help="Measure nothing: show this result, and make its plots and HTML report again, "
              "beside it or --out. Several runs of one machine and commit become one result, in --out.")  # fmt: skip
@click.option("--compare", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="OLD.json",
              help="Also show the change of every record against this result.")  # fmt: skip
@click.option("--readme", "documents", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              metavar="FILE.md", help="Measure nothing: remake this document's tables from result files.")  # fmt: skip
@click.option("--list", "listing", is_flag=True, help="List the cases and what they are.")
@click.option("--model", "whole", is_flag=True,
              help="Instead: training steps of whole models, against padded ones (--model --list).")  # fmt: skip
@click.option("--host", is_flag=True,
              help="Instead: what a repeated small call costs the host, beside SDPA and FlexAttention.")  # fmt: skip
@click.option("--data", "reading", is_flag=True,
              help="Instead: rows per second from CSV and Parquet files to batches.")  # fmt: skip
@click.option("--compile/--no-compile", "compiled", default=None,
              help="With --model: whether all contenders are compiled. Default: on a GPU.")  # fmt: skip
@click.pass_context
def bench(
    ctx: click.Context, cases: tuple[str, ...], functions: tuple[str, ...], params: tuple[float, ...],
    only: tuple[str, ...], layouts: tuple[str, ...], precisions: tuple[str, ...], device: str | None, dtype: str | None,
    quick: bool, out: Path, stored: tuple[Path, ...], compare: Path | None, documents: tuple[Path, ...], listing: bool,
    whole: bool, host: bool, reading: bool, compiled: bool | None,
) -> None:  # fmt: skip
    """Time and memory of every contender on every case, beside the floor that the machine sets."""
    params = params or ()
    told = ctx.get_parameter_source("out") is click.core.ParameterSource.COMMANDLINE
    if told or not (listing or documents or len(stored) == 1):
        out = _place_of_result(ctx, out, "model" if whole else "host" if host else "data" if reading else "bench")
    from gdpa.bench import join, results, run

    if listing:
        _only_with(ctx, "--list", ("--model",))
        return _list_cases(whole)
    if documents:
        _only_with(ctx, "--readme", ())
        return _refresh_documents(documents)
    if host:
        _only_with(ctx, "--host", ("--device", "--quick", "--out"))
        return _bench_host(device, quick, out)
    if reading:
        _only_with(ctx, "--data", ("--quick", "--out"))
        return _bench_data(quick, out)
    if stored:
        _only_with(ctx, "--from", ("--compare", "--out"))
    elif whole:
        return _bench_models(ctx, cases, functions, params, only, device, dtype, compiled, quick, out)
    elif compiled is not None:
        raise click.UsageError("--compile and --no-compile have a meaning only with --model")
    with _refusals_as_errors():
        old = results.read(compare) if compare is not None else None  # before a long run, not after it
        if len(stored) == 1 and not told:
            return _show(results.read(stored[0]), stored[0], old)
        if stored:
            found = [results.read(path) for path in stored]
            document = found[0] if len(found) == 1 else join.joined(found)
            results.save(document, out)
            return _show(document, out, old)
        plan = _plan(cases, functions, params, only, device, dtype, quick, layouts, precisions)
        with progress(make_console(), run.steps(plan), "benchmark") as step:
            document = run.run(plan, step, lambda so_far: results.save(so_far, out))
    results.save(document, out)
    _show(document, out, old)


@main.command(short_help="Find the best tile sizes on this GPU and store them.")
@click.option("--case", "cases", multiple=True, metavar="GLOB",
              help="Benchmark cases, repeatable; only their classes are tuned. Default: two a class.")  # fmt: skip
@click.option("--function", "functions", multiple=True, metavar="SPEC",
              help="Built-in, softplus_squared, module:function or file.py:function, without params; repeatable. "
                   "Default: gelu_tanh.")  # fmt: skip
@click.option("--backend", type=click.Choice(["hopper", "triton"]), help="Default: the one that gdpa prefers here.")
@click.option("--quick", is_flag=True, help="One case for each class, bfloat16 only, few rounds.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Default: GDPA_TUNING, or gdpa/tuning.json in the user's cache directory.")  # fmt: skip
@click.option("--show", is_flag=True, help="Measure nothing: print what is stored.")
@click.option("--reset", is_flag=True, help="Measure nothing: remove what is stored.")
@click.pass_context
def tune(
    ctx: click.Context, cases: tuple[str, ...], functions: tuple[str, ...], backend: str | None, quick: bool,
    out: Path | None, show: bool, reset: bool,
) -> None:  # fmt: skip
    """Measure which tile sizes and pipeline depths are best on this machine's GPU, and store them for all later runs.

    Forward and backward in 16 bits, for each head dimension and class of key lengths; float32 and the deterministic dq
    keep their defaults. A configuration is chosen if it agrees with the default's results and is 2 % faster. Stored
    choices hold for this GPU, this Triton and this gdpa. Nothing is ever measured outside this command.
    """
    from gdpa.bench import tune_command

    for option, given in (("--show", show), ("--reset", reset)):
        if given:
            _only_with(ctx, option, ("--out",))
    with _refusals_as_errors():
        if show:
            tune_command.show(make_console(), out)
        elif reset:
            tune_command.reset(make_console(), out)
        else:
            tune_command.measure(make_console(), cases, functions, backend, quick, out)


def _only_with(ctx: click.Context, mode: str, allowed: tuple[str, ...]) -> None:
    """Refuse options that ``mode`` would ignore."""
    for option in ctx.command.params:
        given = ctx.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
        if given and option.opts[0] not in (mode, *allowed):
            raise click.UsageError(f"{option.opts[0]} has no meaning with {mode}")


def _place(device: str | None) -> torch.device | None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch sees no GPU here")
    return torch.device(device) if device else None


def _plan(
    cases: tuple[str, ...], functions: tuple[str, ...], params: tuple[float, ...], only: tuple[str, ...],
    device: str | None, dtype: str | None, quick: bool, layouts: tuple[str, ...], precisions: tuple[str, ...],
) -> Plan:  # fmt: skip
    import torch

    from gdpa.bench.functions import benchmark_function
    from gdpa.bench.run import make_plan

    if params and not functions:
        raise click.UsageError("--params needs --function: the default functions have none")
    place = _place(device)
    chosen = tuple(benchmark_function(spec, params) for spec in functions)
    kind = getattr(torch, dtype) if dtype else None
    return make_plan(cases, chosen, only, place, kind, quick, layouts, precisions)


def _bench_models(
    ctx: click.Context, cases: tuple[str, ...], functions: tuple[str, ...], params: tuple[float, ...],
    only: tuple[str, ...], device: str | None, dtype: str | None, compiled: bool | None, quick: bool, out: Path,
) -> None:  # fmt: skip
    from gdpa.bench import model_command

    options = ("--case", "--function", "--params", "--backend", "--device", "--dtype", "--compile", "--quick", "--out")
    _only_with(ctx, "--model", options)
    with _refusals_as_errors():
        model_command.measure(
            make_console(), out, cases, functions, params, only, device, dtype, compiled, quick
        )  # fmt: skip


def _bench_host(device: str | None, quick: bool, out: Path) -> None:
    import torch

    from gdpa.bench import host, results

    console = make_console()
    where = _place(device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with progress(console, host.steps(where), "host") as step:
        document = host.run(where, quick, step)
    results.save(document, out)
    host.show(console, document)
    console.print(f"result: {out}", markup=False)


def _place_of_result(ctx: click.Context, out: Path, kind: str) -> Path:
    """--out, if it is no file of something else; by default a file in a folder of gdpa's own."""
    if ctx.get_parameter_source("out") is click.core.ParameterSource.DEFAULT:
        out = BENCH / f"{kind}.json"
        held = {entry.name for entry in BENCH.iterdir()} if BENCH.is_dir() else set()
        if BENCH.exists() and held.isdisjoint({"bench.json", "model.json", "host.json", "data.json"}) and held != set():
            raise click.UsageError(f"{BENCH} holds something else than results of gdpa bench: say with --out where to")
    elif out.exists():
        try:
            ours = "format" in json.loads(out.read_text())
        except (ValueError, UnicodeDecodeError, TypeError):
            ours = False
        if not ours:
            raise click.UsageError(f"--out {out}: that file is no result of gdpa bench, and stays as it is")
    return out


def _bench_data(quick: bool, out: Path) -> None:
    from gdpa.bench import data_rates, results

    console = make_console()
    with progress(console, data_rates.STEPS, "data") as step:
        document = data_rates.run(20_000 if quick else 200_000, step)
    results.save(document, out)
    data_rates.show(console, document)
    console.print(f"result: {out}", markup=False)


def _list_cases(whole: bool) -> None:
    from gdpa.bench import coverage, layouts, suite

    console = make_console()
    if whole:
        from gdpa.bench import model_command

        return model_command.list_all(console)
    console.print(suite.__doc__, markup=False)
    console.print("by default on a GPU: " + " ".join(suite.names()), markup=False)
    console.print("by default on a CPU: " + " ".join(suite.names(on_cpu=True)), markup=False)
    console.print("with --quick: " + " ".join(suite.QUICK_NAMES), markup=False)
    console.print(f"functions: {coverage.EVERYWHERE} on every case", markup=False)
    for name, cases in coverage.ELSEWHERE.items():
        console.print(f"    {name} on {', '.join(cases)} (not with --quick)", markup=False)
    console.print(
        f"layouts: the case's own; all on {', '.join(coverage.LAYOUT_CASES)} (not with --quick)", markup=False
    )
    console.print(layouts.__doc__, markup=False)


def _refresh_documents(paths: tuple[Path, ...]) -> None:
    from gdpa.bench.documents import refresh

    for path in paths:
        with _refusals_as_errors():
            click.echo(f"{path}: {refresh(path)} tables")


def _show(document: dict[str, Any], path: Path, old: dict[str, Any] | None) -> None:
    """The result in ``path`` on the terminal, and its plots and report beside it."""
    from gdpa.bench import conclusion, report
    from gdpa.bench.page import write_page
    from gdpa.bench.plot import plot

    console = make_console()
    if "kind" in document or "kind" in (old or {}):
        from gdpa.bench import data_rates, host, model_command

        if old is not None:
            raise click.UsageError("--compare compares results of kernels, not those of --model, --host or --data")
        if document["kind"] in (host.KIND, data_rates.KIND):
            return (host if document["kind"] == host.KIND else data_rates).show(console, document)
        return model_command.show(console, document, path)
    console.print(report.table(document))
    for line in report.skipped(document):
        console.print(line, style="dim", markup=False)
    for line in conclusion.lines(document):
        console.print(line, style="yellow" if line.startswith("Warning") else None, markup=False)
    if old is not None:
        console.print(report.comparison(document, old))
    console.print(f"result: {path}", markup=False)
    console.print(plot(document, path.with_suffix(".png")), markup=False)
    console.print(write_page(document, path.with_suffix(".html")), markup=False)


if __name__ == "__main__":
    main()
