"""The order of Hopper's tiles: made on the device, every tile once, the heaviest first, shared out evenly."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from support import FULL, GPU, INTERPRET

if not (INTERPRET or GPU):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl

from gdpa.backends.hopper.scheduling import sorting, work
from gdpa.backends.hopper.scheduling.schedule import (
    TAKEN,
    Listed,
    Zeros,
    item_at,
    items_of,
    ordered_records_kernel,
    paired,
)
from gdpa.backends.hopper.scheduling.sorting import EVERY
from gdpa.device.sequences import RECORD
from gdpa.functions.activation import resolve_one
from gdpa.masks.band import Band
from gdpa.problem import Operands, make_problem
from gdpa.testing.cases import offsets

pytestmark = pytest.mark.triton
DEVICE = "cpu" if INTERPRET else "cuda"
BLOCK, OTHER = 128, 64
QUICK = INTERPRET and not FULL
CHUNK = 32 if INTERPRET else 1024  # sequences and tiles that a program looks at in one step
UNTOUCHED = -7


@pytest.fixture(params=["counted", "sorted"])
def way(request, monkeypatch):
    """The list of few sequences is made by counting, that of many by sorting: the same list."""
    for step in ("CHUNK", "TILES"):
        monkeypatch.setattr(sorting, step, CHUNK)
    if request.param == "sorted":
        monkeypatch.setitem(globals(), "write_records", sorting.sorted_records)


both_ways = pytest.mark.usefixtures("way")


def write_records(memory, offsets, rows, rows_other, n_seqs, most, block, other, listed):
    ordered_records_kernel[(n_seqs,)](
        memory, *offsets, None, None, None, None, rows, rows_other, n_seqs, most, 0, 0, 0, BLOCK=block, OTHER=other,
        CHUNK=CHUNK, L=listed, Z=Zeros(), num_warps=4,
    )  # fmt: skip


def ordered(
    cu: Tensor | None,
    cu_other: Tensor | None,
    rows: int,
    rows_other: int,
    used: Tensor | None = None,
    used_other: Tensor | None = None,
    listed: Listed = EVERY,
) -> tuple[list[list[int]], int, Tensor]:
    """(the records of the list, the records there is room for, what lies behind them)."""
    if cu is not None:
        n_seqs = cu.numel() - 1
        most = rows // BLOCK + n_seqs
    else:
        n_seqs = (cu_other if used is None else used).numel() - (used is None)
        most = n_seqs * triton.cdiv(rows, BLOCK)
    memory = torch.full((1 + most + 64, RECORD.value), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    offsets = tuple(None if t is None else t.to(DEVICE) for t in (cu, cu_other, used, used_other))
    write_records(memory, offsets, rows, rows_other, n_seqs, most, BLOCK, OTHER, listed)
    count = int(memory[0, 0])
    assert int(memory[0, TAKEN.value]) == 0
    return memory[1 : 1 + count, :6].tolist(), most, memory[1 + most :].cpu()


def expected(lengths: list[int], others: list[int], least: int = 0) -> list[list[int]]:
    """A stable sort of the sequences by their blocks on the other side; each one's tiles in order."""
    starts, starts_other = offsets(tuple(lengths)).tolist(), offsets(tuple(others)).tolist()
    order = sorted(range(len(lengths)), key=lambda b: -triton.cdiv(others[b], OTHER))
    return [
        [b, row, starts[b], lengths[b], starts_other[b], others[b]]
        for b in order
        for row in range(0, max(lengths[b], least), BLOCK)
    ]


LENGTHS = {
    "one": ([300], [70]),
    "empty ones": ([0, 300, 0, 128, 129, 0], [70, 0, 0, 64, 65, 3]),
    "all empty": ([0, 0, 0], [5, 0, 9]),
    "no other side": ([5, 200, 130], [0, 0, 0]),
    "equal weights keep their order": ([128] * 5, [10, 20, 64, 1, 63]),
    "tile edges": ([1, 127, 128, 129, 255, 256, 257], [1, 63, 64, 65, 127, 128, 129]),
}


@both_ways
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("lengths", "others"), LENGTHS.values(), ids=LENGTHS.keys())
def test_every_tile_once_and_the_heaviest_first(lengths, others, dtype):
    cu, cu_other = (offsets(tuple(n), dtype=dtype) for n in (lengths, others))
    records, most, behind = ordered(cu, cu_other, sum(lengths), sum(others))
    assert records == expected(lengths, others)
    assert len(records) <= most
    assert (behind == UNTOUCHED).all()


LIMIT = 256
# Which sequences each list holds.
LISTS = {
    "all": (Listed(1), lambda n: True),
    "all, none of them long": (Listed(1, 300), lambda n: True),
    "short": (Listed(1, LIMIT, False), lambda n: n <= LIMIT),
    "long": (Listed(1, LIMIT, True), lambda n: n > LIMIT),
    "long ones with rows": (Listed(0, LIMIT, True), lambda n: n > LIMIT),
}


@both_ways
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("case", LENGTHS)
def test_lists_of_some_sequences(case, name):
    """Those without rows have a tile as well, where asked for; every sequence is in the short list or in the long."""
    lengths, others = LENGTHS[case]
    listed, belongs = LISTS[name]
    records, most, behind = ordered(offsets(tuple(lengths)), offsets(tuple(others)), sum(lengths), sum(others),
                                    listed=listed)  # fmt: skip
    assert records == [record for record in expected(lengths, others, listed.LEAST) if belongs(record[3])]
    assert len(records) <= most
    assert (behind == UNTOUCHED).all()


LENGTHS_Q, LENGTHS_K = (5, 0, 40, 3), (20, 17, 0, 33)
ZEROED = {
    "forward": (False, {"zeros": True}),
    "backward": (True, {"zeros": True, "zeros_other": True, "flags": 3000}),
    "backward, dq by itself": (True, {"zeros": True}),
    "no zeros": (True, {"flags": 7}),
}


def rows_used(lengths: tuple[int, ...], used: Tensor | None, total: int) -> Tensor:
    """Which of the rows belong to a sequence."""
    found = torch.zeros(total, dtype=torch.bool)
    for b, start in enumerate(offsets(lengths).tolist()[:-1]):
        found[start : start + (lengths[b] if used is None else int(used[b]))] = True
    return found


@pytest.mark.parametrize("many", [False, True], ids=["", "many sequences"])
@pytest.mark.parametrize("used", [False, True], ids=["", "used"])
@pytest.mark.parametrize("name", ZEROED)
def test_zeros_where_nothing_else_writes(name: str, used: bool, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the list, or, for many sequences, beside it: all rows of no sequence, and no other."""
    of_keys, asked = ZEROED[name]
    if many:
        monkeypatch.setattr(work, "MANY_SEQUENCES", 2)
    used_q, used_k = (torch.tensor(t) for t in ((3, 0, 40, 1), (20, 0, 0, 30))) if used else (None, None)
    q, k = (torch.full((1, heads, rows, 24), torch.nan, dtype=torch.float16) for heads, rows in ((4, 130), (2, 75)))
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    tensors = (q, k, k.clone(), offsets(LENGTHS_Q), offsets(LENGTHS_K), None, used_q, used_k)
    x = Operands(*(None if t is None else t.to(DEVICE) for t in tensors))
    problem = make_problem(x, (resolve_one("gelu", 0),), 0.1, 1.0, Band())
    tiling = work.Tiling(of_keys, BLOCK, OTHER, **asked)
    flags = torch.full((4000,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    t, u, w = (x.k, x.v, x.q) if of_keys else (x.q, None, None)
    table = work.make_list(problem, x, work.listing(problem, tiling), t, u, w, flags)
    assert not flags[: tiling.flags].any()
    assert (flags[tiling.flags :] == UNTOUCHED).all()
    mine_q, mine_k = rows_used(LENGTHS_Q, used_q, 130), rows_used(LENGTHS_K, used_k, 75)
    for z, mine, zeroed in (
        (x.q, mine_q, tiling.zeros_other if of_keys else tiling.zeros),
        (x.k, mine_k, of_keys and tiling.zeros), (x.v, mine_k, of_keys and tiling.zeros),
    ):  # fmt: skip
        assert z[:, :, mine].isnan().all()
        assert (z[:, :, ~mine] == 0).all() if zeroed else z.isnan().all()
    lengths = (LENGTHS_K if used_k is None else used_k.tolist()) if of_keys else used_q.tolist() if used else LENGTHS_Q
    assert int(table[0, 0]) == sum(triton.cdiv(n, BLOCK) for n in lengths)


@both_ways
def test_lists_by_used_lengths():
    used = torch.tensor([0, 300, 256, 257])
    slots = offsets((300,) * 4)
    short, _, _ = ordered(slots, None, 1200, 10, used, listed=Listed(1, LIMIT, False))
    long, _, _ = ordered(slots, None, 1200, 10, used, listed=Listed(1, LIMIT, True))
    assert [record[:2] for record in short] == [[0, 0], [2, 0], [2, 128]]
    assert [record[:2] for record in long] == [[b, row] for b in (1, 3) for row in (0, 128, 256)]


@both_ways
def test_used_lengths_count():
    """Of 8 slots of 300 rows; on the other side of 8 slots of 100, or of dense keys."""
    lengths, others = [0, 300, 5, 128, 129, 256, 257, 1], [100, 0, 64, 65, 1, 63, 99, 100]
    slots, slots_other = offsets((300,) * 8), offsets((100,) * 8)
    used, used_other = torch.tensor(lengths), torch.tensor(others)
    want = [[b, row, slots[b], n, slots_other[b], m] for b, row, _, n, _, m in expected(lengths, others)]
    records, _, behind = ordered(slots, slots_other, 2400, 800, used, used_other)
    assert records == want
    assert (behind == UNTOUCHED).all()
    records, _, _ = ordered(slots, None, 2400, 100, used, used_other)
    assert records == [[*record[:4], 0, record[5]] for record in want]
    records, _, behind = ordered(None, slots_other, 300, 800, used, used_other)
    assert records == [[b, row, 0, *rest] for b, row, _, *rest in want]
    assert (behind == UNTOUCHED).all()


@both_ways
@pytest.mark.parametrize("n_seqs", [CHUNK - 1, CHUNK, CHUNK + 1, *([] if QUICK else [3 * CHUNK + 5])])
def test_more_sequences_than_are_counted_at_once(n_seqs):
    rng = random.Random(n_seqs)
    lengths, others = ([rng.choice([0, 3, 150, 300]) for _ in range(n_seqs)] for _ in range(2))
    cu, cu_other = offsets(tuple(lengths)), offsets(tuple(others))
    records, _, _ = ordered(cu, cu_other, sum(lengths), sum(others))
    assert records == expected(lengths, others)


@both_ways
def test_a_side_that_is_dense():
    """Without offsets on the other side all tiles weigh the same."""
    records, _, _ = ordered(offsets((300, 0, 128)), None, 428, 50)
    assert records == [
        [b, row, start, n, 0, 50] for b, start, n in ((0, 0, 300), (2, 300, 128)) for row in range(0, n, BLOCK)
    ]


@both_ways
def test_one_long_sequence():
    """More tiles than a program writes at once."""
    length = (CHUNK + 3) * BLOCK - 1
    records, _, _ = ordered(offsets((5, length)), offsets((1, 1)), length + 5, 2)
    assert records == expected([5, length], [1, 1])


BAD = {
    "start": [50, 120, 300],
    "negative": [-100, -3, 300],
    "decreasing": [0, 280, 70],
    "past-the-end": [0, 100, 5000],
    "all-past-the-end": [9000, 9500, 10000],
    "backwards": [300, 150, 0],
    "largest": [0, 2**31 - 1, 2**31 - 1],
    "smallest": [0, -(2**31), 300],
    "short": [0, 30, 60],
    "overlapping": [0, 300, 0, 300, 0, 300, 0, 300, 0, 300],
}


@both_ways
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_offsets_stay_inside(bad, dtype):
    """Nobody checks offsets on a GPU: nonsense is listed then, but never rows outside the tensor nor past the table."""
    rows = 300
    records, most, behind = ordered(torch.tensor(bad, dtype=dtype), None, rows, 10)
    assert len(records) <= most, "the list is longer than its table"
    assert (behind == UNTOUCHED).all(), "records past the table"
    for _, row, start, length, _, _ in records:
        assert 0 <= row < length
        assert 0 <= start <= start + length <= rows


# ---- who takes which item --------------------------------------------------------------------------------------------
@triton.jit
def items_kernel(p_owner, p_count, n_programs, n_items, ZIGZAG: tl.constexpr):
    """Program p writes its number to each of its items."""
    p = tl.program_id(0)
    count = items_of(p, n_programs, n_items, ZIGZAG)
    tl.store(p_count + p, count)
    for n in range(count):
        tl.atomic_add(p_owner + item_at(p, n_programs, n, ZIGZAG), p + 1)


@pytest.mark.parametrize(
    ("programs", "zigzag"), [(1, True), (2, True), (3, True), (7, True), (3, False), *([] if QUICK else [(16, True)])]
)
def test_every_item_has_one_owner(programs, zigzag):
    for items in [0, 1, 2, 3, *range(programs - 1, 4 * programs + 3), 50]:
        owner = torch.zeros(items + 64, dtype=torch.int32, device=DEVICE)
        count = torch.zeros(programs, dtype=torch.int32, device=DEVICE)
        items_kernel[(programs,)](owner, count, programs, items, zigzag)
        owners = (owner[:items] - 1).tolist()
        assert not owner[items:].any(), "an item past the end"
        assert count.tolist() == [owners.count(p) for p in range(programs)]
        rounds = [owners[i : i + programs] for i in range(0, items, programs)]
        for n, taken in enumerate(rounds):  # forwards, then backwards: the sums of a falling list stay close
            order = list(range(programs)) if n % 2 == 0 or not zigzag else list(range(programs))[::-1]
            assert taken == order[: len(taken)]


@triton.jit
def pairs_kernel(p_items, n_programs, n_items, heads, tiles):
    item = tl.program_id(0)
    tl.store(p_items + item, paired(item, n_programs, n_items, heads, tiles))


def causal_sums(items: list[int], programs: int, heads: int, tiles: int) -> list[int]:
    """What each program has to do: a tile and all before it."""
    sums = [0] * programs
    for i, item in enumerate(items):
        n, p = divmod(i, programs)
        sums[p if n % 2 == 0 else programs - 1 - p] += item // heads % tiles + 1
    return sums


@pytest.mark.parametrize(
    ("programs", "seqs", "heads", "tiles"), [(5, 3, 2, 8), (7, 4, 1, 6), (4, 2, 3, 2), (16, 1, 2, 4)]
)
def test_pairs_of_tiles_have_the_same_work(programs, seqs, heads, tiles):
    n = seqs * heads * tiles
    found = torch.full((n,), -1, dtype=torch.int32, device=DEVICE)
    pairs_kernel[(n,)](found, programs, n, heads, tiles)
    items = found.tolist()
    assert sorted(items) == list(range(n))
    sums = causal_sums(items, programs, heads, tiles)  # at most one pair, or half of one, more than another
    assert max(sums) - min(sums) <= tiles + 1
