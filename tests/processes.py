"""Processes for the tests: of several ranks, of workers, and of what has to be seen from a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

NEEDED = ["gdpa.distributed", "gdpa.nn", "gdpa.train", "sklearn.metrics", "torch._dynamo", "torch.distributed.fsdp"]


def forked() -> Any:
    """Where to make processes: all are forked from one that has imported what they need, and computed nothing.

    To import it takes each of them 3 to 7 seconds otherwise.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(NEEDED)
    return context


def elsewhere(fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args), or its exception, from a forked process, in which no function has been traced yet."""
    with ProcessPoolExecutor(1, forked()) as pool:
        return pool.submit(fn, *args).result()


def run_program(program: str, *arguments: str) -> None:
    """``program`` as the main program of a forked process."""
    elsewhere(_run, program, arguments)


def exit_of(program: str, log: Path) -> int | None:
    """With what status ``program`` ends a forked process, whose stderr goes to ``log``; none after 100 seconds."""
    process = forked().Process(target=_run_logged, args=(program, log), daemon=True)
    process.start()
    process.join(100)
    return process.exitcode


def _run_logged(program: str, log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    _run(program, ())


def _run(program: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    exec(program, {"__name__": "__main__"})
