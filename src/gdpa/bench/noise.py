"""Two measurements compared in words: faster only above 1, and nothing where the spread exceeds the difference."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]  # median_ms, p20_ms, p80_ms


def ratio(ours: Record, theirs: Record) -> float:
    """How many times as fast ``ours`` is."""
    return theirs["median_ms"] / ours["median_ms"]


def uncertain(ours: Record, theirs: Record) -> bool:
    """Whether the ranges from p20 to p80 overlap, so that the order of the medians may be chance."""
    first, second = sorted((ours, theirs), key=lambda record: record["median_ms"])
    return first["p80_ms"] >= second["p20_ms"]


def speed(ours: Record, theirs: Record) -> str:
    """1.8x faster, 1.1x slower, or that the spread exceeds the difference."""
    if uncertain(ours, theirs):
        return "within the noise"
    return than(ratio(ours, theirs), "faster", "slower")


def than(times: float, more: str, less: str) -> str:
    """1.8x faster, 1.3x slower, equal: a factor is never below 1."""
    shown, word = (times, more) if times >= 1 else (1 / times if times else float("inf"), less)
    digits = f"{shown:.1f}" if shown >= 1.95 else f"{shown:.2f}"
    return "equal" if digits == "1.00" else f"{digits}x {word}"


def between(low: float, high: float) -> str:
    """1.2x to 1.8x faster, 1.1x slower to 1.3x faster."""
    first, last = than(low, "faster", "slower"), than(high, "faster", "slower")
    if first == last:
        return first
    if first.split()[-1] == last.split()[-1] == "slower":
        first, last = last, first
    word = last.split()[-1]
    return f"{first.removesuffix(f' {word}')} to {last}"


class Others:
    """How busy other processes keep the machine from now on."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def load(self) -> dict[str, float] | None:
        """Cores that others used on average so far, and how many there are; None where the system does not tell."""
        busy, took = _busy_seconds(), time.monotonic() - self._began
        if busy is None or self._busy is None or took <= 0:
            return None
        others = (busy - self._busy - (_own_seconds() - self._own)) / took
        return {"others": round(max(others, 0.0), 2), "cores": os.cpu_count() or 1}


def _busy_seconds() -> float | None:
    """Of all cores since the system started."""
    try:
        user, nice, system, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    except (OSError, ValueError):  # not Linux
        return None
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Of this process and of those it has started and seen end."""
    return sum(os.times()[:4])


def busy(document: Mapping[str, Any]) -> bool:
    """Whether others used so much of the machine that times may be too long."""
    found = document.get("load")
    return found is not None and found["others"] > 0.15 * found["cores"]


def load_words(document: Mapping[str, Any]) -> str | None:
    """What a result says of the load on its machine."""
    found = document.get("load")
    if not found:
        return None
    doubt = " (busy: times may be too long)" if busy(document) else ""
    return f"other processes used {found['others']:.2f} of {found['cores']:.0f} cores while times were measured{doubt}"
