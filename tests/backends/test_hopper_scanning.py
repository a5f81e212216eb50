"""Tiles that programs find among the offsets (scheduling/scanning.py), from the kernel's own arithmetic."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from gdpa.backends.hopper import config
from gdpa.backends.hopper.scheduling import scanning
from gdpa.backends.hopper.scheduling.work import most_tiles
from gdpa.device import sequences
from in_python import in_python

BLOCK = config.WARPGROUP_ROWS


class Pointer:
    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at + other)


LANGUAGE = SimpleNamespace(
    int32=torch.int32, BlockedLayout=lambda *args: None, arange=lambda a, b, layout: torch.arange(a, b),
    load=lambda p: p.memory[p.at], sum=lambda t, axis: t.sum(axis),
    minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    where=lambda c, a, b: torch.where(c, torch.as_tensor(a), torch.as_tensor(b)),
)  # fmt: skip


@pytest.fixture(scope="module")
def kernel() -> Any:
    return in_python(scanning, sequences, gl=LANGUAGE, tl=LANGUAGE)


def cases() -> list[list[int]]:
    rng, lengths = random.Random(0), (0, 0, 1, 63, 64, 65, 127, 128, 129, 300)
    found = [[rng.choice(lengths) for _ in range(rng.randint(1, 12))] for _ in range(25)]
    return [*found, [1] * config.MOST_SCANNED, [0] * 5, [64] * 7]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("unused", [0, 5, 200])
def test_every_row_belongs_to_one_tile(unused: int, dtype: torch.dtype, kernel: Any) -> None:
    for lengths in cases():
        cu = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
        rows = int(cu[-1]) + unused
        tiles, seen = most_tiles(True, rows, len(lengths), BLOCK), torch.zeros(rows, dtype=torch.int64)
        for tile in range(tiles):
            b, row, start, length, start_k, len_k = map(
                int, kernel.tile_among(Pointer(cu), Pointer(cu), tile, tiles, rows, rows, BLOCK, 4)
            )
            assert (start, length) == (start_k, len_k) == (int(cu[b]), lengths[b])
            seen[start + row : start + min(row + BLOCK, length)] += 1
        end = int(kernel.first_unused_row(Pointer(cu), tiles, rows, BLOCK))
        assert end == rows - unused
        assert (seen[:end] == 1).all()
        assert (seen[end:] == 0).all()


def test_bad_offsets_stay_inside(kernel: Any) -> None:
    rng = random.Random(1)
    for _ in range(30):
        n, rows = rng.randint(1, 9), rng.randint(1, 400)
        cu = torch.tensor([rng.randint(-500, 900) for _ in range(n + 1)], dtype=torch.int32)
        tiles = most_tiles(True, rows, n, BLOCK)
        for tile in range(tiles):
            b, row, start, length, *_ = map(
                int, kernel.tile_among(Pointer(cu), None, tile, tiles, rows, rows, BLOCK, 4)
            )
            assert 0 <= b < n
            assert 0 <= row <= length
            assert 0 <= start <= start + length <= rows
        assert 0 <= int(kernel.first_unused_row(Pointer(cu), tiles, rows, BLOCK)) <= rows
