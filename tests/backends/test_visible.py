"""Which tiles the CPU backend knows without looking at their pairs, against the mask on every pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import gdpa
from gdpa import masks
from gdpa.backends.cpu import schedule
from gdpa.backends.cpu.places import _positions
from gdpa.backends.cpu.visible import visible_tiles
from gdpa.functions.activation import resolve_one
from gdpa.functions.mask import MaskFunction, mask_from_key
from gdpa.functions.places.program import Places
from gdpa.functions.places.tables import TableView
from gdpa.masks.band import Band
from gdpa.problem import Operands, Problem, make_problem
from places.tiled import ANY, NAMED, OTHERS

HEADS, LQ, LK, SIDE = 2, 83, 97, 16
LENGTHS_Q, LENGTHS_K = (83, 40, 0), (97, 20, 60)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SIDE", "BANDED_SIDE", "SMALLEST_BANDED_SIDE"):
        monkeypatch.setattr(schedule, name, SIDE)


def tensors(packed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """q, k and v of three sequences, and where they begin."""
    generator = torch.Generator().manual_seed(0)
    if not packed:
        q, k, v = (torch.randn(3, HEADS, n, 8, generator=generator) for n in (LQ, LK, LK))
        return q, k, v, None, None
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (LENGTHS_Q, LENGTHS_K))
    q, k, v = (torch.randn(sum(n), HEADS, 8, generator=generator) for n in (LENGTHS_Q, LENGTHS_K, LENGTHS_K))
    return q, k, v, cu_q, cu_k


def problem_of(mask: gdpa.Mask, packed: bool) -> tuple[Problem, Operands]:
    q, k, v, cu_q, cu_k = tensors(packed)
    if packed:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    x = Operands(q, k, v, cu_q, cu_k, tables=mask.tables)
    problem = make_problem(x, (resolve_one("silu", 0),), 1.0, 1.0, Band())
    return replace(problem, mask=mask_from_key(mask.key)), x


def check(mask: gdpa.Mask, packed: bool) -> tuple[int, int]:
    """Nothing visible is left out, nothing invisible is taken whole; how many empty tiles were found, and are there."""
    problem, x = problem_of(mask, packed)
    found = there = 0
    for chunk in schedule.chunks(problem, x):
        known = visible_tiles(problem, x, chunk)
        for q0, q1 in chunk.q_blocks:
            for k0, k1 in chunk.k_blocks:
                seen = pairs(problem, x, chunk, mask, (q0, q1), (k0, k1))
                there += not seen.any()
                if known is None:
                    continue
                found += known.is_empty(q0, k0)
                assert not (known.is_empty(q0, k0) and seen.any()), "a visible pair was left out"
                assert not (known.is_whole(q0, k0) and not seen.all()), "an invisible pair was taken"
    return found, there


def pairs(problem: Any, x: Operands, chunk: Any, mask: gdpa.Mask, rows: Any, keys: Any) -> Tensor:
    """Whether the pairs of a tile are visible, those of sequences alone."""
    at = _positions(problem, x, chunk, rows, keys)
    inside = ((at["q_idx"] < at["q_len"]) & (at["kv_idx"] < at["kv_len"])).expand(chunk.n_seqs, HEADS, -1, -1)
    assert mask._held is not None
    views = [TableView(t, "t", inside) for t in mask.tables]
    return mask._held.eager(Places(at, views), torch.zeros(())).expand_as(inside)[inside]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", NAMED)
def test_empty_tiles_are_found(name: str, packed: bool) -> None:
    found, there = check(NAMED[name], packed)  # of all sequences together: those of other numbers leave few
    assert found >= 0.95 * there


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_lost(name: str, packed: bool) -> None:
    check(OTHERS[name], packed)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANY)
def test_random_masks(mask: gdpa.Mask) -> None:
    for packed in (False, True):
        check(mask, packed)


def results(mask: gdpa.Mask, backend: str) -> list[Tensor]:
    q, k, v, cu_q, cu_k = tensors(packed=True)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = gdpa.attention_varlen(*leaves, cu_q, cu_k, "silu", mask=mask, causal=True, backend=backend)
    return [out, *torch.autograd.grad(out, leaves, torch.cos(out.detach()))]


@pytest.mark.parametrize("name", ["window", "document", "hstu", "not"])
def test_results_are_the_same(name: str) -> None:
    for found, expected in zip(results(NAMED[name], "cpu"), results(NAMED[name], "reference"), strict=True):
        torch.testing.assert_close(found, expected)


def test_pairs_are_looked_at_only_where_a_mask_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = MaskFunction.eager
    monkeypatch.setattr(MaskFunction, "eager", lambda *args: calls.append(args) or real(*args))
    q = torch.randn(1, 1, 20 * SIDE, 8)
    gdpa.attention(q, q, q, "silu", mask=masks.window(None, -1), backend="cpu")
    assert len(calls) == 20  # the tiles of the diagonal


def test_an_index_outside_of_a_table_is_named() -> None:
    q, ids = torch.randn(1, 1, 20 * SIDE, 8), torch.arange(20 * SIDE - 1)
    with pytest.raises(IndexError, match=rf"index {20 * SIDE - 1} is out of range .* of mask\.tables"):
        gdpa.attention(q, q, q, "silu", mask=masks.document(ids), backend="cpu")


def test_integers_that_might_wrap_around_are_not_reckoned_with() -> None:
    far = torch.full((3 * LK,), 2**62)
    mask = gdpa.Mask(lambda q_row, kv_row, t: t[q_row] + t[kv_row] > 0, (far,))  # 2**63, which is -2**63
    for entry, told in ((2**62, False), (2**54, True)):
        problem, x = problem_of(mask.with_tables((torch.full_like(far, entry),)), packed=False)
        assert all((visible_tiles(problem, x, chunk) is not None) == told for chunk in schedule.chunks(problem, x))
