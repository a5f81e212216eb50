"""Table entries that belong to a key of a block or to a query of a tile, looked up before the scores are there.

Each thread looks up the value of one key (see device/once.py), and shared memory hands it out to the others. That takes
as long as the function itself, so it happens while the tensor cores compute the scores: ``look_up`` before they are
queued, ``pass_round`` and ``handed_out`` behind that.
"""

from gdpa.backends.hopper.compat import gl, gluon
from gdpa.backends.hopper.forward.weights import ends_of, places_of
from gdpa.device.places import positions


@gluon.jit
def allocate_columns(T: gl.constexpr):
    """Shared memory for T.COLUMNS values of each consumer: a row of 32-bit numbers for each, one per key."""
    VALUES: gl.constexpr = T.CONSUMERS * T.COLUMNS
    return gl.allocate_shared_memory(gl.int32, [VALUES, T.BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def goes_round(n, x, T):
    """Whether the ``n``-th value is handed out through shared memory: one of the first T.COLUMNS, which are of keys."""
    return n < T.COLUMNS and len(x.shape) == 1 and x.dtype.primitive_bitwidth == 32


@gluon.jit
def look_up(spot, pairs, LAYOUT: gl.constexpr, CODE: gl.constexpr, wg, T: gl.constexpr):
    """All values, as a tuple: those of keys, one per thread, then those of queries, in every thread that has scores of
    theirs."""
    if CODE.COLUMNS is None:
        return ()
    else:
        i, j = places_of(LAYOUT, pairs, wg, T)
        return CODE.COLUMNS((0, positions(spot, i, j, pairs.len_q, pairs.len_k), spot, ends_of(pairs, wg, T)))


@gluon.jit
def pass_round(found, rows, wg, T: gl.constexpr):
    """Write the values of keys to shared memory."""
    for n in gl.static_range(len(found)):
        if goes_round(n, found[n], T):
            rows.index(wg * T.COLUMNS + n).store(found[n].to(gl.int32, bitcast=True))


@gluon.jit
def handed_out(found, rows, LAYOUT: gl.constexpr, wg, T: gl.constexpr):
    """The same tuple with the values of keys read back, each thread those of its columns, for scores in ``LAYOUT``."""
    values = ()
    for n in gl.static_range(len(found)):
        if goes_round(n, found[n], T):
            x = rows.index(wg * T.COLUMNS + n).load(gl.SliceLayout(0, LAYOUT))
            values = values + (x.to(found[n].dtype, bitcast=True),)
        else:
            values = values + (found[n],)
    return values
