"""What the backward does to a tile of scores between products: the function, masks, gradients of params and tables."""

from gdpa.backends.hopper.compat import gl, gluon
from gdpa.backends.hopper.messages import DQ, PAIRS, SPOT, told
from gdpa.backends.hopper.pipeline import BACKWARD_CONSUMERS, ROWS, visible_pairs
from gdpa.backends.hopper.row_sums import DELTA, ROW, divided_by_row, some_terms_of, through_sums
from gdpa.device.places import positions
from gdpa.device.sequences import in_band

HIDDEN = gl.constexpr(-2)  # as bits, a NaN that no arithmetic makes


@gluon.jit
def masked(x, pairs, CODE: gl.constexpr, wg, T: gl.constexpr):
    """x (this consumer's 64 keys x BLOCK_M queries), zero for pairs outside the band or the mask."""
    if T.MASKED:
        if pairs.cut:
            x = gl.where(visible(x, pairs, CODE, wg, T), x, 0.0).to(x.dtype)
    return x


@gluon.jit
def both_masked(p, slope, pairs, CODE: gl.constexpr, wg, T: gl.constexpr):
    """The same for weights and derivatives, with one look at what is visible: a hidden derivative becomes HIDDEN."""
    if T.MASKED:
        if pairs.cut:
            keep = visible(p, pairs, CODE, wg, T)
            p = gl.where(keep, p, 0.0).to(p.dtype)
            slope = or_hidden(slope, keep)
    return p, slope


@gluon.jit
def or_hidden(x, keep):
    return gl.where(keep, x.to(gl.int32, bitcast=True), HIDDEN).to(gl.float32, bitcast=True)


@gluon.jit
def unless_hidden(y, x, cut, T: gl.constexpr):
    """y, 0 where x is HIDDEN."""
    if T.MASKED:
        if cut:
            y = gl.where(x.to(gl.int32, bitcast=True) == HIDDEN, 0.0, y)
    return y


@gluon.jit
def times_slope(dp, slope, cut, T: gl.constexpr):
    """ds of what both_masked left: 0 for hidden pairs, whatever dp is. (0 times an infinite one would be NaN.)"""
    return unless_hidden(dp * slope, slope, cut, T)


@gluon.jit
def visible(x, pairs, CODE: gl.constexpr, wg, T: gl.constexpr):
    """Which of this consumer's pairs are visible, in the layout of x."""
    LAYOUT: gl.constexpr = x.type.layout
    _, rows_left, keys_left, len_k, band, steps, step, places = pairs
    # Counted from here to the ends, positions and lengths give the same distances.
    i, j = places_of(LAYOUT, 0, wg * ROWS, T)
    if T.LISTED:
        keep = in_band(i, j, rows_left, keys_left, band)
        b, h, start_q, start_k, len_q = spot_of(steps, step, T)
        spot = (b, h, start_q, start_k, places[0], places[1])
        i0, j0 = len_q - rows_left, len_k - keys_left
        at = positions(spot, i0 + i, j0 + j, len_q, len_k)
        return keep & CODE.KEEP(at, spot, ends_of(i0, j0 + wg * ROWS, T))
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
def placed(s, params, pairs, columns, CODE: gl.constexpr, wg, T: gl.constexpr):
    """A placed function (one of positions) and its derivative, of this consumer's scores (keys x queries)."""
    results = at_places(s, params, pairs, columns, CODE.BACKWARD, wg, T)
    return results[0], results[1]


@gluon.jit
def shifted(s, params, pairs, columns, CODE: gl.constexpr, wg, T: gl.constexpr):
    """The shift that the function takes: the scores plus what their positions and tables give."""
    return at_places(s, params, pairs, columns, CODE.SHIFT, wg, T)


@gluon.jit
def learn(ds, pairs, columns, CODE: gl.constexpr, wg, T: gl.constexpr):
    """Add to the gradients of the tables that the sum looked up, whose own gradient is ds."""
    if CODE.LEARN is not None:
        at_places(ds, 0, pairs, columns, CODE.LEARN, wg, T)


@gluon.jit
def at_places(s, params, pairs, columns, F: gl.constexpr, wg, T: gl.constexpr):
    """F of scores (or of their gradients) at their positions. ``columns``: what columns_of has looked up."""
    _, rows_left, keys_left, len_k, _, steps, step, places = pairs
    b, h, start_q, start_k, len_q = spot_of(steps, step, T)
    spot = (b, h, start_q, start_k, places[0], places[1])
    i0, j0 = len_q - rows_left, len_k - keys_left + wg * ROWS
    LAYOUT: gl.constexpr = s.type.layout
    i, j = places_of(LAYOUT, i0, j0, T)
    return F(s, (params, positions(spot, i, j, len_q, len_k), spot, ends_of(i0, j0, T), columns))


@gluon.jit
def columns_of(steps, step, places, LAYOUT: gl.constexpr, CODE: gl.constexpr, wg, T: gl.constexpr):
    """What is looked up for each query of a step (see device/once.py): to be called before the scores are there."""
    if CODE.COLUMNS is None:
        return 0
    else:
        _, rows_left, keys_left, len_k = told(steps, step, PAIRS, T)
        b, h, start_q, start_k, len_q = spot_of(steps, step, T)
        spot = (b, h, start_q, start_k, places[0], places[1])
        i0, j0 = len_q - rows_left, len_k - keys_left + wg * ROWS
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
def with_params(s, dp, sums, params, pairs, bufs, stage, ds_scale, CODE: gl.constexpr, wg, T: gl.constexpr):
    """p, ds and the sums for the params' gradients of one step."""
    LAYOUT: gl.constexpr = s.type.layout
    HALVINGS: gl.constexpr = halvings(T)
    N: gl.constexpr = T.N_PARAMS
    # One mask for all derivatives, since they are finite at 0 (config.no_room_for_params): dp = 0 makes them 0 there.
    s = apart(masked(s, pairs, CODE, wg, T), HALVINGS)
    dp = apart(masked_dp(dp, pairs, CODE, wg, T), HALVINGS)
    p = ()
    ds = ()
    for i in gl.static_range(1 << HALVINGS):
        # Beside dk and dv there are registers for few scores at a time. In one piece of code the assembler would begin
        # with all of them and then go on one by one, each waiting for its own exponential (see its SASS). It moves
        # nothing over a branch. So scores are skipped that need not be: of queries past the end, rows of zeros. (With
        # more params what comes out of a branch does not fit: 1.4 to 2.9 KB of spills.)
        if T.NORM == "none":
            skips = 0
            if T.N_PARAMS == 1 and i > 0:
                skips = (pairs.rows_left <= i * s[i].type.shape[1]).to(gl.int32)
            results = CODE.BACKWARD(s[i], dp[i], ds_scale, params, skips)
            part_p = results[0]
            part_ds = results[1]
            new = ()
            for n in gl.static_range(N):
                new = new + (sums[n] + summed(results[2 + n], T),)
            sums = new
        else:
            part_p, part_ds, sums = of_row_sums(s[i], dp[i], sums, params, pairs, bufs, stage, i, ds_scale, CODE, T)
        p = p + (part_p,)
        ds = ds + (part_ds,)
    return masked(joined(p, HALVINGS, LAYOUT), pairs, CODE, wg, T), joined(ds, HALVINGS, LAYOUT), sums


@gluon.jit
def masked_dp(dp, pairs, CODE: gl.constexpr, wg, T: gl.constexpr):
    """dp of hidden pairs is 0; or, where row sums take something of it before that, HIDDEN."""
    if T.NORM == "none":
        return masked(dp, pairs, CODE, wg, T)
    else:
        if T.MASKED:
            if pairs.cut:
                dp = or_hidden(dp, visible(dp, pairs, CODE, wg, T))
        return dp


@gluon.jit
def of_row_sums(s, dp, sums, params, pairs, bufs, stage, PART: gl.constexpr, ds_scale, CODE: gl.constexpr,
                T: gl.constexpr):  # fmt: skip
    """p and ds, rounded, and the sums, of the ``PART``-th part of a step whose outputs are divided by row sums."""
    N: gl.constexpr = T.N_PARAMS
    found = CODE.BACKWARD(s, params)
    p, factor = divided_by_row(found[0], 1.0, some_terms_of(bufs.terms, stage, ROW, PART, s), T)
    df = through_sums(dp, some_terms_of(bufs.terms, stage, DELTA, PART, s), factor, T) * factor
    df = unless_hidden(df, dp, pairs.cut, T)
    ds = df * found[1]
    if T.LEAST_FACTOR > 0:
        ds = ds * ds_scale
    new = ()
    for n in gl.static_range(N):
        new = new + (sums[n] + summed(df * found[2 + n], T),)
    return p.to(bufs.q.dtype), ds.to(bufs.q.dtype), new


@gluon.constexpr_function
def halvings(T):
    """How often a step's scores are halved: until a thread has the 8 that a block of PTX takes (see emission/ptx.py),
    or once, where there is no such block."""
    return (T.BLOCK_M // 16).bit_length() - 1 if T.BY_EIGHT else 1  # each of 128 threads has 8 of 64 rows, 16 columns


@gluon.jit
def summed(x, T: gl.constexpr):
    """Sums of x (rows, n): of each thread's numbers of a row, so that no lane waits for another before
    ``store_params``. Of a function that is no block of PTX sums of whole rows, whose shuffles keep the halves of a step
    apart: the assembler would compute both at once."""
    M: gl.constexpr = x.type.shape[0]
    N: gl.constexpr = x.type.shape[1]
    if T.BY_EIGHT:
        return gl.sum(x.reshape([M, N // 8, 4, 2]).permute((0, 2, 1, 3)).reshape([M, 4, N // 4]), 2)
    else:
        return gl.expand_dims(gl.sum(x, 1), 1)


@gluon.jit
def apart(x, HALVINGS: gl.constexpr):
    """x (rows, n) as 2^HALVINGS tiles of fewer columns. They are other registers; nothing moves."""
    tiles = (x,)
    for level in gl.static_range(HALVINGS):
        finer = ()
        for i in gl.static_range(1 << level):
            finer = finer + halves(tiles[i])
        tiles = finer
    return tiles


@gluon.jit
def joined(tiles, HALVINGS: gl.constexpr, LAYOUT: gl.constexpr):
    """What ``apart`` took apart."""
    for level in gl.static_range(HALVINGS):
        wider = ()
        for i in gl.static_range(1 << (HALVINGS - 1 - level)):
            wider = wider + (whole(tiles[2 * i], tiles[2 * i + 1]),)
        tiles = wider
    return gl.convert_layout(tiles[0], LAYOUT)


@gluon.jit
def halves(x):
    M: gl.constexpr = x.type.shape[0]
    N: gl.constexpr = x.type.shape[1]
    return x.reshape([M, 2, N // 2]).permute((0, 2, 1)).split()


@gluon.jit
def whole(low, high):
    M: gl.constexpr = low.type.shape[0]
    N: gl.constexpr = low.type.shape[1]
    return gl.join(low, high).permute((0, 2, 1)).reshape([M, 2 * N])


@gluon.jit
def no_params(LAYOUT: gl.constexpr, T: gl.constexpr):
    """A sum for each param, as ``summed`` has it."""
    N: gl.constexpr = T.N_PARAMS
    BLOCK_M: gl.constexpr = T.BLOCK_M
    sums = ()
    for n in gl.static_range(N):
        sums = sums + (summed(apart(gl.zeros([ROWS, BLOCK_M], gl.float32, LAYOUT), halvings(T))[0], T),)
    return sums


@gluon.jit
def settle_params(p_dparams, sums, params, last, number, heads, hq, LAYOUT: gl.constexpr, CODE: gl.constexpr,
                  wg, T: gl.constexpr):  # fmt: skip
    """Write the sums of the params' gradients after the ``last`` step of a query head, for tile ``number``."""
    if T.N_PARAMS > 0:
        if last:
            index = (number * BACKWARD_CONSUMERS + wg) * (heads * T.GROUP) + hq
            place = p_dparams + index.to(gl.int64) * T.N_PARAMS
            if CODE.GAINS is None:
                store_params(place, sums, no_gains(T), T)
            else:
                store_params(place, sums, CODE.GAINS(params), T)
            sums = no_params(LAYOUT, T)
    return sums


@gluon.jit
def no_gains(T: gl.constexpr):
    N: gl.constexpr = T.N_PARAMS
    gains = ()
    for n in gl.static_range(N):
        gains = gains + (1.0,)
    return gains


@gluon.jit
def store_params(p_dparams, sums, gains, T: gl.constexpr):
    """Write the sums over all threads."""
    N: gl.constexpr = T.N_PARAMS
    for n in gl.static_range(N):
        gl.store(p_dparams + n, gl.sum(gl.sum(sums[n], 1), 0) * gains[n])
