"""Values of a tile's columns that one thread each looks up, for a whole warpgroup.

As the tensor cores leave scores, every thread has those of a quarter of the columns: what is looked up for columns
would be looked up 32 times over, with its bounds. Here a thread has one column, and shared memory hands the values out.
For functions kernels look up before they wait for the scores (the forward hands out then, too, see its columns.py, if
there are registers for it). For masks both happen when they meet a block that the mask cuts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def numbered(first, like):
    """The numbers of the columns of ``like`` (1, columns), from ``first`` on."""
    N: gl.constexpr = like.shape[1]
    return first + gl.arange(0, N, ONE_EACH)


@gluon.jit
def spread(x, like):
    """What belongs to those columns, as ``like`` has them."""
    return gl.convert_layout(x, gl.SliceLayout(0, like.type.layout))[None, :]
