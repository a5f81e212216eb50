"""How a consumer of the backward writes its parts of dq, dk and dv: through shared memory, by TMA."""

from gdpa.backends.hopper.backward.ring import in_ring
from gdpa.backends.hopper.backward.walk import part_of
from gdpa.backends.hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_add,
    tma_store,
    tma_store_wait,
)
from gdpa.backends.hopper.messages import DQ, IS_FIRST, IS_LAST, NO_TURN, SLOT_SHIFT, told
from gdpa.backends.hopper.pipeline import ROWS


@gluon.jit
def dq_out(outputs, buffers, dq, steps, step, ready, ds_scale, wg, T: gl.constexpr):
    """Send this consumer's part of the dq of step ``step``: store it as the first part of a sum, add it to one, or, if
    it completes the sum, write dq. Which of these, the step's send code says (messages.py). ``buffers``: of 16 bits,
    for dq, and of float32, for sums."""
    narrow, wide = buffers
    end, row, head, code = told(steps, step, DQ, T)
    if T.IN_TURN:
        mbarrier.wait(ready.index(step & 1), (step >> 1) & 1)
        if (code & IS_LAST) != 0:
            if (code & IS_FIRST) == 0:
                dq += wide.reshape([ROWS, ROWS]).load(dq.type.layout)
            send(outputs.dq, narrow, dq * ds_scale, part_of(end, row, head, wg, T))
        elif T.DQ == "ring":
            pass_sum_on(outputs.ring, wide, dq, in_ring(code >> SLOT_SHIFT, wg, T), code)
        elif code != NO_TURN:
            pass_sum_on(outputs.ring, wide, dq, part_of(end, row, head, wg, T), code)
    else:
        stage(outputs.ring, wide, dq)
        tma_add(outputs.ring, part_of(end, row, head, wg, T), wide)


@gluon.jit
def pass_sum_on(desc, staged, dq, at, code):
    """Store this part as a block's sum if it is the first one, or add it."""
    stage(desc, staged, dq)
    if (code & IS_FIRST) != 0:
        tma_store(desc, at, staged)
    else:
        tma_add(desc, at, staged)


@gluon.jit
def send(desc, staged, tile, at):
    """Write ``tile`` through shared memory, in the dtype of the target."""
    stage(desc, staged, tile)
    tma_store(desc, at, staged)


@gluon.jit
def stage(desc, staged, tile):
    """Copy ``tile`` to shared memory, for TMA."""
    SHAPE: gl.constexpr = tile.type.shape
    tma_store_wait(0)  # waits in the thread that sends; before the others write, Triton makes them wait for it
    staged.reshape(SHAPE).store(tile.to(desc.dtype))
    fence_async_shared()


@gluon.jit
def free_buffer(steps, step, free, T: gl.constexpr):
    """If the dq of the step before ``step`` will complete a sum, let the courier fetch that sum into this consumer's
    buffer. Early: it takes as long as a product or two."""
    _, _, _, code = told(steps, step - 1, DQ, T)
    if (step > 0) & ((code & (IS_FIRST | IS_LAST)) == IS_LAST):
        tma_store_wait(0)
        mbarrier.arrive(free, count=1)


@gluon.jit
def all_written(x):
    """Wait until all that this thread has sent by TMA is in global memory; tma_store_wait only waits until it has been
    read from shared memory. Returns ``x``."""
    TEXT: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(TEXT, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def buffer_for(out_sm, desc, wg):
    """This consumer's staging buffer as a tile of ``desc``: all of it, or its first part where such tiles are smaller.
    (Triton 3.8 only reinterprets whole buffers.)"""
    PARTS: gl.constexpr = (ROWS * ROWS * 4) // desc.block_type.nbytes
    if PARTS > 1:
        staged = reinterpret(out_sm.index(wg), desc.dtype, [PARTS] + desc.block_type.shape, desc.layout).index(0)
    else:
        staged = reinterpret(out_sm.index(wg), desc.dtype, desc.block_type.shape, desc.layout)
    return staged
