"""Positions of scores, for functions and masks of positions: the index arithmetic of emitted code, and which blocks of
a row a mask leaves visible."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tables(NamedTuple):
    """Kernel arguments: pointers to the tables of the function, of the mask, and to their gradients; None for none."""

    own: Any
    mask: Any
    gradients: Any


class Numbers(NamedTuple):
    """Kernel arguments that change from batch to batch, each as ``odd`` has it. A dense side has ``slot`` rows per
    sequence, a packed one 0."""

    slot_q: Any
    slot_k: Any
    first_head: Any
    head_step: Any
    sizes: Any  # of the function's tables, a tuple each
    mask_sizes: Any
    small: Any = None  # some number if no position is larger than SMALL_ROWS, otherwise None
    copies: Any = None  # of the gradients of tables


def odd(n: int) -> int:
    """``n`` as a number for which Triton compiles nothing anew: it does for 1 and for multiples of 16, and inside of
    tuples do_not_specialize says nothing."""
    return 2 * n + 3


@triton.jit
def even(x):
    """The number of which ``odd`` made x."""
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
    """What floordiv leaves, with the sign of b."""
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
    """x as float32. Where ``small`` is not None, -2^22 < x < 2^22, and x is put into the digits of 1.5 * 2^23: two
    short instructions instead of a conversion, of which the device has a quarter as many units."""
    if small is None:
        return x.to(tl.float32)
    else:
        return (x + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def difference(x, y, small):
    """x - y as float32. In the digits of 1.5 * 2^23, as above, each is put by itself: for a difference of a query's and
    a key's number one instruction per pair."""
    if small is None:
        return (x - y).to(tl.float32)
    else:
        return (x + 0x4B400000).to(tl.float32, bitcast=True) - (y + 0x4B400000).to(tl.float32, bitcast=True)


@triton.jit
def product(x, y):
    """x * y, rounded: never one instruction with what it is added to."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def finished(x):
    """x, of float32, computed before the end of a branch: otherwise LLVM moves what both branches end with behind them,
    and all that it takes has to wait there."""
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
    """b, h, q_idx, kv_idx, q_len, kv_len, q_row, kv_row of queries ``i`` and keys ``j``, which broadcast. A placed
    function takes (params, these, spot, ends) beside the score, where ``ends`` are the first and the last query and the
    first and the last key, or None; with ends also what was looked up for the tile's columns (see once.py); and a sum
    that waits for a vote takes the scale, too. (A function cannot return that: spot may hold None.)"""
    b, h, start_q, start_k, _, numbers = spot
    row_q = (start_q + b * even(numbers.slot_q)).to(tl.int32)
    row_k = (start_k + b * even(numbers.slot_k)).to(tl.int32)
    head = (even(numbers.first_head) + even(numbers.head_step) * h).to(tl.int32)
    return b.to(tl.int32), head, i, j, len_q, len_k, row_q + i, row_k + j


@triton.jit
def starts(spot):
    """b, h, and the rows at which the sequence begins on both sides."""
    b, h, start_q, start_k, _, numbers = spot
    head = even(numbers.first_head) + even(numbers.head_step) * h
    return b.to(tl.int64), head.to(tl.int64), start_q + b * even(numbers.slot_q), start_k + b * even(numbers.slot_k)


@triton.jit
def seen(keep, spot, i, j, len_q, len_k, KEEP: tl.constexpr):
    """``keep``, and where the mask holds."""
    if KEEP is None:
        return keep
    else:
        tables, numbers = spot[4], spot[5]
        return keep & KEEP(positions(spot, i, j, len_q, len_k), tables.mask, numbers.mask_sizes)


# ---- blocks that a mask leaves ---------------------------------------------------------------------------------------
CHUNK = tl.constexpr(32)  # blocks that are looked at together: a warp's lanes


@triton.jit
def points(first, last, BLOCK: tl.constexpr, MANY: tl.constexpr):
    """The places of one block, or of MANY, one row each; past the end the last one again."""
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
    """The number of the lowest bit that is set: the exponent of that power of two."""
    return ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def block_kinds(spot, c0, fixed, len_q, len_k, full_lo, full_hi, hi, CLASSIFY: tl.constexpr, BY_KEY: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """(whether any pair is visible, whether all are) in each of the CHUNK blocks from c0 on. BY_KEY: blocks of keys,
    beside the block of queries from ``fixed`` on; otherwise the other way."""
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
    """(counts, sets) of the blocks of block_kinds: those that are wholly visible, and those that are cut. A set has a
    bit per block."""
    some, every = block_kinds(spot, c0, fixed, len_q, len_k, full_lo, full_hi, hi, CLASSIFY, BY_KEY, BLOCK_M, BLOCK_N)
    cut = some & (every == 0)
    bit = tl.full((CHUNK,), 1, tl.int64) << tl.arange(0, CHUNK).to(tl.int64)
    n_full, full = tl.sum(every.to(tl.int32)), tl.sum(tl.where(every, bit, 0))
    n_cut, cut = tl.sum(cut.to(tl.int32)), tl.sum(tl.where(cut, bit, 0))
    return (n_full, n_cut), (full, cut)
