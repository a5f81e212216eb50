"""Row sums on the device: how the forward keeps them while it walks over the keys, and what gradients need of them.

    o = out_scale * acc / d        dp' = (dp - n'(p) delta) / d,   delta = <do, o>

NORM is one of gdpa.problem's. Where it is "exp", the emitted function is the exponent g, of which p = exp(g) is taken
here, relative to the largest of the row so far; what is kept of d is its logarithm. GAIN is the factor that the emitted
function leaves out: of g, or of p, whose sum it belongs to. Both are in CODE, or in what a Hopper kernel has instead.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdpa.device.rows import load_rows, row_stride, rows_source
from gdpa.device.sequences import locate_tile


class RowTerms(NamedTuple):
    """Kernel argument of a backward with row sums: float32 numbers per row, and their strides between batch entries and
    heads; rows follow each other."""

    delta: Any  # <do, o> / out_scale, less the gradient of the sum if the caller has used it
    row: Any  # 1 / d, or log d where NORM is "exp"
    batch: Any
    head: Any


LARGEST_EXPONENT = tl.constexpr(87.0)


@triton.jit
def no_sums(BLOCK: tl.constexpr):
    """(total, largest) of rows before any key."""
    return tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32)


@triton.jit
def finite(m):
    """m, the largest exponent of a row, or 0 for a row without any: what can be subtracted."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def add_block(e, keep, acc, total, largest, CODE: tl.constexpr, MASKED: tl.constexpr):
    """(p, acc, total, largest) after one more block of the function's values e (BLOCK_M, BLOCK_N): its weights, the
    rescaled accumulator (BLOCK_M, BLOCK_DV), and the state of the rows (BLOCK_M,)."""
    if CODE.NORM == "exp":
        if CODE.GAIN != 1.0:
            e = e * CODE.GAIN
        if MASKED:
            e = tl.where(keep, e, float("-inf"))
        now = tl.maximum(largest, tl.max(e, 1))
        subtracted = finite(now)
        shrink = tl.exp(largest - subtracted)
        p = tl.exp(e - subtracted[:, None])
        acc = acc * shrink[:, None]
        total = total * shrink + tl.sum(p, 1)
        largest = now
    else:
        p = e
        if MASKED:
            p = tl.where(keep, p, 0.0)
        total = total + tl.sum(tl.abs(p) if CODE.NORM == "abs" else p, 1)
    return p, acc, total, largest


@triton.jit
def finish(total, largest, p_sink, h, CODE: tl.constexpr):
    """(the factor of acc, what is kept of the denominator d), both (BLOCK_M,): 1 / d and d; or, where NORM is "exp",
    the same for sums relative to the largest exponent, and log d."""
    sink = 0.0
    if p_sink is not None:
        sink = tl.load(p_sink + h)
    if CODE.NORM == "exp":
        m = largest
        if p_sink is not None:
            positive = sink > 0
            m = tl.maximum(m, tl.where(positive, tl.log(tl.where(positive, sink, 1.0)), float("-inf")))
        m = finite(m)
        shrink = tl.exp(largest - m)
        d = total * shrink
        if p_sink is not None:
            d = d + sink * tl.exp(tl.minimum(-m, LARGEST_EXPONENT))
        none = d <= 0  # not so for NaN, which must not become a row of zeros
        safe = tl.where(none, 1.0, d)
        return tl.where(none, 0.0, shrink / safe), tl.where(none, float("-inf"), m + tl.log(safe))
    else:
        if CODE.NORM == "abs":
            if CODE.GAIN < 0:
                total = -total
        d = total * CODE.GAIN + sink
        some = d != 0
        return tl.where(some, 1.0 / tl.where(some, d, 1.0), 0.0), d


@triton.jit
def nothing(kept, CODE: tl.constexpr):
    """Which rows have a denominator of 0, from what is kept of d. (One of inf has an inverse of 0 too.)"""
    return kept == (float("-inf") if CODE.NORM == "exp" else 0.0)


@triton.jit
def load_terms(terms, b, h, start, i, len_q):
    """delta and row of the queries ``i`` of a sequence."""
    at = b * terms.batch + h * terms.head + start + i
    return tl.load(terms.delta + at, mask=i < len_q, other=0.0), tl.load(terms.row + at, mask=i < len_q, other=0.0)


@triton.jit
def through_sums(e, dp, delta, row, CODE: tl.constexpr):
    """p / d, and the gradient of the function's value e as it is emitted; ``delta`` and ``row`` broadcast with it."""
    if CODE.NORM == "exp":
        if CODE.GAIN != 1.0:
            e = e * CODE.GAIN
        p = tl.exp(e - row)
        de = p * (dp - delta)
        if CODE.GAIN != 1.0:
            de = de * CODE.GAIN
    else:
        p = e * row
        if CODE.NORM == "abs":
            sign = tl.where(e > 0, 1.0, tl.where(e < 0, -1.0, 0.0))
            if CODE.GAIN < 0:
                sign = -sign
            delta = sign * delta
        de = (dp - delta) * row
    return p, de


@triton.jit(do_not_specialize=["rows_q", "rows_k"])
def row_terms_kernel(
    do_rows, out_rows, sums, dsums, terms, p_dsink, p_cu_k, p_records, rows_q, rows_k, unscale, heads,
    NORM: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The terms of one tile of queries, and its part of the gradient of the sink, (tiles, heads): minus the sum of
    delta / d. ``unscale`` is 1 / out_scale."""
    tile = tl.program_id(0)
    h = tl.program_id(1)
    b, m0, start_q, len_q, _, _ = locate_tile(p_records, p_cu_k, tile, rows_q, rows_k, T.BLOCK_M)
    if m0 >= len_q:
        return
    hq = h.to(tl.int64)
    stride_do, stride_out = row_stride(do_rows, T.ALIGN, T.WIDE), row_stride(out_rows, T.ALIGN, T.WIDE)
    do_source = rows_source(do_rows, stride_do, b, hq, start_q, len_q, T.DV, T.BLOCK_M, T.BLOCK_DV, T)
    out_source = rows_source(out_rows, stride_out, b, hq, start_q, len_q, T.DV, T.BLOCK_M, T.BLOCK_DV, T)
    do = load_rows(do_source, m0, T.DV, T.BLOCK_M, T.BLOCK_DV, True, T.TMA)
    out = load_rows(out_source, m0, T.DV, T.BLOCK_M, T.BLOCK_DV, True, T.TMA)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    i = m0 + tl.arange(0, T.BLOCK_M)
    real = i < len_q
    d = tl.load(sums.p + b * sums.batch + hq * sums.head + start_q + i, mask=real, other=1.0)
    if dsums is not None:  # every term of a sum has this gradient more
        more = tl.load(dsums.p + b * dsums.batch + hq * dsums.head + (start_q + i) * dsums.row, mask=real, other=0.0)
        delta = delta - (more if NORM == "exp" else more * d)
    if NORM == "exp":  # exp(e - inf) is the 0 that a row without a denominator gives
        row = tl.where(d == float("-inf"), float("inf"), d)
        inverse = tl.exp(tl.minimum(-row, LARGEST_EXPONENT))
    else:
        row = tl.where(d == 0, 0.0, 1.0 / tl.where(d == 0, 1.0, d))
        inverse = row
    at = b * terms.batch + hq * terms.head + start_q + i
    tl.store(terms.delta + at, delta * unscale, mask=real)
    tl.store(terms.row + at, row, mask=real)
    if p_dsink is not None:
        tl.store(p_dsink + tile.to(tl.int64) * heads + h, -tl.sum(tl.where(real, delta * inverse, 0.0)))
