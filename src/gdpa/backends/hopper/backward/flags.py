"""Flags in global memory, by which programs wait for each other's parts of dq (ring.py, turns.py)."""

from gdpa.backends.hopper.compat import gl, gluon


@gluon.jit
def wait_for(p_flag, mask, low, spread):
    """Spin until (flag & mask) lies in [low, low + spread]. What was written before the flag was set can then be read,
    also by TMA."""
    TEXT: gl.constexpr = """{
        .reg .pred outside;
        again: ld.acquire.gpu.global.b32 $0, [$1];
        and.b32 $0, $0, $2;
        sub.s32 $0, $0, $3;
        setp.hi.u32 outside, $0, $4;
        @outside bra again;
        fence.proxy.async.global;
    }"""
    operands = [p_flag, mask, low, spread]
    gl.inline_asm_elementwise(TEXT, "=&r,l,r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def set_flag(p_flag, value, ADD: gl.constexpr):
    """Set a flag, or ADD to it, once everything written before is visible, TMA's writes included. By one lane."""
    OPERATION: gl.constexpr = "red.relaxed.gpu.global.add.s32" if ADD else "st.relaxed.gpu.global.s32"
    TEXT: gl.constexpr = (
        "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
        "fence.proxy.async.global; fence.acq_rel.gpu; @first " + OPERATION + " [$1], $2; mov.b32 $0, $2; }"
    )
    gl.inline_asm_elementwise(TEXT, "=r,l,r", [p_flag, value], dtype=gl.int32, is_pure=False, pack=1)
