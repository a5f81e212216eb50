"""What the functions of the forward hand to each other, by names."""

from collections import namedtuple
from typing import Any, NamedTuple

# Tiles in shared memory, and their barriers: filled by the producer, released by the consumers.
Buffers = namedtuple("Buffers", "q k v o columns")
Barriers = namedtuple("Barriers", "q_full q_empty k_full k_empty v_full v_empty")

# Tiles of queries of one head from row r0 on, and the keys that they see: one of their parts, the first, how many
# blocks. Those from full_lo to full_hi need no mask.
Item = namedtuple("Item", "h b r0 start_q len_q start_k len_k part first blocks full_lo full_hi tiles")

# One of them: its first query; whether it is the item's final one, is done with these keys (the next one loads its
# own), and has queries of this consumer; the numbers of its first block of keys and of itself among all that were
# loaded; and the (buffer, phase) of that block.
Tile = namedtuple("Tile", "t m0 final done active block number first")

# The block of keys that comes next: whether the one at hand was the tile's last, and it is another item's; if there is
# one; its number, buffer and phase; and its tile's number and buffer of queries. (Numbers as in Tile.)
Coming = namedtuple("Coming", "last moves more block slot phase number q_slot")

# A tile's queries beside a block of keys: the first of each, and how many their sequence has.
Pairs = namedtuple("Pairs", "m0 j0 len_q len_k")


class Work(NamedTuple):
    """Where a program finds its items, and where their rows are."""

    p_table: Any  # the list of tiles, or with T.SCANS the offsets of queries; None if tiles can be counted
    p_cu_k: Any
    heads: Any
    rows_q: Any
    rows_k: Any
    visits: Any  # the blocks that a mask leaves (device/visits.py), or None
    steps: Any  # which of them the producer loads (backward/steps.py)
    n_items: Any
    taken: Any  # items on their way to the consumers, and how many were taken (scheduling/taking.py), if T.TAKES
    p_count: Any
    batch_rows: Any  # rows from one batch entry to the next of q, k, v and the result, and from one part to the next
    band: Any


class Inputs(NamedTuple):
    """What the function takes beside the scores, and what becomes of its values."""

    p_params: Any
    stride_params: Any
    row_sums: Any  # where they go, their strides between batch entries and heads, and the sinks; None without sums
    places: Any  # tables and numbers of a placed function or of a mask (device/places.py), or two None
    scale: Any
    out_scale: Any
