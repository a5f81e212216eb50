"""Where the factor of ds is applied, so that rounding ds to 16 bits costs no more digits than it must."""

import triton
import triton.language as tl

# Below 6e-5 float16 loses digits: at out_scale = 1 / 4096 most of a ds would. gdpa.exactness takes the same share.
LEAST_FACTOR = tl.constexpr(2**-6)


@triton.jit
def ds_factors(factor, LEAST: tl.constexpr, PRESCALED: tl.constexpr):
    """(before, after): what ds is multiplied by before it is rounded, by LEAST at least, and dk and dq at the end.
    Float16 could overflow if all of it came at the end."""
    if PRESCALED:
        after = tl.where(factor == 0, 1.0, tl.minimum(tl.abs(factor) / LEAST, 1.0))
        return factor / after, after
    else:
        return 1.0, factor
