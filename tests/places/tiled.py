"""Masks whose tiles are told by intervals: of three sequences of up to 97 rows."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import gdpa
from gdpa import masks
from places.library import PARENTS, natten, tree


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
ANY = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a: ~a, inner),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
    ),
    max_leaves=4,
)
