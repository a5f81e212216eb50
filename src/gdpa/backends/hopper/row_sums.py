"""Row sums in the Hopper kernels: how the forward keeps them, and how the backward uses them.

The definitions are those of the triton backend. NORM "exp": the function is the exponent g of p = exp(g), and p is
taken relative to the largest g of its row so far. (Updating that maximum only where p would exceed 2^8 saves rescaling.
But then the largest weight of a row is no longer exactly 1, which rounding leaves as it is, and errors are 1.2 times
the definition's.)
"""

import triton.language as tl

from gdpa.backends.hopper.compat import gl, gluon, thread_barrier
from gdpa.backends.triton.row_sums import finish, nothing
from gdpa.device.places import finished

LOG2E = gl.constexpr(1.4426950408889634)
MOST = gl.constexpr(1.0)  # exponent of p / d, which is at most 0 but for rounding
NAN = gl.constexpr(tl.PropagateNan.ALL)  # a diverged row is not to look like an ordinary one


@gluon.jit
def no_sums(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """The state of a row before any key: its sum, and its largest exponent so far."""
    return gl.zeros([ROWS], gl.float32, LAYOUT), gl.full([ROWS], float("-inf"), gl.float32, LAYOUT)


@gluon.jit
def add_block(e, total, largest, fresh, T: gl.constexpr):
    """(p, total, largest, shrink) after one more block of the function's values e: its weights, the state of the rows,
    and the factor by which the running o is rescaled. ``fresh``: it is the first block of a tile. ``largest`` is a
    value of e; the exponent is g = T.GAIN e."""
    if T.NORM == "exp":
        if T.GAIN < 0:
            e = -e
        UNIT: gl.constexpr = (T.GAIN if T.GAIN >= 0 else -T.GAIN) * LOG2E
        before = gl.where(fresh, float("-inf"), largest)
        now = gl.maximum(before, gl.max(e, 1))
        p = gl.exp2(e * UNIT - (gl.where(now == float("-inf"), 0.0, now) * UNIT)[:, None])
        shrink = gl.where(now == before, 1.0, gl.exp2((before - now) * UNIT))
        total = gl.where(fresh, 0.0, total * shrink) + gl.sum(p, 1)
        return p, total, now, shrink
    else:
        added = gl.abs(e) if T.NORM == "abs" else e
        return e, gl.where(fresh, 0.0, total) + gl.sum(added, 1), largest, 1.0


@gluon.jit
def divided(o, sums, out_scale, p_sums, at, rows_left, p_sink, h, T: gl.constexpr):
    """o (64 rows) divided by its row sums, times ``out_scale``. Stores the sums of the rows that exist from ``at``
    on."""
    total, largest = sums
    if T.NORM == "exp":
        largest = largest * (T.GAIN if T.GAIN >= 0 else -T.GAIN)
    inverse, kept = finish(total, largest, p_sink, h, T)
    i = gl.arange(0, o.type.shape[0], total.type.layout)
    gl.store(p_sums + at + i, kept, mask=i < rows_left)
    empty = gl.convert_layout(nothing(kept, T), gl.SliceLayout(1, o.type.layout))
    inverse = gl.convert_layout(inverse * out_scale, gl.SliceLayout(1, o.type.layout))
    return gl.where(empty[:, None], 0.0, o * inverse[:, None])


# ---- backward --------------------------------------------------------------------------------------------------------
DELTA, ROW = gl.constexpr(0), gl.constexpr(1)  # the two terms of each query: see backends/triton/row_sums.py, RowTerms


@gluon.jit
def allocate_terms(T: gl.constexpr):
    """Shared memory for both terms of each stage's queries; 0 without row sums."""
    if T.NORM == "none":
        return 0
    else:
        COUNT: gl.constexpr = 2 * T.STAGES
        BLOCK_M: gl.constexpr = T.BLOCK_M
        return gl.allocate_shared_memory(gl.float32, [COUNT, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def bring_terms(terms_sm, terms, stage, b, h, start, row, length, T: gl.constexpr):
    """Copy the terms of the BLOCK_M queries from ``row`` on to shared memory, zero past the end, logarithms to the base
    2. By the producer, one warp."""
    if T.NORM != "none":
        BLOCK_M: gl.constexpr = T.BLOCK_M
        p_delta, p_row, step_batch, step_head = terms
        i = row + gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))
        at = b.to(gl.int64) * step_batch + h.to(gl.int64) * step_head + start + i
        delta = gl.load(p_delta + at, mask=i < length, other=0.0)
        divisor = gl.load(p_row + at, mask=i < length, other=0.0)
        if T.NORM == "exp":
            divisor = divisor * LOG2E
        terms_sm.index(2 * stage + DELTA).store(delta)
        terms_sm.index(2 * stage + ROW).store(divisor)
        thread_barrier()  # one thread of this warp arrives at the stage's barrier for all


@gluon.jit
def terms_of(terms_sm, stage, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """One term of each query of a stage, for scores (keys x queries) in ``LAYOUT``."""
    return terms_sm.index(2 * stage + WHICH).load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def some_terms_of(terms_sm, stage, WHICH: gl.constexpr, PART: gl.constexpr, scores):
    """The same for ``scores`` of some of the queries, the ``PART``-th ones of so many."""
    N: gl.constexpr = scores.type.shape[1]
    mine = terms_sm.index(2 * stage + WHICH).slice(PART * N, N)
    return mine.load(gl.SliceLayout(0, scores.type.layout))[None, :]


@gluon.jit
def divided_by_row(e, slope, row, T: gl.constexpr):
    """(p / d, the slope that dp - delta is multiplied by) of the function's values e and their derivative. Where NORM
    is "abs", the slope is ``tagged``."""
    if T.NORM == "exp":
        # Keys past the end have scores of 0, beside which d can be tiny: their p must not be inf, which times 0 is NaN.
        p = gl.exp2(gl.minimum(e * (T.GAIN * LOG2E) - row, MOST, propagate_nan=NAN))
        return p, p * slope * T.GAIN
    else:
        return e * row, tagged(slope * row, e, T)


# NORM "abs": dp - sign(p) delta needs the sign of the weight, which is known long before dp. There are no registers to
# hold it until then, so it takes the place of the slope's two lowest bits: ds is rounded to 16 bits anyway.
NEGATIVE, NOTHING = gl.constexpr(1), gl.constexpr(2)
OTHER_BITS = gl.constexpr(-4)
LARGEST = gl.constexpr(3.4028234663852886e38)  # number of float32


@gluon.jit
def tagged(slope, e, T: gl.constexpr):
    """The slope with the sign of the weight T.GAIN e in its two lowest bits."""
    if T.NORM == "abs":
        if T.GAIN < 0:
            e = -e
        sign = gl.where(e < 0, NEGATIVE, gl.where(e > 0, 0, NOTHING))
        # Infinity with other bits would be NaN.
        slope = gl.maximum(gl.minimum(slope, LARGEST, propagate_nan=NAN), -LARGEST, propagate_nan=NAN)
        slope = ((slope.to(gl.int32, bitcast=True) & OTHER_BITS) | sign).to(gl.float32, bitcast=True)
        return finished(slope)  # or the compiler would look through the bits, and hold the weights
    else:
        return slope


@gluon.jit
def through_sums(dp, delta, slope, T: gl.constexpr):
    """dp - n'(p) delta: the gradient of p through the division by the row's sum. ``slope`` is tagged."""
    if T.NORM == "abs":
        sign = slope.to(gl.int32, bitcast=True)
        delta = gl.where((sign & NOTHING) != 0, 0.0, gl.where((sign & NEGATIVE) != 0, -delta, delta))
    return dp - delta
