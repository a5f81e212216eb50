"""The `gdpa` command. Each subcommand reads its options, calls one module and prints what that returns.

One file per group of commands; what they share is in options.py. Nothing here imports torch until a command runs.
"""

from __future__ import annotations

import click

import gdpa
from gdpa.cli import benchmarks, checking, showing, training, tuning


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(gdpa.__version__, prog_name="gdpa")
def main() -> None:
    """Attention in which softmax is replaced by any function: what this machine can run, whether it is right, how fast
    it is; and training of recommendation models with it."""


for _command in (
    checking.info,
    checking.check,
    checking.fuzz,
    showing.demo,
    showing.compare,
    training.convert,
    training.train,
    training.predict,
    training.evaluate,
    benchmarks.bench,
    tuning.tune,
):
    main.add_command(_command)
