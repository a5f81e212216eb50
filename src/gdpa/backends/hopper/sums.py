"""Row sums in the Hopper kernels: how the forward keeps them, and how the backward uses them.

The definitions are those of backends/triton/sums.py. NORM "exp": the function is the exponent g of p = exp(g), and p is
taken relative to the largest g of its row so far. (Updating that maximum only where p would exceed 2^8 saves rescaling.
But then the largest weight of a row is no longer exactly 1, which rounding leaves as it is, and errors are 1.2 times
the definition's.)
"""

import triton.language as tl

from gdpa.backends.hopper.compat import gl, gluon, thread_barrier
from gdpa.backends.triton.sums import finish, nothing
from gdpa.device.places import finished

LOG2E = gl.constexpr(1.4426950408889634)
MOST = gl.constexpr(1.0)  # exponent of p / d, which is at most 0 but for rounding
NAN = gl.constexpr(tl.PropagateNan.ALL)  # a diverged row is not to look like an ordinary one


@gluon.jit
def no_sums(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """The sum and the largest exponent of every row before any key."""
    return gl.zeros([ROWS], gl.float32, LAYOUT), gl.full([ROWS], float("-inf"), gl.float32, LAYOUT)


@gluon.jit
def add_block(e, total, largest, fresh, T: gl.constexpr):
    """(p, total and largest with this block, what earlier sums are multiplied by) of a block of the function's values
    e; those of a ``fresh`` tile begin with it. ``largest`` counts in units of e, T.GAIN of which make one of g."""
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
    """o (64 rows) divided by its row sums, which are stored from ``at`` on, times ``out_scale``."""
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
DELTA, ROW = gl.constexpr(0), gl.constexpr(1)  # what the backward knows of each query: see RowTerms


@gluon.jit
def allocate_terms(T: gl.constexpr):
    """Room for the terms of the queries of each stage; none without row sums."""
    if T.NORM == "none":
        return 0
    else:
        COUNT: gl.constexpr = 2 * T.STAGES
        BLOCK_M: gl.constexpr = T.BLOCK_M
        return gl.allocate_shared_memory(gl.float32, [COUNT, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def bring_terms(terms_sm, terms, stage, b, h, start, row, length, T: gl.constexpr):
    """By the producer, one warp: the terms of BLOCK_M queries from ``row`` on, zero past the end; exponents of 2."""
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
        thread_barrier()  # one thread of this warp says that they are there


@gluon.jit
def terms_of(terms_sm, stage, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """One term of each query of a stage, for scores (keys x queries) in ``LAYOUT``."""
    return terms_sm.index(2 * stage + WHICH).load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def divided_by_row(e, slope, row, T: gl.constexpr):
    """p / d and what dp - delta is multiplied by, of the function's values e and their derivative (tagged)."""
    if T.NORM == "exp":
        # Keys past the end have scores of 0, beside which d can be tiny: their p must not be inf, which times 0 is NaN.
        p = gl.exp2(gl.minimum(e * (T.GAIN * LOG2E) - row, MOST, propagate_nan=NAN))
        return p, p * slope * T.GAIN
    else:
        return e * row, tagged(slope * row, e, T)


# Absolute values: what is subtracted from dp has the sign of the weight, which is known long before dp. There are no
# registers to hold it until then, but two bits of the derivative, which is rounded to 16 bits, can be spared.
NEGATIVE, NOTHING = gl.constexpr(1), gl.constexpr(2)
OTHER_BITS = gl.constexpr(-4)
LARGEST = gl.constexpr(3.4028234663852886e38)  # number of float32


@gluon.jit
def tagged(slope, e, T: gl.constexpr):
    """The derivative, in whose last bits is the sign of the weight T.GAIN e."""
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
    """dp, less what the row's sum takes of it. ``slope`` is tagged."""
    if T.NORM == "abs":
        sign = slope.to(gl.int32, bitcast=True)
        delta = gl.where((sign & NOTHING) != 0, 0.0, gl.where((sign & NEGATIVE) != 0, -delta, delta))
    return dp - delta
