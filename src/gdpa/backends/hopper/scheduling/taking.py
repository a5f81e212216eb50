"""Dynamic scheduling: items that programs take from a list one by one, whoever is free, instead of fixed shares of it.

Where tiles differ in what they see, as in causal attention on packed sequences, fixed shares of the forward's list are
2 to 25 % more than the mean, the more the fewer items there are. Its producer takes an item as soon as the loads of
the item before have begun, looks up what the item is, and hands that on to the consumers through shared memory.
"""

from gdpa.backends.hopper.compat import gl, gluon, mbarrier
from gdpa.backends.hopper.forward.bundles import Located
from gdpa.backends.hopper.messages import allocate_steps, slots, tell, told

PLACE, SPANS, LIST = (gl.constexpr(n) for n in range(3))  # messages about an item (see messages.py)


@gluon.jit
def take(p_count):
    """Take an item; its number. By one warp."""
    return number_of(ask_for(p_count))


@gluon.jit
def ask_for(p_count):
    """Take an item without waiting for the result: lane 0 will have its number, see ``number_of``."""
    TEXT: gl.constexpr = """{
        .reg .pred first;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.b32 $0, 0;
        @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
    }"""
    return gl.inline_asm_elementwise(TEXT, "=&r,l", [p_count], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def number_of(asked):
    """The number of the item that ``ask_for`` took, in all lanes."""
    TEXT: gl.constexpr = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xFFFFFFFF;"
    return gl.inline_asm_elementwise(TEXT, "=r,r", [asked], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def allocate_taken(T: gl.constexpr):
    """(records of items on their way, barriers: they are there, they have been received)."""
    PLACES: gl.constexpr = slots(T)
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    records = allocate_steps(T)
    there = gl.allocate_shared_memory(gl.int64, [PLACES, 1], layout)
    received = gl.allocate_shared_memory(gl.int64, [PLACES, 1], layout)
    for i in gl.static_range(PLACES):
        mbarrier.init(there.index(i), count=1)
        mbarrier.init(received.index(i), count=T.CONSUMERS)
    return records, there, received


@gluon.jit
def hand_on(taken, n, found, is_one, T: gl.constexpr):
    """Hand the program's n-th item, a Located one, to its consumers; by the producer. ``is_one``: whether there is
    one."""
    records, there, received = taken
    h, b, r0, start_q, len_q, start_k, len_k, part, own_list = found
    at = n % slots(T)
    mbarrier.wait(received.index(at), ((n // slots(T)) & 1) ^ 1)
    tell(records, n, PLACE, is_one.to(gl.int32), h, b, r0, T)
    tell(records, n, SPANS, start_q, len_q, start_k, len_k, T)
    if T.LISTED:
        tell(records, n, LIST, own_list, 0, 0, 0, T)
    mbarrier.arrive(there.index(at), count=1)


@gluon.jit
def recall(taken, n, WARPS: gl.constexpr, T: gl.constexpr):
    """(the n-th item, Located, whether there is one), as it was handed on. Items that are taken have all of the
    keys."""
    records = taken[0]
    is_one, h, b, r0 = told(records, n, PLACE, T, WARPS)
    start_q, len_q, start_k, len_k = told(records, n, SPANS, T, WARPS)
    own_list = 0
    if T.LISTED:
        own_list, _, _, _ = told(records, n, LIST, T, WARPS)
    return Located(h, b, r0, start_q, len_q, start_k, len_k, 0, own_list), is_one != 0


@gluon.jit
def receive(taken, n, T: gl.constexpr):
    """What ``recall`` returns, once the producer has handed it on; by a consumer."""
    records, there, received = taken
    at = n % slots(T)
    mbarrier.wait(there.index(at), (n // slots(T)) & 1)
    found, is_one = recall(taken, n, 4, T)
    mbarrier.arrive(received.index(at), count=1)
    return found, is_one
