"""The seeds of the contest spread over the cores: a process and one thread for each, and bars that show how far.

Small models gain nothing from threads. One thread each also gives the same numbers whatever the number of cores.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gdpa.demo.contest import Tell, run_seed
from gdpa.demo.statistics import shown

Work = Callable[[Any, int, Tell], dict[str, Any]]  # of a plan and a seed
MOST = 8  # processes: each holds a torch of its own

_messages: Any = None  # of a worker: where it tells how far it is,
_stop: Any = None  # and the event that ends it


def run(plan: Any, console: Console, work: Work = run_seed) -> list[dict[str, Any]]:
    """The answers of ``work``, in the order of the seeds. A plan has contestants, seeds and steps."""
    count = min(len(plan.seeds), cores(), MOST)
    with board(plan, console) as tell:
        return _here(plan, tell, work) if count == 1 else _apart(plan, count, tell, work)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _here(plan: Any, tell: Tell, work: Work = run_seed) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [work(plan, seed, tell) for seed in plan.seeds]
    finally:
        torch.set_num_threads(threads)


def _apart(plan: Any, count: int, tell: Tell, work: Work = run_seed) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    messages, stop = context.SimpleQueue(), context.Event()
    with ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(messages, stop)) as pool:
        futures = [pool.submit(_work, plan, seed, work) for seed in plan.seeds]
        try:
            _listen(futures, messages, tell)
        except BaseException:
            stop.set()  # the pool cannot cancel what runs, nor what it has handed out already
            raise
        return [future.result() for future in futures]


def _listen(futures: list[Future[dict[str, Any]]], messages: Any, tell: Tell) -> None:
    """Until all have ended, or one has failed."""
    pending = True
    while pending:
        done, others = wait(futures, timeout=0.1, return_when=FIRST_EXCEPTION)
        pending = bool(others)
        while not messages.empty():
            tell(*messages.get())
        for future in done:
            future.result()  # raises what the worker raised


def _begin(messages: Any, stop: Any) -> None:
    global _messages, _stop
    _messages, _stop = messages, stop
    torch.set_num_threads(1)


def _work(plan: Any, seed: int, work: Work) -> dict[str, Any]:
    def tell(*message: Any) -> None:
        if _stop.is_set():
            raise KeyboardInterrupt
        _messages.put(message)

    return work(plan, seed, tell)


@contextmanager
def board(plan: Any, console: Console) -> Iterator[Tell]:
    """A bar for each contestant over all its seeds; in a log a line for each run that has ended."""
    total = len(plan.contestants) * len(plan.seeds)
    ended: list[dict[str, Any]] = []

    def line(run: dict[str, Any]) -> str:
        return (
            f"[{len(ended)}/{total}] {run['name']}, seed {run['seed']}: AUC {shown(run['auc'])}, "
            f"LogLoss {shown(run['logloss'])}"
        )

    if not console.is_terminal:

        def log(name: str, seed: int, step: int, run: dict[str, Any] | None) -> None:
            if run is not None:
                ended.append(run)
                console.print(line(run), markup=False)

        yield log
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks = {c.name: bars.add_task(c.name, total=plan.steps * len(plan.seeds), state="") for c in plan.contestants}
        steps = {name: dict.fromkeys(plan.seeds, 0) for name in tasks}

        def show(name: str, seed: int, step: int, run: dict[str, Any] | None) -> None:
            steps[name][seed] = step
            if run is not None:
                ended.append(run)
            mine = [run["auc"] for run in ended if run["name"] == name]
            state = f"AUC {' '.join(map(shown, mine))}" if mine else ""
            bars.update(tasks[name], completed=sum(steps[name].values()), state=state)

        yield show
