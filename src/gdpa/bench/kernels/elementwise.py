"""The emitted device code of an activation applied to a vector: what its error is measured with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdpa.functions.activation import Activation
from gdpa.functions.emit import jit_functions

BLOCK = 1024


@triton.jit
def elementwise_kernel(  # type: ignore[no-untyped-def]  # Triton types it
    p_s, p_p, p_again, p_ds, n,
    FORWARD: tl.constexpr, BACKWARD: tl.constexpr, LOAD_PARAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(p_s + i, mask=i < n, other=0.0)
    params = LOAD_PARAMS(p_s, 0, 0)
    tl.store(p_p + i, FORWARD(s, params), mask=i < n)
    p, ds = BACKWARD(s, params)
    tl.store(p_again + i, p, mask=i < n)
    tl.store(p_ds + i, ds, mask=i < n)


def apply(act: Activation, s: Tensor, dtype: torch.dtype, target: str) -> tuple[Tensor, Tensor, Tensor]:
    """(f(s) by the forward code, f(s) by the backward code, f'(s)) in float32, by the code emitted for ``dtype``."""
    f = jit_functions(act, dtype, target)
    p, again, ds = (torch.full_like(s, float("nan")) for _ in range(3))
    grid = (triton.cdiv(s.numel(), BLOCK),)
    elementwise_kernel[grid](s, p, again, ds, s.numel(), f.forward, f.backward, f.load_params, BLOCK)
    return f.factor * p, f.backward_factor * again, f.backward_factor * ds
