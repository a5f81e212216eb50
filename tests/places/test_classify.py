"""Which tiles a mask leaves, told by intervals on the device, against the mask itself on every pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gdpa
from gdpa import masks
from gdpa.functions.places.program import Places
from gdpa.functions.places.tables import TableView
from places.library import PARENTS, natten, tree
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


def counts(n: int) -> Tensor:
    return torch.tensor([0, 1, n])


SORTED = torch.arange(3 * 97) // 11
SHUFFLED = torch.tensor([5, 3, 9, 0, 7, 2, 8, 1, 6, 4] * 30).repeat_interleave(9)[: 3 * 97]

NAMED = {
    "causal": masks.causal(),
    "window": masks.window(9, 4),
    "window_negative": masks.window(40, -20),
    "window_first": masks.window(3, 5, "first"),
    "prefix": masks.prefix(counts(30)),
    "document": masks.document(SORTED),
    "document_2d": masks.document(SORTED[: 3 * 97].view(3, 97)),
    "targets": masks.targets(counts(40)),
    "targets_group": masks.targets(counts(40), 5) & masks.causal(),
    "context": masks.context(counts(20)),
    "full_tail": masks.full_tail(counts(20)) & masks.causal(),
    "hstu": (masks.causal() & masks.window(12, 0) | masks.full_tail(counts(17)) & masks.causal()
             | masks.context(counts(5))) & masks.targets(counts(24)),
    "not": ~masks.window(9, 4),
}  # fmt: skip


def by_one_side(names: dict[str, gdpa.Mask], name: str) -> Sequence[bool]:
    """Under the interpreter masks take turns: what a side changes is not the mask's code."""
    return in_turn((True, False), list(names).index(name)) if INTERPRET else (True, False)


@pytest.mark.parametrize("name", NAMED)
def test_empty_tiles_are_found(name: str) -> None:
    found, there = check(NAMED[name], by_one_side(NAMED, name))
    assert there > 0
    assert found >= 0.95 * there


OTHERS = {
    "dilated": masks.dilated(3),
    "natten": masks.from_flex(natten),
    "tree": gdpa.Mask(tree, (PARENTS.repeat(2),)),
    "shuffled documents": masks.document(SHUFFLED),
    "a table of truths": gdpa.Mask(lambda kv_row, t: t[kv_row], (SHUFFLED > 4,)),
    "xor": gdpa.Mask(lambda q_idx, kv_idx: (q_idx > 40) ^ (kv_idx > 50)),
    "where": gdpa.Mask(lambda q_idx, kv_idx: torch.where(q_idx < 30, kv_idx, kv_idx - 20) < 33),
    "floats": gdpa.Mask(lambda q_idx, kv_idx: (q_idx - kv_idx).float().abs().sqrt() < 4.0),
    "products": gdpa.Mask(lambda q_idx, kv_idx: q_idx * kv_idx < 900),
    "blocks": gdpa.Mask(lambda q_idx, kv_idx: q_idx // 20 == kv_idx // 20),
    "constant": gdpa.Mask(lambda q_idx: torch.ones_like(q_idx, dtype=torch.bool)),
    "far": gdpa.Mask(lambda q_idx, kv_idx, t: t[q_idx] - t[kv_idx] < 2**61, (SHUFFLED * 2**55,)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_lost(name: str) -> None:
    check(OTHERS[name], by_one_side(OTHERS, name))


def leaf(n: int, m: int) -> Any:
    made = [
        lambda: masks.window(n, m - 20),
        lambda: masks.window(None, m, "first"),
        lambda: masks.prefix(counts(n)),
        lambda: masks.targets(counts(n), 1 + m % 4),
        lambda: masks.context(counts(m)),
        lambda: masks.document((SORTED + n) // (1 + m % 5)),
        lambda: masks.document(SHUFFLED // (1 + m % 3)),
        lambda: gdpa.Mask(lambda q_idx, kv_idx, q_len: (3 * q_idx - 2 * kv_idx + q_len) // (n + 1) > m),
        lambda: gdpa.Mask(lambda q_idx, kv_idx: (q_idx.clamp(min=m) - kv_idx).abs() % (n + 2) <= m),
    ]
    return made[(n + 3 * m) % len(made)]()


LEAVES = st.builds(leaf, st.integers(0, 90), st.integers(0, 40))
MASKS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a: ~a, inner),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
    ),
    max_leaves=4,
)


@settings(max_examples=4 if INTERPRET and not FULL else 8)
@given(MASKS)
def test_random_masks(mask: gdpa.Mask) -> None:
    check(mask)
