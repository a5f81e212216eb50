"""`gdpa tune`: the best tile sizes on this GPU."""

from __future__ import annotations

from pathlib import Path

import click

from gdpa.cli.options import Specs, only_with, refusals_as_errors
from gdpa.commands.terminal import make_console


@click.command(short_help="Find the best tile sizes on this GPU and store them.")
@click.option("--case", "cases", multiple=True, metavar="GLOB",
              help="Benchmark cases, repeatable; only their classes are tuned. Default: two a class.")  # fmt: skip
@click.option("--function", "functions", multiple=True, metavar="SPEC", type=Specs("softplus_squared"),
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
    from gdpa.bench.tune import command as tune_command

    for option, given in (("--show", show), ("--reset", reset)):
        if given:
            only_with(ctx, option, ("--out",))
    with refusals_as_errors():
        if show:
            tune_command.show(make_console(), out)
        elif reset:
            tune_command.reset(make_console(), out)
        else:
            tune_command.measure(make_console(), cases, functions, backend, quick, out)
