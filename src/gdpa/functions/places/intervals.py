"""Interval arithmetic as Triton code: the least and the largest value that integers of a program can have in a tile.

For a boolean these are whether it is true for every pair, and whether it is for some pair. The tile is q_first to
q_last and kv_first to kv_last, scalars, or vectors for many tiles; b, h, q_len, kv_len and the rows of the sequence's
first query and key, q_row and kv_row, are scalars. All of them have 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gdpa.functions.emission.code import literal
from gdpa.functions.graph import Arg, Node, Ref
from gdpa.functions.places.names import POSITIONS
from gdpa.functions.places.program import Program, limits, may_wrap

FAR = 2**62
ENDS = {
    "b": ("b", "b"), "h": ("h", "h"), "q_len": ("q_len", "q_len"), "kv_len": ("kv_len", "kv_len"),
    "q_idx": ("q_first", "q_last"), "kv_idx": ("kv_first", "kv_last"),
    "q_row": ("q_row + q_first", "q_row + q_last"), "kv_row": ("kv_row + kv_first", "kv_row + kv_last"),
}  # fmt: skip


class Intervals:
    """``lines`` of code for some nodes of a program (None: all), and for whatever these need; ``ends`` then has the
    names of the results. Nothing is known of looked-up values here: subclasses may."""

    def __init__(self, program: Program, nodes: Iterable[int] | None = None) -> None:
        self.program = program
        self.lines: list[str] = []
        for index in needed(program, range(len(program.graph.nodes)) if nodes is None else nodes):
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
        if may_wrap(self.program, index):  # of fewer than 64 bits: then it may be anything
            least, most = limits(node.dtype)
            self.lines += [
                f"fits{index} = (a{index} >= {least}) & (z{index} <= {most})",
                f"a{index} = tl.where(fits{index}, a{index}, {least})",
                f"z{index} = tl.where(fits{index}, z{index}, {most})",
            ]

    def _bounds(self, index: int, node: Node) -> tuple[str, str]:
        truth = node.dtype == torch.bool
        unknown = ("0 > q_len", "q_len >= 0") if truth else self._anywhere(index)
        if node.op == "position":
            return ENDS[POSITIONS[node.args[0]]]  # type: ignore[index]
        if node.op == "lookup":
            return self._lookup(index, node) or unknown
        kinds = [self._dtype(a) for a in node.args]
        if any(k.is_floating_point for k in kinds):
            return unknown
        found = self._truth(node) if truth else self._integer(index, node)
        return found or unknown

    def _anywhere(self, index: int) -> tuple[str, str]:
        """As far as it can be: sums of what is further off would wrap around."""
        low, high = self.program.ranges[index] or (-FAR, FAR)
        return f"q_len * 0 + {paren(str(max(low, -FAR)))}", f"q_len * 0 + {paren(str(min(high, FAR)))}"

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
        return None


def paren(text: str) -> str:
    return f"({text})" if text.startswith("-") else text


def needed(program: Program, nodes: Iterable[int]) -> list[int]:
    """Those and all that they are made of, in order; not what a lookup is made of."""
    found: set[int] = set()
    waiting = list(nodes)
    while waiting:
        index = waiting.pop()
        node = program.graph.nodes[index]
        if index not in found:
            found.add(index)
            waiting += [a.index for a in node.args if isinstance(a, Ref) and node.op != "lookup"]
    return sorted(found)
