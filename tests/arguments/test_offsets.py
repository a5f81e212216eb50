"""cu_seqlens: what is accepted, and that its data is looked at on the CPU always and elsewhere only when asked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gdpa
from gdpa.arguments import checks
from gdpa.functions.activation import from_name
from gdpa.masks.band import Band
from gdpa.problem import Operands, Problem, make_problem
from gdpa.testing.cases import offsets


def packed(cu_q: Tensor, cu_k: Tensor, rows_q: int, rows_k: int, **kwargs: int) -> Tensor:
    q, k = torch.randn(rows_q, 2, 8), torch.randn(rows_k, 2, 8)
    return gdpa.attention_varlen(q, k, k, cu_q, cu_k, **kwargs)


@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int32), (torch.int64, torch.int64), (torch.int32, torch.int64)])
def test_both_integer_types(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    cu_q, cu_k = (offsets((3, 4), dtype=dtype) for dtype in dtypes)
    assert packed(cu_q, cu_k, 7, 7).shape == (7, 2, 8)


def test_no_sequences() -> None:
    assert packed(offsets(()), offsets(()), 0, 0).shape == (0, 2, 8)
    assert not packed(offsets(()), offsets(()), 3, 0).any()


@pytest.mark.parametrize("activation", ["silu", "softmax"])
def test_shared_queries_of_no_sequences(activation: str) -> None:
    """The keys have rows that belong to no sequence, as in a batch of fixed capacity without users."""
    q, k = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 3, 4, requires_grad=True)
    out = gdpa.attention_varlen(q, k, k, None, offsets(()), activation)
    assert out.shape == (0, 3, 4)
    out.sum().backward()
    for t in (q, k):
        assert t.grad is not None
        assert not t.grad.any()


def test_only_empty_sequences() -> None:
    q = torch.randn(0, 2, 8, requires_grad=True)
    out = gdpa.attention_varlen(q, q, q, offsets((0, 0)), offsets((0, 0)))
    out.sum().backward()
    assert q.grad.shape == (0, 2, 8)


@given(st.lists(st.integers(-2, 9), min_size=1, max_size=6), st.integers(0, 9), st.sampled_from(["int32", "int64"]))
def test_exactly_the_good_offsets_are_accepted(values: list[int], rows: int, dtype: str) -> None:
    good = values[0] == 0 and values[-1] <= rows and values == sorted(values)
    cu = torch.tensor(values, dtype=getattr(torch, dtype))
    if good:
        assert packed(cu, cu, rows, rows).isfinite().all()
    else:
        with pytest.raises(ValueError, match="cu_seqlens_q must"):
            packed(cu, cu, rows, rows)


@pytest.mark.parametrize("extreme", [2**31 - 1, -(2**31)])
def test_differences_do_not_overflow(extreme: int) -> None:
    with pytest.raises(ValueError, match="cu_seqlens_q must"):
        packed(torch.tensor([0, extreme, 7], dtype=torch.int32), offsets((3, 4)), 7, 7)


@pytest.mark.parametrize(("longest", "good"), [(None, True), (4, True), (100, True), (3, False), (0, False)])
def test_max_seqlen_is_an_upper_bound(longest: int | None, good: bool) -> None:
    if good:
        packed(offsets((3, 4)), offsets((4, 1)), 7, 5, max_seqlen_q=longest, max_seqlen_k=longest)
    else:
        with pytest.raises(ValueError, match=rf"max_seqlen_k={longest} is less than the longest sequence \(4\)"):
            packed(offsets((3, 4)), offsets((4, 1)), 7, 5, max_seqlen_k=longest)


def test_max_seqlen_does_not_change_the_result() -> None:
    q, cu = torch.randn(7, 2, 8), offsets((3, 4))
    hinted = gdpa.attention_varlen(q, q, q, cu, cu, max_seqlen_q=4, max_seqlen_k=4)
    assert torch.equal(hinted, gdpa.attention_varlen(q, q, q, cu, cu))


def test_offsets_changed_before_the_backward_are_noticed() -> None:
    q, cu = torch.randn(7, 2, 8, requires_grad=True), offsets((3, 4))
    out = gdpa.attention_varlen(q, q, q, cu, cu)
    cu[1] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- devices where looking would mean waiting ------------------------------------------------------------------------
@pytest.fixture
def elsewhere() -> tuple[Problem, Operands]:
    """Bad offsets, said to be on a GPU."""
    q = torch.randn(1, 2, 7, 8)
    x = Operands(q, q, q, torch.tensor([0, 9, 7]), torch.tensor([0, 3, 7]))
    problem = make_problem(x, (from_name("relu"),), 1.0, 1.0, Band())
    object.__setattr__(problem, "device", torch.device("cuda"))
    return problem, x


def test_a_gpu_is_not_asked(elsewhere: tuple[Problem, Operands], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GDPA_CHECK", raising=False)
    checks.offsets(*elsewhere)


def test_unless_told_to(elsewhere: tuple[Problem, Operands], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDPA_CHECK", "1")
    with pytest.raises(ValueError, match="cu_seqlens_q must not decrease: entry 2 is 7 after 9"):
        checks.offsets(*elsewhere)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_no_sequences_at_all_still_have_gradients(backend: str) -> None:
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    k, v = (torch.randn(0, 2, 5, 4, requires_grad=True) for _ in range(2))
    slope = torch.tensor(0.5, requires_grad=True)
    out = gdpa.attention(q, k, v, lambda s, a: a * s, params=(slope,), backend=backend)
    assert out.shape == (0, 2, 3, 4)
    out.sum().backward()
    for t in (q, k, v, slope):
        assert t.grad is not None
        assert not t.grad.any()
