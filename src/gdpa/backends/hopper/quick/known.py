"""What both quick passes share: the lookup of known launches, memory, and the strides of row sums."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import UntypedStorage

from gdpa.backends.hopper.scheduling.sorting import MANY_SEQUENCES
from gdpa.backends.hopper.scheduling.work import Launch, Listing
from gdpa.backends.triton.launching import unwatched
from gdpa.device.sequences import RECORD
from gdpa.problem import Problem

Pass = Callable[..., bool]
Memory = UntypedStorage
# memory(Memory, n, device=...): n bytes. Its __init__ does nothing, and takes time for it.
memory: Callable[..., UntypedStorage] = UntypedStorage.__new__
RECORD_BYTES = 4 * RECORD.value  # of a tile in a list


def finder(problem: Problem, main: Launch, listing: Listing | None, kind: Hashable) -> Callable[..., Any] | None:
    """A function of the layout under which the main kernel's launch is known (see Repeated). It returns that launch,
    the launch that makes the list (None without a list), and the stream; or None if a launch is not known yet."""
    if listing is not None and problem.n_seqs > MANY_SEQUENCES:
        return None
    index, kernel, found = problem.device.index, main.kernel.kernel, main.kernel.found
    lists = None if listing is None else listing.launch.kernel.found

    def find(layout: Hashable) -> tuple[Any, Any, int] | None:
        where = unwatched(kernel)
        if where is None:
            return None
        device, stream = where
        run = found.get((device, layout))
        if run is None or (device != index and index is not None):  # None: a test is running on the CPU
            return None
        if lists is None:
            return run.launch, None, stream
        write = lists.get((device, kind))
        return None if write is None else (run.launch, write.launch, stream)

    return find


def steps_of_sums(problem: Problem) -> Callable[[int], tuple[int, int]]:
    """A function of rows_q: the strides of batch entries and heads in row sums and their terms."""
    heads = 0 if problem.out_batch == 1 else problem.heads_q
    return lambda rows_q: (heads * rows_q, rows_q)
