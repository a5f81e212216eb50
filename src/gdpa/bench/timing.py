"""How long a call takes: the median of many, with the 20th and 80th percentiles.

On a GPU each call is timed by its own pair of events, and a buffer larger than the L2 cache is overwritten before it,
so that no call finds its inputs in the cache. Where the GPU would wait for the host, it is overwritten more often,
until the host has submitted the call: Python's time is not the kernels', and in training it hides behind earlier work.
Only short kernels need that, so nobody's long ones get a pause to cool down that others do not get. The first tenth of
a second after a pause is up to 10 % faster, hence the warm-up. For seconds after it the power limit makes the clock
swing: self-attention of 2048 on an H200 ran at 650, 600, 645, 605, 640 ... 635 TFLOP/s, with a period of 0.7 s. Calls
of 5 ms and more are measured for one such period; 0.2 s would be 4 % off, up or down. On a CPU the clock is the wall's.

>>> time_ms(lambda: a @ b, a.device).median_ms
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import quantiles
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Clock = Callable[[Callable[[], Any], int], list[float]]

FLUSH_BYTES = 256 * 2**20  # an H200 has 60 MiB of L2, no GPU has 256
FLUSH_MS = 0.06  # on an H200; more elsewhere
MOST_FLUSHES = 32  # a call that waits for the device takes as long as it takes


@dataclass(frozen=True)
class Timing:
    """Milliseconds; half of the calls took at most ``median_ms``, a fifth less than ``p20_ms``."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    repeats: int


@dataclass(frozen=True)
class Effort:
    """How much time one measurement may take: warm-up and measuring in ms, and bounds on the number of calls."""

    warmup_ms: float = 200.0
    measure_ms: float = 700.0
    least: int = 7
    most: int = 150


QUICK = Effort(warmup_ms=20.0, measure_ms=100.0, least=3, most=30)


def time_ms(fn: Callable[[], Any], device: torch.device | str, effort: Effort | None = None) -> Timing:
    """Time ``fn()`` on ``device``."""
    effort = effort or Effort()
    clock = clock_of(device)
    clock(fn, 1)  # compiles, allocates, starts threads
    times = clock(fn, 2)
    once = max(sum(times) / 2, 1e-3)
    clock(fn, min(int(effort.warmup_ms / once), effort.most))
    repeats = min(max(int(effort.measure_ms / once), effort.least), effort.most)
    # A call longer than the whole warm-up was warm at its second: those two count.
    kept = times if once > effort.warmup_ms else []
    return summarise(kept + clock(fn, repeats - len(kept)))


class Stopwatch:
    """Times one function in several turns; what others do in between does not count."""

    def __init__(self, clock: Clock, effort: Effort, turns: int) -> None:
        self._clock, self._effort, self._turns = clock, effort, turns
        self._once = 0.0
        self._times: list[float] = []

    def turn(self, fn: Callable[[], Any]) -> None:
        """One of the turns."""
        effort, kept = self._effort, []
        if not self._times:
            self._clock(fn, 1)  # compiles, allocates, starts threads
            kept = self._clock(fn, 1)
            if kept[0] <= effort.measure_ms:  # else it has a call in every turn
                kept += self._clock(fn, 1)
            self._once = max(sum(kept) / len(kept), 1e-3)
        long = self._once > effort.warmup_ms  # warm at its second call, which counts
        if not long:
            self._clock(fn, min(int(effort.warmup_ms / self._turns / self._once), effort.most))
            kept = []
        repeats = min(max(int(effort.measure_ms / self._once), effort.least), effort.most)
        self._times += kept + self._clock(fn, max(math.ceil(repeats / self._turns) - len(kept), 0))

    def timing(self) -> Timing:
        return summarise(self._times)


def time_in_turns(
    calls: Mapping[str, Callable[[], Any]], device: torch.device | str, effort: Effort | None = None, turns: int = 3
) -> dict[str, Timing]:
    """Time all of ``calls`` on ``device`` in turns: a load that comes and goes meets all of them."""
    watches = {name: Stopwatch(clock_of(device), effort or Effort(), turns) for name in calls}
    for turn in range(turns):
        for name in order(list(calls), turn):
            watches[name].turn(calls[name])
    return {name: watch.timing() for name, watch in watches.items()}


def order(names: Sequence[T], turn: int) -> list[T]:
    """Those of one turn: in every other turn backwards, so that nobody always follows the same one."""
    return list(names) if turn % 2 == 0 else list(reversed(names))


def clock_of(device: torch.device | str) -> Clock:
    """What times calls on ``device``: the milliseconds of each of n calls of a function."""
    return _cuda_times if torch.device(device).type == "cuda" else _cpu_times


def summarise(times: list[float]) -> Timing:
    fifths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
    return Timing(median_ms=fifths[4], p20_ms=fifths[1], p80_ms=fifths[7], repeats=len(times))


def _cpu_times(fn: Callable[[], Any], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _cuda_times(fn: Callable[[], Any], repeats: int) -> list[float]:
    flush, times = _flush_buffer(), 1
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        for _ in range(times):
            flush.zero_()
        start.record()
        begun = time.perf_counter()
        fn()
        end.record()
        if start.query():  # the GPU came by before the call was there
            host_ms = (time.perf_counter() - begun) * 1e3
            times = min(times + 1 + int(host_ms / FLUSH_MS), MOST_FLUSHES)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


@cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
