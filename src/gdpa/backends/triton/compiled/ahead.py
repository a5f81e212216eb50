"""Launches that only compile, several kernels at a time.

A pass may have more kernels than its own: packed sequences have one that makes a list of tiles, which comes first. What
is compiled ahead need not keep to that order: the kernel that takes the function, by far the largest, is compiled by
the thread that asked, and the others beside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple


class Job(NamedTuple):
    """A kernel to compile."""

    kernel: Any
    is_large: bool
    compile: Callable[[], Any]


class _Mode(threading.local):
    """Of this thread: what its launches are to compile; None if they launch."""

    jobs: list[Job] | None = None


_mode = _Mode()


def is_asked() -> bool:
    """Whether launches of this thread only compile."""
    return _mode.jobs is not None


def put(job: Job) -> None:
    assert _mode.jobs is not None
    _mode.jobs.append(job)


@contextmanager
def compiling(
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[list[tuple[str, float]]]:
    """Launches of this thread inside the block launch nothing; at its end their kernels are compiled. Yields a list,
    which then has the names of kernels and the seconds each took. Tensors may be on the meta device, and count as
    aligned. ``around``: what other threads are to enter while they compile."""
    before, _mode.jobs = _mode.jobs, []
    compiled: list[tuple[str, float]] = []
    try:
        yield compiled
        jobs = _mode.jobs
    finally:
        _mode.jobs = before
    compiled += _compile(jobs, around)


def _compile(jobs: list[Job], around: Callable[[], AbstractContextManager[Any]]) -> list[tuple[str, float]]:
    """One kernel beside the other. Launches of the same one may have the same code, which the second finds."""
    kernels: dict[int, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: not job.is_large):
        kernels.setdefault(id(job.kernel), []).append(job)
    if len(kernels) < 2:
        return [made for same in kernels.values() for made in map(_timed, same)]

    def elsewhere(same: list[Job]) -> list[tuple[str, float]]:
        with around():
            return list(map(_timed, same))

    first, *others = kernels.values()
    with ThreadPoolExecutor(len(others), "gdpa-compile") as pool:
        beside = [pool.submit(elsewhere, same) for same in others]
        made = list(map(_timed, first))
        return made + [one for future in beside for one in future.result()]


def _timed(job: Job) -> tuple[str, float]:
    start = time.perf_counter()
    job.compile()
    return job.kernel.__name__, time.perf_counter() - start
