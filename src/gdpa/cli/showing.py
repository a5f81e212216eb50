"""`gdpa demo` and `gdpa compare`: functions, from their kernels to what they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gdpa.cli.checking import load
from gdpa.cli.claiming import claim_report
from gdpa.cli.options import Numbers, Specs, given, refusals_as_errors, together
from gdpa.commands.terminal import make_console


@click.command(short_help="One function: its kernel, error, training and cost.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("gdpa-demo"), show_default=True,
              help="Where report.html, the numbers and the emitted code go.")  # fmt: skip
@click.option("--activation", "spec", metavar="SPEC", type=Specs("softmax"),
              help="A function to use instead of the demo's own: a built-in's name, module:function or "
                   "file.py:function.")  # fmt: skip
@click.option("--params", type=Numbers(), multiple=True, callback=together,
              help="Initial values of its params; 1 for each by default.")  # fmt: skip
@click.option(
    "--quick", is_flag=True, help="One seed, few steps and lengths, no interpreter: a minute or two on two cores."
)
@click.pass_context
def demo(ctx: click.Context, out: Path, spec: str | None, params: tuple[float, ...] | None, quick: bool) -> None:
    """One function: the kernel it becomes, its error, how a model learns with it beside softmax, its time and memory.

    Writes a report for the browser. Exits with 1 if a result is wrong.
    """
    if spec is None and params is not None:
        raise click.UsageError("--params needs --activation")
    claim_report("demo", out, given(ctx, "out"), ["kernel.py"])
    from gdpa import demo

    try:
        with refusals_as_errors():
            loaded = load((spec,), params, None)[0] if spec else None
            if loaded is not None and params is not None:
                loaded.check_start(params)
            right = demo.run(make_console(), out, quick, loaded)
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


@click.command(short_help="Functions side by side: errors, kernels, speed, training.")
@click.option("--activation", "specs", multiple=True, required=True, metavar="SPEC", type=Specs("softmax"),
              help="A built-in's name, softmax, module:function or file.py:function (or an nn.Module there); at least "
                   "two.")  # fmt: skip
@click.option("--params", multiple=True, type=Named(Numbers(), "gate=0.5 or gate=0.5,2"), metavar="NAME=NUMBERS",
              help="Initial values of a function's params; 1 for each by default.")  # fmt: skip
@click.option("--normalize", multiple=True, type=Named(click.Choice(["sum", "abs"]), "gate=sum"),
              metavar="NAME=sum|abs",
              help="Divide a function's outputs by the sum of a row's (absolute) weights.")  # fmt: skip
@click.option("--model", metavar="NAME", help="The model to train with each: interformer (the default), transformer, "
              "hstu, kunlun, or as in gdpa train.")  # fmt: skip
@click.option("--set", "assignments", multiple=True, metavar="OPTION=VALUE", help="An option of the model, repeatable.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.toml",
              help="Settings of gdpa train, with your data. Default: the synthetic click log.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(min=1), help="Runs of each function. Default: 3, or 1 with --quick.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps of each run.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("gdpa-compare"),
              show_default=True, help="Where report.html, the numbers and the emitted code go.")  # fmt: skip
@click.option(
    "--quick", is_flag=True, help="One seed, few steps and lengths, no interpreter; --seeds and --steps override it."
)
@click.pass_context
def compare(
    ctx: click.Context, specs: tuple[str, ...], params: tuple[tuple[str, tuple[float, ...]], ...],
    normalize: tuple[tuple[str, str], ...], model: str | None, assignments: tuple[str, ...],
    config: Path | None, seeds: int | None, steps: int | None, out: Path, quick: bool,
) -> None:  # fmt: skip
    """Attention functions side by side, in one report: their errors against float64, the kernels that they become, what
    they cost, and how a model learns with each over several seeds, with intervals of the differences.

    Others are compared with softmax if it is among them, else with the first. Exits with 1 if a result is wrong. Two
    functions and three seeds take about two minutes on two idle cores, half a minute with --quick; --steps, --seeds and
    a model of --config take in proportion.
    """
    if len(specs) < 2:
        raise click.UsageError("a comparison needs at least two functions: give --activation twice")
    claim_report("compare", out, given(ctx, "out"), [f"kernel_{spec.rpartition(':')[2]}.py" for spec in specs])
    try:
        from gdpa.compare import command, plan
        from gdpa.train.config.flags import assigned

        functions = plan.load_functions(specs, dict(params), dict(normalize))
        trial = plan.make_trial(
            functions, model=model, options=assigned(assignments), file=config, seeds=seeds, steps=steps, quick=quick
        )
        with refusals_as_errors():
            right = command.run(make_console(), functions, trial, out, quick)
    except (ImportError, ArithmeticError, ValueError) as e:
        raise click.ClickException(str(e)) from e
    if not right:
        raise SystemExit(1)
