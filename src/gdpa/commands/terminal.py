"""What the commands print with: one console, and progress that also reads well in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LOG_WIDTH = 140  # where there is no terminal to ask, as in CI: tables do not wrap


def make_console() -> Console:
    """A console on the current stdout."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(LOG_WIDTH, console.width))


@contextmanager
def progress(console: Console, total: int, title: str) -> Iterator[Callable[[str], None]]:
    """Gives ``step(label)``, to be called before each of ``total`` steps: it moves a bar, or prints a line in a log."""
    if not console.is_terminal:
        done = 0

        def log(label: str) -> None:
            nonlocal done
            done += 1
            console.print(f"[{done}/{total}] {label}", markup=False)

        yield log
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        started = False

        def advance(label: str) -> None:
            nonlocal started
            bar.update(task, advance=int(started), description=label)
            started = True

        yield advance
