"""From a block of scores to a block of weights p: what belongs to positions and tables, the function, masks."""

from gdpa.backends.hopper.compat import gl, gluon
from gdpa.backends.hopper.messages import PAIRS, told
from gdpa.backends.hopper.pipeline import ROWS, visible_pairs
from gdpa.device.places import positions
from gdpa.device.sequences import in_band


@gluon.jit
def weights(s, params, spot, columns, pairs, cut, band, scale, CODE: gl.constexpr, wg, T: gl.constexpr):
    """p (64, BLOCK_N) of one block of keys, 0 for hidden pairs. Where NORM is "exp", the exponents of p, -inf for
    hidden pairs (before T.GAIN). ``columns``: what columns.py has looked up; ``cut``: whether any pair may be
    hidden."""
    if T.MASK_SCORES and not T.SHIFTED:
        s = masked(s, spot, pairs, cut, band, 0.0, CODE, wg, T)
    if not T.SCALE_FOLDED:
        s = s * scale
    LAYOUT: gl.constexpr = s.type.layout
    i, j = places_of(LAYOUT, pairs, wg, T)
    ends = ends_of(pairs, wg, T)
    if T.SHIFTED:
        s = CODE.SHIFT(s, (params, positions(spot, i, j, pairs.len_q, pairs.len_k), spot, ends, columns, scale))
    if T.VOTES:
        s = ended(s, pairs, T)
    if T.MASK_SCORES and T.SHIFTED:
        s = masked(s, spot, pairs, cut, band, 0.0, CODE, wg, T)
    if T.PLACED:
        p = CODE.FORWARD(s, (params, positions(spot, i, j, pairs.len_q, pairs.len_k), spot, ends, columns))
    else:
        p = CODE.FORWARD(s, params)
    if T.MASKED and not T.MASK_SCORES:
        NOTHING: gl.constexpr = 0.0 if T.NORM != "exp" else float("-inf") if T.GAIN >= 0 else float("inf")
        p = masked(p, spot, pairs, cut, band, NOTHING, CODE, wg, T)
    return p


@gluon.jit
def masked(x, spot, pairs, cut, band, NOTHING: gl.constexpr, CODE: gl.constexpr, wg, T: gl.constexpr):
    """x (this consumer's 64 queries x BLOCK_N keys), with NOTHING in place of hidden pairs; x itself unless ``cut``."""
    if cut:
        LAYOUT: gl.constexpr = x.type.layout
        m0, j0, len_q, len_k = pairs
        i, j = places_of(LAYOUT, pairs, wg, T)
        if T.LISTED:
            keep = in_band(i, j, len_q, len_k, band)
            keep &= CODE.KEEP(positions(spot, i, j, len_q, len_k), spot, ends_of(pairs, wg, T))
        elif band.left is None and band.right is None:
            BLOCK_N: gl.constexpr = T.BLOCK_N
            keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, x.type.layout))
            keep = (keys < len_k - j0)[None, :]  # rows past the end are not written
        else:
            keep = visible_pairs(i, j, len_q, len_k, band, T)
        x = gl.where(keep, x, NOTHING).to(x.dtype)
    return x


@gluon.jit
def ended(s, pairs, T: gl.constexpr):
    """Sums of scores and places, 0 past the end of the keys: sums of 0 have no vote (see emission/guarded.py)."""
    BLOCK_N: gl.constexpr = T.BLOCK_N
    if pairs.j0 + BLOCK_N > pairs.len_k:
        keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
        s = gl.where((keys < pairs.len_k - pairs.j0)[None, :], s, 0.0)
    return s


@gluon.jit
def block_at(steps, block, j0, full_lo, full_hi, T: gl.constexpr):
    """(first key of block number ``block``, whether it is cut). With a mask the producer has sent both; otherwise that
    is j0, and blocks outside of [full_lo, full_hi) are cut."""
    if T.LISTED:
        j0, cut, _, _ = told(steps, block, PAIRS, T)
        return j0, cut != 0
    else:
        return j0, (j0 < full_lo) | (j0 >= full_hi)


@gluon.jit
def places_of(LAYOUT: gl.constexpr, pairs, wg, T: gl.constexpr):
    """Positions of this consumer's pairs: queries as a column (64, 1), keys as a row (1, BLOCK_N)."""
    BLOCK_N: gl.constexpr = T.BLOCK_N
    i = pairs.m0 + wg * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    j = pairs.j0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    return i[:, None], j[None, :]


@gluon.jit
def ends_of(pairs, wg, T: gl.constexpr):
    """First and last query, first and last key of this consumer's pairs."""
    i0 = pairs.m0 + wg * ROWS
    return i0, i0 + ROWS - 1, pairs.j0, pairs.j0 + T.BLOCK_N - 1
