"""How the backward's two consumers share a tile of keys, and the ds that each computes, in shared memory.

Usually a consumer's half is a slice of one buffer, at an offset known at compile time. Consumers that are ALIKE (one
copy of the code runs as both, see compiled/sharing.py) only know their number at run time, so that each half is a
buffer of its own.
"""

from gdpa.backends.hopper.compat import fence_async_shared, gl, gluon, mbarrier, reinterpret, tma_load, warpgroup_mma
from gdpa.backends.hopper.pipeline import ROWS, ragged


@gluon.jit
def load_keys(desc, full, buffers, slot, start, length, row, h, T: gl.constexpr):
    """Load the tile of keys (or values) from row ``row`` of a sequence on; arrives at the barrier ``full``."""
    if T.ALIKE:
        mbarrier.expect(full, 2 * desc.block_type.nbytes)
        for half in gl.static_range(2):
            tma_load(desc, ragged(start, length, row + half * ROWS, h, 0), full, buffers.index(2 * slot + half))
    else:
        mbarrier.expect(full, desc.block_type.nbytes)
        tma_load(desc, ragged(start, length, row, h, 0), full, buffers.index(slot))


@gluon.jit
def own_keys(buffers, slot, wg, T: gl.constexpr):
    """The 64 keys (or values) of consumer wg."""
    BLOCK_N: gl.constexpr = T.BLOCK_N
    D: gl.constexpr = T.D
    if T.ALIKE:
        return buffers.index(2 * slot + wg).reshape([ROWS, D])
    else:
        return buffers.index(slot).reshape([BLOCK_N, D]).slice(wg * ROWS, ROWS, dim=0)


@gluon.jit
def share_ds(ds, bufs, bars, step, wg, T: gl.constexpr):
    """Write this consumer's half of ds to shared memory, for the dq of both consumers in the next step."""
    here = step & 1
    mbarrier.wait(bars.ds_empty.index(here), ((step >> 1) & 1) ^ 1)
    if T.ALIKE:
        bufs.ds.index(2 * here + wg).store(ds)
    else:
        bufs.ds.index(here).slice(wg * ROWS, ROWS, dim=0).store(ds)
    fence_async_shared()
    mbarrier.arrive(bars.ds_full.index(here), count=1)


@gluon.jit
def dq_product(bufs, slot, step, zero, wg, T: gl.constexpr):
    """This consumer's 64 x 64 part of ds k, started and not waited for; ``step``: which of the two buffers holds ds. At
    D 64 a step has 128 queries, of which each consumer takes half; at D 128 it has 64, and each takes half of the
    columns."""
    BLOCK_N: gl.constexpr = T.BLOCK_N
    D: gl.constexpr = T.D
    if T.ALIKE:
        dq = zero
        for half in gl.static_range(2):
            k = square_of(bufs.k.index(2 * slot + half), wg, T.D)
            ds = square_of(bufs.ds.index(2 * step + half), wg, T.BLOCK_M)
            dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    else:
        k = bufs.k.index(slot).reshape([BLOCK_N, D])
        ds = bufs.ds.index(step)
        if T.D == 64:
            ds = ds.slice(wg * ROWS, ROWS, dim=1)
        else:
            k = k.slice(wg * ROWS, ROWS, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)
    return dq


@gluon.jit
def square_of(rows, wg, COLUMNS: gl.constexpr):
    """64 x 64 of 64 rows: all of them, or the half of the columns that is consumer wg's. (Rows of 128 bytes, one after
    the other, are how 64 columns of 16 bits lie in shared memory; the next 64 follow behind all rows.)"""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    squares = reinterpret(rows, rows.dtype, [COLUMNS // ROWS, ROWS, ROWS], layout)
    if COLUMNS == ROWS:
        return squares.index(0)
    else:
        return squares.index(wg)
