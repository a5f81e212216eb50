"""Time of each function on the same tensors, forward, and forward with backward.

Functions take turns, there and back again, so that a machine that is busy for a while is so for all of them. A
difference that is smaller than the spread of the times is called that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

import gdpa
from gdpa.bench.timing import clock_of, summarise
from gdpa.demo.measure import Setting, this_machine
from gdpa.spec import Loaded

PASSES = ("forward", "both")
ROUNDS, QUICK_ROUNDS = 8, 3
TURN_MS = 20.0  # that a function gets before the next one has its turn
MOST = 20  # calls in a turn
NOISE = "within noise"


def setting_of(quick: bool) -> Setting:
    """A short and a long length of the demonstration's problem."""
    whole = this_machine(quick=False)
    lengths = (whole.lengths[1],) if quick else (whole.lengths[1], whole.lengths[3])
    return Setting(whole.device, whole.dtype, whole.batch, whole.heads, whole.d, lengths)


def run(
    setting: Setting, functions: Sequence[Loaded], rival: str, rounds: int, step: Callable[[str], None]
) -> dict[str, Any]:
    """{"cases": [{length, pass, backend, times: {function: Timing}}]} beside the setting."""
    cases = []
    for length in setting.lengths:
        step(f"length {length}")
        ready = {f.name: _prepare(setting, length, f) for f in functions}
        for which in PASSES:
            calls = {name: made[which] for name, made in ready.items()}
            times = {name: asdict(summarise(found)) for name, found in in_turns(calls, setting.device, rounds).items()}
            cases.append({"length": length, "pass": which, "times": times})
    return {"setting": setting.words(), "rival": rival, "cases": cases, "warnings": warnings(cases, rival)}


def _prepare(setting: Setting, length: int, loaded: Loaded) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    shape = (setting.batch, setting.heads, length, setting.d)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(setting.device, setting.dtype) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)] + list(loaded.leaves(q))
    act, out_scale = loaded.compile(), 1.0 if loaded.normalize else 1 / length

    def forward() -> torch.Tensor:
        out: torch.Tensor = gdpa.attention(
            q, k, v, act, params=tuple(leaves[3:]), normalize=loaded.normalize, out_scale=out_scale
        )
        return out

    def both() -> object:
        return torch.autograd.grad(forward(), leaves, grad)

    def without_graph() -> object:
        with torch.no_grad():
            return forward()

    return {"forward": without_graph, "both": both}


def in_turns(calls: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of calls of each, in rounds there and back."""
    clock = clock_of(device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    each = {}
    for name, call in calls.items():
        clock(call, 1)  # compiles, allocates
        once = max(min(clock(call, 2)), 1e-3)
        each[name] = max(1, min(int(TURN_MS / once), MOST))
    for i in range(rounds):
        for name in list(calls) if i % 2 == 0 else list(calls)[::-1]:
            times[name] += clock(calls[name], each[name])
    return times


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the middle three fifths of two sets of times have something in common."""
    return one["p20_ms"] <= other["p80_ms"] and other["p20_ms"] <= one["p80_ms"]


def warnings(cases: Sequence[dict[str, Any]], rival: str) -> list[str]:
    """Differences that the spread of the times hides."""
    found = []
    for case in cases:
        theirs = case["times"][rival]
        hidden = [n for n, mine in case["times"].items() if n != rival and overlap(mine, theirs)]
        if hidden:
            what = "forward" if case["pass"] == "forward" else "forward and backward"
            found.append(f"length {case['length']}, {what}: {', '.join(hidden)} within the noise of {rival}")
    return found


def ratio(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """How the median compares: never a factor below 1."""
    r = theirs["median_ms"] / mine["median_ms"]
    if overlap(mine, theirs):
        return NOISE
    return f"{r:.2f}x faster" if r >= 1 else f"{1 / r:.2f}x slower"
