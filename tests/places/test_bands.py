"""Masks that are bands: causal attention and windows written as masks run as causal= and window= do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gdpa
from gdpa import api, masks
from gdpa.masks.band import Band
from gdpa.masks.mask import Mask, as_mask
from gdpa.problem import Problem
from support import f64

CU = torch.tensor([0, 4, 9], dtype=torch.int32)


def dense(mask: Any, len_q: int = 9, len_k: int = 9, **options: Any) -> Problem:
    q, k = (torch.zeros(2, 1, n, 8) for n in (len_q, len_k))
    given = {"params": (), "tables": (), "normalize": None, "sink": 0.0, "scale": None, "out_scale": 1.0}
    call = api._dense_call(
        q, k, k, "silu", **given, mask=mask, causal=options.get("causal", False), window=options.get("window"),
        backend=None, return_weights_sum=False,
    )  # fmt: skip
    return call.settings.problem(call.x)


def packed(mask: Any, used: Tensor | None = None) -> Problem:
    q = torch.zeros(9, 1, 8)
    given = {"params": (), "tables": (), "normalize": None, "sink": 0.0, "scale": None, "out_scale": 1.0}
    call = api._varlen_call(
        q, q, q, CU, CU, "silu", **given, mask=mask, causal=False, window=None, backend=None, return_weights_sum=False,
        max_seqlen_q=None, max_seqlen_k=None, seqused_q=used, seqused_k=used,
    )  # fmt: skip
    return call.settings.problem(call.x)


BANDS: dict[str, tuple[Any, Band]] = {  # of 9 queries and 9 keys
    "causal": (masks.causal(), Band(None, 0)),
    "window": (masks.window(3, 2), Band(3, 2)),
    "no bounds": (masks.window(None, None), Band()),
    "causal, from the first row": (masks.window(None, 0, "first"), Band(None, 0)),
    "FlexAttention's causal": (masks.from_flex(lambda b, h, q, k: q >= k), Band(None, 0)),
    "and": (masks.causal() & masks.window(4, 7, "first"), Band(4, 0)),
    "not": (~gdpa.Mask(lambda q_idx, kv_idx: kv_idx > q_idx), Band(None, 0)),
    "neither nor": (~(gdpa.Mask(lambda q_idx, kv_idx: kv_idx > q_idx) | ~masks.window(5, None)), Band(5, 0)),
    "both ways": (lambda q_idx, kv_idx: (q_idx - kv_idx).abs() < 3, Band(2, 2)),
    "the diagonal": (lambda q_idx, kv_idx: q_idx == kv_idx, Band(0, 0)),
    "rearranged": (lambda q_idx, q_len, kv_idx, kv_len: q_len - (q_idx + 1) <= kv_len - kv_idx + 2, Band(None, 3)),
    "far": (masks.window(2**40, 0), Band(None, 0)),
    "everything": (lambda q_idx: torch.ones_like(q_idx, dtype=torch.bool), Band()),
}
OTHERS: dict[str, Any] = {
    "negative bound": masks.window(None, -1),
    "or": masks.causal() | masks.window(3, 3),
    "dilated": masks.dilated(2),
    "by head": lambda h, q_idx, kv_idx: q_idx - kv_idx >= h,
    "by length": lambda q_idx, kv_idx, kv_len: (q_idx >= kv_idx) & (kv_len > 3),
    "not equal": lambda q_idx, kv_idx: q_idx != kv_idx,
    "nothing": lambda q_idx: torch.zeros_like(q_idx, dtype=torch.bool),
    "twice the distance": lambda q_idx, kv_idx: 2 * q_idx >= kv_idx,
    "32 bits": lambda q_idx, kv_idx: q_idx.int() >= kv_idx.int(),
    "floats": lambda q_idx, kv_idx: q_idx.float() >= kv_idx,
    "an unused table": gdpa.Mask(lambda q_idx, kv_idx, t: q_idx >= kv_idx, (torch.zeros(3),)),
    "documents": masks.causal() & masks.document(torch.zeros(2, 9, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", BANDS)
def test_bands_are_found(name: str) -> None:
    mask, band = BANDS[name]
    problem = dense(mask)
    assert (problem.mask, problem.band) == (None, band)


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay_masks(name: str) -> None:
    problem = dense(OTHERS[name])
    assert problem.mask is not None
    assert problem.band == Band()


def test_what_counts_from_the_first_row() -> None:
    """Where lengths are known it is moved; where they are data it stays a mask."""
    first = masks.window(4, 0, "first")
    assert dense(first, 6, 9).mask is not None  # keys up to the query's own number are 3 before its place in the band
    assert dense(first, 9, 6).band == Band(1, 3)
    assert dense(first, 9, 6).mask is None
    assert packed(first).mask is not None
    assert packed(masks.causal()).band == Band(None, 0)
    assert packed(masks.causal(), torch.tensor([2, 3])).band == Band(None, 0)
    assert packed(masks.causal(), torch.tensor([2, 3])).mask is None
    assert packed(first, torch.tensor([2, 3])).mask is not None


def test_causal_and_window_are_narrowed() -> None:
    assert dense(masks.window(3, 2), causal=True).band == Band(3, 0)
    assert dense(masks.causal(), window=(2, 5)).band == Band(2, 0)
    assert dense(masks.window(7, None), window=(2, 5)).band == Band(2, 5)


CONDITIONS: list[Callable[[int], Mask]] = [
    lambda c: masks.window(None, c),
    lambda c: masks.window(c, None),
    lambda c: masks.window(c, c, "first"),
    lambda c: as_mask(lambda q_idx, kv_idx, c=c: kv_idx < q_idx + c),
    lambda c: as_mask(lambda q_idx, kv_idx, q_len, kv_len, c=c: kv_len - kv_idx > -c + q_len - q_idx),
    lambda c: ~as_mask(lambda q_idx, kv_idx, c=c: (q_idx - c > kv_idx) | (kv_idx > q_idx + 2)),
    lambda c: as_mask(lambda q_idx, kv_idx, c=c: (kv_idx - q_idx + 1).abs() <= c),
]
condition = st.tuples(st.sampled_from(CONDITIONS), st.integers(-3, 6))


@settings(max_examples=60, deadline=None)
@given(st.lists(condition, min_size=1, max_size=3), st.integers(1, 9), st.integers(1, 9))
def test_a_band_has_the_pairs_of_its_mask(conditions: Any, len_q: int, len_k: int) -> None:
    mask = conditions[0][0](conditions[0][1])
    for make, c in conditions[1:]:
        mask = mask & make(c)
    rng = torch.Generator().manual_seed(len_q)
    q, k, v = (torch.randn(1, 1, n, 2, dtype=f64, generator=rng) for n in (len_q, len_k, len_k))
    out = gdpa.attention(q, k, v, "sigmoid", mask=mask, backend="reference")
    never_a_band = mask & masks.dilated(2) | mask & ~masks.dilated(2)
    assert dense(never_a_band, len_q, len_k).mask is not None
    assert torch.equal(out, gdpa.attention(q, k, v, "sigmoid", mask=never_a_band, backend="reference"))
