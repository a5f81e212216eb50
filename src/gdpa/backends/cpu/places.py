"""Positions of the scores of a tile, for functions and masks of positions: views that broadcast against the tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdpa.backends.cpu.schedule import Chunk
from gdpa.backends.cpu.visible import VisibleTiles
from gdpa.functions.places.program import Places
from gdpa.functions.places.tables import Recorded, TableView
from gdpa.problem import Operands, Problem

Span = tuple[int, int]


@dataclass(frozen=True)
class Tile:
    """What belongs to a tile of scores (n, Hq, rows, keys): which pairs are visible (``keep``, see Chunk.keep), and the
    positions and tables that its function takes."""

    keep: Tensor | None
    places: Places | None = None
    empty: bool = False  # no pair is visible


def place(
    problem: Problem, x: Operands, chunk: Chunk, known: VisibleTiles | None, rows: Span, keys: Span, learn: bool = False
) -> Tile:
    """The Tile of queries ``rows`` and keys ``keys``. ``known``: which tiles the mask leaves empty or whole; ``learn``:
    tables remember what is looked up in them, for their gradients."""
    if known is not None and known.is_empty(rows[0], keys[0]):
        return Tile(None, empty=True)
    keep = chunk.keep(*rows, *keys)
    is_cut = problem.mask is not None and not (known is not None and known.is_whole(rows[0], keys[0]))
    if not is_cut and problem.activation.placed is None:
        return Tile(keep)
    at = _positions(problem, x, chunk, rows, keys)
    like = x.q.new_empty((), dtype=torch.float64 if problem.dtype == torch.float64 else torch.float32)
    if problem.mask is not None and is_cut:
        given = x.tables[problem.n_tables :]
        visible = None if keep is None else keep != 0
        views = [TableView(t, f"mask.tables[{i}]", visible) for i, t in enumerate(given)]
        seen = problem.mask.eager(Places(at, views), like)
        if bool(seen.all()):
            pass
        elif not bool(seen.any()):
            return Tile(keep, empty=True)
        else:
            bits = -seen.to(chunk.spans.len_q.dtype)  # all bits set where visible
            keep = bits if keep is None else keep & bits
            if not bool(keep.any()):
                return Tile(keep, empty=True)
    if problem.activation.placed is None:
        return Tile(keep)
    view, visible = Recorded if learn else TableView, None if keep is None else keep != 0
    views = [view(t, f"tables[{i}]", visible) for i, t in enumerate(x.tables[: problem.n_tables])]
    return Tile(keep, Places(at, views))


def _positions(problem: Problem, x: Operands, chunk: Chunk, rows: Span, keys: Span) -> dict[str, Tensor]:
    b = chunk.seqs[:, None, None, None]
    h = problem.first_head + problem.head_step * torch.arange(chunk.heads_q.start, chunk.heads_q.stop)
    i, j = torch.arange(*rows)[:, None], torch.arange(*keys)
    first_q = b * problem.rows_q if x.cu_q is None else x.cu_q.long()[b]
    first_k = b * problem.rows_k if x.cu_k is None else x.cu_k.long()[b]
    return {
        "b": b, "h": h[:, None, None], "q_idx": i, "kv_idx": j, "q_len": chunk.spans.len_q.long()[:, None],
        "kv_len": chunk.spans.len_k.long()[:, None], "q_row": first_q + i, "kv_row": first_k + j,
    }  # fmt: skip
