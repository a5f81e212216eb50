"""Backward of norms over the features of a row, each in one pass: the row is in registers, so that its mean and its
deviation are computed again, and the gradients of weights are summed up on the way.

Each of n programs takes every n-th block of rows and adds up gradients for each feature; the host then has the sums of
all programs added up, in the same order every time.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(t, rows, row, columns, keep):
    return tl.load(t + rows[:, None] * row + columns[None, :], mask=keep, other=0.0).to(tl.float32)


@triton.jit
def store_rows(t, rows, row, columns, keep, values):
    tl.store(t + rows[:, None] * row + columns[None, :], values.to(t.dtype.element_ty), mask=keep)


@triton.jit
def standardised(x, keep, eps, C: tl.constexpr, CENTRED: tl.constexpr):
    """The rows of ``x`` by their deviations, from their means if CENTRED; and what they were multiplied by."""
    if CENTRED:
        x = tl.where(keep, x - (tl.sum(x, 1) / C)[:, None], 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) / C + eps)
    return x * factor[:, None], factor


@triton.jit
def standardised_gradient(g, y, factor, C: tl.constexpr, CENTRED: tl.constexpr):
    """Of x, for the gradient ``g`` of y = standardised(x). Columns that do not exist get what is not stored."""
    d = g - y * (tl.sum(g * y, 1) / C)[:, None]
    if CENTRED:
        d -= (tl.sum(g, 1) / C)[:, None]
    return d * factor[:, None]


@triton.jit
def norm_backward_kernel(
    dz, x, weight, beside, dx, sums, n_rows, dz_row, x_row, beside_row, dx_row, eps, C: tl.constexpr,
    CENTRED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx = beside + gradient of x for z = weight * standardised(x) + bias; sums (programs, 2, C): of weight and bias.
    ``weight`` and ``beside`` may be None, ``sums`` is then, without a weight."""
    columns = tl.arange(0, BLOCK_C)
    there = columns < C
    w = tl.full([BLOCK_C], 1.0, tl.float32)
    if weight is not None:
        w = tl.load(weight + columns, mask=there, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK_ROWS, BLOCK_C], tl.float32)
    db = tl.zeros([BLOCK_ROWS, BLOCK_C], tl.float32)
    first, step = tl.program_id(0) * BLOCK_ROWS, tl.num_programs(0) * BLOCK_ROWS
    for start in range(first, n_rows, step):
        rows = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        keep = (rows < n_rows)[:, None] & there[None, :]
        g = load_rows(dz, rows, dz_row, columns, keep)
        y, factor = standardised(load_rows(x, rows, x_row, columns, keep), keep, eps, C, CENTRED)
        if sums is not None:
            dw += g * y
            db += g
        d = standardised_gradient(g * w[None, :], y, factor, C, CENTRED)
        if beside is not None:
            d += load_rows(beside, rows, beside_row, columns, keep)
        store_rows(dx, rows, dx_row, columns, keep, d)
    if sums is not None:
        mine = sums + tl.program_id(0) * 2 * C + columns
        tl.store(mine, tl.sum(dw, 0), mask=there)
        tl.store(mine + C, tl.sum(db, 0), mask=there)


@triton.jit
def add_normed_backward_kernel(
    dy, x, o, weight, dz, weight_z, dx, do, sums, n_rows, dy_row, x_row, o_row, dz_row, dx_row, do_row, eps_x, eps,
    eps_z, C: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx and do of y = x + weight * standardised(o + n), n = standardised(x) about its mean, for the gradient dy of y
    and, unless it is None, dz of z = weight_z * standardised(y) + bias; sums (programs, 3, C): of weight, and of
    weight_z and the bias."""
    columns = tl.arange(0, BLOCK_C)
    there = columns < C
    w = tl.load(weight + columns, mask=there, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK_ROWS, BLOCK_C], tl.float32)
    wz, dwz, dbz = w, dw, dw
    if dz is not None:
        wz = tl.load(weight_z + columns, mask=there, other=0.0).to(tl.float32)
    first, step = tl.program_id(0) * BLOCK_ROWS, tl.num_programs(0) * BLOCK_ROWS
    for start in range(first, n_rows, step):
        rows = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        keep = (rows < n_rows)[:, None] & there[None, :]
        g = load_rows(dy, rows, dy_row, columns, keep)
        value = load_rows(x, rows, x_row, columns, keep)
        n, n_factor = standardised(value, keep, eps_x, C, True)
        t, t_factor = standardised(load_rows(o, rows, o_row, columns, keep) + n, keep, eps, C, False)
        if dz is not None:
            y = (value + w[None, :] * t).to(x.dtype.element_ty).to(tl.float32)  # as forward has rounded it
            z, z_factor = standardised(y, keep, eps_z, C, True)
            gz = load_rows(dz, rows, dz_row, columns, keep)
            dwz += gz * z
            dbz += gz
            g += standardised_gradient(gz * wz[None, :], z, z_factor, C, True)
        dw += g * t
        dt = standardised_gradient(g * w[None, :], t, t_factor, C, False)
        store_rows(do, rows, do_row, columns, keep, dt)
        dt = tl.where(keep, dt, 0.0)
        store_rows(dx, rows, dx_row, columns, keep, g + standardised_gradient(dt, n, n_factor, C, True))
    mine = sums + tl.program_id(0) * 3 * C + columns
    tl.store(mine, tl.sum(dw, 0), mask=there)
    if dz is not None:
        tl.store(mine + C, tl.sum(dwz, 0), mask=there)
        tl.store(mine + 2 * C, tl.sum(dbz, 0), mask=there)
