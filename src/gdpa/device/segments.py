"""Sums of the rows of each segment, and the optimizer's update of a table's row by its sum.

Rows come in the order of their segments. A program adds up a chunk of them, one after another. Segments that lie within
one chunk are then finished. A segment that goes on in other chunks has one sum per chunk; these sums are again rows in
the order of their segments, for the next launch. So a segment of any length is added up by many programs, and in the
same order every time.
"""

import triton
import triton.language as tl


@triton.jit
def segment_of(code):
    """The segment of an entry. (Of one that has no row, the code is the segment's number with all bits inverted.)"""
    return tl.where(code < 0, ~code, code)


@triton.jit
def load_row(places, rows, i, code, wanted, columns, keep, D: tl.constexpr, ROW: tl.constexpr, ALIGNED: tl.constexpr):
    """Row i, of type ROW, from its address in ``places``, or from ``rows`` (n, D) if that is None; zeros if it is not
    wanted or not there."""
    if places is not None:
        p_row = tl.load(places + i, mask=wanted, other=0).to(tl.pointer_type(ROW))
        if ALIGNED:
            p_row = tl.multiple_of(p_row, 16)
        return tl.load(p_row + columns, mask=keep & wanted, other=0.0)
    else:
        return tl.load(rows + tl.cast(i, tl.int64) * D + columns, mask=keep & wanted & (code >= 0), other=0.0)


@triton.jit(do_not_specialize=["n"])
def embedding_sum_kernel(
    places, rows, codes, sums, squares, parts, part_codes, n, D: tl.constexpr, ROW: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sum of a segment into its row of ``sums``, and that of the squares of its BLOCK_D entries into ``squares``.

    Of a chunk's first segment, if it began before, and of its last one, if that goes on, there are sums of the chunk's
    rows in ``parts`` (chunks, 2, D); ``part_codes`` (chunks, 2) says which segments those are.
    """
    chunk, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK_D + tl.arange(0, BLOCK_D)
    keep = columns < D
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, n)
    code = tl.load(codes + first)
    segment = segment_of(code)
    begun = (first > 0) & (segment_of(tl.load(codes + first - 1, mask=first > 0, other=0)) == segment)
    found = code >= 0
    head, tail = ~segment, ~segment
    total = tl.zeros([BLOCK_D], tl.float32)
    ahead = load_row(places, rows, first, code, first < last, columns, keep, D, ROW, ALIGNED)
    for i in range(first, last):
        row = ahead
        after = tl.load(codes + i + 1, mask=i + 1 < n, other=0)
        ahead = load_row(places, rows, i + 1, after, i + 1 < last, columns, keep, D, ROW, ALIGNED)
        total += row.to(tl.float32)
        ends = (i + 1 == n) | (segment_of(after) != segment)
        leaves = ends | (i + 1 == last)
        if leaves:
            named = tl.where(found, segment, ~segment)
            if begun | (ends == 0):
                slot = tl.cast(chunk, tl.int64) * 2 + tl.where(begun, 0, 1)
                tl.store(parts + slot * D + columns, total, mask=keep)
            elif found:
                p_sum = sums + tl.cast(segment, tl.int64) * D + columns
                tl.store(p_sum, total.to(sums.dtype.element_ty), mask=keep)
                if squares is not None:
                    tl.store(squares + segment * tl.num_programs(1) + block, tl.sum(total * total, 0))
            head = tl.where(begun, named, head)
            tail = tl.where(begun | ends, ~segment, named)
            total = tl.zeros([BLOCK_D], tl.float32)
        begun = begun & (leaves == 0)
        found = (found & (leaves == 0)) | (after >= 0)
        segment = segment_of(after)
    if block == 0:
        tl.store(part_codes + chunk * 2, head)
        tl.store(part_codes + chunk * 2 + 1, tail)


@triton.jit
def summed_row(sums, clip, segment, columns, keep, D: tl.constexpr):
    """Float32, by the factor that ``clip`` holds unless it is None."""
    g = tl.load(sums + tl.cast(segment, tl.int64) * D + columns, mask=keep, other=0.0)
    if clip is not None:
        g *= tl.load(clip)
    return g


@triton.jit(do_not_specialize=["number", "offset"])
def optimizer_adagrad_kernel(
    table, state, sums, keys, bounds, clip, lr, number, offset, EPS: tl.constexpr, LR_HELD: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Row-wise Adagrad of one row of ``table`` (rows, D) and of ``state`` (rows,). The table of this ``number`` has the
    segments from bounds[number] to the next bound; what ``keys`` has for a segment is its row, counted from ``offset``.
    LR_HELD: ``lr`` is where the learning rate is."""
    segment = tl.load(bounds + number) + tl.program_id(0)
    if segment < tl.load(bounds + number + 1):
        columns = tl.arange(0, BLOCK_D)
        keep = columns < D
        row = tl.load(keys + segment).to(tl.int64) - offset
        p_w = table + row * D + columns
        g = summed_row(sums, clip, segment, columns, keep, D)
        w = tl.load(p_w, mask=keep, other=0.0).to(tl.float32)
        total = tl.load(state + row).to(tl.float32) + tl.sum(g * g, 0) / D
        tl.store(state + row, total.to(state.dtype.element_ty))
        w -= (tl.load(lr) if LR_HELD else lr) * (g / (tl.sqrt_rn(total) + EPS))
        tl.store(p_w, w.to(table.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["number", "offset"])
def optimizer_adam_kernel(
    table, m, v, steps, sums, keys, bounds, clip, lr, number, offset, BETA1: tl.constexpr, BETA2: tl.constexpr,
    LOG2_BETA1: tl.constexpr, LOG2_BETA2: tl.constexpr, EPS: tl.constexpr, LR_HELD: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adam of one row of ``table``, ``m`` and ``v`` (rows, D), found as in ``optimizer_adagrad_kernel``; a row whose
    gradient is zero was not read. ``steps``: how many there are with this one."""
    segment = tl.load(bounds + number) + tl.program_id(0)
    if segment < tl.load(bounds + number + 1):
        columns = tl.arange(0, BLOCK_D)
        keep = columns < D
        at = (tl.load(keys + segment).to(tl.int64) - offset) * D + columns
        g = summed_row(sums, clip, segment, columns, keep, D)
        w = tl.load(table + at, mask=keep, other=0.0).to(tl.float32)
        m_row = tl.load(m + at, mask=keep, other=0.0).to(tl.float32)
        v_row = tl.load(v + at, mask=keep, other=0.0).to(tl.float32)
        t = tl.load(steps).to(tl.float64)  # 1 - b^t loses digits where b^t is near 1
        correction1 = (1.0 - tl.exp2(t * LOG2_BETA1)).to(tl.float32)
        correction2 = (1.0 - tl.exp2(t * LOG2_BETA2)).to(tl.float32)
        keep = keep & (tl.max((g != 0.0).to(tl.int32), 0) > 0)
        m_row += (1.0 - BETA1) * (g - m_row)
        v_row += (1.0 - BETA2) * (g * g - v_row)
        w -= (tl.load(lr) if LR_HELD else lr) * (m_row / correction1 / (tl.sqrt_rn(v_row / correction2) + EPS))
        tl.store(m + at, m_row.to(m.dtype.element_ty), mask=keep)
        tl.store(v + at, v_row.to(v.dtype.element_ty), mask=keep)
        tl.store(table + at, w.to(table.dtype.element_ty), mask=keep)
