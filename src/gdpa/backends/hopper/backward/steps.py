"""What the producer tells the consumers of a step, in shared memory: they have no registers to find it out themselves.

    DQ      end of the queries' sequence in dq, row of the step counted from there, query head, code (see send_code)
    PAIRS   whether a band or a mask cuts the step's pairs, queries and keys left until the ends of their sequences; for
            a placed function or a mask also the number of keys
    TILE    steps of the tile of keys, end of its sequence in dk and in dv, key head
    PARAMS  query head, whether this is its last step, number of the tile among all of one head
    SPOT    for a placed function or a mask, neither of which has params here: sequence, its queries, where it begins on
            both sides

The barrier that says that a step's queries are there says that these are, too. They are read until the end of the next
step, when its dq is sent; the producer is at most STAGES steps ahead of what the consumers have released.
"""

from gdpa.backends.hopper.compat import gl, gluon

FIELDS = gl.constexpr(4)
DQ, PAIRS, TILE, PARAMS = (gl.constexpr(n) for n in range(4))
SPOT = PARAMS
RECORDS = gl.constexpr(4)


@gluon.constexpr_function
def slots(T):
    """A power of two, of at least STAGES + 2: those ahead, the current step and the one before."""
    return 1 << (T.STAGES + 1).bit_length()


@gluon.constexpr_function
def in_every_thread(warps):
    return gl.BlockedLayout([FIELDS], [32], [warps], [0])


@gluon.jit
def allocate_steps(T: gl.constexpr):
    ROWS: gl.constexpr = slots(T) * RECORDS
    return gl.allocate_shared_memory(gl.int32, [ROWS, FIELDS], gl.SwizzledSharedLayout(FIELDS, 1, 1, [0]))


@gluon.jit
def tell(steps, step, WHAT: gl.constexpr, a, b, c, d, T: gl.constexpr):
    """By the producer, one warp. The thread that arrives at the barrier writes all of it."""
    LAYOUT: gl.constexpr = in_every_thread(1)
    i = gl.arange(0, FIELDS, LAYOUT)
    fields = gl.where(i == 0, a, gl.where(i == 1, b, gl.where(i == 2, c, d)))
    steps.index((step & (slots(T) - 1)) * RECORDS + WHAT).store(fields)


@gluon.jit
def told(steps, step, WHAT: gl.constexpr, T: gl.constexpr, WARPS: gl.constexpr = 4):
    """By ``WARPS`` warps, of a consumer unless said: the four numbers."""
    LAYOUT: gl.constexpr = in_every_thread(WARPS)
    i = gl.arange(0, FIELDS, LAYOUT)
    fields = steps.index((step & (slots(T) - 1)) * RECORDS + WHAT).load(LAYOUT)
    found = ()
    for n in gl.static_range(FIELDS):
        found = found + (gl.sum(gl.where(i == n, fields, 0), 0),)
    return found
