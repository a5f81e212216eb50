"""A function of positions and tables: its meaning in torch, and what can be told of it without running it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gdpa.functions.graph import Arg, Graph, Node, Ref, as_tensor
from gdpa.functions.passes.simplify import Builder
from gdpa.functions.places.lower import meaning
from gdpa.functions.places.names import POSITIONS, TableKind
from gdpa.functions.places.tables import TableView

# No kernel that hands out positions runs on more rows, so that differences and small multiples fit 32 bits.
MOST_ROWS = 2**29
SMALL_ROWS = 2**21  # sums and differences of two such positions are exact in few instructions: see places.as_float
# Integers of 64 bits in tables are taken to be this far from where sums would wrap around.
MOST_IN_TABLE = 2**61
QUERY, KEY = "query", "key"
# Of floats: finite for arguments of any sensible size.
TAME = (
    "position", "cast", "add", "sub", "mul", "neg", "abs", "minimum", "maximum", "where", "sin", "cos", "tanh",
)  # fmt: skip
STEPS = {"floor", "ceil", "round", "trunc", "fmod", "remainder", "sign"}
SIDE = {"q_idx": QUERY, "q_row": QUERY, "kv_idx": KEY, "kv_row": KEY}


@dataclass(frozen=True)
class Places:
    """What a program is evaluated with: positions that broadcast against the scores, and tables."""

    at: Mapping[str, Tensor]
    tables: Sequence[TableView] = ()


@dataclass(frozen=True)
class Program:
    """``graph`` (see lower.py) on ``tables``."""

    graph: Graph
    tables: tuple[TableKind, ...]

    @cached_property
    def key(self) -> str:
        kinds = ", ".join(f"{t.ndim} {t.dtype}" for t in self.tables)
        return hashlib.sha256(f"{self.graph.text()}\n{kinds}".encode()).hexdigest()[:16]

    @cached_property
    def positions(self) -> tuple[str, ...]:
        """Those that are used."""
        found = {n.args[0] for n in self.graph.nodes if n.op == "position"}
        return tuple(name for i, name in enumerate(POSITIONS) if i in found)

    def evaluate(self, places: Places, like: Tensor) -> list[Tensor]:
        """The outputs in eager torch, as small as broadcasting allows; float32 follows the dtype of ``like``, but for
        what a step follows: there 21 may be the last digit of 30 * 0.7 away, in float32 or in float64."""
        values: list[Tensor] = []

        def get(a: Arg) -> Any:
            return values[a.index] if isinstance(a, Ref) else a

        for index, node in enumerate(self.graph.nodes):
            follows = node.dtype == torch.float32 and index not in self.before_steps
            dtype = like.dtype if follows else node.dtype
            if node.op == "position":
                value = places.at[POSITIONS[node.args[0]]]  # type: ignore[index]
            elif node.op == "lookup":
                value = places.tables[node.args[0]].look_up([get(a) for a in node.args[1:]])  # type: ignore[index]
            else:
                value = meaning(node.op)(*map(get, node.args))
            values.append(value.to(dtype))
        return [as_tensor(get(o), like) for o in self.graph.outputs]

    @cached_property
    def before_steps(self) -> frozenset[int]:
        """Numbers made of integers alone that a step follows, as in (q_idx * 0.7).floor(). In PyTorch they are float32
        beside scores of any dtype, and so must be the places of the steps."""
        nodes, followed, learned = self.graph.nodes, set[int](), set[int]()
        for i in range(len(nodes) - 1, -1, -1):
            floats = {a.index for a in nodes[i].args if isinstance(a, Ref) and nodes[a.index].dtype.is_floating_point}
            if i in followed or nodes[i].op in STEPS or not nodes[i].dtype.is_floating_point:
                followed |= floats
        for i, node in enumerate(nodes):
            floating = node.dtype.is_floating_point
            if floating and (node.op == "lookup" or any(isinstance(a, Ref) and a.index in learned for a in node.args)):
                learned.add(i)
        return frozenset(followed - learned)

    @cached_property
    def ranges(self) -> list[tuple[int, int] | None]:
        """Of each node the least and the largest value that it may have, None for floats."""
        return static_ranges(self.graph, MOST_ROWS)

    @cached_property
    def small_ranges(self) -> list[tuple[int, int] | None]:
        """The same, if no position is larger than SMALL_ROWS."""
        return static_ranges(self.graph, SMALL_ROWS)

    @cached_property
    def sides(self) -> list[frozenset[str]]:
        """Of each node whether it depends on the query, the key, both, or on the sequence and the head alone."""
        found: list[frozenset[str]] = []
        for node in self.graph.nodes:
            if node.op == "position":
                side = SIDE.get(POSITIONS[node.args[0]])  # type: ignore[index]
                found.append(frozenset([side] if side else []))
            else:
                found.append(frozenset().union(*(found[a.index] for a in node.args if isinstance(a, Ref))))
        return found

    def looked_up(self, table: int) -> str:
        """How often a table is read, in words."""
        nodes = zip(self.graph.nodes, self.sides, strict=True)
        sides = [s for n, s in nodes if n.op == "lookup" and n.args[0] == table]
        if not sides:
            return "not used"
        often = max(sides, key=len)
        if len(often) == 2:
            return "looked up for every pair"
        return f"looked up once per {next(iter(often))}" if often else "looked up once per sequence and head"

    @cached_property
    def finite_past_the_end(self) -> bool:
        """Whether it is finite for rows past the ends of their sequence as well, if all that it looks up is: by sums
        and products of positions, and lookups at a row itself, for which kernels take the last one (emit.py, index)."""
        return all(
            not sides or (self._is_tame(n) if n.op != "lookup" else self._is_at_row(n))
            for n, sides in zip(self.graph.nodes, self.sides, strict=True)
        )

    def _is_tame(self, node: Node) -> bool:
        return node.op in TAME or not node.dtype.is_floating_point

    def _is_at_row(self, node: Node) -> bool:
        """Whether an index is a position, or the same for all rows."""
        indices = [a.index for a in node.args[1:] if isinstance(a, Ref)]
        return all(not self.sides[i] or self.graph.nodes[i].op == "position" for i in indices)

    @cached_property
    def gathers(self) -> bool:
        """Whether a table is looked up for every pair: not once per query, key, head or sequence."""
        return any(n.op == "lookup" and len(s) == 2 for n, s in zip(self.graph.nodes, self.sides, strict=True))

    def columns(self, side: str) -> list[int]:
        """The values that differ with ``side`` alone, take a lookup, and are used together with the other side or by
        the function: what a kernel may look up by one thread each, if its columns are that side (device/once.py)."""
        takes_lookup = self._takes_lookup(lambda sides: len(sides) > 0)  # for each column, and not once for all of them
        found = [i for i in self._used if self.sides[i] == {side} and takes_lookup[i]]
        return [i for i in found if self.graph.nodes[i].dtype != torch.bool]

    def rows(self, side: str) -> list[int]:
        """The values that take a lookup and do not differ with the other side than ``side``: what is known of a tile's
        rows before its scores are."""
        takes_lookup = self._takes_lookup(lambda sides: True)
        found = [i for i in self._used if self.sides[i] <= {side} and takes_lookup[i]]
        return [i for i in found if self.graph.nodes[i].dtype != torch.bool]

    @cached_property
    def _used(self) -> list[int]:
        """By the function, or for what differs with both sides."""
        nodes = zip(self.graph.nodes, self.sides, strict=True)
        used = {a.index for node, sides in nodes if len(sides) == 2 for a in refs(node.args)}
        return sorted(used | {a.index for a in refs(self.graph.outputs)})

    def _takes_lookup(self, counts: Callable[[frozenset[str]], bool]) -> list[bool]:
        """Of each value, whether lookups at indices of sides that count are behind it."""
        found: list[bool] = []
        for node, sides in zip(self.graph.nodes, self.sides, strict=True):
            found.append((node.op == "lookup" and counts(sides)) or any(found[a.index] for a in refs(node.args)))
        return found

    @cached_property
    def pair_operations(self) -> int:
        """How many operations there are for every pair, lookups included."""
        return sum(len(sides) == 2 for sides in self.sides)


def refs(args: Sequence[Arg]) -> list[Ref]:
    return [a for a in args if isinstance(a, Ref)]


def joined(op: str, programs: Sequence[Program]) -> Program:
    """One program of ``op`` ("and", "or", "not") on the only outputs of several; its tables are theirs, in order."""
    b, outputs = Builder(0), []
    tables: tuple[TableKind, ...] = ()
    for program in programs:
        new: list[Arg] = []
        for node in program.graph.nodes:
            args = tuple(new[a.index] if isinstance(a, Ref) else a for a in node.args)
            if node.op == "lookup":
                args = (args[0] + len(tables), *args[1:])  # type: ignore[operator]
            new.append(b.intern(Node(node.op, args, node.dtype)))
        (out,) = program.graph.outputs
        outputs.append(new[out.index] if isinstance(out, Ref) else out)
        tables += program.tables
    result: Arg = b(op, *outputs, dtype=torch.bool)
    return Program(b.finish((result,)), tables)


# ---- ranges ----------------------------------------------------------------------------------------------------------
Range = tuple[int, int]


def static_ranges(graph: Graph, most: int, in_table: int = MOST_IN_TABLE) -> list[Range | None]:
    """``most``: the largest position; ``in_table``: the largest integer of a table."""
    found: list[Range | None] = []
    floats: list[tuple[float, float] | None] = []

    def of(a: Arg) -> Range | None:
        if isinstance(a, Ref):
            return found[a.index] or _whole(floats[a.index])
        return (int(a), int(a)) if not isinstance(a, float) else None

    def of_float(a: Arg) -> tuple[float, float] | None:
        return found[a.index] or floats[a.index] if isinstance(a, Ref) else (float(a), float(a))

    for node in graph.nodes:
        found.append(_range(node, [of(a) for a in node.args], most, in_table))
        is_float = node.dtype.is_floating_point and node.op not in ("position", "lookup")
        floats.append(_float_range(node.op, [of_float(a) for a in node.args]) if is_float else None)
    return found


def _float_range(op: str, args: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Of an operation that makes numbers of integers, such as those that a logarithm divides into buckets; what float32
    arithmetic may add to it is in it. None if it is not known."""
    (a, b), (c, d) = args[0] or NOTHING, args[-1] or NOTHING
    if op == "log" and a >= 1:
        ends = [math.log(a), math.log(b)]
    elif op == "mul":
        ends = [x * y for x in (a, b) for y in (c, d)]
    elif op == "div_rn" and c == d != 0:
        ends = [a / c, b / c]
    elif op == "cast":
        ends = [a, b]
    else:
        return None
    lost = [0.0 if op == "cast" and abs(x) <= EXACT_INTEGERS else abs(x) * SLACK for x in (min(ends), max(ends))]
    low, high = min(ends) - lost[0], max(ends) + lost[1]
    return (low, high) if abs(low) < LARGEST and abs(high) < LARGEST else None


def _whole(ends: tuple[float, float] | None) -> Range | None:
    """Of a number as an integer. From 0 on only if the number is: -0.5 becomes 0, but code for such may not take it."""
    return None if ends is None else (math.floor(ends[0]), math.trunc(ends[1]))


NOTHING = (math.nan, math.nan)
SLACK = 2.0**-16  # far more than an operation loses
EXACT_INTEGERS = 2**24  # up to which float32 has them all
LARGEST = 2.0**120  # nothing comes near infinity, which could become NaN


def limits(dtype: torch.dtype) -> Range:
    return (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _range(node: Node, args: list[Range | None], most: int, in_table: int) -> Range | None:
    if node.dtype.is_floating_point:
        return None
    ends = limits(node.dtype)
    if node.op == "position":
        return (0, most)
    if node.op == "lookup" or node.dtype == torch.bool:
        return max(ends[0], -in_table), min(ends[1], in_table)
    known = [a or ends for a in (args[1:] if node.op == "where" else args)]  # what nothing is known of may be anything
    found = interval(node.op, known)
    wraps = found is None or found[0] < ends[0] or found[1] > ends[1]
    return ends if wraps else found


def may_wrap(program: Program, index: int) -> bool:
    """Whether an integer may be too large for its dtype, and so be another one. (64 bits are taken to be enough.)"""
    node = program.graph.nodes[index]
    if node.op in ("position", "lookup") or node.dtype in (torch.int64, torch.bool):
        return False
    ranges = [program.ranges[a.index] if isinstance(a, Ref) else (int(a), int(a)) for a in node.args]
    known = ranges[1:] if node.op == "where" else ranges
    ends = limits(node.dtype)
    found = None if None in known else interval(node.op, known)  # type: ignore[arg-type]
    return found is None or found[0] < ends[0] or found[1] > ends[1]


def interval(op: str, args: Sequence[Range]) -> Range | None:
    """Of an integer operation on intervals, None if it is not known."""
    (a, b), (c, d) = args[0], args[-1]
    if op == "add":
        return a + c, b + d
    if op == "sub":
        return a - d, b - c
    if op == "neg":
        return -b, -a
    if op == "abs":
        return (0 if a <= 0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))
    if op == "sign":
        return (a > 0) - (a < 0), (b > 0) - (b < 0)
    if op == "minimum":
        return min(a, c), min(b, d)
    if op == "maximum":
        return max(a, c), max(b, d)
    if op in ("where", "cast"):
        return min(a, c), max(b, d)
    if op == "mul":
        corners = [x * y for x in (a, b) for y in (c, d)]
        return min(corners), max(corners)
    if op == "floordiv" and c > 0:
        corners = [x // y for x in (a, b) for y in (c, d)]
        return min(corners), max(corners)
    if op == "mod" and c > 0:
        return (a, b) if a >= 0 and b < c else (0, d - 1)
    if op == "shr" and a >= 0 and c >= 0 and d < 63:
        return a >> d, b >> c
    if op == "bitand" and a >= 0 and c >= 0:
        return 0, min(b, d)
    return None
