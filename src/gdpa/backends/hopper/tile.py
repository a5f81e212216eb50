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
    PARTS: int  # into which the keys of a tile are divided (split-KV, see split_kv.py): the results are float32 then
    SCALE_FOLDED: bool  # the scale of the scores is in the function's code, or in that of its shift
    MASKED: bool  # blocks that a band or the end of a sequence cuts need a mask
    MASK_SCORES: bool  # f(0) = 0: masking the scores masks p
    FINITE_AT_ZERO: bool  # rows past a sequence's end read as zeros, and need no mask: f(0) is finite, times zero
    PING_PONG: bool  # consumers take turns at issuing products
    PAIRED: bool  # causal: the largest and the smallest tiles of a sequence go to one program (see schedule.paired)
    NORM: str  # what outputs are divided by: PLAIN, SUM, ABS or EXP of gdpa.problem
    GAIN: float  # the factor of f (or of the exponent) that row sums need and the function's code leaves out
    PLACED: bool  # the function takes positions and tables itself
    SHIFTED: bool  # the function is one of a shift, a sum of the score and of what positions and tables give
    COLUMNS: int  # values of keys that are looked up and handed out while the scores are computed (forward/columns.py)
    BIAS_FACTOR: float  # 1 / scale if the tensor cores add what else is in that sum (forward/bias.py), otherwise 0
    OUT_IN_Q: bool  # results are staged where their queries were: there is no other shared memory for them
    VOTES: bool  # guarded code of a shift that keys past the end have, too: they must not vote (emission/guarded.py)
    LISTED: bool  # there is a mask: lists have the blocks that each tile visits (device/visits.py),
    PER_HEAD: bool  # one list for every head
    TAKES: bool  # programs take items one by one (scheduling/taking.py)
    SCANS: bool  # programs find their tiles among the offsets, without a list of tiles (scheduling/scanning.py)
    ALIKE: bool  # two consumers run one copy of the code, and ask which one they are (compiled/sharing.py)


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
    DQ: str  # how dq is summed: a mode of config.dq_mode
    ROOM: int  # ring: slots of each program, for sums of dq that go from tile to tile
    ORDERED: bool  # ring: tiles add their parts in a fixed order
    LEAST_FACTOR: float  # that ds has before it is rounded, 0 if it has none there (see device/rounding.py)
    PING_PONG: bool  # consumers take turns at computing the function
    NORM: str  # see ForwardTile
    GAIN: float
    PLACED: bool
    SHIFTED: bool
    LISTED: bool
    PER_HEAD: bool
    BY_EIGHT: bool  # with params: a thread computes 8 scores at a time (a block of PTX), not half of a step's
    IN_TURN: bool  # modes "ring" and "turns": a part of dq is sent when other tiles have sent theirs
    TAKES: bool  # programs take items one by one (backward/items.py),
    SOME_HEADS: bool  # those of some heads first
    ALIKE: bool  # see ForwardTile
