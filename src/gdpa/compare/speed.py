"""Time of each function on the same tensors, forward, and forward with backward.

Functions take turns, so that a machine that is busy for a while is so for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

import gdpa
from gdpa.bench import noise
from gdpa.bench.timing import Effort, time_in_turns
from gdpa.demo.measure import Setting, this_machine
from gdpa.spec import Loaded

PASSES = ("forward", "both")
EFFORT = Effort(warmup_ms=50.0, measure_ms=400.0, least=10, most=100)


def setting_of(quick: bool) -> Setting:
    """A short and a long length of the demonstration's problem."""
    whole = this_machine(quick=False)
    lengths = (whole.lengths[1],) if quick else (whole.lengths[1], whole.lengths[3])
    return Setting(whole.device, whole.dtype, whole.batch, whole.heads, whole.d, lengths)


def run(
    setting: Setting, functions: Sequence[Loaded], rival: str, effort: Effort, step: Callable[[str], None]
) -> dict[str, Any]:
    """{"cases": [{length, pass, times: {function: Timing}}]} beside the setting and the machine's load."""
    cases, others = [], noise.Others()
    for length in setting.lengths:
        step(f"length {length}")
        ready = {f.name: _prepare(setting, length, f) for f in functions}
        for which in PASSES:
            calls = {name: made[which] for name, made in ready.items()}
            found = time_in_turns(calls, setting.device, effort)
            times = {name: asdict(timing) for name, timing in found.items()}
            cases.append({"length": length, "pass": which, "times": times})
    return {"setting": setting.words(), "rival": rival, "cases": cases, "load": others.load()}


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


def warnings(document: dict[str, Any]) -> list[str]:
    """A busy machine, and differences that the spread of the times exceeds."""
    found, rival = [], document["rival"]
    if noise.busy(document):
        found.append(f"Warning: {noise.load_words(document)}.")
    for case in document["cases"]:
        theirs = case["times"][rival]
        hidden = [n for n, mine in case["times"].items() if n != rival and noise.uncertain(mine, theirs)]
        if hidden:
            what = "forward" if case["pass"] == "forward" else "forward and backward"
            found.append(
                f"Warning: the spread of times exceeds the difference of {', '.join(hidden)} from {rival}, {what} at "
                f"length {case['length']:,}."
            )
    return found
