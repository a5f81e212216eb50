"""Tiles of rows of a (B, H, L, D) tensor: read, written, added to."""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """A tensor as a kernel argument: its pointer, and its strides between batch entries, heads and rows.

    Strides are in units of ALIGN elements (16 bytes, or 1 element where rows are not so aligned): the compiler then
    knows that rows start at multiples of it and loads 16 bytes at a time, also for D = 24 or 40.
    """

    p: Any
    batch: Any
    head: Any
    row: Any


# What the tiles of one head of one sequence are read from or written to. With TMA that is a tensor descriptor bounded
# by the sequence's end, otherwise a pointer to its first row, the number of rows and the stride between them.
Source = namedtuple("Source", "at n_rows stride")


@triton.jit
def row_stride(t, ALIGN: tl.constexpr, WIDE: tl.constexpr):
    """Elements from one row to the next. WIDE: in 64 bits, since a tile's last row is 2^31 elements away or further."""
    if WIDE:
        return tl.cast(t.row, tl.int64) * ALIGN
    else:
        return t.row * ALIGN


@triton.jit
def rows_source(
    t, stride, b, h, start, n_rows, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """The Source of head ``h`` of the sequence in batch entry ``b`` whose ``n_rows`` rows begin at row ``start``.
    ``stride``: what row_stride returns."""
    p_first = t.p + (b * t.batch + h * t.head + start * t.row) * T.ALIGN
    if T.TMA:
        # A descriptor must not have an empty dimension; no tile of an empty sequence is ever read.
        wide = row_stride(t, T.ALIGN, True)  # descriptors have strides of 64 bits anyway
        at = tl.make_tensor_descriptor(p_first, [tl.maximum(n_rows, 1), D], [wide, 1], [BLOCK, BLOCK_D])
        return Source(at, n_rows, stride)
    else:
        return Source(p_first, n_rows, stride)


@triton.jit
def zero_rows(BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """A float32 accumulator."""
    return tl.zeros((BLOCK, BLOCK_D), tl.float32)


@triton.jit
def row_pointers(p_base, row, stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK, BLOCK_D) of pointers to the rows from ``row`` on: 64 bits to reach the tile, stride's own within it."""
    p_tile = p_base + tl.cast(row, tl.int64) * stride
    return p_tile + tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def inside(row, n_rows, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    return (row + tl.arange(0, BLOCK) < n_rows)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]


@triton.jit
def load_rows(
    source, row, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr
):
    """(BLOCK, BLOCK_D): the rows from ``row`` on, zero past the last one (CHECK: there may be such) and column D."""
    if TMA:
        return source.at.load([row, 0])
    else:
        p_tile = row_pointers(source.at, row, source.stride, BLOCK, BLOCK_D)
        if CHECK:
            return tl.load(p_tile, mask=inside(row, source.n_rows, D, BLOCK, BLOCK_D), other=0.0)
        elif D == BLOCK_D:
            return tl.load(p_tile)
        else:
            return tl.load(p_tile, mask=(tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)


@triton.jit
def store_rows(source, tile, row, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """Write those rows of ``tile`` that are there, in the dtype of the target."""
    if TMA:
        source.at.store([row, 0], tile.to(source.at.dtype))
    else:
        p_tile = row_pointers(source.at, row, source.stride, BLOCK, BLOCK_D)
        tl.store(p_tile, tile.to(source.at.dtype.element_ty), mask=inside(row, source.n_rows, D, BLOCK, BLOCK_D))


@triton.jit
def add_rows(source, tile, row, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """Add those rows of ``tile`` that are there to the target, atomically."""
    if TMA:
        source.at.atomic_add([row, 0], tile)
    else:
        p_tile = row_pointers(source.at, row, source.stride, BLOCK, BLOCK_D)
        tl.atomic_add(p_tile, tile, mask=inside(row, source.n_rows, D, BLOCK, BLOCK_D), sem="relaxed")
