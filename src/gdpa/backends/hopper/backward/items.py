"""Which items of work a program of the backward does: each is a tile of keys of one head.

With T.TAKES, programs take items from the list one by one, whoever is free, so that all end at about the same time
although tiles see different numbers of queries. The producer takes them, and hands them on to the two warps that look
after sums of dq (turns.py). Where tiles must run at the same time (ring.py), items are dealt out beforehand.

By turns, the tiles of a head follow each other through its queries. They find those, and the sums of dq, in the L2
cache if they are close enough to each other: tiles that begin at the same time are two blocks apart, and the more heads
programs work on at a time, the farther. So where tiles see many blocks, as in long causal sequences, programs take all
tiles of some heads before those of the other heads (T.SOME_HEADS).
"""

from gdpa.backends.hopper import config
from gdpa.backends.hopper.compat import gl, gluon, mbarrier
from gdpa.backends.hopper.messages import FIELDS, in_every_thread
from gdpa.backends.hopper.scheduling.schedule import item_at
from gdpa.backends.hopper.scheduling.taking import take

QUERIES_AT_ONCE = gl.constexpr(config.QUERIES_AT_ONCE)
PLACES = gl.constexpr(4)  # items that the producer may be ahead of the slower one of the other two warps
RECEIVERS = gl.constexpr(2)  # those


@gluon.jit
def item_after(n, item, T: gl.constexpr):
    """The item after a program's n-th one; if items are taken, a guess (it is only prefetched)."""
    if T.TAKES:
        return item + gl.num_programs(0)
    else:
        return item_at(gl.program_id(0), gl.num_programs(0), n + 1, not T.IN_TURN)


@gluon.jit
def first_item(p_flags, some, heads, n_items, T: gl.constexpr):
    """A program's first item; there are no more once a number is n_items or larger. ``some``: see heads_at_once."""
    if T.TAKES:
        return arranged(take(p_flags), some, heads, n_items, T)
    else:
        return item_at(gl.program_id(0), gl.num_programs(0), 0, not T.IN_TURN)


@gluon.jit
def next_item(p_flags, n, item, some, heads, n_items, T: gl.constexpr):
    if T.TAKES:
        return arranged(take(p_flags), some, heads, n_items, T)
    else:
        return item_after(n, item, T)


@gluon.jit
def heads_at_once(heads, rows_q, rows_k, n_tiles, one_entry, PACKED: gl.constexpr, T: gl.constexpr):
    """Of how many heads programs take all tiles before those of other heads. ``one_entry``: keys have one batch entry,
    since they are packed or there is one sequence; PACKED: queries are packed."""
    if PACKED:  # see most_tiles
        sequences = gl.where(one_entry, n_tiles - rows_k // T.BLOCK_N, n_tiles // gl.cdiv(rows_k, T.BLOCK_N))
        rows_q = rows_q // gl.maximum(sequences, 1)
    return gl.minimum(gl.maximum(QUERIES_AT_ONCE // gl.maximum(rows_q, 1), 1), heads)


@gluon.jit
def arranged(taken, some, heads, n_items, T: gl.constexpr):
    """The ``taken``-th item in the order of T.SOME_HEADS: those of ``some`` heads first, then those of the next
    ones."""
    if T.SOME_HEADS:
        tiles = n_items // heads
        part = taken // (some * tiles)
        place = taken - part * (some * tiles)
        width = gl.maximum(gl.minimum(some, heads - part * some), 1)
        item = place // width * heads + part * some + place % width
        taken = gl.where(taken < n_items, item, taken)
    return taken


@gluon.jit
def allocate_items():
    """(numbers of items on their way, barriers: it is there, it has been received)."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    items = gl.allocate_shared_memory(gl.int32, [PLACES, FIELDS], gl.SwizzledSharedLayout(FIELDS, 1, 1, [0]))
    there = gl.allocate_shared_memory(gl.int64, [PLACES, 1], layout)
    received = gl.allocate_shared_memory(gl.int64, [PLACES, 1], layout)
    for i in gl.static_range(PLACES):
        mbarrier.init(there.index(i), count=1)
        mbarrier.init(received.index(i), count=RECEIVERS)
    return items, there, received


@gluon.jit
def hand_on(items, n, item, T: gl.constexpr):
    """Hand the producer's n-th item to the other two warps."""
    if T.DQ == "turns":
        place, there, received = items
        at = n % PLACES
        mbarrier.wait(received.index(at), ((n // PLACES) & 1) ^ 1)
        place.index(at).store(gl.full([FIELDS], item, gl.int32, in_every_thread(1)))
        mbarrier.arrive(there.index(at), count=1)


@gluon.jit
def receive(items, n):
    """The producer's n-th item, by one of the other warps."""
    place, there, received = items
    at = n % PLACES
    mbarrier.wait(there.index(at), (n // PLACES) & 1)
    item = gl.max(place.index(at).load(in_every_thread(1)), 0)
    mbarrier.arrive(received.index(at), count=1)
    return item
