"""What a run shows while it runs: a bar on a terminal, JSON lines anywhere else, nothing without a console."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

SHOWN = ("auc", "gauc", "logloss", "ne")


class Silent:
    """The interface, and what a run without a console does."""

    def begin(self, total: int | None, done: int, **facts: Any) -> None:
        """Before the first step; ``total`` steps if that is known, of which ``done`` were made before."""

    def step(self, record: Mapping[str, Any]) -> None:
        """After every step: step, loss, samples_per_s."""

    def validating(self, samples: int) -> None:
        """During an evaluation: samples done."""

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """After an evaluation."""

    def message(self, text: str) -> None:
        """In words."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """Once, also after an error (then with nothing)."""


class Lines(Silent):
    """Few and for machines: the beginning, evaluations, messages, the end."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def _print(self, event: str, values: Mapping[str, Any]) -> None:
        line = json.dumps({"event": event, **values})
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def begin(self, total: int | None, done: int, **facts: Any) -> None:
        self._print("begin", {"steps": total, "step": done, **facts})

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._print("eval", record)

    def message(self, text: str) -> None:
        self._print("message", {"text": text})

    def end(self, summary: Mapping[str, Any]) -> None:
        if summary:
            self._print("end", summary)


class Bar(Silent):
    """A bar with the loss and the speed; evaluations stay above it; a table at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("training", total=None, state="")
        self._validated = 0

    def begin(self, total: int | None, done: int, **facts: Any) -> None:
        self._console.print(", ".join(f"{name} {value}" for name, value in facts.items()), markup=False)
        self._bar.update(self._task, total=total, completed=done)
        self._bar.start()

    def step(self, record: Mapping[str, Any]) -> None:
        state = f"loss {record['loss']:.4f}  {record['samples_per_s']:,.0f} samples/s"
        self._validated = 0
        self._bar.update(self._task, completed=record["step"], description="training", state=state)

    def validating(self, samples: int) -> None:
        self._validated += samples
        self._bar.update(self._task, description="validating", state=f"{self._validated:,} samples")

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._validated = 0
        others = [name for name in record if name.endswith(".auc")]  # of further labels
        values = "  ".join(f"{name} {_number(record[name])}" for name in (*SHOWN, *others))
        self._bar.console.print(f"step {record['step']:>7}  {record['split']:<5}  {values}", markup=False)

    def message(self, text: str) -> None:
        self._bar.console.print(text, markup=False, soft_wrap=True)

    def end(self, summary: Mapping[str, Any]) -> None:
        self._bar.stop()
        if summary:
            self._console.print(_summary_table(summary))
            for name in ("steps", "seconds", "samples_per_s", "best_step", "best_checkpoint"):
                if summary.get(name) is not None:
                    self._console.print(f"{name.replace('_', ' ')}: {_number(summary[name])}", markup=False)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _summary_table(summary: Mapping[str, Any]) -> Table:
    table = Table("split", *SHOWN, "samples")
    for split, values in summary["metrics"].items():
        table.add_row(split, *(_number(values[name]) for name in SHOWN), f"{values['samples']:,}")
    return table


def make_reporter(console: Console | None) -> Silent:
    if console is None:
        return Silent()
    return Bar(console) if console.is_terminal else Lines(console)
