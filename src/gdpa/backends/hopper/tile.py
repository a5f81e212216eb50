"""The compile-time shapes of the Hopper kernels, which each takes as one argument.

Names are capitals, as constexprs are: kernels write T.BLOCK_M. Only plain values: Triton's cache knows a compiled
kernel by their repr.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardTile:
    GROUP: int  # query heads per key head
    D: int  # columns of a tile of q and k, a power of two; columns past the head dimension are zero
    DV: int  # of v
    BLOCK_M: int  # queries of a program's tile
    CONSUMERS: int  # warpgroups that compute, 64 of those queries each
    ITEM_ROWS: int  # queries of an item of work: one tile, or several over which the keys stay in shared memory
    BLOCK_N: int  # keys of a block
    STAGES: int  # buffers for blocks of keys
    PARTS: int  # of the keys of a tile, each an item of its own whose sums are float32
    SCALE_FOLDED: bool  # the function contains the scale, or the sum that it is a function of takes it
    MASKED: bool  # blocks at a band's edge or past a sequence's end need a mask
    MASK_SCORES: bool  # f(0) = 0: a mask on the scores does for p
    FINITE_AT_ZERO: bool  # what zero rows past a sequence's end lead to is finite, and hidden by zeros
    PING_PONG: bool  # consumers take turns
    PAIRED: bool  # causal: a tile with much to see and one with little belong together (see schedule.py)
    NORM: str  # what outputs are divided by, one of gdpa.problem's; and the factor of those sums (see sums.py)
    GAIN: float
    PLACED: bool  # the function takes positions, and tables
    SHIFTED: bool  # a sum takes them, and the function that sum
    COLUMNS: int  # values of keys that are handed out beside the products of the scores (see forward/columns.py)
    VOTES: bool  # it is guarded, and there may be sums of keys past the end, which must not vote (see guarded.py)
    LISTED: bool  # a mask's lists say which blocks a tile visits (see visits.py),
    PER_HEAD: bool  # and every head has its own
    TAKES: bool  # programs take the items of the list as they come (see scheduling/taking.py)
    SCANS: bool  # they find their tiles without a list (see scheduling/scanning.py)
    ALIKE: bool  # two consumers ask which one they are, and so have the same code (see compiled/sharing.py)


@dataclass(frozen=True)
class BackwardTile:
    GROUP: int
    D: int  # columns of every tile: 64 or 128
    BLOCK_M: int  # queries of a step
    BLOCK_N: int  # keys of a program's tile
    STAGES: int  # buffers for steps
    N_PARAMS: int
    SCALE_FOLDED: bool
    MASKED: bool
    FINITE_AT_ZERO: bool
    DQ: str  # one of config.dq_mode
    ROOM: int  # blocks of queries per tile of keys whose sums can be on their way at once
    ORDERED: bool  # sums that go round are added up in a fixed order
    LEAST_FACTOR: float  # of ds before it is rounded, 0 if it has none there (see device/rounding.py)
    PING_PONG: bool  # consumers compute their function in turns
    NORM: str  # see ForwardTile
    GAIN: float
    PLACED: bool
    SHIFTED: bool
    LISTED: bool
    PER_HEAD: bool
    BY_EIGHT: bool  # of functions with params: a thread computes so many scores at a time, not half of a step's
    IN_TURN: bool  # a program may have to wait until it can send its dq
    TAKES: bool  # programs take the items of the list as they come (see backward/items.py),
    SOME_HEADS: bool  # those of some heads first
    ALIKE: bool  # see ForwardTile
