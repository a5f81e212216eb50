"""Values that belong to the columns of a tile of scores, looked up once per column for a whole warpgroup.

In the layout of a tensor core's accumulator every thread holds scores of a quarter of the columns, so that a value of a
column would be looked up by 32 threads, each checking bounds. Here each column is looked up by one thread
(``numbered``), and shared memory hands the values out (``spread``). Emitted code calls both. For functions, kernels
look up before they wait for the scores (and the forward hands out then, too, if there are registers:
forward/columns.py); for masks both happen at a block that the mask cuts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def numbered(first, like):
    """Positions of the columns of ``like`` (1, columns), from ``first`` on, one in each thread."""
    N: gl.constexpr = like.shape[1]
    return first + gl.arange(0, N, ONE_EACH)


@gluon.jit
def spread(x, like):
    """Values x of those columns as a row (1, columns) in the layout of ``like``."""
    return gl.convert_layout(x, gl.SliceLayout(0, like.type.layout))[None, :]
