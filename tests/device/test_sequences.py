"""Where tiles, sequences and bands lie, against a loop over every pair."""

from __future__ import annotations

import itertools

import pytest
import torch

from support import GPU, INTERPRET

if not (INTERPRET or GPU):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl

from gdpa.device.sequences import BandBounds, in_band, visible_keys, visible_queries

pytestmark = pytest.mark.triton
DEVICE = "cpu" if INTERPRET else "cuda"
BLOCK_M, BLOCK_N = 4, 8
SIDES = [None, 0, 5, 2**31 - 1]
LENGTHS = [(1, 20), (20, 1), (9, 9), (17, 30), (30, 13), (5, 0)]


@triton.jit
def blocks_kernel(p_out, len_q, len_k, band, n, QUERIES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Four bounds for each of n tiles."""
    for tile in range(0, n):
        if QUERIES:
            bounds = visible_queries(tile * BN, len_q, len_k, band, BM, BN)
        else:
            bounds = visible_keys(tile * BM, len_q, len_k, band, BM, BN)
        for i in tl.static_range(4):
            tl.store(p_out + tile * 4 + i, bounds[i])


@triton.jit
def band_kernel(p_out, len_q, len_k, band, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    keep = in_band(i[:, None], i[None, :], len_q, len_k, band)
    tl.store(p_out + i[:, None] * SIZE + i[None, :], keep.to(tl.int8))


def keep(len_q, len_k, left, right):
    """(len_q, len_k) of bool, by the definition."""
    i, j = torch.arange(len_q)[:, None], torch.arange(len_k)
    distance = j - i - (len_k - len_q)
    mask = torch.ones(len_q, len_k, dtype=torch.bool)
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    return mask


@pytest.mark.parametrize("queries", [False, True], ids=["keys", "queries"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_visible_blocks(lengths, queries):
    """Every visible pair lies in [lo, hi), none of the blocks in [full_lo, full_hi) needs a band mask."""
    len_q, len_k = lengths
    held, walked = (BLOCK_N, BLOCK_M) if queries else (BLOCK_M, BLOCK_N)
    for left, right in itertools.product(SIDES, SIDES):
        mask = keep(len_q, len_k, left, right)
        mask = mask.mT if queries else mask  # (held side, walked side)
        n = triton.cdiv(mask.shape[0], held)
        out = torch.zeros(n, 4, dtype=torch.int32, device=DEVICE)
        if n:
            blocks_kernel[(1,)](out, len_q, len_k, BandBounds(left, right), n, QUERIES=queries, BM=BLOCK_M, BN=BLOCK_N)
        for tile, (lo, full_lo, full_hi, hi) in enumerate(out.tolist()):
            rows = mask[tile * held : (tile + 1) * held]
            context = f"tile {tile}, band ({left}, {right}): {lo, full_lo, full_hi, hi}"
            assert 0 <= lo <= full_lo <= full_hi <= hi, context
            assert all(bound % walked == 0 for bound in (lo, full_lo, full_hi, hi)), context
            assert hi < mask.shape[1] + walked, context
            assert not rows[:, :lo].any(), context
            assert not rows[:, hi:].any(), context
            assert full_hi <= mask.shape[1] or full_hi == full_lo, context
            assert rows[:, full_lo:full_hi].all(), context


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_in_band(lengths):
    size = 32
    for left, right in itertools.product(SIDES, SIDES):
        out = torch.zeros(size, size, dtype=torch.int8, device=DEVICE)
        band_kernel[(1,)](out, *lengths, BandBounds(left, right), SIZE=size)
        expected = torch.zeros(size, size, dtype=torch.bool)
        expected[: lengths[0], : lengths[1]] = keep(*lengths, left, right)
        assert torch.equal(out.cpu().bool(), expected), (left, right)
