"""Tiles of packed queries without a list: a program looks at all offsets itself.

A list of tiles is one launch more, and sorts them by what they have to do. Where all tiles run at the same time, or in
two rounds, their order hardly matters, nor what is read twice: there every program finds its tile among the offsets,
and zeros in rows of no sequence are written by whoever is there.
"""

from gdpa.backends.hopper.compat import gl, gluon
from gdpa.backends.hopper.config import MOST_SCANNED
from gdpa.device.sequences import seq_span

SCANNED = gl.constexpr(MOST_SCANNED)  # offsets, four of them by each lane of a warp


@gluon.jit
def sequences_among(n_tiles, rows, BLOCK: gl.constexpr):
    """How many sequences there are, from the number of tiles that the host counts with (work.most_tiles)."""
    return n_tiles - rows // BLOCK


@gluon.jit
def tile_among(p_cu, p_cu_other, tile, n_tiles, rows, rows_other, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """What device.sequences.locate_tile returns, for tiles numbered as in its tile_records_kernel: sequence b owns
    those from start // BLOCK + b on. The number of a tile that does not exist gives one without rows, at a sequence's
    end."""
    i = gl.arange(0, SCANNED, gl.BlockedLayout([SCANNED // 32], [32], [WARPS], [0]))
    n_seqs = sequences_among(n_tiles, rows, BLOCK)
    starts = gl.load(p_cu + gl.minimum(i, n_seqs - 1)).to(gl.int32)
    firsts = gl.minimum(gl.maximum(starts, 0), rows) // BLOCK + i
    b = gl.maximum(gl.sum(((i < n_seqs) & (firsts <= tile)).to(gl.int32), 0) - 1, 0)
    start, length = seq_span(p_cu, b, rows)
    start_other, length_other = seq_span(p_cu_other, b, rows_other)
    row = (tile - start // BLOCK - b) * BLOCK
    return b, gl.where((row < 0) | (row > length), length, row), start, length, start_other, length_other


@gluon.jit
def first_unused_row(p_cu, n_tiles, rows, BLOCK: gl.constexpr):
    """The first row behind the last sequence."""
    end = gl.load(p_cu + sequences_among(n_tiles, rows, BLOCK)).to(gl.int32)
    return gl.minimum(gl.maximum(end, 0), rows)
