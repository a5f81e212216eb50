"""Where sequences, tiles and bands lie: the index arithmetic every attention kernel shares."""

import triton
import triton.language as tl


@triton.jit
def seq_span(p_cu, b, rows):
    """(first row, length) of sequence b. Dense tensors have no offsets: every batch entry holds ``rows`` rows.

    Offsets are clamped to the tensor, so that bad ones (which only GDPA_CHECK=1 reports) cannot reach outside it.
    """
    if p_cu is None:
        return tl.full((), 0, tl.int64), rows
    start = tl.load(p_cu + b).to(tl.int64)
    end = tl.load(p_cu + b + 1).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), rows)
    end = tl.minimum(tl.maximum(end, start), rows)
    return start, (end - start).to(tl.int32)


@triton.jit
def seq_of_tile_kernel(p_cu, p_seq, rows, n_tiles, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Write the number of each tile's sequence. Sequence b owns tiles start // BLOCK + b up to the next one's first.

    That numbering needs no prefix sum over tile counts: it leaves at most one empty tile per sequence.
    """
    b = tl.program_id(0)
    start, length = seq_span(p_cu, b, rows)
    first = (start // BLOCK).to(tl.int32) + b
    count = ((start + length) // BLOCK - start // BLOCK).to(tl.int32) + 1
    for i in range(0, count, CHUNK):
        tile = i + tl.arange(0, CHUNK)
        tl.store(p_seq + first + tile, b, mask=(tile < count) & (first + tile < n_tiles))


@triton.jit
def locate_tile(p_seq, p_cu, tile, rows, n_seqs, BLOCK: tl.constexpr):
    """(sequence, first row of it, its length, first row of the tile within it) of tile number ``tile``."""
    if p_cu is None:
        per_seq = tl.cdiv(rows, BLOCK)
        b = tile // per_seq
        start, length = seq_span(p_cu, b, rows)
        return b, start, length, (tile % per_seq) * BLOCK
    else:
        b = tl.load(p_seq + tile)
        b = tl.minimum(tl.maximum(b, 0), n_seqs - 1)  # bad offsets leave entries unwritten
        start, length = seq_span(p_cu, b, rows)
        within = tile - (start // BLOCK).to(tl.int32) - b
        # A tile that is not this sequence's (bad offsets again) is moved past its end, where nothing is done.
        return b, start, length, tl.where(within >= 0, within * BLOCK, length)


@triton.jit
def visible_keys(m0, len_q, len_k, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(lo, full_lo, full_hi, hi): key blocks the query rows [m0, m0 + BLOCK_M) see; those in full need no band mask.

    All four are multiples of BLOCK_N. Key j is visible to row i iff -left <= j - i - (len_k - len_q) <= right.
    """
    shift = len_k - len_q
    last = m0 + BLOCK_M - 1
    lo = 0
    full_lo = 0
    end = len_k
    full_end = len_k
    if left is not None:
        lo = tl.maximum(m0 + shift - left, 0) // BLOCK_N * BLOCK_N
        full_lo = tl.cdiv(tl.maximum(last + shift - left, 0), BLOCK_N) * BLOCK_N
    if right is not None:
        end = tl.minimum(end, last + shift + right + 1)
        full_end = tl.minimum(full_end, m0 + shift + right + 1)
    hi = tl.cdiv(tl.maximum(end, 0), BLOCK_N) * BLOCK_N
    full_lo = tl.minimum(full_lo, hi)
    full_hi = tl.maximum(tl.maximum(full_end, 0) // BLOCK_N * BLOCK_N, full_lo)
    return tl.minimum(lo, full_lo), full_lo, full_hi, hi


@triton.jit
def visible_queries(n0, len_q, len_k, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(lo, full_lo, full_hi, hi): query blocks that see the keys [n0, n0 + BLOCK_N), the mirror of visible_keys.

    Row i sees key j iff -right <= i - j - (len_q - len_k) <= left: the same band with sides exchanged.
    """
    return visible_keys(n0, len_k, len_q, right, left, BLOCK_N, BLOCK_M)


@triton.jit
def in_band(i, j, len_q, len_k, left, right):
    """Whether rows ``i`` see keys ``j`` (broadcast against each other); past-the-end keys and rows are never seen."""
    keep = (i < len_q) & (j < len_k)
    distance = j - i - (len_k - len_q)
    if left is not None:
        keep = keep & (distance >= -left)
    if right is not None:
        keep = keep & (distance <= right)
    return keep


@triton.jit
def row_pointers(p_base, rows, stride, cols):
    """(rows, cols) of pointers; the caller has already moved ``p_base`` to the tile, so 32-bit offsets are enough."""
    return p_base + rows[:, None] * stride + cols[None, :]


@triton.jit
def load_rows(p_base, rows, n_rows, stride, cols, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr):
    """A (rows, BLOCK_D) tile, zero past row ``n_rows`` (if CHECK) and past column D."""
    p_tile = row_pointers(p_base, rows, stride, cols)
    if CHECK:
        if D == BLOCK_D:
            return tl.load(p_tile, mask=(rows < n_rows)[:, None], other=0.0)
        else:
            return tl.load(p_tile, mask=(rows < n_rows)[:, None] & (cols < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        return tl.load(p_tile)
    else:
        return tl.load(p_tile, mask=(cols < D)[None, :], other=0.0)


@triton.jit
def store_rows(p_base, tile, rows, n_rows, stride, cols, D: tl.constexpr):
    """Write a tile's rows before ``n_rows`` and columns before D, in the dtype of the target."""
    p_tile = row_pointers(p_base, rows, stride, cols)
    tl.store(p_tile, tile.to(p_base.dtype.element_ty), mask=(rows < n_rows)[:, None] & (cols < D)[None, :])
