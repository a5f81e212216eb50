"""Rotary positions: pairs of features turned by angles that all heads of a row share."""

import triton
import triton.language as tl

HALF_PI = tl.constexpr(1.5707963267948966)


@triton.jit
def cos_sin(quarters):
    """cos and sin of ``quarters`` quarter turns (float64, of any size), in float32 to about an ulp.

    What counts is the part of a turn that is left over, and float64 still has it where float32 has lost it: an event
    at 1.7e9 seconds has turned 2.7e8 times.
    """
    whole = tl.floor(quarters + 0.5)
    a = (quarters - whole).to(tl.float32) * HALF_PI  # at most pi / 4 from 0; Cephes' polynomials are for that
    z = a * a
    sin = a + a * z * ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1)
    cos = 1.0 - 0.5 * z + z * z * ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2)
    quadrant = whole.to(tl.int64)
    swapped = (quadrant & 1) == 1
    c, s = tl.where(swapped, sin, cos), tl.where(swapped, cos, sin)
    return tl.where(((quadrant + 1) & 2) == 2, -c, c), tl.where((quadrant & 2) == 2, -s, s)


@triton.jit
def turn_kernel(
    x, y, positions, n_rows, n_positions, x_row, x_head, y_row, y_head, turned, heads,
    STEP: tl.constexpr, INVERSE: tl.constexpr, REPEATED: tl.constexpr, HALF: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """The first ``turned`` heads of x (n_rows, heads, 2 HALF), turned, and the others as they are, into y, which may be
    x. A program has the rows of a block with all their heads, so that an angle is computed once. Row r has the position
    r, or r % n_positions if they are REPEATED; the angle of pair c at position 1 is 2^(c STEP)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    pairs = tl.arange(0, BLOCK_HALF)
    m_rows = rows < n_rows
    keep = m_rows[:, None] & (pairs < HALF)[None, :]
    places = rows
    if REPEATED:  # else no division
        places = rows % n_positions
    place = tl.load(positions + places, mask=m_rows, other=0).to(tl.float64)
    step, quarter = tl.full([1], STEP, tl.float64), tl.full([1], HALF_PI, tl.float64)
    quarters = tl.exp2(pairs.to(tl.float64) * step) / quarter  # of a turn, at position 1
    cos, sin = cos_sin(place[:, None] * quarters[None, :])
    if INVERSE:
        sin = -sin
    from_x = x + rows[:, None] * x_row + pairs[None, :]
    to_y = y + rows[:, None] * y_row + pairs[None, :]
    for h in range(0, turned):
        a = tl.load(from_x + h * x_head, mask=keep, other=0.0)
        b = tl.load(from_x + h * x_head + HALF, mask=keep, other=0.0)
        first, second = a.to(tl.float32), b.to(tl.float32)
        tl.store(to_y + h * y_head, (first * cos - second * sin).to(a.dtype), mask=keep)
        tl.store(to_y + h * y_head + HALF, (second * cos + first * sin).to(a.dtype), mask=keep)
    for h in range(turned, heads):
        tl.store(to_y + h * y_head, tl.load(from_x + h * x_head, mask=keep, other=0.0), mask=keep)
        tl.store(to_y + h * y_head + HALF, tl.load(from_x + h * x_head + HALF, mask=keep, other=0.0), mask=keep)
