"""Sums of dq by turns: at every block of queries each tile of keys that sees it has a turn of its own, the same with
any schedule, and nobody waits for ever. The index arithmetic of the kernels is run in plain Python."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from support import INTERPRET

pytest.importorskip("triton")
if INTERPRET:
    pytest.skip("Triton's interpreter does not take Gluon kernels", allow_module_level=True)

from gdpa.backends.hopper.backward import turns, walk
from gdpa.backends.hopper.scheduling import schedule
from gdpa.device import sequences
from in_python import BLOCK_N, Language, Tile, in_python

PROCESSORS = 13
k = in_python(sequences, schedule, walk, turns)


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
    """A tile at a block of queries. ``turn``: as the kernel has it."""

    sequence: int
    tile: int
    head: int  # of the queries
    row: int
    flag: int
    turn: int


def steps_of(batch: Batch, program: int) -> list[Step]:
    """What a program does, in order, as take_turns sees it."""
    T, found = batch.T, []
    for n in range(k.items_of(program, Language.programs, batch.n_items, False)):
        Language.program = program
        item = k.item_at(program, Language.programs, n, False)
        b, row = batch.records[item // batch.heads]
        len_q, len_k = batch.len_q[b], batch.len_k[b]
        h, tile, tiles, number = k.name_tile(batch.records, item, b, row, len_k, batch.heads, batch.n_items, T)
        assert batch.records[number][0] == b
        first, blocks, _, _ = k.query_range(tile * BLOCK_N, len_q, len_k, batch.band, T)
        begin = k.first_block(batch.records, b, batch.start_q(b), 0, T)
        at = k.first_step(h, tile, tiles, blocks, T)
        for _ in range(blocks * T.GROUP):
            row = k.row_of(at, first, T)
            turn = k.turn_at(row, tile, tiles, len_q, len_k, batch.band, T)
            flag = k.flag_at(0, begin, row, at[0], batch.heads, T)
            found.append(Step(b, tile, at[0], row, flag, turn))
            at = k.next_step(at, tile, tiles, blocks, T)
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


def check_turns(batch: Batch, programs: list[list[Step]]) -> None:
    """Turns at a block are 0, 1, 2 ...; whoever sees the block has one; and a flag belongs to one block."""
    taken: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
    flags: dict[int, tuple[int, int, int]] = {}
    for s in (s for steps in programs for s in steps if s.turn >= 0):
        block = s.sequence, s.head, s.row
        assert s.turn not in taken[block], "two tiles have the same turn"
        taken[block][s.turn] = s.tile
        assert flags.setdefault(s.flag, block) == block, "two blocks have the same flag"
        assert s.flag < batch.heads * batch.T.GROUP * (sum(batch.len_q) // batch.T.BLOCK_M + len(batch.len_q))
    for (b, _, row), tiles in taken.items():
        assert sorted(tiles) == list(range(len(tiles)))
        visible = {tile for tile in range(k.gl.cdiv(batch.len_k[b], BLOCK_N)) if sees(batch, b, row, tile)}
        assert visible <= set(tiles.values())


class Program:
    """What was computed in one step waits for its turn in the next, and others learn of it in the one after."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps, self.at = steps, 0

    @property
    def is_over(self) -> bool:
        return self.at > len(self.steps) or not self.steps

    def advance(self, flags: dict[int, int]) -> bool:
        """One step, or the end after the last; False if it is not this program's turn yet."""
        sent = self.steps[self.at - 1] if self.at else None
        if sent is not None and flags[sent.flag] < sent.turn - self._comes_before(sent):
            return False
        if self.at >= 2:
            self._publish(self.steps[self.at - 2], flags)
        if sent is not None and sent.turn >= 0:
            assert flags[sent.flag] == sent.turn, "out of turn"
        if self.at == len(self.steps) and sent is not None:
            self._publish(sent, flags)
        self.at += 1
        return True

    def _comes_before(self, sent: Step) -> int:
        """Whether the step before, of another tile, is at the same block: it is published first."""
        before = self.steps[self.at - 2] if self.at >= 2 else None
        return int(before is not None and before.turn >= 0 and before.flag == sent.flag)

    def _publish(self, s: Step, flags: dict[int, int]) -> None:
        if s.turn >= 0:
            flags[s.flag] += 1


def simulate(programs: list[list[Step]], rng: random.Random) -> None:
    """All programs to their ends, whoever comes first by chance."""
    flags: dict[int, int] = defaultdict(int)
    running = [program for program in map(Program, programs) if not program.is_over]
    while running:
        rng.shuffle(running)
        moved = False
        for program in running:
            for _ in range(rng.randint(1, 12)):  # one may get far ahead of the others
                if program.is_over or not program.advance(flags):
                    break
                moved = True
        assert moved, "all wait"
        running = [program for program in running if not program.is_over]


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


def all_steps(batch: Batch, processors: int = PROCESSORS) -> list[list[Step]]:
    Language.programs = max(min(processors, batch.n_items), 1)
    return [steps_of(batch, program) for program in range(Language.programs)]


@pytest.mark.parametrize("seed", range(30))
def test_everybody_has_a_turn(seed: int) -> None:
    batch = make(seed)
    programs = all_steps(batch)
    check_turns(batch, programs)
    simulate(programs, random.Random(seed))
    # Another machine, another schedule, the same turns.
    assert {s for steps in programs for s in steps} == {s for steps in all_steps(batch, 5) for s in steps}


def test_more_tiles_than_programs() -> None:
    batch = Batch(
        [2500], [2500], 2, SimpleNamespace(left=None, right=None), Tile("turns"), [(0, i * 128) for i in range(20)]
    )
    programs = all_steps(batch, 7)
    check_turns(batch, programs)
    simulate(programs, random.Random(0))


@pytest.mark.parametrize("seed", range(8))
def test_bad_offsets_do_not_hang(seed: int) -> None:
    """The list ends in the middle of a sequence."""
    batch = make(seed)
    batch = replace(batch, records=batch.records[: 1 + seed * len(batch.records) // 8])
    simulate(all_steps(batch), random.Random(seed))
