"""A mask as Triton code that finds, by interval arithmetic, which tiles have no visible pair and which have only
visible ones.

For every integer of the mask's program the code computes the least and the largest value that it can have in a tile,
and for every boolean whether it can be true for some pair, and whether it is for all. Values that depend on one side
through a table are looked up for all rows of the tile: ids have a least and a largest one, sorted or not. The result is
conservative: where nothing is known, a tile counts as cut, and every pair of it is tested.

One tile of one side is classified against many blocks of the other at once: these have vectors, one entry per block.
"""

from __future__ import annotations

import torch

from gdpa.functions.graph import Node, Ref
from gdpa.functions.places.emit import Writer, function
from gdpa.functions.places.intervals import ENDS, Intervals
from gdpa.functions.places.program import QUERY, Program


class Classifier(Intervals):
    """With what depends on one side through a table, place by place."""

    def __init__(self, program: Program) -> None:
        self._points: dict[str, Writer] = {}
        super().__init__(program)

    def _lookup(self, index: int, node: Node) -> tuple[str, str] | None:
        """If it depends on one side at most."""
        sides = self.program.sides[index]
        if len(sides) > 1:
            return None
        many = None
        if not sides:
            writer = self._writer("at", {})
        elif QUERY in sides:
            writer, many = self._writer("q", {"q_idx": "q_points", "q_row": "q_row + q_points"}), "BY_KEY == 0"
        else:
            writer, many = self._writer("k", {"kv_idx": "kv_points", "kv_row": "kv_row + kv_points"}), "BY_KEY"
        value = writer.value(Ref(index))
        self.lines += writer.lines
        writer.lines.clear()
        if node.dtype == torch.bool:
            value = f"{value}.to(tl.int32)"
        if many is None:
            ends = (f"{value}", f"{value}")
        else:
            ends = (f"places.least({value}, {many})", f"places.most({value}, {many})")
        if node.dtype == torch.bool:
            return f"{ends[0]} != 0", f"{ends[1]} != 0"
        return f"{ends[0]}.to(tl.int64)", f"{ends[1]}.to(tl.int64)"

    def _writer(self, kind: str, at: dict[str, str]) -> Writer:
        """Writes the values at the places of one side, or those of the whole sequence."""
        if kind not in self._points:
            scalars = {name: ENDS[name][0] for name in ("b", "h", "q_len", "kv_len")}
            self._points[kind] = Writer(self.program, {**scalars, **at}, f"{kind}_x")
        return self._points[kind]


def classify_source(name: str, program: Program) -> str:
    """The function ``name`` (see device/places.py, block_sets): some, every."""
    classifier = Classifier(program)
    (output,) = program.graph.outputs
    if isinstance(output, Ref):
        every, some = (f"({end}) != 0" for end in classifier.ends(output))
    else:
        every = some = "q_len >= 0" if output else "q_len < 0"
    start = [
        *(["tables, sizes = spot[4].mask, spot[5].mask_sizes"] if program.tables else []),
        "b, h, q_row, kv_row = places.starts(spot)",
        "q_len, kv_len = len_q.to(tl.int64), len_k.to(tl.int64)",
        "q_last, kv_last = tl.minimum(q_first + BLOCK_M, len_q) - 1, tl.minimum(kv_first + BLOCK_N, len_k) - 1",
        "q_points = places.points(q_first, q_last, BLOCK_M, BY_KEY == 0)",
        "kv_points = places.points(kv_first, kv_last, BLOCK_N, BY_KEY)",
        "q_first, q_last = q_first.to(tl.int64), q_last.to(tl.int64)",
        "kv_first, kv_last = kv_first.to(tl.int64), kv_last.to(tl.int64)",
    ]
    shape = "BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_KEY: tl.constexpr"
    lines = [*start, *classifier.lines, f"return {some}, {every}"]
    return function(f"{name}(spot, q_first, kv_first, len_q, len_k, {shape})", lines)
