"""Where the factor scale * out_scale of ds is applied: to dk and dq at the end, or, in float16, partly to ds before it
is rounded, so that it neither overflows nor loses digits."""

import torch
import triton
import triton.language as tl

# Below 6e-5 float16 loses digits: at out_scale = 1 / 4096 most of a ds would. gdpa.exactness takes the same share.
LEAST_FACTOR = 2.0**-6


def least_factor(dtype: torch.dtype, folded: float = 1.0) -> float:
    """The least factor that ds has when it is rounded to ``dtype``, besides a scale that is ``folded`` into f'; 0 if
    the whole factor is applied at the end, which could overflow in float16 alone."""
    return LEAST_FACTOR / folded if dtype == torch.float16 else 0.0


@triton.jit
def ds_factors(factor, LEAST: tl.constexpr):
    """(before, after): ``factor`` as a product of what ds is multiplied by before it is rounded, and dk and dq at the
    end."""
    if LEAST > 0:
        after = tl.where(factor == 0, 1.0, tl.minimum(tl.abs(factor) / LEAST, 1.0))
        return factor / after, after
    else:
        return 1.0, factor
