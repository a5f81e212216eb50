"""What leaves a consumer of the backward: its half of ds to the other one, dq, dk and dv to memory."""

from gdpa.backends.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
)
from gdpa.backends.hopper.pipeline import ROWS, ragged


@gluon.jit
def share_ds(ds, ds_sm, ds_full, ds_empty, step, WG: gl.constexpr):
    """Put this consumer's half of ds where both find it in the next step."""
    here = step & 1
    mbarrier.wait(ds_empty.index(here), ((step >> 1) & 1) ^ 1)
    ds_sm.index(here).slice(WG * ROWS, ROWS, dim=0).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(here), count=1)


@gluon.jit
def dq_product(k, ds, zero, WG: gl.constexpr, T: gl.constexpr):
    """This consumer's 64 x 64 part of ds k, running. At D 64 a step has 128 queries and the consumers share them; at
    D 128 it has 64, and they share the columns."""
    BLOCK_N: gl.constexpr = T.BLOCK_N
    D: gl.constexpr = T.D
    k = k.reshape([BLOCK_N, D])
    if T.D == 64:
        ds = ds.slice(WG * ROWS, ROWS, dim=1)
    else:
        k = k.slice(WG * ROWS, ROWS, dim=1)
    return warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def dq_out(dq_desc, staged, dq, place, ds_scale, WG: gl.constexpr, T: gl.constexpr):
    """Send this consumer's part of dq, for the place (start, length, row, head) and from the keys from n0 on, on its
    way."""
    start, length, row, head, n0 = place
    if T.SCALE_DQ:
        dq = dq * ds_scale
    if T.TILES > 1:
        all_written(row)  # above all what this is added to
    tma_store_wait(0)  # by the thread that sends; Triton lets the others, which are about to write, wait for it
    staged.reshape([ROWS, ROWS]).store(dq.to(dq_desc.dtype))
    fence_async_shared()
    if T.D == 64:
        at = ragged(start, length, row + WG * ROWS, head, 0)
    else:
        at = ragged(start, length, row, head, WG * ROWS)
    if T.DQ == "add":
        tma_add(dq_desc, at, staged)
    elif T.TILES == 1:
        tma_store(dq_desc, at, staged)
    elif n0 > 0:
        tma_add(dq_desc, at, staged)
    else:
        tma_store(dq_desc, at, staged)


@gluon.jit
def all_written(x):
    """Wait until all that this thread has sent is in memory, and not only read from its buffer (tma_store_wait)."""
    TEXT: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(TEXT, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def staging(out_sm, desc, other, WG: gl.constexpr):
    """This consumer's buffer for tiles on their way out, in the form of ``desc``: all of it, or the first part where
    tiles of ``other`` are larger. (Triton 3.8 wants to see the whole buffer in the new form.)"""
    PARTS: gl.constexpr = other.block_type.nbytes // desc.block_type.nbytes
    if PARTS > 1:
        staged = reinterpret(out_sm.index(WG), desc.dtype, [PARTS] + desc.block_type.shape, desc.layout).index(0)
    else:
        staged = reinterpret(out_sm.index(WG), desc.dtype, desc.block_type.shape, desc.layout)
    return staged


@gluon.jit
def write(desc, at, staged, tile):
    """Store ``tile`` through shared memory, in the dtype of the target."""
    SHAPE: gl.constexpr = tile.type.shape
    tma_store_wait(0)
    staged.reshape(SHAPE).store(tile.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, at, staged)
