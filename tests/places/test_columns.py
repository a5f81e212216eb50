"""What Hopper's kernels look up for a tile before its scores are there: for columns, and in the forward for rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gdpa import masks
from gdpa.functions.activation import resolve_one
from gdpa.functions.emission.masks import jit_mask, near_keep
from gdpa.functions.emit import emit
from gdpa.functions.mask import mask_from_key
from gdpa.functions.places.names import TableKind
from gdpa.functions.places.program import KEY, QUERY, Program

f32, i64 = torch.float32, torch.int64


def keys(s, t, *, kv_row):
    return F.silu(s + t[kv_row])


def time_buckets(s, t, times, *, q_row, kv_row):
    return F.silu(s + t[(times[q_row] - times[kv_row]).clamp(0, 7)])


def computed(s, times, rows, *, kv_row, q_idx, kv_idx):
    """Of a lookup of a lookup, exp alone is what pairs take."""
    return F.silu(s + torch.exp(-0.1 * times[rows[kv_row]]) * (q_idx - kv_idx))


def positions_only(s, *, q_idx, kv_idx):
    return F.silu(s - 0.1 * (q_idx - kv_idx).abs())


def heads(s, t, *, h):
    return F.silu(s + t[h])


def from_the_end(s, t, *, b, kv_idx):
    """Looked up once for all columns."""
    return F.silu(s + (t[b] - kv_idx))


def segments(s, t, *, q_row, kv_row):
    """Comparisons are of pairs; no truth value belongs to a side."""
    return torch.where(t[q_row] == t[kv_row], F.silu(s), 0.0)


CASES = {
    keys: ([f32], {KEY: ["lookup"]}),
    time_buckets: ([f32, i64], {QUERY: ["lookup"], KEY: ["lookup"]}),
    computed: ([i64, i64], {KEY: ["exp"]}),
    positions_only: ([], {}),
    heads: ([f32], {}),
    from_the_end: ([i64], {}),
    segments: ([i64], {QUERY: ["lookup"], KEY: ["lookup"]}),
}


def program_of(fn: Any) -> Program:
    act = resolve_one(fn, 0, tuple(TableKind(1, dtype) for dtype in CASES[fn][0]))
    found: Program = act.placed.program
    return found


@pytest.mark.parametrize("fn", CASES)
def test_values_of_one_side_with_a_lookup(fn: Any) -> None:
    program = program_of(fn)
    for side in (QUERY, KEY):
        ops = [program.graph.nodes[i].op for i in program.columns(side)]
        assert ops == CASES[fn][1].get(side, [])


def of_both(s, t, u, w, *, h, q_row, kv_row):
    return F.silu(w[h] * s + t[q_row] + u[kv_row])


@pytest.mark.parametrize(
    ("fn", "tables", "ops"),
    [(keys, 1, []), (heads, 1, ["lookup"]), (from_the_end, 1, ["lookup"]), (of_both, 3, ["lookup", "lookup"])],
)
def test_values_of_rows_and_heads_with_a_lookup(fn: Any, tables: int, ops: list[str]) -> None:
    program = resolve_one(fn, 0, (TableKind(1, f32),) * tables).placed.program
    assert [program.graph.nodes[i].op for i in program.rows(QUERY)] == ops


def test_the_forward_is_given_values_of_columns_first() -> None:
    act = resolve_one(of_both, 0, (TableKind(1, f32),) * 3)
    program = act.placed.program
    source = emit(act, torch.bfloat16, "sm90").source
    forward = source[source.index("def of_both_forward") :].split("@triton.jit")[0]
    for number, i in enumerate(program.columns(KEY)):
        assert f"x{i} = once.spread(given[4][{number}]" in forward
    for number, i in enumerate(program.rows(QUERY), len(program.columns(KEY))):
        assert f"x{i} = given[4][{number}]" in forward
    assert near_keep(mask_from_key(masks.document(torch.zeros(9, dtype=torch.int32)).key)).src.count("= given[4]") == 0


def test_only_kernels_of_hopper_are_given_them() -> None:
    """Others have no ends, and look up what they need themselves; code for other devices does not know of columns."""
    act = resolve_one(keys, 0, (TableKind(1, f32),))
    hopper, other = (emit(act, torch.bfloat16, target).source for target in ("sm90", "cuda"))
    assert "once." not in other
    assert "keys_columns" in hopper
    assert hopper.count("once.spread") == hopper.count("elif at[3].shape[0] == 1:") > 0


def unused_leaf(s, t, u, *, kv_row):
    """What the derivative alone takes is a leaf as well; the sum does not use it."""
    return F.silu(s + torch.ones_like(t[kv_row]) * u[kv_row])


def test_every_code_of_a_function_counts_columns_alike() -> None:
    act = resolve_one(unused_leaf, 0, (TableKind(1, f32), TableKind(1, f32)))
    _, second = act.placed.program.columns(KEY)
    source = emit(act, torch.bfloat16, "sm90").source
    voted = source[source.index("def unused_leaf_shifted_for_vote") :].split("@triton.jit")[0]
    assert f"x{second} = once.spread(given[4][1]" in voted
    assert "given[4][0]" not in voted


@pytest.mark.parametrize(
    ("mask", "spread"),
    [(masks.document(torch.zeros(9, dtype=torch.int32)), 2), (masks.targets(torch.zeros(9, dtype=torch.int32)), 0)],
    ids=["of rows", "of sequences"],
)
def test_masks_look_up_columns_in_kernels_of_hopper(mask: Any, spread: int) -> None:
    function = mask_from_key(mask.key)
    assert near_keep(function).src.count("once.spread") == spread  # one for each side
    assert "once." not in jit_mask(function).keep.src
