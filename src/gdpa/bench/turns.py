"""The contenders of a case, timed in turns: a load, or a GPU's heat, that comes and goes meets all of them.

Each has TURNS turns of a part of its time. What a backward needs is made in its turn and dropped after it, so that only
inputs in their layouts are held for all at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gdpa.bench.contenders.contender import Prepared
from gdpa.bench.kernels.passes import PASSES, pass_functions
from gdpa.bench.timing import Effort, Stopwatch, Timing, clock_of, order

TURNS = 3
Timings = dict[str, Timing]  # by pass


def time_passes(
    contenders: Sequence[Prepared], device: torch.device, effort: Effort
) -> list[Timings | torch.OutOfMemoryError]:
    """The timings of each of ``contenders``, or that there was no memory for it beside the others."""
    watches = [{which: Stopwatch(clock_of(device), effort, TURNS) for which in PASSES} for _ in contenders]
    failed: dict[int, torch.OutOfMemoryError] = {}
    for turn in range(TURNS):
        for i in order(range(len(contenders)), turn):
            if i in failed:
                continue
            try:
                _turn(contenders[i], watches[i])
            except torch.OutOfMemoryError as e:
                failed[i] = e.with_traceback(None)  # whose frames hold tensors
            if device.type == "cuda" and len(contenders) > 1:
                torch.cuda.empty_cache()
    return [
        failed[i] if i in failed else {which: watch.timing() for which, watch in found.items()}
        for i, found in enumerate(watches)
    ]


def _turn(contender: Prepared, watches: dict[str, Stopwatch]) -> None:
    """One turn of every pass; the graph of the backward ends with it."""
    for which, fn in pass_functions(contender).items():
        watches[which].turn(fn)
