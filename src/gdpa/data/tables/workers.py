"""Decoding in other processes or threads, with the results in order: their number does not change what is read."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import TypeVar

from gdpa.data.decoding import Decoded, Decoder
from gdpa.data.sources.base import Task

T = TypeVar("T")
AHEAD = 2  # tasks of each process that wait or are done
_decoder: Decoder | None = None


class Workers:
    """``count`` processes or threads, begun when they are first needed; 0 decodes in this one."""

    def __init__(self, count: int, decoder: Decoder) -> None:
        self.count, self.decoder = count, decoder
        self._pool: Executor | None = None

    def decode(self, tasks: Iterable[tuple[T, Task]]) -> Iterator[tuple[T, Decoded]]:
        """(what came with the task, its rows), one after another."""
        if not self.count:
            for about, task in tasks:
                yield about, self._decode(task)
            return
        held: deque[tuple[T, Future[Decoded]]] = deque()
        try:
            for about, task in tasks:
                pool = self._started(task.threads)
                work = self._decode if task.threads else _decode
                held.append((about, pool.submit(work, task)))
                if len(held) > AHEAD * self.count:
                    yield _done(held)
            while held:
                yield _done(held)
        finally:
            for _, future in held:
                future.cancel()

    def _decode(self, task: Task) -> Decoded:
        return self.decoder(task.columns())

    def _started(self, threads: bool) -> Executor:
        if self._pool is None and threads:
            self._pool = ThreadPoolExecutor(self.count)
        elif self._pool is None:
            # Spawned, since a fork of a process with threads, such as torch's and Arrow's, may hang.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count, context, initializer=_begin, initargs=(self.decoder,))
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __getstate__(self) -> dict[str, object]:
        """A copy in another process begins its own."""
        return {**self.__dict__, "_pool": None}


def _done(held: deque[tuple[T, Future[Decoded]]]) -> tuple[T, Decoded]:
    about, future = held.popleft()
    return about, future.result()


def _begin(decoder: Decoder) -> None:
    global _decoder
    _decoder = decoder


def _decode(task: Task) -> Decoded:
    assert _decoder is not None
    return _decoder(task.columns())
