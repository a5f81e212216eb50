"""The list of tiles of many sequences.

``ordered_records_kernel`` finds the place of a sequence by looking at all others: one launch, but n^2 / 1024 steps.
Many sequences are sorted by torch instead, and a sum over the sorted tile counts says where each one's tiles begin: the
same list, in n log n steps and a dozen launches, still without reading anything back.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdpa.device.sequences import RECORD, seq_span, write_record

# Below, one launch takes less time than a dozen: at 8192 sequences 8 steps in each of 8192 programs, which run in four
# waves, are about 30 us.
MANY_SEQUENCES = 8192
CHUNK = 1024  # sequences that a program counts the tiles of
TILES = 128  # tiles that a program writes in one step: sequences are short where there are many


@triton.jit(do_not_specialize=["rows", "rows_other", "n_seqs"])
def count_tiles_kernel(
    p_tiles, p_weights, p_cu, p_cu_other, rows, rows_other, n_seqs, BLOCK: tl.constexpr, OTHER: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """How many tiles each sequence has, and how many blocks on the other side each of them visits."""
    b = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    known = tl.minimum(b, n_seqs - 1)
    _, length = seq_span(p_cu, known, rows)
    _, length_other = seq_span(p_cu_other, known, rows_other)
    tl.store(p_tiles + b, tl.cdiv(length, BLOCK), mask=b < n_seqs)
    tl.store(p_weights + b, tl.cdiv(length_other, OTHER), mask=b < n_seqs)


@triton.jit(do_not_specialize=["rows", "rows_other", "n_seqs", "most"])
def place_records_kernel(
    p_table, p_order, p_ends, p_cu, p_cu_other, rows, rows_other, n_seqs, most, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """The records of the tiles of sequence ``order[place]``, which end before tile ``ends[place]`` of the list; the
    table is that of ordered_records_kernel."""
    place = tl.program_id(0)
    b = tl.load(p_order + place).to(tl.int32)
    end = tl.load(p_ends + place)  # 64 bits: bad offsets could count more than 2^31 tiles
    start, length = seq_span(p_cu, b, rows)
    start_other, length_other = seq_span(p_cu_other, b, rows_other)
    count = tl.cdiv(length, BLOCK)
    first = end - count
    if place == n_seqs - 1:
        tl.store(p_table, tl.minimum(end, most).to(tl.int32))
    for i in range(0, count, CHUNK):
        tile = i + tl.arange(0, CHUNK)
        p_record = p_table + (1 + first + tile) * RECORD
        mine = (tile < count) & (first + tile < most)
        write_record(p_record, b, tile * BLOCK, start, length, start_other, length_other, mine)


def sorted_records(
    table: Tensor, cu: Tensor, cu_other: Tensor | None, rows: int, rows_other: int, n_seqs: int, most: int, block: int,
    other: int,
) -> None:  # fmt: skip
    """What ordered_records_kernel writes: heaviest first, ties by index. At most ``most`` records fit ``table``."""
    tiles, weights = torch.empty(2, n_seqs, dtype=torch.int32, device=cu.device).unbind()
    count_tiles_kernel[(triton.cdiv(n_seqs, CHUNK),)](
        tiles, weights, cu, cu_other, rows, rows_other, n_seqs, BLOCK=block, OTHER=other, CHUNK=CHUNK, num_warps=4,
        enable_fp_fusion=True,  # there is none here, but Triton 3.9 warns of a default that will change
    )  # fmt: skip
    order = weights.sort(descending=True, stable=True).indices
    ends = tiles[order].cumsum(0, dtype=torch.int64)
    place_records_kernel[(n_seqs,)](
        table, order, ends, cu, cu_other, rows, rows_other, n_seqs, most, BLOCK=block, CHUNK=TILES, num_warps=1,
        enable_fp_fusion=True,
    )  # fmt: skip
