"""What is looked up for the keys of a block and for a tile's queries, before the scores are there.

One thread looks up one key's (see device/once.py), and all have it by way of shared memory. That takes as long as the
function itself, so it happens beside the products of the scores.
"""

from gdpa.backends.hopper.compat import gl, gluon
from gdpa.backends.hopper.forward.weights import ends_of, places_of
from gdpa.device.places import positions


@gluon.jit
def allocate_columns(T: gl.constexpr):
    """A row for each value of a consumer, a number of 32 bits for each key."""
    VALUES: gl.constexpr = T.CONSUMERS * T.COLUMNS
    return gl.allocate_shared_memory(gl.int32, [VALUES, T.BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def goes_round(n, x, T):
    """Whether the ``n``-th of the values goes through those rows: keys' values come first."""
    return n < T.COLUMNS and len(x.shape) == 1 and x.dtype.primitive_bitwidth == 32


@gluon.jit
def look_up(spot, pairs, LAYOUT: gl.constexpr, CODE: gl.constexpr, wg, T: gl.constexpr):
    """All values: of keys by one thread each, of queries by those that have their scores."""
    if CODE.COLUMNS is None:
        return ()
    else:
        i, j = places_of(LAYOUT, pairs, wg, T)
        return CODE.COLUMNS((0, positions(spot, i, j, pairs.len_q, pairs.len_k), spot, ends_of(pairs, wg, T)))


@gluon.jit
def pass_round(found, rows, wg, T: gl.constexpr):
    """Write those of keys to where the other threads find them."""
    for n in gl.static_range(len(found)):
        if goes_round(n, found[n], T):
            rows.index(wg * T.COLUMNS + n).store(found[n].to(gl.int32, bitcast=True))


@gluon.jit
def handed_out(found, rows, LAYOUT: gl.constexpr, wg, T: gl.constexpr):
    """The same values, those of keys as ``spread`` (device/once.py) would have them for tiles of ``LAYOUT``."""
    values = ()
    for n in gl.static_range(len(found)):
        if goes_round(n, found[n], T):
            x = rows.index(wg * T.COLUMNS + n).load(gl.SliceLayout(0, LAYOUT))
            values = values + (x.to(found[n].dtype, bitcast=True),)
        else:
            values = values + (found[n],)
    return values
