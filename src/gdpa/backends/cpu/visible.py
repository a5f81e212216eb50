"""Which tiles a mask leaves empty or whole, found by interval arithmetic before any pair of them is evaluated.

The code that GPU kernels run for it (functions/places/intervals.py) runs here on tensors, with an entry for every
sequence, head, block of queries and block of keys: (n, Hq, q blocks, k blocks), each dimension 1 where nothing depends
on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gdpa.backends.cpu.schedule import Chunk
from gdpa.functions.graph import Node, Ref
from gdpa.functions.kept import kept_with_activation
from gdpa.functions.mask import MaskFunction
from gdpa.functions.passes.simplify import Builder
from gdpa.functions.places.intervals import FAR, Intervals, needed
from gdpa.functions.places.program import MOST_ROWS, Places, Program, static_ranges
from gdpa.functions.places.tables import TableView
from gdpa.problem import Operands, Problem

# With fewer tiles the pairs take less time: 0.3 ms, for 256 x 256 of a window.
FEWEST_TILES = 4
MOST_AT_ONCE = 2**20  # tiles of sequences and heads
# Integers in tables up to which sums of a few cannot wrap around. (Times in microseconds are 2**51.)
MOST_IN_TABLE = 2**56


@dataclass(frozen=True)
class VisibleTiles:
    """(q blocks, k blocks) each: ``empty`` tiles, of which no pair is visible in any sequence and head of the chunk,
    and ``whole`` ones, of which all pairs are visible in all. Of other tiles nothing is known."""

    empty: list[list[bool]]
    whole: list[list[bool]]
    block_q: int
    block_k: int

    def is_empty(self, q0: int, k0: int) -> bool:
        return self.empty[q0 // self.block_q][k0 // self.block_k]

    def is_whole(self, q0: int, k0: int) -> bool:
        return self.whole[q0 // self.block_q][k0 // self.block_k]


def visible_tiles(problem: Problem, x: Operands, chunk: Chunk) -> VisibleTiles | None:
    """The VisibleTiles of a chunk; None if the mask is to be evaluated for every pair."""
    blocks_q, blocks_k = len(chunk.q_blocks), len(chunk.k_blocks)
    if problem.mask is None or blocks_q * blocks_k < FEWEST_TILES:
        return None
    code, given = _interval_code(problem.mask), x.tables[problem.n_tables :]
    if code is None or not _are_certain(problem, given):
        return None
    at_once = max(1, MOST_AT_ONCE // (chunk.n_seqs * (chunk.heads_q.stop - chunk.heads_q.start) * blocks_k))
    try:
        parts = [
            _classify(code, _Rows(problem, x, chunk, first, min(first + at_once, blocks_q)), given)
            for first in range(0, blocks_q, at_once)
        ]
    except IndexError:  # if a visible pair has a bad index, evaluating the pairs raises it; otherwise it is no error
        return None
    some, every = (torch.cat(part) for part in zip(*parts, strict=True))
    return VisibleTiles((~some).tolist(), every.tolist(), chunk.block_q, chunk.block_k)


def _are_certain(problem: Problem, tables: Sequence[Tensor]) -> bool:
    """Whether rows and tables are as small as the ranges behind _interval_code assume."""
    if problem.most_rows > MOST_ROWS:
        return False
    wide = [t for t in tables if t.dtype == torch.int64 and t.numel()]
    return all(-int(low) <= MOST_IN_TABLE and int(high) <= MOST_IN_TABLE for low, high in map(torch.aminmax, wide))


# ---- code of a mask --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Code:
    """Compiled ``lines`` that compute ``some`` and ``every``, the values of the ``lookups`` being known; and the part
    of the mask's program that computes these."""

    lines: CodeType
    program: Program
    lookups: tuple[int, ...]


class _OfTiles(Intervals):
    """Intervals in which lookups that depend on one side have known bounds, ``least`` and ``most``."""

    def _lookup(self, index: int, node: Node) -> tuple[str, str] | None:
        return (f"least[{index}]", f"most[{index}]") if len(self.program.sides[index]) < 2 else None


@kept_with_activation
def _interval_code(mask: MaskFunction) -> _Code | None:
    """The _Code of a mask; None if intervals say nothing about it."""
    program = mask.program
    (output,) = program.graph.outputs
    ranges = static_ranges(program.graph, MOST_ROWS, MOST_IN_TABLE)
    if not isinstance(output, Ref) or any(r is not None and max(-r[0], r[1]) > FAR for r in ranges):
        return None
    used = [output.index]
    intervals = _OfTiles(program, used)
    every, some = (f"({end}) != 0" for end in intervals.ends(output))
    lines = [*intervals.lines, f"some, every = {some}, {every}"]
    lookups = tuple(i for i in needed(program, used) if _is_told(program, i))
    return _Code(compile("\n".join(lines), f"<{mask.name} by intervals>", "exec"), _part(program, lookups), lookups)


def _is_told(program: Program, index: int) -> bool:
    node = program.graph.nodes[index]
    return node.op == "lookup" and len(program.sides[index]) < 2 and not node.dtype.is_floating_point


def _part(program: Program, outputs: Sequence[int]) -> Program:
    """The program whose outputs are these nodes of ``program``."""
    b = Builder(0)
    new: list[Any] = []
    for node in program.graph.nodes:
        args = tuple(new[a.index] if isinstance(a, Ref) else a for a in node.args)
        new.append(b.intern(Node(node.op, args, node.dtype)))
    return Program(b.finish(tuple(new[i] for i in outputs)), program.tables)


# ---- its values ------------------------------------------------------------------------------------------------------
class _Rows:
    """Positions in the tiles of query blocks ``first`` to ``end`` and all key blocks. Rows past the end of a sequence
    have the position of its last row."""

    def __init__(self, problem: Problem, x: Operands, chunk: Chunk, first: int, end: int) -> None:
        self.chunk, self.shape = chunk, (end - first, len(chunk.k_blocks))
        self.len_q, self.len_k = (t.long()[:, None] for t in (chunk.spans.len_q, chunk.spans.len_k))
        self.starts_q = torch.arange(first, end)[:, None] * chunk.block_q
        self.starts_k = torch.arange(self.shape[1]) * chunk.block_k
        b = chunk.seqs[:, None, None, None]
        heads = torch.arange(chunk.heads_q.start, chunk.heads_q.stop)
        self.scalars = {
            "b": b, "h": (problem.first_head + problem.head_step * heads)[:, None, None],
            "q_len": self.len_q, "kv_len": self.len_k,
            "q_row": b * problem.rows_q if x.cu_q is None else x.cu_q.long()[b],
            "kv_row": b * problem.rows_k if x.cu_k is None else x.cu_k.long()[b],
        }  # fmt: skip

    @property
    def inside(self) -> Tensor:
        """Whether a tile has pairs of a sequence at all."""
        return (self.starts_q < self.len_q) & (self.starts_k < self.len_k)

    def ends(self) -> dict[str, Tensor]:
        """The names that the code of Intervals uses."""
        q_last, kv_last = self.starts_q + self.chunk.block_q - 1, self.starts_k + self.chunk.block_k - 1
        return {
            **self.scalars,
            "q_first": _within(self.starts_q, self.len_q), "q_last": _within(q_last, self.len_q),
            "kv_first": _within(self.starts_k, self.len_k), "kv_last": _within(kv_last, self.len_k),
        }  # fmt: skip

    def points(self) -> dict[str, Tensor]:
        """Every position of a tile, in a dimension behind the others."""
        at = {name: t[..., None] for name, t in self.scalars.items()}
        i = _within(self.starts_q[..., None] + torch.arange(self.chunk.block_q), self.len_q[..., None])
        j = _within(self.starts_k[..., None] + torch.arange(self.chunk.block_k), self.len_k[..., None])
        return {**at, "q_idx": i, "kv_idx": j, "q_row": at["q_row"] + i, "kv_row": at["kv_row"] + j}


def _within(rows: Tensor, length: Tensor) -> Tensor:
    return torch.minimum(rows, length - 1).clamp(min=0)


def _classify(code: _Code, rows: _Rows, tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(q blocks, k blocks): whether some pair of a tile may be visible, and whether every one is."""
    is_any = ((rows.len_q > 0) & (rows.len_k > 0))[..., None]
    views = [TableView(t, f"mask.tables[{i}]", is_any) for i, t in enumerate(tables)]
    found = code.program.evaluate(Places(rows.points(), views), torch.zeros(()))
    values = {i: _in_64_bits(t) for i, t in zip(code.lookups, found, strict=True)}
    scope: dict[str, Any] = {
        **rows.ends(), "tl": _LANGUAGE, "places": _PLACES,
        "least": {i: t.amin(-1) for i, t in values.items()}, "most": {i: t.amax(-1) for i, t in values.items()},
    }  # fmt: skip
    exec(code.lines, scope)
    inside = rows.inside
    some, every = scope["some"] & inside, scope["every"] | ~inside
    return some.flatten(0, 1).any(0).expand(rows.shape), every.flatten(0, 1).all(0).expand(rows.shape)


def _in_64_bits(t: Tensor) -> Tensor:
    """Integers as Intervals take them; with a dimension of points even if there is none."""
    t = t if t.dtype == torch.bool else t.long()
    return t.reshape(t.shape or (1,))


def _tensors(call: Any) -> Any:
    return lambda *args: call(*(torch.as_tensor(a) for a in args))


# What the lines use of Triton's language, on tensors and numbers.
_LANGUAGE = SimpleNamespace(
    int64=torch.int64, where=_tensors(torch.where), minimum=_tensors(torch.minimum), maximum=_tensors(torch.maximum)
)
_PLACES = SimpleNamespace(
    floordiv=lambda a, b: torch.div(a, b, rounding_mode="floor"), mod=lambda a, b: torch.remainder(a, b)
)
