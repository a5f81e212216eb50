"""A bias of the scores that is x of the query plus y of the key, added by the tensor cores.

    q k^T + x + y  =  (q, 1, 1, 1, x0, x1, x2) (k, y0, y1, y2, 1, 1, 1)^T

Such a bias is three more columns of queries and three of keys: what x and y are in float32 is the sum of three numbers
in bfloat16. Products of fewer than 16 columns there are not, so the others are 0. An addition for every pair would take
the consumers longer: two instructions where silu has ten, and registers for the 32 keys of a thread.

The producer writes these columns beside the queries and keys that it loads, under the same barriers. x and y may count
positions from the tile's first query (functions/places/terms/distances.py). Past the ends of a sequence they are 0;
the ones are not, since 0 times an infinite bias is no number.
"""

from gdpa.backends.hopper import config
from gdpa.backends.hopper.compat import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma
from gdpa.backends.hopper.pipeline import ROWS
from gdpa.device.places import positions

COLUMNS = gl.constexpr(config.BIAS_COLUMNS)
BY_ROW = gl.constexpr(gl.BlockedLayout([1, 16], [32, 1], [1, 1], [1, 0]))  # rows 32 apart in each thread of the warp
LARGEST = gl.constexpr(2.0**126)


@gluon.constexpr_function
def tile_layout(rows):
    return gl.NVMMASharedLayout.get_default_for([rows, config.BIAS_COLUMNS], gl.bfloat16)


@gluon.jit
def allocate_bias(Q_SLOTS: gl.constexpr, T: gl.constexpr):
    """(of queries, of keys): shared memory for the columns beside every buffer of queries and of keys."""
    BLOCK_N: gl.constexpr = T.BLOCK_N
    of_queries = gl.allocate_shared_memory(gl.bfloat16, [Q_SLOTS, ROWS, COLUMNS], tile_layout(ROWS))
    of_keys = gl.allocate_shared_memory(gl.bfloat16, [T.STAGES, BLOCK_N, COLUMNS], tile_layout(BLOCK_N))
    return of_queries, of_keys


@gluon.jit
def write_bias(tile, full, item, m0, first, inputs, OF_KEYS: gl.constexpr, CODE: gl.constexpr, T: gl.constexpr):
    """Write the columns of a consumer's queries from ``first`` on, of the tile that begins at m0; or those of a block
    of keys beside that tile."""
    N: gl.constexpr = T.BLOCK_N if OF_KEYS else ROWS
    row = first + gl.arange(0, N, gl.SliceLayout(1, BY_ROW))
    spot = (item.b, item.h, item.start_q, item.start_k, inputs.places[0], inputs.places[1])
    params, ends = CODE.LOAD_PARAMS(inputs.p_params, inputs.stride_params, item.h), (m0, m0, m0, m0)
    if OF_KEYS:
        y = CODE.BIAS_OF_KEYS((params, positions(spot, m0, row, item.len_q, item.len_k), spot, ends))
        tile.store(columns(y, row < item.len_k, 0, 3, T))
    else:
        x = CODE.BIAS_OF_QUERIES((params, positions(spot, row, m0, item.len_q, item.len_k), spot, ends))
        tile.store(columns(x, row < item.len_q, 3, 0, T))
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def columns(x, inside, FIRST: gl.constexpr, ONES: gl.constexpr, T: gl.constexpr):
    """A tile of rows with the three parts of x from column FIRST on, and three ones from ONES on. x is 0 where not
    ``inside``."""
    x = gl.where(inside, x, 0.0)
    x = gl.where(gl.abs(x) < float("inf"), within_range(x * T.BIAS_FACTOR), x)
    high = cut(x)
    rest = gl.where(x == high, 0.0, x - high)  # not inf - inf
    middle = cut(rest)
    n = gl.arange(0, COLUMNS, gl.SliceLayout(0, BY_ROW))[None, :]
    tile = gl.where((n >= ONES) & (n < ONES + 3), 1.0, 0.0)
    tile = gl.where(n == FIRST, high[:, None], tile)
    tile = gl.where(n == FIRST + 1, middle[:, None], tile)
    tile = gl.where(n == FIRST + 2, (rest - middle)[:, None], tile)
    return tile.to(gl.bfloat16)


@gluon.jit
def cut(x):
    """x without the bits that bfloat16 has no room for."""
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def within_range(x):
    """A finite bias stays finite in the units of the products, as -1e38 in place of a mask must."""
    return gl.minimum(gl.maximum(x, -LARGEST), LARGEST)


@gluon.jit
def queue_bias(nothing, bias, q_slot, slot):
    """Queue the product of these columns alone, which q k^T is then added to. (The other way round the tensor cores
    would cut off what q k^T has below the last digit of x, where x + y may be 0.)"""
    q, k = bias[0].index(q_slot), bias[1].index(slot)
    return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
