"""What the functions of the backward hand to each other, by names."""

from collections import namedtuple
from typing import Any, NamedTuple

# In shared memory: tiles, what the producer tells of steps (steps.py), terms of their rows (sums.py). And the tiles'
# barriers: filled by the producer, ds by the consumers, and released by the consumers.
Buffers = namedtuple("Buffers", "q k v do ds out steps terms")
Barriers = namedtuple("Barriers", "q_full q_empty do_full k_full k_empty v_full v_empty ds_full ds_empty")

# Of a step's part of dq, between the consumers and the two warps of ring.py: it may be sent, there is room for the sum
# that it completes, it is in memory, the next tile knows.
RingBarriers = namedtuple("RingBarriers", "ready free done published")

# Descriptors of what consumers write. ring: float32, where sums of dq go round, or all of dq is added up.
Outputs = namedtuple("Outputs", "dq ring dk dv")


class Work(NamedTuple):
    """Where a program finds its items, and where their rows are."""

    p_table: Any  # the list of items, None if they can be counted
    p_cu_q: Any
    heads: Any
    rows_q: Any
    rows_k: Any
    visits: Any  # the blocks that a mask leaves (device/visits.py), or None
    batch_rows: Any  # rows from one batch entry to the next of q, k, v, do, dq, dk and dv
    n_items: Any
    band: Any
    p_flags: Any  # of sums of dq (ring.py, turns.py); by turns the first one counts the items that were taken


class Inputs(NamedTuple):
    """What the function takes beside the scores, where the gradients of params go, and the factors."""

    p_params: Any
    stride_params: Any
    p_dparams: Any
    places: Any  # tables and numbers of a placed function or of a mask (device/places.py), or two None
    scale: Any
    out_scale: Any


class Pairs(NamedTuple):
    """A consumer's keys beside the queries of a step."""

    cut: Any  # whether the band or the mask cuts them at all
    rows_left: Any  # queries and keys from here to the end of their sequence,
    keys_left: Any
    len_k: Any  # which has so many keys
    band: Any
    steps: Any  # what the positions are found by (see spot_of)
    step: Any
    places: Any  # see Inputs
