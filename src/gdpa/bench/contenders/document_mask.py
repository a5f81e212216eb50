"""FlexAttention's mask for packed sequences, made from their offsets.

create_block_mask() asks the mask about every pair of rows: 10^12 for this benchmark's batches. But the blocks of keys
that a block of queries sees are one contiguous range, those in its middle without any masking, so both ends of that
range say everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128


class Blocks(NamedTuple):
    """For each block of rows the blocks of columns it visits: ``counts`` (1, 1, n), ``indices`` (1, 1, n, widest)."""

    counts: Tensor
    indices: Tensor


def document_mask(cu_q: Tensor, cu_k: Tensor) -> BlockMask:
    """A pair counts if both rows are of the same sequence."""
    from torch.nn.attention.flex_attention import BlockMask

    lengths = (int(cu_q[-1]), int(cu_k[-1]))
    of_q, of_k = _sequence_of_row(cu_q, -1), _sequence_of_row(cu_k, -2)

    def same_sequence(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return of_q[i] == of_k[j]

    (kv, full_kv), (q, full_q) = visited_blocks(cu_q, cu_k), visited_blocks(cu_k, cu_q)
    return BlockMask(lengths, *kv, *full_kv, *q, *full_q, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=same_sequence)


def _sequence_of_row(cu: Tensor, beyond: int) -> Tensor:
    """With entries past the end, which kernels read where the last block has fewer than BLOCK rows."""
    rows = torch.repeat_interleave(torch.arange(len(cu) - 1, device=cu.device, dtype=torch.int32), cu.diff())
    return torch.nn.functional.pad(rows, (0, BLOCK), value=beyond)


def visited_blocks(cu_rows: Tensor, cu_columns: Tensor) -> tuple[Blocks, Blocks]:
    """(those that need the mask, those that do not) of each block of rows."""
    cu_rows, cu_columns = cu_rows.long(), cu_columns.long()
    rows, columns = int(cu_rows[-1]), int(cu_columns[-1])
    first = torch.arange(0, rows, BLOCK, device=cu_rows.device)
    last = (first + BLOCK).clamp_max(rows) - 1
    begin, end = (torch.searchsorted(cu_rows, row, right=True) - 1 for row in (first, last))  # sequences
    low, stop = cu_columns[begin], cu_columns[end + 1]  # columns
    outer_low = low // BLOCK
    outer_high = torch.where(stop > low, -(-stop // BLOCK), outer_low)
    # Without masking: the whole block of rows and the whole block of columns lie in one sequence.
    alone = (begin == end) & (first + BLOCK <= rows)
    inner_low = torch.where(alone, -(-low // BLOCK), outer_low).minimum(outer_high)
    inner_high = torch.where(alone, stop // BLOCK, inner_low).maximum(inner_low)
    before, after = inner_low - outer_low, outer_high - inner_high
    blocks = -(-columns // BLOCK)
    return (
        _lists(before + after, outer_low, blocks, jump_at=before, jump=inner_high - inner_low),
        _lists(inner_high - inner_low, inner_low, blocks),
    )


def _lists(counts: Tensor, start: Tensor, blocks: int, jump_at: Tensor | None = None, jump: Tensor | int = 0) -> Blocks:
    """start, start + 1, ... for each row; from entry ``jump_at`` on they are larger by ``jump``."""
    entry = torch.arange(max(int(counts.max()), 1), device=counts.device)
    indices = start[:, None] + entry
    if jump_at is not None and isinstance(jump, Tensor):
        indices = torch.where(entry < jump_at[:, None], indices, indices + jump[:, None])
    # Beyond a row's count nothing is read, but every entry is a valid block.
    return Blocks(counts.int()[None, None], indices.clamp_max(blocks - 1).int()[None, None].contiguous())
