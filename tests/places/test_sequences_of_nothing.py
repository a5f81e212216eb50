"""Sequences with rows on one side only: whatever tables have for them, or for their neighbours, nobody sees it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gdpa
from support import Target, bf16, f16, skipping_refusals, targets

LEN_Q, LEN_K = (5, 6, 0, 4), (7, 0, 9, 3)
HEADS, D = 2, 64


def by_rows(s, t, u, *, q_row, kv_row):
    return F.softplus(s + t[q_row] + u[kv_row])


def gated(s, t, u, *, q_row, kv_row):
    return torch.sigmoid(s) * t[q_row] * u[kv_row]


def by_sequence(s, t, u, *, b, h):
    return F.softplus(s + t[b] - u[b])


def tables_of(rows: bool, poisoned: bool) -> tuple[Tensor, Tensor]:
    """One for queries and one for keys. What only sequences 1 and 2 look up is ``poisoned``. (Sequence 2 has no
    queries: for those, kernels would look up the row before them, the last one of sequence 1.)"""
    if not rows:
        t = torch.linspace(-1, 1, len(LEN_Q))
        u = t.flip(0).clone()
        places = [[1, 2], [1, 2]]
    else:
        t, u = torch.linspace(-1, 1, sum(LEN_Q)), torch.linspace(-1, 1, sum(LEN_K))
        places = [list(range(5, 11)), list(range(7, 16))]
    for table, at in zip((t, u), places, strict=True):
        if poisoned:
            table[at] = torch.nan
    return t, u


@pytest.mark.parametrize("target", targets(bf16, f16, backends=("cpu", "triton", "hopper")))
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("fn", [by_rows, gated, by_sequence])
def test_nothing_comes_of_them(fn, learned: bool, target: Target) -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(sum(LEN_Q), HEADS, D, generator=g)
    k, v = (torch.randn(sum(LEN_K), HEADS, D, generator=g) for _ in range(2))
    cu = [torch.tensor([0, *lengths]).cumsum(0).int().to(target.device) for lengths in (LEN_Q, LEN_K)]
    leaves = [t.to(target.device, target.dtype).requires_grad_() for t in (q, k, v)]

    def run(poisoned: bool) -> list[Tensor]:
        tables = [t.to(target.device) for t in tables_of(fn is not by_sequence, poisoned)]
        if learned:
            tables = [t.requires_grad_() for t in tables]
        with skipping_refusals(target):
            out = gdpa.attention_varlen(*leaves, *cu, fn, tables=tuple(tables), backend=target.backend)
            return [out, *torch.autograd.grad(out, leaves + tables * learned, torch.ones_like(out))]

    clean, dirty = run(False), run(True)
    assert not bool(clean[0][5:11].any())  # queries without keys
    assert not any(bool(t[7:16].any()) for t in clean[2:4])  # keys without queries
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before, after)
