"""Messages in shared memory: what the producer warp has computed about each step, for consumers to read.

A step is one block of queries (in the forward: one block of keys) that a consumer works on. Which rows those are, of
which sequence and head, takes index arithmetic that consumers have no registers for. So the producer ``tell``s them by
messages of four 32-bit fields, and consumers read what they were ``told`` where they need it. Up to five messages
belong to a step (``messages``):

    DQ      end of the sequence's queries in dq, the step's first row counted from that end, query head, send code
    PAIRS   whether a band or a mask cuts any pair of the step; how many queries and keys are left from here to the ends
            of their sequences; for functions of positions and masks, also the sequence's number of keys
    TILE    number of steps of the tile of keys, end of its sequence in dk and in dv, key head
    PARAMS  query head, whether this is its last step, the tile's number among all tiles of one head
    SPOT    (for functions of positions and masks; without params in the place of PARAMS) sequence, its number of
            queries, its first row on the side of the queries and of the keys

The send code tells consumers what to do with a step's part of dq where tiles of keys add up dq together (ring.py,
turns.py): the bits IS_FIRST (store it: this tile is the first one at the block) and IS_LAST (add the sum of the others
to it, round, and write dq); with a ring, the slot of the sum above SLOT_SHIFT; by turns, NO_TURN if this tile adds
nothing.

There is no barrier for messages: the one that the step's queries (keys) arrive at covers them. They are read until the
end of the next step, when the step's dq is sent, and the producer is at most STAGES steps ahead of what consumers have
released: so many steps' messages are kept (``slots``).
"""

from gdpa.backends.hopper.compat import gl, gluon

FIELDS = gl.constexpr(4)
DQ, PAIRS, TILE, PARAMS, SPOT = (gl.constexpr(n) for n in range(5))
IS_LAST, IS_FIRST, NO_TURN = gl.constexpr(1), gl.constexpr(2), gl.constexpr(4)  # bits of send codes
SLOT, SLOT_SHIFT = gl.constexpr(4), gl.constexpr(2)  # the slot is above them


@gluon.constexpr_function
def messages(T):
    """How many a step has: all of them only where there are params and something that asks for SPOT. (The forward,
    which walks over the blocks of a mask, loads its params itself.)"""
    tells_params = getattr(T, "N_PARAMS", 0) > 0
    return 5 if tells_params and (T.LISTED or T.PLACED or T.SHIFTED) else 4


@gluon.constexpr_function
def place_in_step(what, T):
    return min(what, messages(T) - 1)


@gluon.constexpr_function
def slots(T):
    """Steps whose messages are kept, a power of two: STAGES ahead, the current one and the one before."""
    return 1 << (T.STAGES + 1).bit_length()


@gluon.constexpr_function
def in_every_thread(warps):
    """A layout in which each thread of so many warps holds all fields of a message."""
    return gl.BlockedLayout([FIELDS], [32], [warps], [0])


@gluon.jit
def allocate_steps(T: gl.constexpr):
    """Shared memory for the messages of all steps that are kept."""
    ROWS: gl.constexpr = slots(T) * messages(T)
    return gl.allocate_shared_memory(gl.int32, [ROWS, FIELDS], gl.SwizzledSharedLayout(FIELDS, 1, 1, [0]))


@gluon.jit
def tell(steps, step, WHAT: gl.constexpr, a, b, c, d, T: gl.constexpr):
    """Write the message WHAT of a step; by the producer, one warp. The thread that writes also arrives at the barrier:
    it has all fields."""
    LAYOUT: gl.constexpr = in_every_thread(1)
    i = gl.arange(0, FIELDS, LAYOUT)
    fields = gl.where(i == 0, a, gl.where(i == 1, b, gl.where(i == 2, c, d)))
    steps.index((step & (slots(T) - 1)) * messages(T) + place_in_step(WHAT, T)).store(fields)


@gluon.jit
def told(steps, step, WHAT: gl.constexpr, T: gl.constexpr, WARPS: gl.constexpr = 4):
    """The four fields of the message WHAT of a step, as scalars; read by all of ``WARPS`` warps (4: a consumer)."""
    LAYOUT: gl.constexpr = in_every_thread(WARPS)
    i = gl.arange(0, FIELDS, LAYOUT)
    fields = steps.index((step & (slots(T) - 1)) * messages(T) + place_in_step(WHAT, T)).load(LAYOUT)
    found = ()
    for n in gl.static_range(FIELDS):
        found = found + (gl.sum(gl.where(i == n, fields, 0), 0),)
    return found
