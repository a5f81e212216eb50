"""Products of the rows of two blocks, all columns at once or a few at a time."""

from collections import namedtuple

import triton
import triton.language as tl

from gdpa.device.rows import load_rows, zero_rows

# Rows of a source from ``row`` on: ``tile`` as load_rows has loaded them, and from where, to load them in parts.
Block = namedtuple("Block", "tile source row")


@triton.jit
def load_block(
    source, row, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr
):
    """The Block of what load_rows loads."""
    return Block(load_rows(source, row, D, BLOCK, BLOCK_D, CHECK, TMA), source, row)


@triton.jit
def load_part(block, c, D: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr):
    """T.PART columns, from c on, of a Block of BLOCK rows and D columns."""
    PART: tl.constexpr = T.PART
    row = block.row + tl.arange(0, BLOCK)
    column = c + tl.arange(0, PART)
    p_tile = block.source.at + tl.cast(block.row, tl.int64) * block.source.stride
    p_tile = p_tile + tl.arange(0, BLOCK)[:, None] * block.source.stride + column[None, :]
    return tl.load(p_tile, mask=(row < block.source.n_rows)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def rows_product(a, b, D: tl.constexpr, A: tl.constexpr, B: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr):
    """a b^T of two Blocks of A and B rows. With T.PART, columns are loaded in parts and added up in a loop: Triton
    would hold all columns of float32 operands in registers, and tensor cores cut off sums of many terms."""
    if T.PART == 0:
        return tl.dot(a.tile, b.tile.T, input_precision=T.PRECISION)
    else:
        s = zero_rows(A, B)
        for c in tl.range(0, BLOCK_D, T.PART):
            x = load_part(a, c, D, A, T)
            y = load_part(b, c, D, B, T)
            s = tl.dot(x, y.T, s, input_precision=T.PRECISION)
        return s
