"""One spelling for the Gluon names that differ between Triton 3.6 and the newest release."""

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor", "fence_async_shared", "gl", "gluon", "mbarrier", "reinterpret", "thread_barrier", "tma_add",
    "tma_load", "tma_store", "tma_store_wait", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip

# Triton 3.9 keeps the old names, but they raise: ask for the new ones first.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:

    @builtin
    def tma_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """Triton 3.6 has the operation and its binding, and no Python name for it."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@builtin
def reinterpret(buffer: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same bytes of shared memory as a tile of another dtype, shape and layout: a method whose name changed."""
    dtype, shape, layout = (_unwrap_if_constexpr(a) for a in (dtype, shape, layout))
    return _semantic.memdesc_reinterpret(buffer, dtype, [_unwrap_if_constexpr(n) for n in shape], layout)
