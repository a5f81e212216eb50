"""Lookups without bounds: the emitted code, run by torch instead of Triton."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.functions.activation import resolve_one
from gdpa.functions.graph import Arg, Ref
from gdpa.functions.places import gather
from gdpa.functions.places.names import POSITIONS, TableKind
from gdpa.functions.places.program import Places, Program

tl = SimpleNamespace(
    int64=torch.int64, int32=torch.int32, maximum=torch.maximum, minimum=torch.minimum, where=torch.where
)
START = (torch.tensor(1), torch.tensor(1), torch.tensor(40), torch.tensor(40))  # b, h, rows of the sequence
device = SimpleNamespace(
    even=torch.tensor, starts=lambda spot: START, floordiv=lambda a, b: a // b, mod=lambda a, b: a % b
)
INDICES = {
    "distance": lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, q_idx - kv_idx + 20]),
    "distance of rows, turned": lambda s, t, *, b, q_row, kv_row: F.silu(s + t[b % 2, 30 - (q_row - kv_row)]),
    "sum": lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, -(-kv_idx - q_idx)]),
    "both dimensions": lambda s, t, *, q_idx, kv_idx: F.silu(s + t[q_idx // 16, kv_idx]),
}


def program_of(fn: Any, *tables: TableKind) -> tuple[Program, list[int]]:
    program = resolve_one(fn, 0, tables or (TableKind(2, torch.float32),)).placed.program
    return program, gather.lookups(program)


def run(program: Program, index: int, size: tuple[int, int], tile: tuple[int, int]) -> tuple[bool, Tensor, Tensor]:
    """Whether a tile of 8 queries and 8 keys is found inside of the table, where it would look, and where it should."""
    i, j = (first + torch.arange(8) for first in tile)
    named = dict(b=START[0], h=START[1], q_idx=i[:, None], kv_idx=j[None], q_len=torch.tensor(40),
                 kv_len=torch.tensor(40), q_row=40 + i[:, None], kv_row=40 + j[None])  # fmt: skip
    at = tuple(named[name] for name in POSITIONS)
    scope: dict[str, Any] = {
        "tl": tl, "places": device, "spot": None, "at": at,
        "sizes": [size], "tables": [0], "ends": (i[0], i[-1], j[0], j[-1]),
    }  # fmt: skip
    exec("\n".join(gather.inside_lines(program, [index])), scope)
    values: dict[int, Tensor] = {}

    def value(a: Arg) -> str:
        assert isinstance(a, Ref)
        graph = replace(program.graph, nodes=program.graph.nodes[: a.index + 1], outputs=(a,))
        (values[a.index],) = Program(graph, program.tables).evaluate(Places(named), torch.zeros(()))
        return f"values[{a.index}]"

    scope["values"] = values
    found = eval(gather.address(program, index, value, "tables[0]"), scope)
    arguments = program.graph.nodes[index].args[1:]
    rows, columns = (eval(value(a), scope) if isinstance(a, Ref) else torch.tensor(a) for a in arguments)
    want = torch.where(
        (rows >= 0) & (rows < size[0]) & (columns >= 0) & (columns < size[1]), rows * size[1] + columns, -1
    )
    return bool(scope["inside"]), found.expand(8, 8), want.expand(8, 8)


@pytest.mark.parametrize("name", INDICES)
def test_addresses_and_what_is_inside(name: str) -> None:
    program, (index,) = program_of(INDICES[name])
    told = []
    for size in ((4, 60), (3, 31), (2, 9)):
        for tile in ((0, 0), (16, 8), (8, 24), (32, 0), (0, 32)):
            inside, found, want = run(program, index, size, tile)
            told.append(inside)
            assert inside == bool((want >= 0).all())
            if inside:
                torch.testing.assert_close(found, want)
    assert any(told)
    assert not all(told)


def test_what_needs_bounds() -> None:
    """Indices that are data, or bent: their bounds would be checked beside those of others."""
    data = lambda s, t, u, *, q_idx, kv_idx: F.silu(s + t[u[q_idx] - kv_idx])
    assert program_of(data, TableKind(1, torch.float32), TableKind(1, torch.int64))[1] == []
    assert program_of(lambda s, t, *, q_idx, kv_idx: F.silu(s + t[0, (q_idx - kv_idx).clamp(0, 9)]))[1] == []
    assert program_of(lambda s, t, *, h, q_idx: F.silu(s + t[h, q_idx]))[1] == []
    both = lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, q_idx - kv_idx] + t[h, (q_idx - kv_idx).abs()])
    assert program_of(both)[1] == []


def test_negative_indices_count_from_the_end_with_bounds() -> None:
    """So a tile that has some is not inside."""
    program, (index,) = program_of(lambda s, t, *, h, q_idx, kv_idx: F.silu(s + t[h, q_idx - kv_idx]))
    assert not run(program, index, (4, 64), (8, 8))[0]
    assert run(program, index, (4, 64), (16, 8))[0]


def test_rows_of_another_sequence_are_not_inside() -> None:
    """A row itself as an index: past the end of the sequence, of 40 rows, it would be the next one's."""
    program, (index,) = program_of(lambda s, t, *, q_idx, kv_idx: F.silu(s + t[q_idx, kv_idx]))
    assert run(program, index, (64, 64), (32, 32))[0]
    assert not run(program, index, (64, 64), (36, 32))[0]
    assert not run(program, index, (64, 64), (32, 36))[0]


def test_integers_that_wrap_around() -> None:
    """8 * 2^28 is negative in 32 bits, so what comes of it may be anything between -8 and 7."""
    wrapping = lambda s, t, *, q_idx, kv_idx: F.silu(s + t[0, q_idx.int() * 2**28 // 2**28 - kv_idx + 20])
    program, (index,) = program_of(wrapping)
    for tile in ((0, 0), (8, 0)):
        inside, found, want = run(program, index, (1, 64), tile)
        assert inside
        torch.testing.assert_close(found, want)
    assert run(program, index, (1, 25), (0, 8))[0]  # up to 7 - 8 + 20
    assert not run(program, index, (1, 64), (8, 8))[0]  # from -8 - 15 + 20 on
