"""What the backward does to a tile of scores between products: the function, masks, gradients of params and tables."""

from gdpa.backends.hopper.backward.steps import DQ, PAIRS, SPOT, told
from gdpa.backends.hopper.compat import gl, gluon
from gdpa.backends.hopper.pipeline import BACKWARD_CONSUMERS, ROWS, visible_pairs
from gdpa.device.places import positions
from gdpa.device.sequences import in_band

HIDDEN = gl.constexpr(-2)  # as bits, a NaN that no arithmetic makes


@gluon.jit
def masked(x, pairs, CODE: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    """x (this consumer's 64 keys x BLOCK_M queries), zero for pairs outside the band or the mask."""
    if T.MASKED:
        if pairs.cut:
            x = gl.where(visible(x, pairs, CODE, WG, T), x, 0.0).to(x.dtype)
    return x


@gluon.jit
def both_masked(p, slope, pairs, CODE: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    """The same for weights and derivatives, with one look at what is visible: a hidden derivative becomes HIDDEN."""
    if T.MASKED:
        if pairs.cut:
            keep = visible(p, pairs, CODE, WG, T)
            p = gl.where(keep, p, 0.0).to(p.dtype)
            slope = gl.where(keep, slope.to(gl.int32, bitcast=True), HIDDEN).to(gl.float32, bitcast=True)
    return p, slope


@gluon.jit
def times_slope(dp, slope, cut, T: gl.constexpr):
    """ds of what both_masked left: 0 for hidden pairs, whatever dp is. (0 times an infinite one would be NaN.)"""
    ds = dp * slope
    if T.MASKED:
        if cut:
            ds = gl.where(slope.to(gl.int32, bitcast=True) == HIDDEN, 0.0, ds)
    return ds


@gluon.jit
def visible(x, pairs, CODE: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    """Which of this consumer's pairs are visible, in the layout of x."""
    LAYOUT: gl.constexpr = x.type.layout
    _, rows_left, keys_left, len_k, band, steps, step, places = pairs
    # Counted from here to the ends, positions and lengths give the same distances.
    i, j = places_of(LAYOUT, 0, WG * ROWS, T)
    if T.LISTED:
        keep = in_band(i, j, rows_left, keys_left, band)
        b, h, start_q, start_k, len_q = spot_of(steps, step, T)
        spot = (b, h, start_q, start_k, places[0], places[1])
        i0, j0 = len_q - rows_left, len_k - keys_left
        at = positions(spot, i0 + i, j0 + j, len_q, len_k)
        return keep & CODE.KEEP(at, spot, ends_of(i0, j0 + WG * ROWS, T))
    else:
        return visible_pairs(i, j, rows_left, keys_left, band, T)


@gluon.jit
def spot_of(steps, step, T: gl.constexpr):
    """Sequence, head, where the sequence begins on both sides, and its queries. (A function cannot return all of a spot
    of device/places.py: tables may be None.)"""
    _, _, h, _ = told(steps, step, DQ, T)
    b, len_q, start_q, start_k = told(steps, step, SPOT, T)
    return b, h, start_q, start_k, len_q


@gluon.jit
def placed(s, params, pairs, columns, CODE: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    """A placed function (one of positions) and its derivative, of this consumer's scores (keys x queries)."""
    results = at_places(s, params, pairs, columns, CODE.BACKWARD, WG, T)
    return results[0], results[1]


@gluon.jit
def shifted(s, params, pairs, columns, CODE: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    """The sum of the scores and something of their places."""
    return at_places(s, params, pairs, columns, CODE.SHIFT, WG, T)


@gluon.jit
def learn(ds, pairs, columns, CODE: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    """Add to the gradients of the tables that the sum looked up, whose own gradient is ds."""
    if CODE.LEARN is not None:
        at_places(ds, 0, pairs, columns, CODE.LEARN, WG, T)


@gluon.jit
def at_places(s, params, pairs, columns, F: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    """What F makes of scores and their places. ``columns``: see columns_of."""
    _, rows_left, keys_left, len_k, _, steps, step, places = pairs
    b, h, start_q, start_k, len_q = spot_of(steps, step, T)
    spot = (b, h, start_q, start_k, places[0], places[1])
    i0, j0 = len_q - rows_left, len_k - keys_left + WG * ROWS
    LAYOUT: gl.constexpr = s.type.layout
    i, j = places_of(LAYOUT, i0, j0, T)
    return F(s, (params, positions(spot, i, j, len_q, len_k), spot, ends_of(i0, j0, T), columns))


@gluon.jit
def columns_of(steps, step, places, LAYOUT: gl.constexpr, CODE: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    """What is looked up for each query of a step (see device/once.py): to be called before the scores are there."""
    if CODE.COLUMNS is None:
        return 0
    else:
        _, rows_left, keys_left, len_k = told(steps, step, PAIRS, T)
        b, h, start_q, start_k, len_q = spot_of(steps, step, T)
        spot = (b, h, start_q, start_k, places[0], places[1])
        i0, j0 = len_q - rows_left, len_k - keys_left + WG * ROWS
        i, j = places_of(LAYOUT, i0, j0, T)
        return CODE.COLUMNS((0, positions(spot, i, j, len_q, len_k), spot, ends_of(i0, j0, T)))


@gluon.jit
def places_of(LAYOUT: gl.constexpr, i0, j0, T: gl.constexpr):
    """The queries, as a row, and the keys, as a column, of a consumer's scores, from i0 and j0 on."""
    BLOCK_M: gl.constexpr = T.BLOCK_M
    i = i0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))[None, :]
    j = j0 + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    return i, j


@gluon.jit
def ends_of(i0, j0, T: gl.constexpr):
    """The first and the last of both."""
    return i0, i0 + T.BLOCK_M - 1, j0, j0 + ROWS - 1


@gluon.jit
def with_params(s, dp, sums, params, pairs, ds_scale, DTYPE: gl.constexpr, CODE: gl.constexpr, WG: gl.constexpr,
                T: gl.constexpr):  # fmt: skip
    """p, ds and the sums for the params' gradients of one step. One half of the scores after the other: derivatives by
    params of all of them would not fit beside dk and dv."""
    LAYOUT: gl.constexpr = s.type.layout
    # One mask for all derivatives, since they are finite at 0 (config.no_room_for_params): dp = 0 makes them 0 there.
    s = masked(s, pairs, CODE, WG, T)
    dp = masked(dp, pairs, CODE, WG, T)
    s0, s1 = halves(s)
    dp0, dp1 = halves(dp)
    p0, ds0, sums = half_with_params(s0, dp0, sums, params, ds_scale, DTYPE, CODE, T)
    p1, ds1, sums = half_with_params(s1, dp1, sums, params, ds_scale, DTYPE, CODE, T)
    p = masked(joined(p0, p1, LAYOUT), pairs, CODE, WG, T)
    return p, joined(ds0, ds1, LAYOUT), sums


@gluon.jit
def half_with_params(s, dp, sums, params, ds_scale, DTYPE: gl.constexpr, CODE: gl.constexpr, T: gl.constexpr):
    """p, ds (rounded) and the sums with the terms of these scores."""
    N: gl.constexpr = T.N_PARAMS
    results = CODE.BACKWARD(s, params)
    new = ()
    for n in gl.static_range(N):
        new = new + (sums[n] + gl.convert_layout(gl.sum(dp * results[2 + n], 1), sums[n].type.layout),)
    ds = dp * results[1]
    if T.PRESCALED:
        ds = ds * ds_scale
    return results[0], ds.to(DTYPE), new


@gluon.jit
def halves(x):
    """x (rows, n) as two of n / 2 columns. They are other registers; nothing moves."""
    M: gl.constexpr = x.type.shape[0]
    N: gl.constexpr = x.type.shape[1]
    return x.reshape([M, 2, N // 2]).permute((0, 2, 1)).split()


@gluon.jit
def joined(low, high, LAYOUT: gl.constexpr):
    """What ``halves`` took apart."""
    M: gl.constexpr = low.type.shape[0]
    N: gl.constexpr = low.type.shape[1]
    return gl.convert_layout(gl.join(low, high).permute((0, 2, 1)).reshape([M, 2 * N]), LAYOUT)


@gluon.jit
def no_params(LAYOUT: gl.constexpr, T: gl.constexpr):
    """A sum for each param, one entry per key."""
    N: gl.constexpr = T.N_PARAMS
    sums = ()
    for n in gl.static_range(N):
        sums = sums + (gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT)),)
    return sums


@gluon.jit
def settle_params(p_dparams, sums, last, number, heads, hq, LAYOUT: gl.constexpr, WG: gl.constexpr, T: gl.constexpr):
    """Write the sums of the params' gradients after the ``last`` step of a query head, for tile ``number``."""
    if T.N_PARAMS > 0:
        if last:
            index = (number * BACKWARD_CONSUMERS + WG) * (heads * T.GROUP) + hq
            store_params(p_dparams + index.to(gl.int64) * T.N_PARAMS, sums, T)
            sums = no_params(LAYOUT, T)
    return sums


@gluon.jit
def store_params(p_dparams, sums, T: gl.constexpr):
    """Write the sums, over keys as well."""
    N: gl.constexpr = T.N_PARAMS
    for n in gl.static_range(N):
        gl.store(p_dparams + n, gl.sum(sums[n], 0))
