"""The lists of blocks that a mask leaves, which Hopper's kernels walk over, against the mask on every pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa import masks
from gdpa.functions.activation import resolve_one
from gdpa.functions.mask import mask_from_key
from gdpa.masks.band import Band
from gdpa.problem import Operands, Problem, make_problem
from support import GPU, INTERPRET

pytest.importorskip("triton")
from gdpa.backends.hopper.scheduling.work import most_tiles
from gdpa.backends.hopper.visits import list_visits, why_not
from gdpa.device.sequences import BandBounds
from gdpa.device.visits import ListedTile

pytestmark = pytest.mark.triton
DEVICE = "cuda" if GPU and not INTERPRET else "cpu"
BLOCK_M, BLOCK_N, HEADS = 16, 32, 2
LQ, LK = 70, 90


def problem_of(mask: gdpa.Mask, band: Band) -> tuple[Problem, Operands]:
    q, k = (torch.empty(2, HEADS, rows, 64, dtype=torch.float16, device=DEVICE) for rows in (LQ, LK))
    tables = [t.to(DEVICE) for t in mask.tables]
    x = Operands(q, k, k, None, None, None, tables=tables)
    problem = make_problem(x, (resolve_one("silu", 0),), 1.0, 1.0, band)
    return replace(problem, mask=mask_from_key(mask.key)), x


def entries(visits, tile: int, blocks: int) -> dict[int, bool]:
    """Of one list: number of a block, and whether it is cut."""
    count = int(visits.counts[tile])
    assert 1 <= count <= blocks
    row = visits.lists.view(len(visits.counts) - 1, -1)[tile, :count].to(torch.int32)
    numbers = (row & 0x7FFF).tolist()
    assert numbers == sorted(set(numbers))
    return dict(zip(numbers, (row < 0).tolist(), strict=True))


MASKS = {
    "targets": (masks.targets(torch.tensor([20, 0])), Band(None, 0)),
    "documents": (masks.document(torch.arange(2 * LK) // 25), Band()),
    "two parts": (gdpa.Mask(lambda q_idx, kv_idx: (kv_idx < 20) | ((kv_idx - q_idx).abs() < 9)), Band()),
    "by head": (gdpa.Mask(lambda h, q_idx, kv_idx: kv_idx >= q_idx * h), Band()),
    "nothing": (gdpa.Mask(lambda q_idx: q_idx < 0), Band()),
}


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("name", MASKS)
def test_lists(name: str, of_keys: bool) -> None:
    """Every visible pair is in a listed block, and pairs of a block that is not cut are all visible."""
    mask, band = MASKS[name]
    problem, x = problem_of(mask, band)
    block, other = (BLOCK_N, BLOCK_M) if of_keys else (BLOCK_M, BLOCK_N)
    rows, others = (LK, LQ) if of_keys else (LQ, LK)
    tiles = most_tiles(False, rows, 2, block)
    bounds = BandBounds(band.left, band.right)
    torch.use_deterministic_algorithms(True)  # memory is not zero by chance: torch fills it
    visits = list_visits(problem, x, ListedTile(of_keys, BLOCK_M, BLOCK_N, True), None, tiles, bounds)
    assert visits is not None
    assert int(visits.counts[-1]) == 0  # items taken so far
    lists = len(visits.counts) // tiles  # one, or one for each head
    assert lists == (HEADS if name == "by head" else 1)
    for place in range(tiles * lists):
        tile, h = place // lists, place % lists
        b, first = divmod(tile, tiles // 2)
        seen = visible(mask, band, b, h)
        seen = seen.T if of_keys else seen
        found = entries(visits, place, -(-others // other))
        empty = True
        for number in range(-(-others // other)):
            part = seen[first * block : (first + 1) * block, number * other : (number + 1) * other]
            empty = empty and not bool(part.any())
            assert number in found or not bool(part.any())
            whole = number in found and not found[number]
            assert not whole or bool(part.all())
            assert not whole or of_keys or (number + 1) * other <= others  # keys past the end are cut
        assert not empty or name != "nothing" or found == {0: True}


def visible(mask: gdpa.Mask, band: Band, b: int, h: int) -> Tensor:
    from gdpa.functions.places.program import Places
    from gdpa.functions.places.tables import TableView

    i, j = torch.arange(LQ)[:, None], torch.arange(LK)
    numbers = {"b": b, "h": h, "q_len": LQ, "kv_len": LK}
    at = {**{name: torch.tensor(n) for name, n in numbers.items()}, "q_idx": i, "kv_idx": j}
    at |= {"q_row": b * LQ + i, "kv_row": b * LK + j}
    keep = mask_from_key(mask.key).eager(Places(at, [TableView(t, "t") for t in mask.tables]), torch.zeros(()))
    if band.right is not None:
        keep = keep & (j - i - (LK - LQ) <= band.right)
    return keep.expand(LQ, LK)


def test_what_is_too_long_for_lists() -> None:
    problem, _ = problem_of(masks.causal(), Band())
    assert why_not(problem, 64, most_tiles) is None
    for rows_q, rows_k in ((2**21, 2**21), (64, 2**22)):  # all lists together, and numbers of blocks in 15 bits
        long = replace(problem, rows_q=rows_q, rows_k=rows_k)
        assert "too long" in (why_not(long, 64, most_tiles) or "")
    grouped = replace(problem_of(MASKS["by head"][0], Band())[0], heads_k=1)
    assert "keys of its own" in (why_not(grouped, 64, most_tiles) or "")
