"""Masks refuse what they cannot mean, by name. What they let through: places/, on every backend; the tiles that they
leave empty: places/test_classify.py and places/test_visits.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gdpa
from gdpa import masks


def with_an_if(q_idx):
    return q_idx >= 0 if q_idx > 0 else q_idx < 0


NUMBERS = torch.arange(9)
WRONG_MASKS: dict[str, tuple[Any, type[Exception], str]] = {
    "another type": (3, TypeError, "mask must be a gdpa.Mask"),
    "of the score": (lambda score, q_idx: score > 0, ValueError, r"takes 1 table \(score\), got 0"),
    "of numbers": (lambda q_idx, kv_idx: q_idx - kv_idx, ValueError, "a bool tensor, but it returned torch.int64"),
    "with an if": (with_an_if, ValueError, "raised RuntimeError when traced"),
    "with an and": (lambda q_idx, kv_idx: q_idx > 2 and kv_idx > 2, ValueError, r"use torch.where, &, \|"),
    "with a captured tensor": (
        lambda q_idx: NUMBERS[q_idx] > 0,
        ValueError,
        r"captures a tensor .*; pass it through tables",
    ),
    "of anything": (lambda *args: args[0] > 0, TypeError, r"takes \*args"),
}


IDS = torch.zeros(9, dtype=torch.int32)


@pytest.mark.parametrize("make", [masks.prefix, masks.targets, masks.context, masks.full_tail])
def test_one_number_per_sequence(make: Any) -> None:
    name = "lengths" if make is masks.prefix else "counts"
    with pytest.raises(TypeError, match=f"{name} must be a tensor of one number per sequence, got list"):
        make([3, 4])
    with pytest.raises(ValueError, match=rf"{name} must have one number per sequence, shape \(B,\), got \(2, 1\)"):
        make(torch.tensor([[3], [4]]))


@pytest.mark.parametrize("make", [masks.prefix, masks.targets, masks.context, masks.full_tail])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, torch.int32])
def test_narrow_numbers_of_sequences(make: Any, dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 8).unbind(0)
    for counts in (torch.tensor([3, 100]), torch.tensor([0, -1 % 128 if dtype == torch.uint8 else -1])):
        want = gdpa.attention(q, k, v, mask=make(counts))
        assert torch.equal(gdpa.attention(q, k, v, mask=make(counts.to(dtype))), want)


@pytest.mark.parametrize(("mask", "error", "named"), WRONG_MASKS.values(), ids=WRONG_MASKS.keys())
def test_what_is_no_mask(mask: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        gdpa.attention(*torch.zeros(3, 2, 2, 9, 8), mask=mask)


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: masks.window(np.bool_(True), 0), TypeError, "left must be an int or None"),
        (lambda: masks.window(1.5, 0), TypeError, "left must be an int or None, got 1.5"),
        (lambda: masks.window(2**70, 0), ValueError, r"left must be less than 2\^62, got 1180591620717411303424"),
        (lambda: masks.window(1, 0, "middle"), ValueError, "align must be"),
        (lambda: masks.targets(torch.tensor([1]), 0), ValueError, "group must be a positive int, got 0"),
        (lambda: masks.from_flex(None), TypeError, "mask_mod must be a function, got NoneType"),
        (lambda: masks.dilated(0), ValueError, "step must be a positive int, got 0"),
        (lambda: masks.document(torch.zeros(2, 2, 2)), ValueError, "ids_q must be a tensor of one id per row"),
        (lambda: masks.document(IDS, IDS.double()), TypeError, "ids_kv must be integers, got torch.float64"),
        (lambda: masks.causal() & 3, TypeError, "mask must be a gdpa.Mask"),
        (
            lambda: masks.causal() and masks.dilated(2),
            TypeError,
            "masks are joined with &, \\| and ~, not with and, or",
        ),
        (lambda: not masks.causal(), TypeError, "masks are joined with &, \\| and ~"),
    ],
)
def test_wrong_arguments_of_masks(make: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        make()


def test_a_mask_has_no_derivative() -> None:
    """A table of it that has one elsewhere does not make a result differentiable."""
    q, gate = torch.randn(2, 2, 9, 8), torch.randn(9, requires_grad=True)
    for backend in ("cpu", "reference"):
        mask = gdpa.Mask(lambda kv_idx, gate: gate[kv_idx] > 0, (gate,))
        assert not gdpa.attention(q, q, q, "silu", mask=mask, backend=backend).requires_grad
        out = gdpa.attention(q.clone().requires_grad_(), q, q, "silu", mask=mask, backend=backend)
        out.sum().backward()
        assert gate.grad is None


def test_numbers_of_numpy_are_those_of_python() -> None:
    counts = torch.tensor([2])
    for make in (lambda n: masks.window(n, n), masks.dilated, lambda n: masks.targets(counts, n)):
        assert make(np.int64(3)).key == make(3).key
