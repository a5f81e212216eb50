"""Masks that calls are drawn with, and beside each a formula on grids of positions that shares no code with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import gdpa
from gdpa import masks
from gdpa.exactness.layout import Positions
from gdpa.fuzz.placed import Draw, Tables, longest, rows_k, rows_q

COUNTS = 24  # of prefixes, targets, contexts: beyond the end of short sequences, short of a tile


@dataclass(frozen=True)
class Masked:
    """``make(*tables)`` is what the API is given, ``sees(at, *tables)`` the same for all pairs, to be broadcast."""

    make: Callable[..., Any]
    sees: Callable[..., Tensor]
    tables: Callable[[Draw], Tables] | None = None


# ---- formulas --------------------------------------------------------------------------------------------------------
def own(at: Positions) -> Tensor:
    """The key that stands where the query does, if both sequences end together."""
    return at.q_idx + at.kv_len - at.q_len


def band(at: Positions, left: int, right: int) -> Tensor:
    return (at.kv_idx >= own(at) - left) & (at.kv_idx <= own(at) + right)


def past(at: Positions) -> Tensor:
    return at.kv_idx <= own(at)


def candidates(at: Positions, counts: Tensor, group: int) -> Tensor:
    first = at.kv_len - counts[at.b]
    mine = own(at) >= first
    return (at.kv_idx < first) | (mine & ((at.kv_idx - first) // group == (own(at) - first) // group))


def hstu_sees(at: Positions, tail: Tensor, contexts: Tensor, targets: Tensor) -> Tensor:
    near = band(at, 9, 0)
    late = (at.q_idx >= at.q_len - tail[at.b]) & past(at)
    return (near | late | (at.q_idx < contexts[at.b])) & candidates(at, targets, 1)


# ---- predicates as users write them ----------------------------------------------------------------------------------
def hstu_mask(tail: Tensor, contexts: Tensor, targets: Tensor) -> Any:
    m = masks
    return (m.causal() & m.window(9, 0) | m.full_tail(tail) & m.causal() | m.context(contexts)) & m.targets(targets)


def every_other_key(h: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx % 2 == h % 2


def few_blocks(b: Tensor, q_idx: Tensor, kv_idx: Tensor, first: Tensor) -> Tensor:
    """One block of 16 x 16 in a hundred; many tiles have none."""
    return (q_idx // 16 % 10 == 0) & (kv_idx // 16 % 10 == first[b])


def neighbours(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Within 2 on a grid of 8 columns: a mask_mod of FlexAttention."""
    return ((q // 8 - kv // 8).abs() <= 2) & ((q % 8 - kv % 8).abs() <= 2)


def mixed_rows(q_row: Tensor, kv_row: Tensor) -> Tensor:
    return (q_row + kv_row) % 4 != 0


# ---- tables ----------------------------------------------------------------------------------------------------------
def _counts(n: int) -> Callable[[Draw], Tables]:
    """``n`` tables of a number per sequence."""
    return lambda draw: tuple(draw.integers(COUNTS, max(1, len(draw.case.len_q))) for _ in range(n))


def _ids(draw: Draw) -> Tables:
    """Sorted ids of rows, as of documents one after the other."""
    rows = max(rows_q(draw.case), rows_k(draw.case))
    return (draw.integers(1 + rows // 8, rows).sort().values,)


def _ids_of_both(draw: Draw) -> Tables:
    """Of the packed rows of queries, and of (b, kv_idx); in no order."""
    shape = max(1, len(draw.case.len_k)), longest(draw.case)
    return draw.integers(3, rows_q(draw.case)), draw.integers(3, *shape)


MENU: dict[str, Masked] = {
    "causal": Masked(masks.causal, past),
    "window": Masked(lambda: masks.window(7, 3), lambda at: band(at, 7, 3)),
    "window before": Masked(lambda: masks.window(40, -2), lambda at: band(at, 40, -2)),
    "window from the first": Masked(
        lambda: masks.window(5, 18, "first"), lambda at: (at.kv_idx >= at.q_idx - 5) & (at.kv_idx <= at.q_idx + 18)
    ),
    "not a window": Masked(lambda: ~masks.window(20, None), lambda at: at.kv_idx < own(at) - 20),
    "prefix": Masked(
        lambda n: masks.prefix(n) | masks.causal(), lambda at, n: (at.kv_idx < n[at.b]) | past(at), _counts(1)
    ),
    "documents": Masked(
        lambda ids: masks.document(ids) & masks.causal(),
        lambda at, ids: (ids[at.q_row] == ids[at.kv_row]) & past(at),
        _ids,
    ),
    "documents of both": Masked(
        masks.document, lambda at, ids, others: ids[at.q_row] == others[at.b, at.kv_idx], _ids_of_both
    ),
    "targets": Masked(masks.targets, lambda at, n: candidates(at, n, 1), _counts(1)),
    "targets in groups": Masked(
        lambda n: masks.targets(n, 3) & masks.causal(), lambda at, n: candidates(at, n, 3) & past(at), _counts(1)
    ),
    "context": Masked(
        lambda n: masks.context(n) | masks.causal(), lambda at, n: (at.q_idx < n[at.b]) | past(at), _counts(1)
    ),
    "full tail": Masked(masks.full_tail, lambda at, n: at.q_idx >= at.q_len - n[at.b], _counts(1)),
    "dilated": Masked(lambda: masks.dilated(3), lambda at: (at.kv_idx - own(at)).remainder(3) == 0),
    "heads": Masked(lambda: every_other_key, lambda at: (at.kv_idx + at.h).remainder(2) == 0),
    "few blocks": Masked(
        lambda first: gdpa.Mask(few_blocks, (first,)),
        lambda at, first: (at.q_idx.remainder(160) < 16) & ((at.kv_idx >> 4).remainder(10) == first[at.b]),
        lambda draw: (draw.integers(4, max(1, len(draw.case.len_k))),),
    ),
    "neighbours": Masked(
        lambda: masks.from_flex(neighbours),
        lambda at: (
            ((at.q_idx >> 3) - (at.kv_idx >> 3)).abs().le(2) & ((at.q_idx & 7) - (at.kv_idx & 7)).abs().le(2)
        ),
    ),
    "rows": Masked(lambda: mixed_rows, lambda at: ((at.q_row + at.kv_row) & 3).bool()),
    "hstu": Masked(hstu_mask, hstu_sees, _counts(3)),
}  # fmt: skip
