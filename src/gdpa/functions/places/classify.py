"""A mask as Triton code that tells tiles with no visible pair, and tiles with no other, by intervals.

Every integer of the mask's program gets the least and the largest value that it can have in a tile, every truth value
whether it holds for some and for every pair. What depends on one side through a table is looked at place by place: the
ids of a tile's rows have a least and a largest one, sorted or not. A pair that is visible is never called invisible;
where nothing is known, the tile is cut.

One side's tile is fixed, the other's are many at once: its values are vectors, one entry per tile.
"""

from __future__ import annotations

import torch

from gdpa.functions.graph import Arg, Node, Ref
from gdpa.functions.places.emit import Writer, function, literal
from gdpa.functions.places.names import POSITIONS
from gdpa.functions.places.program import QUERY, Program

FAR = 2**62
ENDS = {
    "b": ("b", "b"), "h": ("h", "h"), "q_len": ("q_len", "q_len"), "kv_len": ("kv_len", "kv_len"),
    "q_idx": ("q_first", "q_last"), "kv_idx": ("kv_first", "kv_last"),
    "q_row": ("q_row + q_first", "q_row + q_last"), "kv_row": ("kv_row + kv_first", "kv_row + kv_last"),
}  # fmt: skip


class Classifier:
    """Lines of code; afterwards ``some`` and ``every`` of a truth value, ``low`` and ``high`` of an integer."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines: list[str] = []
        self._points: dict[str, Writer] = {}
        for index in range(len(program.graph.nodes)):
            self._node(index)

    def ends(self, a: Arg) -> tuple[str, str]:
        """The least and the largest value; of a truth value (as a number) whether every and whether some is true."""
        if not isinstance(a, Ref):
            return literal(a), literal(a)
        return f"a{a.index}", f"z{a.index}"

    def _node(self, index: int) -> None:
        node = self.program.graph.nodes[index]
        if node.dtype.is_floating_point:
            return  # nothing is known of it
        low, high = self._bounds(index, node)
        self.lines += [f"a{index} = {low}", f"z{index} = {high}"]

    def _bounds(self, index: int, node: Node) -> tuple[str, str]:
        truth = node.dtype == torch.bool
        unknown = ("0 > q_len", "q_len >= 0") if truth else (f"q_len * 0 - {FAR}", f"q_len * 0 + {FAR}")
        if node.op == "position":
            return ENDS[POSITIONS[node.args[0]]]  # type: ignore[index]
        if node.op == "lookup":
            return self._lookup(index, node) or unknown
        kinds = [self._dtype(a) for a in node.args]
        if any(k.is_floating_point for k in kinds):
            return unknown
        found = self._truth(node) if truth else self._integer(index, node)
        return found or unknown

    def _dtype(self, a: Arg) -> torch.dtype:
        if isinstance(a, Ref):
            return self.program.graph.nodes[a.index].dtype
        return torch.float32 if isinstance(a, float) else torch.bool if isinstance(a, bool) else torch.int64

    def _truth(self, node: Node) -> tuple[str, str] | None:
        pairs = [self.ends(a) for a in node.args]
        (a, z), (c, y) = pairs[0], pairs[-1]
        op = node.op
        if op in ("gt", "ge"):
            (a, z), (c, y), op = (c, y), (a, z), {"gt": "lt", "ge": "le"}[op]
        if op in ("lt", "le"):
            sign = "<" if op == "lt" else "<="
            return f"{z} {sign} {c}", f"{a} {sign} {y}"
        if op in ("eq", "ne"):
            apart, same = f"({z} < {c}) | ({y} < {a})", f"({a} == {z}) & ({c} == {y}) & ({a} == {c})"
            return (same, f"({apart}) == 0") if op == "eq" else (apart, f"({same}) == 0")
        if op in ("and", "or"):
            sign = "&" if op == "and" else "|"
            return f"{a} {sign} {c}", f"{z} {sign} {y}"
        if op == "not":
            return f"{z} == 0", f"{a} == 0"
        if op == "xor":
            return (
                f"({a} & ({y} == 0)) | (({z} == 0) & {c})",
                f"({z} & ({c} == 0)) | (({a} == 0) & {y})",
            )
        if op == "cast":
            return f"({a} > 0) | ({z} < 0)", f"({a} != 0) | ({z} != 0)"
        if op == "where":
            (e, s), yes, no = pairs
            every = f"({e} & {yes[0]}) | (({s} == 0) & {no[0]}) | ({yes[0]} & {no[0]})"
            return every, f"({s} & {yes[1]}) | (({e} == 0) & {no[1]})"
        return None

    def _integer(self, index: int, node: Node) -> tuple[str, str] | None:
        known = self.program.ranges[index]
        if known is None or known[0] < -FAR or known[1] > FAR:
            return None  # it might wrap around
        pairs = [self.ends(a) for a in node.args]
        (a, z), (c, y) = pairs[0], pairs[-1]
        if node.op == "cast":
            if self._dtype(node.args[0]) == torch.bool:
                return f"{a}.to(tl.int64)", f"{z}.to(tl.int64)"
            return a, z
        if node.op == "add":
            return f"{a} + {c}", f"{z} + {y}"
        if node.op == "sub":
            return f"{a} - {paren(y)}", f"{z} - {paren(c)}"
        if node.op == "neg":
            return f"-{z}", f"-{a}"
        if node.op in ("minimum", "maximum"):
            return f"tl.{node.op}({a}, {c})", f"tl.{node.op}({z}, {y})"
        if node.op == "abs":
            return f"tl.maximum(tl.maximum({a}, -{z}), 0)", f"tl.maximum({z}, -{a})"
        constant = node.args[-1] if len(node.args) > 1 and not isinstance(node.args[-1], Ref) else None
        if node.op == "mul" and constant is not None:
            return (f"{a} * {c}", f"{z} * {c}") if constant >= 0 else (f"{z} * ({c})", f"{a} * ({c})")
        if node.op == "floordiv" and constant is not None and constant > 0:
            return f"places.floordiv({a}, {c})", f"places.floordiv({z}, {c})"
        if node.op == "mod" and constant is not None and constant > 0:
            whole = f"places.floordiv({a}, {c}) == places.floordiv({z}, {c})"  # no multiple lies between
            return f"tl.where({whole}, places.mod({a}, {c}), 0)", f"tl.where({whole}, places.mod({z}, {c}), {c} - 1)"
        if node.op == "where":
            (e, s), yes, no = pairs
            return (
                f"tl.where({e}, {yes[0]}, tl.where({s}, tl.minimum({yes[0]}, {no[0]}), {no[0]}))",
                f"tl.where({e}, {yes[1]}, tl.where({s}, tl.maximum({yes[1]}, {no[1]}), {no[1]}))",
            )
        return None

    def _lookup(self, index: int, node: Node) -> tuple[str, str] | None:
        """Place by place, if it depends on one side at most."""
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


def paren(text: str) -> str:
    return f"({text})" if text.startswith("-") else text


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
