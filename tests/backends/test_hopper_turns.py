"""Sums of dq by turns: at every block of queries each tile of keys that sees it has a turn of its own, the same with
any schedule, and nobody waits for ever. The index arithmetic of the kernels is run in plain Python."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from support import INTERPRET

pytest.importorskip("triton")
if INTERPRET:
    pytest.skip("Triton's interpreter does not take Gluon kernels", allow_module_level=True)

from gdpa.backends.hopper.backward import items, turns, walk
from gdpa.backends.hopper.scheduling import schedule
from gdpa.device import sequences
from in_python import BLOCK_N, Tile, in_python

PROCESSORS = 13
k = in_python(sequences, schedule, walk, items, turns)


@dataclass(frozen=True)
class Batch:
    """Lengths of packed queries and keys. ``records``: the list of tiles (sequence, first row), which bad offsets may
    cut."""

    len_q: list[int]
    len_k: list[int]
    heads: int
    band: SimpleNamespace
    T: Tile
    records: list[tuple[int, int]]

    @property
    def n_items(self) -> int:
        return len(self.records) * self.heads

    def start_q(self, b: int) -> int:
        return sum(self.len_q[:b])


@dataclass(frozen=True)
class Step:
    """A tile at a block of queries. ``turn`` and ``code``: as the kernel has them."""

    sequence: int
    tile: int
    head: int  # of the queries
    row: int
    flag: int
    turn: int
    code: int

    @property
    def has_turn(self) -> bool:
        return self.code != k.NO_TURN


def steps_of(batch: Batch, item: int) -> list[Step]:
    """What an item takes, in order, as take_turns sees it."""
    T, found = batch.T, []
    b, row = batch.records[item // batch.heads]
    len_q, len_k = batch.len_q[b], batch.len_k[b]
    h, tile, tiles, number = k.name_tile(batch.records, item, b, row, len_k, batch.heads, batch.n_items, T)
    assert batch.records[number][0] == b
    first, blocks, _, _ = k.query_range(tile, tiles, len_q, len_k, batch.band, T)
    begin = k.first_block(batch.records, b, batch.start_q(b), 0, T)
    cursor = k.first_step(h, tile, tiles, blocks, T)
    for _ in range(blocks * T.GROUP):
        row = k.row_of(cursor, first, T)
        turn, code = k.turn_at(row, tile, tiles, len_q, len_k, batch.band, T)
        flag = k.flag_at(0, begin, row, cursor.head, batch.heads, T)
        found.append(Step(b, tile, cursor.head, row, flag, turn, code))
        cursor = k.next_step(cursor, tile, tiles, blocks, T)
    return found


def sees(batch: Batch, b: int, row: int, tile: int) -> bool:
    """Whether any query of the block sees any key of the tile: by every pair."""
    len_q, len_k, band = batch.len_q[b], batch.len_k[b], batch.band
    for i in range(row, min(row + batch.T.BLOCK_M, len_q)):
        lo = 0 if band.left is None else max(i + len_k - len_q - band.left, 0)
        hi = len_k - 1 if band.right is None else min(i + len_k - len_q + band.right, len_k - 1)
        if max(lo, tile * BLOCK_N) <= min(hi, (tile + 1) * BLOCK_N - 1):
            return True
    return False


def check_turns(batch: Batch, items: list[list[Step]]) -> None:
    """Turns at a block are 0, 1, 2 ..., the first stores and the last rounds; whoever sees the block has one; every
    block is somebody's; and a flag belongs to one block."""
    taken: dict[tuple[int, int, int], dict[int, Step]] = defaultdict(dict)
    flags: dict[int, tuple[int, int, int]] = {}
    for s in (s for steps in items for s in steps if s.has_turn):
        block = s.sequence, s.head, s.row
        assert s.turn not in taken[block], "two tiles have the same turn"
        taken[block][s.turn] = s
        assert flags.setdefault(s.flag, block) == block, "two blocks have the same flag"
        assert 0 < s.flag <= batch.heads * batch.T.GROUP * (sum(batch.len_q) // batch.T.BLOCK_M + len(batch.len_q))
    for (b, _, row), steps in taken.items():
        assert sorted(steps) == list(range(len(steps)))
        assert [bool(steps[turn].code & k.IS_FIRST) for turn in sorted(steps)] == [True] + [False] * (len(steps) - 1)
        assert [bool(steps[turn].code & k.IS_LAST) for turn in sorted(steps)] == [False] * (len(steps) - 1) + [True]
        visible = {tile for tile in range(k.gl.cdiv(batch.len_k[b], BLOCK_N)) if sees(batch, b, row, tile)}
        assert visible <= {s.tile for s in steps.values()}
    heads = range(batch.heads * batch.T.GROUP)
    blocks = ((b, h, row) for b, n in enumerate(batch.len_q) for h in heads for row in range(0, n, batch.T.BLOCK_M))
    assert set(taken) == set(blocks), "a block has no gradient"


class Program:
    """What was computed in one step waits for its turn in the next, and others learn of it in the one after. The next
    item is taken ``early`` steps before it begins."""

    def __init__(self, early: int) -> None:
        self.early, self.steps, self.left = early, list[Step](), True
        self.at = self.published = 0  # steps computed, steps that others know of

    def advance(self, flags: dict[int, int], rest: Iterator[list[Step]]) -> bool:
        """One step, or the end after the last; False if it is not this program's turn yet."""
        while self.left and self.at + self.early >= len(self.steps):
            item = next(rest, None)
            self.left = item is not None
            self.steps += item or []
        if self.at - 1 > self.published:  # before it waits for anything else
            self.published += 1
            self._publish(self.steps[self.published - 1], flags)
        sent = self.steps[self.at - 1] if self.at else None
        if sent is not None and sent.has_turn:
            if flags[sent.flag] < sent.turn:
                return False
            assert flags[sent.flag] == sent.turn, "out of turn"
        if self.at == len(self.steps) and sent is not None:
            self._publish(sent, flags)
        self.at += 1
        return True

    @property
    def is_over(self) -> bool:
        return not self.left and (self.at > len(self.steps) or not self.steps)

    def _publish(self, s: Step, flags: dict[int, int]) -> None:
        if s.has_turn:
            flags[s.flag] += 1


def simulate(items: list[list[Step]], rng: random.Random, processors: int = PROCESSORS) -> None:
    """All programs to their ends, whoever comes first by chance."""
    flags: dict[int, int] = defaultdict(int)
    rest = iter(items)
    running = [Program(rng.randint(0, 3)) for _ in range(processors)]
    while running:
        rng.shuffle(running)
        moved = False
        for program in running:
            for _ in range(rng.randint(1, 12)):  # one may get far ahead of the others
                if program.is_over or not program.advance(flags, rest):
                    break
                moved = True
        running = [program for program in running if not program.is_over]
        assert moved or not running, "all wait"


def make(seed: int) -> Batch:
    rng = random.Random(seed)
    n = rng.randint(1, 9)
    len_q = [rng.choice([0, 1, 64, 65, 300, rng.randint(0, 1500)]) for _ in range(n)]
    len_k = len_q if seed % 2 else [rng.choice([0, 1, 128, rng.randint(0, 1500)]) for _ in range(n)]
    near, far = rng.randint(0, 300), rng.randint(0, 300)
    bounds = [
        (None, None),
        (near, far),
        (None, rng.randint(-300, 300)),
        (rng.randint(-300, 300), None),
        (-near, near + far),
    ]
    left, right = bounds[seed % 5]
    T = Tile("turns", GROUP=rng.choice([1, 1, 3]), BLOCK_M=rng.choice([64, 128]))
    records = [(b, row) for b in range(n) for row in range(0, max(len_k[b], 1), BLOCK_N)]
    return Batch(len_q, len_k, rng.randint(1, 3), SimpleNamespace(left=left, right=right), T, records)


def all_steps(batch: Batch) -> list[list[Step]]:
    return [steps_of(batch, item) for item in range(batch.n_items)]


@pytest.mark.parametrize("seed", range(30))
def test_everybody_has_a_turn(seed: int) -> None:
    batch = make(seed)
    items = all_steps(batch)
    check_turns(batch, items)
    simulate(items, random.Random(seed))


def test_more_tiles_than_programs() -> None:
    batch = Batch(
        [2500], [2500], 2, SimpleNamespace(left=None, right=None), Tile("turns"), [(0, i * 128) for i in range(20)]
    )
    items = all_steps(batch)
    check_turns(batch, items)
    simulate(items, random.Random(0), 7)


@pytest.mark.parametrize("seed", range(8))
def test_bad_offsets_do_not_hang(seed: int) -> None:
    """The list ends in the middle of a sequence."""
    batch = make(seed)
    batch = replace(batch, records=batch.records[: 1 + seed * len(batch.records) // 8])
    simulate(all_steps(batch), random.Random(seed))


@pytest.mark.parametrize("rows", [100, 4096, 8192, 40000])
@pytest.mark.parametrize("heads", [1, 3, 8, 12, 25])
def test_items_of_some_heads_come_first(heads: int, rows: int) -> None:
    """In causal attention: every item once, the tiles of a head in their order, and not too many queries at a time."""
    tiles, T = 2 * -(-rows // BLOCK_N), Tile("turns", SOME_HEADS=True)  # of two sequences
    n = tiles * heads
    some = k.heads_at_once(heads, rows, rows, tiles, False, False, T)
    assert some == k.heads_at_once(heads, 2 * rows, 2 * rows, 2 * rows // BLOCK_N + 2, True, True, T)  # packed
    assert some == k.heads_at_once(heads, 2 * rows, rows, tiles, False, True, T)  # packed queries, dense keys
    assert some == max(min(k.QUERIES_AT_ONCE // rows, heads), 1)
    taken = [k.arranged(i, some, heads, n, T) for i in range(n + 3)]
    assert sorted(taken[:n]) == list(range(n))
    assert taken[n:] == [n, n + 1, n + 2]
    assert {item % heads for item in taken[: tiles * some]} == set(range(some))
    for h in range(heads):
        assert [item for item in taken[:n] if item % heads == h] == list(range(h, n, heads))
    assert [k.arranged(i, some, heads, n, replace(T, SOME_HEADS=False)) for i in range(n)] == list(range(n))


@pytest.mark.parametrize("seed", range(4))
def test_nobody_waits_for_ever_with_some_heads_first(seed: int) -> None:
    batch = replace(make(5 * seed + 2), heads=3)  # causal
    items = all_steps(batch)
    T = replace(batch.T, SOME_HEADS=True)
    taken = [k.arranged(i, 2, batch.heads, batch.n_items, T) for i in range(batch.n_items)]
    simulate([items[i] for i in taken], random.Random(seed))
