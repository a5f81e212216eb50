"""What the functions of the backward hand to each other, by names."""

from collections import namedtuple
from typing import Any, NamedTuple

# In shared memory: tiles, messages about steps (messages.py), and with row sums two numbers for each row (row_sums.py).
# ``out`` is where tiles on their way to memory are staged. And the tiles' barriers: "full" is arrived at by the
# producer (for ds: by the consumers), "empty" by the consumers.
Buffers = namedtuple("Buffers", "q k v do ds out steps terms")
Barriers = namedtuple("Barriers", "q_full q_empty do_full k_full k_empty v_full v_empty ds_full ds_empty")

# Of a step's part of dq, between the consumers and the two warps of ring.py. ready: consumers may send it, and if it
# completes a sum, that sum has been fetched; free: consumers have emptied the buffers that such a sum is fetched into;
# done: the part is in memory; published: so its flag says.
RingBarriers = namedtuple("RingBarriers", "ready free done published")

# Descriptors of what consumers write. ring: the float32 buffer for sums of dq, be it slots (ring.py) or all rows.
Outputs = namedtuple("Outputs", "dq ring dk dv")

# Rows from one batch entry to the next, of each tensor.
BatchRows = namedtuple("BatchRows", "q k v do dq dk dv")


class Work(NamedTuple):
    """What a program needs to find its items of work, and their rows in the tensors."""

    p_table: Any  # the list of tiles of keys; None if they follow from the shape
    p_cu_q: Any
    heads: Any
    rows_q: Any
    rows_k: Any
    visits: Any  # the blocks that a mask leaves (device/visits.py), or None
    batch_rows: Any  # see BatchRows
    n_items: Any
    band: Any
    p_flags: Any  # of sums of dq (ring.py, turns.py); by turns, the first one is the counter of items taken


class Inputs(NamedTuple):
    """What the function takes beside the scores, where the gradients of params go, and the factors."""

    p_params: Any
    stride_params: Any
    p_dparams: Any
    places: Any  # tables and numbers of a placed function or of a mask (device/places.py), or two None
    scale: Any
    out_scale: Any


class Pairs(NamedTuple):
    """The pairs of a tile of keys and a step's queries."""

    cut: Any  # whether the band or the mask hides any of them
    rows_left: Any  # queries from the step's first one to the end of the sequence,
    keys_left: Any  # keys from the tile's first one to the end of the sequence,
    len_k: Any  # which has so many keys
    band: Any
    steps: Any  # messages, and the step: where positions are found (see function.spot_of)
    step: Any
    places: Any  # see Inputs
