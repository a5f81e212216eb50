"""How sums of dq go from tile to tile of keys: the index arithmetic of the kernels run in plain Python, and the flags
simulated with programs that are held up at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from support import INTERPRET

pytest.importorskip("triton")
if INTERPRET:
    pytest.skip("Triton's interpreter does not take Gluon kernels", allow_module_level=True)

from gdpa.backends.hopper import config
from gdpa.backends.hopper.backward import ring as backward_ring
from gdpa.backends.hopper.backward import walk
from gdpa.backends.hopper.scheduling import schedule
from gdpa.device import sequences
from in_python import BLOCK_N, Language, Tile, in_python

NO_BAND = SimpleNamespace(left=None, right=None)


k = in_python(sequences, schedule, walk, backward_ring)


@dataclass(frozen=True)
class Batch:
    """Lengths of queries and keys. ``records``: the list of tiles (sequence, first row) if it is made on the device;
    bad offsets may ask for more tiles than fit it."""

    len_q: list[int]
    len_k: list[int]
    heads: int
    T: Tile
    records: list[tuple[int, int]] | None = None

    @property
    def n_items(self) -> int:
        tiles = len(self.len_k) * k.gl.cdiv(self.len_k[0], BLOCK_N) if self.records is None else len(self.records)
        return tiles * self.heads


@dataclass(frozen=True)
class Step:
    """A tile at a block of queries of a gang, and the slot of the sum."""

    gang: tuple[int, int]  # sequence and head of the keys
    tile: int
    tiles: int
    block: tuple[int, int]  # head and first row of the queries
    rank: int
    slot: int
    nth_item: int
    round: int


def steps_of(batch: Batch, program: int) -> Iterator[Step]:
    """What a program does, in order, as courier and publisher see it; the consumers must see the same."""
    T = batch.T
    for n in range(k.items_of(program, Language.programs, batch.n_items, False)):
        Language.program = program
        item = k.item_at(program, Language.programs, n, False)
        if batch.records is None:
            b, row = item // (k.gl.cdiv(batch.len_k[0], BLOCK_N) * batch.heads), 0
        else:
            b, row = batch.records[item // batch.heads]
        h, tile, tiles, _ = k.name_tile(batch.records, item, b, row, batch.len_k[b], batch.heads, batch.n_items, T)
        first, blocks, _, _ = k.query_range(tile, tiles, batch.len_q[b], batch.len_k[b], NO_BAND, T)
        begin = k.begin_of(item, tile)
        cursor = k.first_step(h, tile, tiles, blocks, T)
        for _ in range(blocks * T.GROUP):
            owner, sub = k.owner_of(cursor)
            assert 0 <= owner < tiles
            assert 0 <= sub < T.ROOM, "a block without a slot"
            rank = k.rank_of(cursor, owner, tile, tiles)
            slot, nth_item = k.slot_of(begin, owner, sub, T)
            assert 0 <= slot < Language.programs * T.ROOM
            code = k.send_code(item, cursor, 0, tile, tiles, 0, 0, NO_BAND, T)
            bits = k.IS_FIRST * (rank == 0) + k.IS_LAST * (rank == tiles - 1)
            assert code & (k.IS_FIRST | k.IS_LAST) == bits, "courier and consumers disagree"
            assert tiles == 1 or code // k.SLOT == slot
            block = cursor.head, k.row_of(cursor, first, T)
            yield Step((b, h), tile, tiles, block, rank, slot, nth_item, cursor.rounds)
            cursor = k.next_step(cursor, tile, tiles, blocks, T)


def all_steps(batch: Batch, processors: int) -> list[list[Step]]:
    Language.programs = max(min(processors, batch.n_items), 1)
    return [list(steps_of(batch, program)) for program in range(Language.programs)]


def check_order(batch: Batch, programs: list[list[Step]]) -> None:
    """Every tile visits every block once, and at a block every rank is taken once."""
    found: dict[tuple[Any, ...], dict[int, int]] = {}
    for step in (step for steps in programs for step in steps):
        ranks = found.setdefault((step.gang, step.block), {})
        assert step.tile not in ranks, "twice at a block"
        ranks[step.tile] = step.rank
    seen = {b for b, _ in (gang for gang, _ in found)}
    assert seen == (set(range(len(batch.len_q))) if batch.records is None else {b for b, _ in batch.records})
    for b in seen:
        tiles = max(k.gl.cdiv(batch.len_k[b], BLOCK_N), 1)
        if batch.records is not None:
            tiles = min(tiles, sum(record[0] == b for record in batch.records))
        rows = range(0, max(batch.len_q[b], 1), batch.T.BLOCK_M)
        for head in range(batch.heads * batch.T.GROUP):
            for row in rows:
                ranks = found.pop(((b, head // batch.T.GROUP), (head, row)))
                assert sorted(ranks) == sorted(ranks.values()) == list(range(tiles))
    assert not found, "blocks past the end"


class Ring:
    """Slots, the sums in them, and their flags."""

    def __init__(self, ordered: bool) -> None:
        self.ordered, self.flags, self.sums = ordered, {}, {}  # type: ignore[var-annotated]

    def may_go(self, s: Step) -> bool:
        """What ``courier`` waits for."""
        flag = self.flags.get(s.slot, 0)
        if s.rank == 0:
            return flag & 0x7F == 0
        if not self.ordered and s.rank < s.tiles - 1:
            return 0 <= flag - k.flag_of(s.nth_item, s.round, 1) <= 126
        return flag == k.flag_of(s.nth_item, s.round, s.rank)

    def send(self, s: Step) -> None:
        """What the consumers do: the sum must be the one that they mean, and the last must find all others in it."""
        if s.rank == 0:
            self.sums[s.slot] = (s.gang, s.block, [s.tile])
        else:
            gang, block, tiles = self.sums[s.slot]
            assert (gang, block) == (s.gang, s.block), "added to the sum of another block"
            assert s.tile not in tiles
            assert not self.ordered or len(tiles) == s.rank
            tiles.append(s.tile)
            assert s.rank < s.tiles - 1 or sorted(tiles) == list(range(s.tiles)), "an incomplete sum was taken"

    def publish(self, s: Step) -> None:
        """What ``publisher`` does."""
        if s.rank in (0, s.tiles - 1):
            self.flags[s.slot] = k.flag_of(s.nth_item, s.round, 1 if s.rank == 0 else 0)
        else:
            self.flags[s.slot] += 1


class Program:
    """One program's warps, each at its own step: the courier is up to two steps ahead of the publisher."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self.let_go = self.sent = self.published = 0

    @property
    def is_over(self) -> bool:
        return self.published == len(self.steps)

    def advance(self, ring: Ring, rng: random.Random) -> bool:
        """One action of one warp, whichever comes first by chance; False if all of them wait."""
        warps = [self.courier, self.consumers, self.publisher]
        rng.shuffle(warps)
        return any(warp(ring) for warp in warps)

    def courier(self, ring: Ring) -> bool:
        i = self.let_go
        if i == min(len(self.steps), self.published + 2):
            return False
        s, before = self.steps[i], self.steps[i - 1] if i else None
        begun = before is not None and before.rank == 0 and before.tiles > 1 and before.slot == s.slot
        if s.tiles > 1 and ((begun and self.published < i) or not ring.may_go(s)):
            return False
        self.let_go += 1
        return True

    def consumers(self, ring: Ring) -> bool:
        if self.sent == self.let_go:
            return False
        if self.steps[self.sent].tiles > 1:
            ring.send(self.steps[self.sent])
        self.sent += 1
        return True

    def publisher(self, ring: Ring) -> bool:
        if self.published == self.sent:
            return False
        if self.steps[self.published].tiles > 1:
            ring.publish(self.steps[self.published])
        self.published += 1
        return True


def simulate(all_programs: list[list[Step]], ordered: bool, rng: random.Random) -> None:
    """All programs to their ends, whoever comes first by chance."""
    ring = Ring(ordered)
    running = [program for program in map(Program, all_programs) if not program.is_over]
    waiting = 0
    while running:
        program = rng.choice(running)
        waiting += 1
        for _ in range(rng.randint(1, 12)):  # one program may get far ahead of the others
            if not program.advance(ring, rng):
                break
            waiting = 0
        if program.is_over:
            running.remove(program)
        if waiting > 50 * len(running) > 0:
            assert any(one.advance(ring, rng) for one in running), "all wait"


def check_batch(batch: Batch, processors: int, rng: random.Random) -> None:
    programs = all_steps(batch, processors)
    check_order(batch, programs)
    for ordered in (False, True):
        simulate(programs, ordered, rng)


def listed(len_q: list[int], len_k: list[int], block_m: int, most: int | None = None) -> list[tuple[int, int]]:
    """The list that the device makes, heaviest first; every sequence has a tile."""
    order = sorted(range(len(len_k)), key=lambda b: -k.gl.cdiv(len_q[b], block_m))
    return [(b, row) for b in order for row in range(0, max(len_k[b], 1), BLOCK_N)][:most]


blocks_of = pytest.mark.parametrize("block_m", [64, 128])


@blocks_of
@pytest.mark.parametrize("seed", range(12))
def test_dense(seed: int, block_m: int) -> None:
    """One round, or many."""
    rng = random.Random(seed)
    len_k = rng.choice([1, 127, 129, 300, 640, 1024])
    len_q = max(rng.choice([1, 64, 65, 500, 1100, 3000]), k.gl.cdiv(len_k, BLOCK_N) * block_m)
    T = Tile("ring", GROUP=rng.choice([1, 1, 3]), BLOCK_M=block_m)
    n = rng.randint(1, 12)
    check_batch(Batch([len_q] * n, [len_k] * n, rng.randint(1, 3), T), 17, rng)


@blocks_of
@pytest.mark.parametrize("seed", range(12))
def test_jagged_with_the_same_offsets(seed: int, block_m: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 64, 65, 128, 129, rng.randint(0, 1500)]) for _ in range(rng.randint(1, 30))]
    T = Tile("ring", GROUP=rng.choice([1, 1, 4]), BLOCK_M=block_m)
    records = listed(lengths, lengths, block_m)
    check_batch(Batch(lengths, lengths, rng.randint(1, 3), T, records), 19, rng)


@blocks_of
@pytest.mark.parametrize("seed", range(12))
def test_jagged_with_different_offsets(seed: int, block_m: int) -> None:
    """No relation between the lengths: many rounds, fewer blocks than tiles, no queries, no keys."""
    rng = random.Random(seed)
    n = rng.randint(1, 25)
    len_q, len_k = ([rng.choice([0, 1, 200, rng.randint(0, most)]) for _ in range(n)] for most in (3000, 1500))
    T = Tile("ring", GROUP=rng.choice([1, 1, 2]), BLOCK_M=block_m)
    batch = Batch(len_q, len_k, rng.randint(1, 3), T, listed(len_q, len_k, block_m))
    check_batch(batch, 13, rng)


@blocks_of
@pytest.mark.parametrize("seed", range(6))
def test_rounds_of_one_block(seed: int, block_m: int) -> None:
    """Heads and sequences with one block of queries and several tiles of keys: the same slot in successive steps."""
    rng = random.Random(seed)
    len_q = [rng.randint(1, block_m) for _ in range(8)]
    len_k = [rng.choice([3, 129, 500]) for _ in range(8)]
    T = Tile("ring", GROUP=rng.choice([1, 2, 4]), BLOCK_M=block_m)
    check_batch(Batch(len_q, len_k, 2, T, listed(len_q, len_k, block_m)), 4 + 2 * seed, rng)


def test_the_longest_sequence_on_all_processors() -> None:
    """As many tiles as may go round, with the programs of a small GPU to spare and without."""
    rng, length = random.Random(0), config.MOST_TILES * BLOCK_N
    for processors in (config.MOST_TILES, 132):
        simulate(all_steps(Batch([length] * 3, [length] * 3, 1, Tile("ring", BLOCK_M=BLOCK_N)), processors), False, rng)
    assert config.MOST_TILES <= 0x7F - 1, "a flag counts to 127"


@pytest.mark.parametrize("seed", range(20))
def test_bad_offsets_do_not_hang(seed: int) -> None:
    """The list ends in the middle of a sequence, and equal offsets may be cut to tensors of different lengths."""
    rng = random.Random(seed)
    n = rng.randint(1, 12)
    len_q, len_k = ([rng.randint(0, 1500) for _ in range(n)] for _ in range(2))
    if seed % 2:
        len_q = len_k
    records = listed(len_q, len_k, 64)
    T = Tile("ring", GROUP=rng.choice([1, 2]))
    batch = Batch(len_q, len_k, 2, T, records[: rng.randint(1, len(records))])
    programs = all_steps(batch, 13)
    for ordered in (False, True):
        simulate(programs, ordered, rng)
