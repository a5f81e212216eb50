"""What a thread adds to the gradients of a table for its 32 scores, as one block of PTX.

Scores lie in a thread as the tensor cores leave them. What belongs to one entry is added up first, by a thread and then
by the lanes of its warp (see lanes.py):

    a table of                      sums of a thread    additions per thread
    heads, sequences                1                   one for each warp
    keys                            2                   1/2
    queries                         16                  2
    distances (along diagonals)     18                  4
    pairs                           one for each run of queries with the same entry of a key, 32 at most; all are added

Buckets of time differences have long runs, since times grow along a sequence. Indices are computed inside the block,
one score after the other: the addresses of all 32 would not fit beside the scores, dk and dv (2.4 KB of spills).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from gdpa.functions.graph import Ref
from gdpa.functions.places import gather
from gdpa.functions.places.emit import Writer
from gdpa.functions.places.learned import lanes
from gdpa.functions.places.pairs import PairCode, has_code
from gdpa.functions.places.program import QUERY, Program

SCORES = 32  # of a thread at a time: two keys, 8 apart, and of 8 blocks of 8 queries two each


def _at(block: int, key: int, query: int) -> int:
    return 4 * block + 2 * key + query


BLOCKS, TWO = range(SCORES // 4), (0, 1)
# Which of a thread's scores belong to one entry; of pairs, among which there may be runs.
GROUPS = {
    "tile": [[*range(SCORES)]],
    "key": [[_at(n, k, q) for n in BLOCKS for q in TWO] for k in TWO],
    "query": [[_at(n, k, q) for k in TWO] for n in BLOCKS for q in TWO],
    "diagonal": [[_at(n + k, k, q) for k in TWO if n + k in BLOCKS] for n in (-1, *BLOCKS) for q in TWO],
    "pair": [[_at(n, k, q) for n in BLOCKS for q in TWO] for k in TWO],
}
# The copy of the gradients that a thread adds to, so that lanes of a warp do not wait for each other, nor programs.
# Along diagonals neighbours lie beside each other: to share a line is faster.
COPY = ["mov.u32 copy, %laneid;", "mov.u32 program, %ctaid.x;", "mad.lo.s32 copy, program, 8, copy;"]
COPY_OF_DIAGONAL = ["mov.u32 copy, %ctaid.x;"]


def kind_of(program: Program, index: int) -> str:
    """How a lookup depends on pairs."""
    sides = program.sides[index]
    if len(sides) < 2:
        return "tile" if not sides else "query" if QUERY in sides else "key"
    return "diagonal" if gather.is_along_diagonals(program, index) else "pair"


class Sums(NamedTuple):
    """Registers, and the code that makes what is in them."""

    names: list[str]
    lines: list[str]


class Additions(PairCode):
    """Triton code that adds to the gradients of the table of a lookup: ``lines``, then ``call``."""

    def __init__(self, program: Program, writer: Writer, index: int, value: str, entries: str) -> None:
        """``value``: code of what is added for every score; ``entries``: code of the number of the table's entries."""
        super().__init__(program, writer, value, SCORES)
        self.kind, node = kind_of(program, index), program.graph.nodes[index]
        start = f"gradients[{node.args[0]}]"
        if len(program.sides[index]) == 2 and _is_written(program, index):
            start, entry, within = self._place(index, node, start)
            self._checked = within is not None
            # -1 is nowhere
            code = "selp.b32 {d}, {0}, -1, {1};"
            self._entry_register = entry if within is None else self._new("s32", code, entry, within)
        else:
            at, inside = writer.offset(index)
            start, self._checked = f"{start}.to(tl.int64)", True
            self._entry_register = self._outside(f"tl.where({inside}, ({at}).to(tl.int32), -1)", "r")
        scalars = [(start, "l"), ("places.even(spot[5].copies) - 1", "r"), (f"({entries}).to(tl.int32)", "r")]
        self._scalars = [self._of_lane(self._outside(*x), 0) for x in scalars]

    @property
    def call(self) -> str:
        write = {
            "tile": self._by_tile, "key": self._by_rows, "query": self._by_columns, "diagonal": self._by_diagonals,
            "pair": self._runs,
        }  # fmt: skip
        code = write[self.kind](GROUPS[self.kind])
        # Elementwise code has results, which nobody reads.
        return self._assembly([*self._begin(), *code, *(f"mov.b32 ${i}, 0;" for i in range(SCORES))], "=&r", "tl.int32")

    def _begin(self) -> list[str]:
        """``base``: where the gradients begin that this thread adds to."""
        start, copies, entries = self._scalars
        return [
            ".reg .b32 copy, program;", ".reg .b64 base, place;", ".reg .pred found;",
            *(COPY_OF_DIAGONAL if self.kind == "diagonal" else COPY),
            f"and.b32 copy, copy, {copies};", f"mul.lo.s32 copy, copy, {entries};",
            f"mad.wide.u32 base, copy, 4, {start};",
        ]  # fmt: skip

    def _index(self, score: int) -> list[str]:
        return [self._of_lane(line, score) for line in (*self._declarations(), *self._code)]

    def _entry_of(self, score: int) -> str:
        return self._of_lane(self._entry_register, score)

    def _value_of(self, score: int) -> str:
        return self._of_lane("$<0>", score)

    def _by_tile(self, groups: list[list[int]]) -> list[str]:
        """One sum of all lanes."""
        sums, bits = self._sums(groups), (*lanes.OF_ROW, *lanes.OF_COLUMN)
        lines = [*lanes.begin(), *sums.lines, *lanes.added_up(sums.names[0], bits), ".reg .b32 entry0;"]
        lines += [f"mov.b32 entry0, {self._entry_of(groups[0][0])};", *lanes.only_one("entry0", bits)]
        return [*lines, *self._checked_add("entry0", sums.names[0])]

    def _by_rows(self, groups: list[list[int]]) -> list[str]:
        """Lanes that have the same two keys add up what they have for one of them."""
        sums, entries = self._sums(groups), [self._entry_of(group[0]) for group in groups]
        lines = [*lanes.begin(), *sums.lines, *lanes.scattered_sums(sums.names, (0,))]
        lines += [*lanes.scattered(entries, "entry", (0,)), *lanes.added_up(sums.names[0], (1,))]
        return [*lines, *lanes.only_one("entry0", (1,)), *self._checked_add("entry0", sums.names[0])]

    def _by_columns(self, groups: list[list[int]]) -> list[str]:
        """Lanes that have the same queries add up what they have, and each adds that of two queries."""
        sums, entries = self._sums(groups), [self._entry_of(group[0]) for group in groups]
        lines = [*lanes.begin(), *sums.lines, *lanes.scattered_sums(sums.names), *lanes.scattered(entries, "entry")]
        return [*lines, *(line for q in TWO for line in self._checked_add(f"entry{q}", sums.names[q]))]

    def _by_diagonals(self, groups: list[list[int]]) -> list[str]:
        """The same along diagonals, whose rows are turned first; then the two ends (see lanes.py)."""
        sums = self._sums(groups)
        entries = [self._entry_of(group[0]) for group in groups]
        lines = [line for group in groups for line in self._index(group[0])]
        lines += [
            *lanes.begin(),
            *lanes.begin_turning(),
            *sums.lines,
            ".reg .f32 end0, end1;",
            ".reg .b32 out0, out1, last0, last1;",
        ]
        pairs = [sums.names[n : n + 2] for n in range(0, len(sums.names), 2)]
        lines += [line for pair in pairs for line in lanes.turned(pair)]
        lines += [lanes.moved(f"end{q}", pairs[0][q], pairs[-1][q], q) for q in TWO]
        lines += [lanes.moved(here[q], behind[q], here[q], q) for here, behind in pairwise(pairs) for q in TWO]
        lines += lanes.scattered_sums(sums.names[:-2])
        # Entries of a lane's own diagonals, of those that it has sums of now, and of the ends.
        lines += [*lanes.scattered(entries[:-2], "here"), *lanes.scattered(entries[2:], "behind_it")]
        lines += [f"mov.b32 out{q}, {entries[q]};" for q in TWO]
        lines += [f"mov.b32 last{q}, {entries[q - 2]};" for q in TWO]
        for name in ("here", "behind_it", "out", "last"):
            lines += lanes.turned([f"{name}{q}" for q in TWO])
        for q in TWO:
            lines += [
                lanes.moved(f"here{q}", f"behind_it{q}", f"here{q}", q),
                lanes.moved(f"out{q}", f"out{q}", f"last{q}", q),
            ]
            lines += [*self._checked_add(f"here{q}", sums.names[q]), *self._checked_add(f"out{q}", f"end{q}")]
        return lines

    def _sums(self, groups: list[list[int]]) -> Sums:
        names = [f"sum{n}" for n in range(len(groups))]
        lines = [f".reg .f32 {', '.join(names)};"]
        for name, (first, *others) in zip(names, groups, strict=True):
            lines.append(f"mov.b32 {name}, {self._value_of(first)};")
            lines += [f"add.rn.f32 {name}, {name}, {self._value_of(i)};" for i in others]
        return Sums(names, lines)

    def _checked_add(self, entry: str, value: str) -> list[str]:
        if not self._checked:
            return _add(entry, value, "")
        return [f"setp.ge.s32 found, {entry}, 0;", *_add(entry, value, "@found ")]

    def _runs(self, runs: list[list[int]]) -> list[str]:
        """Successive scores with one entry are a run: ``run`` is that entry, ``sum`` what it gets when it ends."""
        lines = [
            f".reg .{kind} {name}{n};" for n in range(len(runs)) for kind, name in (("b32", "run"), ("f32", "sum"))
        ]
        lines += [".reg .pred ends;", *(f"mov.b32 run{n}, -1;" for n in range(len(runs)))]
        lines += [f"mov.f32 sum{n}, 0f00000000;" for n in range(len(runs))]
        for scores in zip(*runs, strict=True):
            for n, i in enumerate(scores):
                run, sum_, entry = f"run{n}", f"sum{n}", self._entry_of(i)
                lines += ["{", *self._index(i), f"setp.ne.s32 ends, {entry}, {run};"]
                lines += [f"setp.ge.and.s32 found, {run}, 0, ends;", *_add(run, sum_, "@found ")]
                lines += [f"selp.f32 {sum_}, 0f00000000, {sum_}, ends;"]
                lines += [f"add.rn.f32 {sum_}, {sum_}, {self._value_of(i)};", f"mov.b32 {run}, {entry};", "}"]
        for n in range(len(runs)):
            lines += [f"setp.ge.s32 found, run{n}, 0;", *_add(f"run{n}", f"sum{n}", "@found ")]
        return lines


def _is_written(program: Program, index: int) -> bool:
    """Whether all that an index takes for every pair has code."""
    args = [a.index for a in program.graph.nodes[index].args if isinstance(a, Ref)]
    pairs = [i for i in args if len(program.sides[i]) == 2]
    return all(has_code(program, i) and _is_written(program, i) for i in pairs)


def _add(entry: str, value: str, condition: str) -> list[str]:
    return [f"mad.wide.s32 place, {entry}, 4, base;", f"{condition}red.relaxed.gpu.global.add.f32 [place], {value};"]
