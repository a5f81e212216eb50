"""Which of a thread's scores are added up before they go to a table's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gdpa.functions.activation import resolve_one
from gdpa.functions.places.learning import GROUPS, SCORES, kind_of
from gdpa.functions.places.names import TableKind

ENTRY: dict[str, Callable[[int, int], Any]] = {  # of query i and key j
    "tile": lambda i, j: 0,
    "key": lambda i, j: j,
    "query": lambda i, j: i,
    "diagonal": lambda i, j: i - j,
}


def place_of(score: int, lane: int) -> tuple[int, int]:
    """The query and the key of a thread's score, as the tensor cores leave products of 64 keys and 64 queries."""
    block, key, query = score // 4, score // 2 % 2, score % 2
    return 8 * block + 2 * (lane % 4) + query, 8 * key + lane // 4


@pytest.mark.parametrize("kind", ENTRY)
def test_groups_hold_the_scores_of_one_entry(kind: str) -> None:
    groups = GROUPS[kind]
    assert sorted(i for group in groups for i in group) == list(range(SCORES))
    for lane in range(32):
        entries = [{ENTRY[kind](*place_of(i, lane)) for i in group} for group in groups]
        assert all(len(found) == 1 for found in entries)
        assert len({next(iter(found)) for found in entries}) == len(groups)  # none could be joined


KINDS = {
    "tile": [
        lambda s, t, *, h: F.silu(s + t[h, 0]),
        lambda s, t, *, h, b, q_idx, kv_idx: F.silu(s + t[h, b % 2] * (q_idx - kv_idx)),
    ],
    "query": [lambda s, t, *, h, q_row: F.silu(s + t[h, q_row])],
    "key": [lambda s, t, *, h, kv_idx: F.silu(s + t[h, kv_idx // 2])],
    "diagonal": [
        lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, q_idx - kv_idx + 9]),
        lambda s, t, *, h, q_row, kv_row: F.silu(s + t[h, (kv_row - q_row).abs().clamp(max=9)]),
        lambda s, t, *, h, q_idx, kv_idx, q_len: F.silu(s + t[h, -(kv_idx - 2) + q_len + q_idx]),
        lambda s, t, *, q_idx, kv_idx: F.silu(s + t[(q_idx - kv_idx) % 4, (q_idx - kv_idx) // 4]),
    ],
    "pair": [
        lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, q_idx + kv_idx]),
        lambda s, t, *, q_idx, kv_idx: F.silu(s + t[q_idx, kv_idx]),
        lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, 2 * q_idx - kv_idx]),
        lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, q_idx // 2 - kv_idx // 2]),
        lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, (q_idx * 0.5).long() - kv_idx]),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_indices_are_told_apart(kind: str) -> None:
    for fn in KINDS[kind]:
        placed = resolve_one(fn, 0, (TableKind(2, torch.float32),)).placed
        (learned,) = placed.learned
        assert kind_of(placed.program, placed.program.graph.outputs[learned].index) == kind
