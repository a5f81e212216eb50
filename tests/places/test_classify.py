"""Which tiles a mask leaves, told by intervals on the device, against the mask itself on every pair."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import gdpa
from gdpa.functions.places.program import Places
from gdpa.functions.places.tables import TableView
from places.tiled import ANY, NAMED, OTHERS
from support import FULL, GPU, INTERPRET, in_turn

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from gdpa.device.places import CHUNK, Numbers, Tables, block_sets, odd  # noqa: E402
from gdpa.functions.emission.masks import jit_mask  # noqa: E402

pytestmark = pytest.mark.triton
DEVICE = "cuda" if GPU and not INTERPRET else "cpu"
BLOCK_M, BLOCK_N = 16, 8
B, H, LQ, LK = 2, 1, 83, 97  # of sequence and head, and the lengths of both sides


@triton.jit
def sets_kernel(p_out, len_q, len_k, b, h, tables, numbers, CLASSIFY: tl.constexpr, BY_KEY: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """The two sets of each block of one side, all of the other side looked at together."""
    block = tl.program_id(0)
    spot = (b + block * 0, h + block * 0, block * 0, block * 0, tables, numbers)
    zero = block * 0
    hi = zero + (len_k if BY_KEY else len_q)
    fixed = block * (BLOCK_M if BY_KEY else BLOCK_N)
    _, (full, cut) = block_sets(
        spot, zero, fixed, zero + len_q, zero + len_k, 0, hi, hi, CLASSIFY, BY_KEY, BLOCK_M, BLOCK_N
    )
    tl.store(p_out + 2 * block, full)
    tl.store(p_out + 2 * block + 1, cut)


def classified(mask: gdpa.Mask, by_key: bool) -> tuple[Tensor, Tensor]:
    """(query blocks, key blocks) of bool: wholly visible, and cut."""
    tables = [t.to(DEVICE) for t in mask.tables]
    blocks_q, blocks_k = -(-LQ // BLOCK_M), -(-LK // BLOCK_N)
    assert max(blocks_q, blocks_k) <= CHUNK.value
    programs, others = (blocks_q, blocks_k) if by_key else (blocks_k, blocks_q)
    out = torch.zeros(programs, 2, dtype=torch.int64, device=DEVICE)
    sizes = tuple(tuple(map(odd, t.shape)) for t in tables) or None
    numbers = Numbers(odd(LQ), odd(LK), odd(0), odd(1), None, sizes)
    given_tables = Tables(None, tuple(tables) or None, None)
    assert mask._held is not None
    code = jit_mask(mask._held)
    sets_kernel[(programs,)](
        out, LQ, LK, B, H, given_tables, numbers, CLASSIFY=code.classify, BY_KEY=by_key, BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )  # fmt: skip
    bits = (out.cpu()[:, :, None] >> torch.arange(others)) & 1
    full, cut = bits.bool().unbind(1)
    return (full, cut) if by_key else (full.T, cut.T)


def seen(mask: gdpa.Mask) -> tuple[Tensor, Tensor]:
    """(query blocks, key blocks) of bool: some pair is visible, and every one."""
    i, j = torch.arange(LQ)[:, None], torch.arange(LK)
    numbers = {"b": B, "h": H, "q_len": LQ, "kv_len": LK}
    at = {**{name: torch.tensor(n) for name, n in numbers.items()}, "q_idx": i, "kv_idx": j}
    at |= {"q_row": B * LQ + i, "kv_row": B * LK + j}
    assert mask._held is not None
    keep = mask._held.eager(Places(at, [TableView(t, "t") for t in mask.tables]), torch.zeros(()))
    keep = keep.expand(LQ, LK)
    tiles = [[tile for tile in row.split(BLOCK_N, 1)] for row in keep.split(BLOCK_M, 0)]
    return tuple(torch.tensor([[bool(f(t)) for t in row] for row in tiles]) for f in (Tensor.any, Tensor.all))  # type: ignore[return-value]


def check(mask: gdpa.Mask, sides: Sequence[bool] = (True, False)) -> tuple[int, int]:
    """Nothing visible is left out, nothing invisible is taken whole; how many empty tiles were found, and are there."""
    some, every = seen(mask)
    found = 0
    for by_key in sides:
        full, cut = classified(mask, by_key)
        assert not (full & cut).any()
        assert not (some & ~(full | cut)).any(), "a visible pair was left out"
        assert not (full & ~every).any(), "an invisible pair was taken"
        found += int((~(full | cut)).sum())
    return found, len(sides) * int((~some).sum())


def by_one_side(names: dict[str, gdpa.Mask], name: str) -> Sequence[bool]:
    """Under the interpreter masks take turns: what a side changes is not the mask's code."""
    return in_turn((True, False), list(names).index(name)) if INTERPRET else (True, False)


@pytest.mark.parametrize("name", NAMED)
def test_empty_tiles_are_found(name: str) -> None:
    found, there = check(NAMED[name], by_one_side(NAMED, name))
    assert there > 0
    assert found >= 0.95 * there


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_lost(name: str) -> None:
    check(OTHERS[name], by_one_side(OTHERS, name))


@settings(max_examples=4 if INTERPRET and not FULL else 8)
@given(ANY)
def test_random_masks(mask: gdpa.Mask) -> None:
    check(mask)
