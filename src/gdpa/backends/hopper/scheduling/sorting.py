"""The list of tiles where there are many sequences, sorted by torch.

``ordered_records_kernel`` finds the place of a sequence by looking at all others: one launch, but n^2 / 1024 steps.
Many sequences are sorted by torch instead, and a sum over the sorted tile counts says where each one's tiles begin: the
same list, in n log n steps and a dozen launches, still without reading anything back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdpa.backends.hopper.scheduling.schedule import Listed, count_tiles_kernel, place_records_kernel
from gdpa.backends.triton.arguments import BOUND
from gdpa.backends.triton.launching import bind, cdiv

EVERY = Listed()
# Kernels that write the list may stop the device with a message (debug). There is no fusion here, but Triton 3.9 warns
# of a default that will change.
OPTIONS = {"enable_fp_fusion": True, "debug": True, "sanitize_overflow": False}
# Below, one launch takes less time than a dozen: at 8192 sequences 8 steps in each of 8192 programs, which run in four
# waves, are about 30 us.
MANY_SEQUENCES = 8192
CHUNK = 1024  # sequences that a program counts the tiles of
TILES = 128  # tiles that a program writes in one step: sequences are short where there are many


def sorted_records(
    table: Tensor, offsets: tuple[Tensor | None, ...], rows: int, rows_other: int, n_seqs: int, most: int, block: int,
    other: int, listed: Listed = EVERY,
) -> None:  # fmt: skip
    """What ordered_records_kernel writes: heaviest first, ties by index. At most ``most`` records fit ``table``.
    ``offsets``: those of both sides, then the used lengths of both."""
    tiles, weights = torch.empty(2, n_seqs, dtype=torch.int32, device=table.device).unbind()
    count = bind(BOUND, count_tiles_kernel, BLOCK=block, OTHER=other, CHUNK=CHUNK, L=listed, num_warps=4, **OPTIONS)
    count((cdiv(n_seqs, CHUNK),), tiles, weights, *offsets, rows, rows_other, n_seqs)
    order = weights.sort(descending=True, stable=True).indices
    ends = tiles[order].cumsum(0, dtype=torch.int64)
    place = bind(BOUND, place_records_kernel, BLOCK=block, CHUNK=TILES, L=listed, num_warps=1, **OPTIONS)
    place((n_seqs,), table, order, ends, *offsets, rows, rows_other, n_seqs, most)
