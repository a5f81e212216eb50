"""What the functions of the forward hand to each other, by names."""

from collections import namedtuple
from typing import Any, NamedTuple

# Tiles in shared memory, and their barriers: filled by the producer, released by the consumers.
Buffers = namedtuple("Buffers", "q k v o columns bias")
Barriers = namedtuple("Barriers", "q_full q_empty k_full k_empty v_full v_empty")

# Rows from one batch entry to the next, of each tensor; and from one part of the result to the next (see split_kv.py).
BatchRows = namedtuple("BatchRows", "q k v out part")

# Where an item of work is: tiles of queries of head h in sequence b, from its row r0 on; the first row and the length
# of the sequence on both sides; which part of the keys it has; with a mask the number of its list (device/visits.py).
Located = namedtuple("Located", "h b r0 start_q len_q start_k len_k part own_list")

# The same with the keys that its tiles see: the first one and the number of blocks, of which those from full_lo to
# full_hi need no mask. And how many tiles it has.
Item = namedtuple("Item", "h b r0 start_q len_q start_k len_k part first blocks full_lo full_hi tiles")

# The t-th tile of an item: its first query m0; whether it is the item's ``final`` one, is ``done`` with the blocks of
# keys in shared memory (the next tile loads its own), and has any queries of this consumer (``active``). ``block`` and
# ``number`` count all blocks of keys and all tiles that this program has loaded: those of the tile's first block, and
# of the tile itself. ``first``: (buffer, phase) of that block.
Tile = namedtuple("Tile", "t m0 final done active block number first")

# The block of keys whose scores are queued next: whether the current block is the tile's ``last``, whether the next one
# is of another item (``moves``), and whether there is ``more`` at all; its number, its buffer (slot) and phase; and of
# its tile the number and the buffer of the queries. (Numbers as in Tile.)
Coming = namedtuple("Coming", "last moves more block slot phase number q_slot")

# The pairs of a tile and a block of keys: the first query and key, and the lengths of their sequence.
Pairs = namedtuple("Pairs", "m0 j0 len_q len_k")


class Work(NamedTuple):
    """What a program needs to find its items of work, and their rows in the tensors."""

    p_table: Any  # the list of tiles; with T.SCANS the offsets of queries; None if tiles follow from the shape
    p_cu_k: Any
    heads: Any
    rows_q: Any
    rows_k: Any
    visits: Any  # the blocks that a mask leaves (device/visits.py), or None
    steps: Any  # with a mask: messages that say which blocks the producer has loaded (messages.py)
    n_items: Any
    taken: Any  # with T.TAKES: items on their way from the producer to the consumers (scheduling/taking.py),
    p_count: Any  # and the counter of those that all programs have taken
    batch_rows: Any  # see BatchRows
    band: Any


class Inputs(NamedTuple):
    """What the function takes beside the scores, and what its results are scaled by."""

    p_params: Any
    stride_params: Any
    row_sums: Any  # where row sums are written, the strides of batch entries and heads there, sinks; None without sums
    places: Any  # tables and numbers of a placed function or of a mask (device/places.py), or two None
    scale: Any
    out_scale: Any
