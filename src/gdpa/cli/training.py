"""`gdpa convert`, `train`, `predict` and `evaluate`: from published files to a trained model and its scores."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from gdpa import paths
from gdpa.cli.options import given, missing_as_errors, refusals_as_errors
from gdpa.commands.terminal import make_console, progress


@click.command(short_help="A published data set as a table with histories.")
@click.argument("name", metavar="NAME")
@click.argument("raw", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="CSV (.csv, .csv.gz) or Parquet (.parquet), by its name. Default: NAME.csv.")  # fmt: skip
@click.option("--max-len", type=click.IntRange(min=1), default=50, show_default=True, help="Most events in a history.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
def convert(name: str, raw: Path, out: Path | None, max_len: int, overwrite: bool) -> None:
    """Make a table for `gdpa train` of the files of a data set as they are published, unpacked in FOLDER.

    NAME: movielens-100k, movielens-1m, movielens-20m, kuairand-pure, kuairand-1k, kuairand-27k. Rows are in the order
    of time, each with what its user did before. Large ones are best written as Parquet, a tenth of the size of CSV.
    """
    if name not in paths.CONVERTERS:
        raise click.UsageError(f"NAME must be one of {', '.join(paths.CONVERTERS)}, not {name!r}")
    out = out or Path(f"{name}.csv")
    if out.exists() and not overwrite:
        raise click.UsageError(f"{out} already exists: --overwrite replaces it, or choose another --out")
    from gdpa.data.convert import CONVERTERS

    with refusals_as_errors(), missing_as_errors():
        rows = CONVERTERS[name].convert(raw, out, max_len, partial(progress, make_console()), click.echo)
    click.echo(f"{out}: {rows:,} rows, {out.stat().st_size / 1e6:,.1f} MB")
    click.echo(f"gdpa train --data files --data-train {out} --data-preset {CONVERTERS[name].preset} --data-split last")


class TrainCommand(click.Command):
    """Its other flags are the settings of a run, which are only imported when the command is used."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        try:
            from gdpa.train.config.flags import options
        except ImportError as e:
            raise click.ClickException(str(e)) from e
        own = super().get_params(ctx)
        return [*own[:-1], *options(), own[-1]]  # --help stays last


@click.command(cls=TrainCommand, short_help="Train a model of click logs.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.toml",
              help="Settings; flags override them.")  # fmt: skip
@click.option("--model", metavar="NAME", help="dlrm, din, transformer, hstu, interformer (the default), kunlun, or "
              "module:function or file.py:function that makes one.")  # fmt: skip
@click.option("--set", "assignments", multiple=True, metavar="OPTION=VALUE",
              help="An option of the model, repeatable: num_layers=2, activation=silu, "
                   "activation=module:function or activation=file.py:function, "
                   "and params=[0.5, 1] if that function has params.")  # fmt: skip
@click.option("--print-config", is_flag=True, help="Print all settings as TOML and exit.")
@click.option("--resume", is_flag=True,
              help="Continue the run in --out from its last checkpoint; start it if there is none.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Remove the run in --out and start over.")
@click.option("--replay", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
              help="Instead of training, recompute the step that stopped a run with inf or NaN.")  # fmt: skip
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
                 help="Rows per batch."),
    click.option("--vocabularies", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.json",
                 help="Which id each value has. Default: vocabularies.json of the checkpoint's run folder."),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
                 help="auto: a GPU if there is one."),
    click.option("--trust", is_flag=True,
                 help="Import and run what the checkpoint names as module:function or file.py:function."),
)  # fmt: skip


def _checkpoint_options(command: Any) -> Any:
    for option in reversed(CHECKPOINT_OPTIONS):
        command = option(command)
    return command


@click.command(short_help="Score the rows of a file with a trained model.")
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, metavar="FILE",
              help="Where the scores go: .csv, or .parquet (needs pyarrow).")  # fmt: skip
@click.option("--id", "ids", multiple=True, metavar="COLUMN",
              help="A column of FILE to write beside the scores, repeatable. Default: the group's.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@_checkpoint_options
def predict(**options: Any) -> None:
    """Score every row of FILE with CHECKPOINT (a file, or a run folder, whose best one is taken).

    Rows are read, scored and written in the file's order, a batch at a time, so that memory does not grow with the
    file. It is a table (CSV, TSV, Parquet, Arrow) like those of the training; the label column may be missing.
    """
    with refusals_as_errors(), missing_as_errors():
        from gdpa.serving import command

        make_console().print(command.predict(**options), markup=False, soft_wrap=True)


@click.command(short_help="The metrics of a trained model on a file.")
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--split", type=click.Choice(["valid", "test"]), default="test", show_default=True,
              help="Without FILE: which of the run's own samples.")  # fmt: skip
@_checkpoint_options
@click.pass_context
def evaluate(ctx: click.Context, /, **options: Any) -> None:
    """AUC, gAUC, LogLoss and NE of CHECKPOINT (a file, or a run folder, whose best one is taken) on the table FILE,
    or on the run's own samples, as a line of JSON."""
    if options["file"] is not None and given(ctx, "split"):
        raise click.UsageError("--split does not apply with FILE")
    with refusals_as_errors(), missing_as_errors():
        from gdpa.serving import command

        click.echo(command.evaluate(**options))
