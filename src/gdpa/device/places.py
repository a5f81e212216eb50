"""What functions and masks of positions need on the device: positions, the index arithmetic that emitted code calls,
and which blocks a mask leaves visible."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tables(NamedTuple):
    """Kernel argument: tuples of pointers to the tables of the function, those of the mask, and the gradients of the
    function's; None for none."""

    own: Any
    mask: Any
    gradients: Any


class Numbers(NamedTuple):
    """Kernel argument: integers that change from batch to batch, each encoded by ``odd``. Batch entry b of a dense side
    begins at row b * slot; a packed side has slot 0."""

    slot_q: Any
    slot_k: Any
    first_head: Any
    head_step: Any
    sizes: Any  # a tuple for each table of the function,
    mask_sizes: Any  # and of the mask
    small: Any = None  # not None if no position is larger than program.SMALL_ROWS: see as_float
    copies: Any = None  # how many copies there are of the gradients of tables


def odd(n: int) -> int:
    """``n`` encoded as an odd number other than 1: Triton would compile a kernel anew for 1 and for multiples of 16,
    and do_not_specialize has no effect on integers inside of tuples."""
    return 2 * n + 3


@triton.jit
def even(x):
    """The inverse of ``odd``."""
    return (x - 3) >> 1


# ---- what emitted code calls -----------------------------------------------------------------------------------------
@triton.jit
def floordiv(a, b):
    """Rounded down; the device's own division is rounded to zero."""
    quotient = a // b
    rest = a - quotient * b
    return quotient - ((rest != 0) & ((rest < 0) != (b < 0))).to(tl.int32)


@triton.jit
def mod(a, b):
    """The remainder of floordiv, with the sign of b."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def from_end(i, size):
    """A negative index counts from the end."""
    return tl.where(i < 0, i + size, i)


@triton.jit
def number(c, like):
    """A constant as a scalar of the device."""
    return like * 0 + c


@triton.jit
def as_float(x, small):
    """x as float32. Where ``small`` is not None, -2^22 < x < 2^22, and x is added to the bits of 1.5 * 2^23, which is
    then subtracted as a float: two cheap instructions instead of a conversion, which has a quarter of the
    throughput."""
    if small is None:
        return x.to(tl.float32)
    else:
        return (x + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def difference(x, y, small):
    """x - y as float32. Each is added to the bits of 1.5 * 2^23 as in as_float, and the constants cancel: if x belongs
    to the query and y to the key, that is one instruction per pair."""
    if small is None:
        return (x - y).to(tl.float32)
    else:
        return (x + 0x4B400000).to(tl.float32, bitcast=True) - (y + 0x4B400000).to(tl.float32, bitcast=True)


@triton.jit
def product(x, y):
    """x * y, rounded by itself: never fused into a multiply-add."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def finished(x):
    """x (float32), computed before the end of a branch. Otherwise LLVM sinks operations that both branches end with
    behind them, and keeps all of their operands in registers until then."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def lane(like):
    """The number of the thread in its warp, in the shape of ``like``."""
    return tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [like], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def inside(i, size):
    return (i >= 0) & (i < size)


# ---- positions -------------------------------------------------------------------------------------------------------
@triton.jit
def positions(spot, i, j, len_q, len_k):
    """(b, h, q_idx, kv_idx, q_len, kv_len, q_row, kv_row) of queries ``i`` and keys ``j``, which broadcast.

    A *spot* is what positions are computed from: (sequence b, head h, the sequence's first query and key, Tables,
    Numbers). A placed function takes ``given`` beside the score: (params, positions, spot, ends), where ``ends`` are
    the first and last query and the first and last key of the tile, or None; with ends also the values that were looked
    up for the tile's columns (once.py); a shift for a vote takes the scale as well. (No function returns a spot, since
    it may hold None.)
    """
    b, h, start_q, start_k, _, numbers = spot
    row_q = (start_q + b * even(numbers.slot_q)).to(tl.int32)
    row_k = (start_k + b * even(numbers.slot_k)).to(tl.int32)
    head = (even(numbers.first_head) + even(numbers.head_step) * h).to(tl.int32)
    return b.to(tl.int32), head, i, j, len_q, len_k, row_q + i, row_k + j


@triton.jit
def starts(spot):
    """(b, h, first row of the sequence's queries, first row of its keys), 64 bits each."""
    b, h, start_q, start_k, _, numbers = spot
    head = even(numbers.first_head) + even(numbers.head_step) * h
    return b.to(tl.int64), head.to(tl.int64), start_q + b * even(numbers.slot_q), start_k + b * even(numbers.slot_k)


@triton.jit
def with_mask(keep, spot, i, j, len_q, len_k, KEEP: tl.constexpr):
    """``keep``, narrowed to the pairs that the mask leaves visible, if there is one."""
    if KEEP is None:
        return keep
    else:
        tables, numbers = spot[4], spot[5]
        return keep & KEEP(positions(spot, i, j, len_q, len_k), tables.mask, numbers.mask_sizes)


# ---- blocks that a mask leaves ---------------------------------------------------------------------------------------
CHUNK = tl.constexpr(32)  # blocks that are classified together, one by each lane of a warp


@triton.jit
def points(first, last, BLOCK: tl.constexpr, MANY: tl.constexpr):
    """Positions of the rows of one block (BLOCK,), or of MANY blocks (n, BLOCK); past the end the last one again."""
    if MANY:
        return tl.maximum(tl.minimum(first[:, None] + tl.arange(0, BLOCK)[None, :], last[:, None]), 0)
    else:
        return tl.maximum(tl.minimum(first + tl.arange(0, BLOCK), last), 0)


@triton.jit
def least(x, MANY: tl.constexpr):
    return tl.min(x, axis=1 if MANY else 0)


@triton.jit
def most(x, MANY: tl.constexpr):
    return tl.max(x, axis=1 if MANY else 0)


@triton.jit
def first_of(bits):
    """The number of the lowest bit that is set, from the exponent of that power of two."""
    return ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def block_kinds(spot, c0, fixed, len_q, len_k, full_lo, full_hi, hi, CLASSIFY: tl.constexpr, BY_KEY: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """(whether any pair is visible, whether all are) for each of the CHUNK blocks from row c0 on. BY_KEY: these are
    blocks of keys, and the tile is of queries, from ``fixed`` on; otherwise the other way round. ``full_lo``,
    ``full_hi``, ``hi``: see sequences.visible_blocks."""
    lane = tl.arange(0, CHUNK)
    if BY_KEY:
        first = c0 + lane * BLOCK_N
        some, every = CLASSIFY(spot, fixed, first, len_q, len_k, BLOCK_M, BLOCK_N, True)
    else:
        first = c0 + lane * BLOCK_M
        some, every = CLASSIFY(spot, first, fixed, len_q, len_k, BLOCK_M, BLOCK_N, False)
    some = some & (first < hi)
    return some, every & some & (first >= full_lo) & (first < full_hi)


@triton.jit
def block_sets(spot, c0, fixed, len_q, len_k, full_lo, full_hi, hi, CLASSIFY: tl.constexpr, BY_KEY: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """(counts, sets) of the CHUNK blocks of block_kinds, each a pair: for blocks whose pairs are all visible, and for
    blocks that are cut. A set has a bit per block."""
    some, every = block_kinds(spot, c0, fixed, len_q, len_k, full_lo, full_hi, hi, CLASSIFY, BY_KEY, BLOCK_M, BLOCK_N)
    cut = some & (every == 0)
    bit = tl.full((CHUNK,), 1, tl.int64) << tl.arange(0, CHUNK).to(tl.int64)
    n_full, full = tl.sum(every.to(tl.int32)), tl.sum(tl.where(every, bit, 0))
    n_cut, cut = tl.sum(cut.to(tl.int32)), tl.sum(tl.where(cut, bit, 0))
    return (n_full, n_cut), (full, cut)
