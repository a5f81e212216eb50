"""`gdpa demo`: a function of our own, from its kernel to what it learns."""

from __future__ import annotations

from pathlib import Path

import click

from gdpa.commands.terminal import make_console


@click.command(short_help="A function of our own: kernel, error, training, cost.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("gdpa-demo"), show_default=True,
              help="Where report.html, the numbers and the emitted code go.")  # fmt: skip
@click.option("--quick", is_flag=True, help="One seed, few steps and lengths, no interpreter: some seconds.")
def demo(out: Path, quick: bool) -> None:
    """A function of our own: the kernel it becomes, its error, how it learns beside softmax, its time and memory.

    Writes a report for the browser. Exits with 1 if a result is wrong.
    """
    from gdpa import demo

    try:
        right = demo.run(make_console(), out, quick)
    except (ImportError, ArithmeticError) as e:  # what gdpa.train needs, or a loss that is inf or NaN
        raise click.ClickException(str(e)) from e
    if not right:
        raise SystemExit(1)
