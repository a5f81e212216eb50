"""The container: constructors, conversions both ways, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gdpa.nn import Jagged

LENGTHS = (3, 0, 2, 4, 0)


def example(**kwargs: Any) -> Jagged:
    values = torch.arange(18, dtype=torch.float64).view(9, 2).requires_grad_()
    return Jagged.from_lengths(values, torch.tensor(LENGTHS), **kwargs)


def test_lengths_and_places() -> None:
    x = example()
    assert x.cu_seqlens.tolist() == [0, 3, 3, 5, 9, 9]
    assert x.cu_seqlens.dtype == torch.int32
    assert len(x) == 5
    assert x.lengths.tolist() == list(LENGTHS)
    assert x.sequence_ids().tolist() == [0, 0, 0, 2, 2, 3, 3, 3, 3]
    assert x.positions().tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]


def test_sequences_there_and_back() -> None:
    x = example()
    parts = x.unbind()
    assert [len(p) for p in parts] == list(LENGTHS)
    back = Jagged.from_sequences(parts)
    assert torch.equal(back.values, x.values)
    assert torch.equal(back.cu_seqlens, x.cu_seqlens)
    assert back.max_seqlen == 4


def test_nested_there_and_back() -> None:
    x = example(max_seqlen=4)
    nested = x.to_nested()
    assert nested.is_nested
    assert [tuple(t.shape) for t in nested.unbind()] == [(n, 2) for n in LENGTHS]
    back = Jagged.from_nested(nested)
    assert torch.equal(back.values, x.values)
    assert torch.equal(back.cu_seqlens, x.cu_seqlens)
    assert back.max_seqlen == 4


@pytest.mark.parametrize(("bound", "length", "want"), [(None, None, 4), (6, None, 6), (4, 5, 5), (None, 7, 7)])
def test_padding(bound: int | None, length: int | None, want: int) -> None:
    x = example(max_seqlen=bound)
    padded = x.to_padded(length)
    assert padded.shape == (5, want, 2)
    for b, part in enumerate(x.unbind()):
        assert torch.equal(padded[b, : len(part)], part)
        assert not padded[b, len(part) :].any()
    weights = torch.randn_like(padded)
    (grad,) = torch.autograd.grad((padded * weights).sum(), x.values)
    keep = torch.arange(want) < x.lengths[:, None]
    assert torch.equal(grad, weights[keep])


def test_rows_of_no_sequence_are_left_out() -> None:
    """A batch of fixed capacity."""
    exact = example()
    x = Jagged(torch.cat([exact.values, torch.full((3, 2), 7.0)]), exact.cu_seqlens)
    assert x.sequence_ids().tolist() == [*exact.sequence_ids().tolist(), 5, 5, 5]
    for length in (None, 6):
        assert torch.equal(x.to_padded(length), exact.to_padded(length))
    (grad,) = torch.autograd.grad(x.to_padded().sum(), x.values)
    assert grad.tolist() == [[1.0, 1.0]] * 9 + [[0.0, 0.0]] * 3
    for got, want in ((x.unbind(), exact.unbind()), (x.to_nested().unbind(), exact.to_nested().unbind())):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    none = Jagged(torch.ones(3, 2), torch.zeros(3, dtype=torch.int32))
    assert none.to_padded().shape == (2, 0, 2)
    assert [len(part) for part in none.unbind()] == [0, 0]


def test_nothing_at_all() -> None:
    x = Jagged(torch.zeros(0, 2), torch.zeros(1, dtype=torch.int32))
    assert len(x) == 0
    assert x.unbind() == []
    assert x.positions().shape == (0,)
    assert x.to_padded().shape == (0, 0, 2)


def test_it_is_frozen_and_gives_others() -> None:
    x = example(max_seqlen=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        x.max_seqlen = 3  # type: ignore[misc]
    y = x.with_values(torch.zeros(9, 5))
    assert y.cu_seqlens is x.cu_seqlens
    assert (y.max_seqlen, y.values.shape) == (7, (9, 5))


def test_torch_finds_the_tensors_in_it() -> None:
    """As fully_shard, checkpointing and other tools that walk over what a layer takes and returns."""
    x = example(max_seqlen=7)
    tensors, form = tree_flatten({"x": x})
    assert [t is part for t, part in zip(tensors, (x.values, x.cu_seqlens), strict=True)] == [True, True]
    y = tree_unflatten([t.detach() for t in tensors], form)["x"]
    assert isinstance(y, Jagged)
    assert torch.equal(y.values, x.values)
    assert y.max_seqlen == 7
    assert tree_unflatten(["a", "b"], form)["x"].values == "a", "whatever a tool puts in place of a tensor"


def test_to_another_device() -> None:
    x = example(max_seqlen=7).to("meta")
    assert x.values.device.type == x.cu_seqlens.device.type == "meta"
    assert x.max_seqlen == 7


def narrowed() -> Tensor:
    dense, starts, lengths = torch.zeros(2, 4, 3), torch.tensor([0, 1]), torch.tensor([2, 3])
    return torch.nested.narrow(dense, 1, starts, lengths, layout=torch.jagged)


def test_a_length_may_be_one_of_numpy() -> None:
    """A data loader has its lengths there; the layers' programs are made of Python's."""
    found = Jagged(torch.zeros(5, 2), torch.tensor([0, 2, 5]), np.array([2, 3]).max()).max_seqlen
    assert found == 3
    assert type(found) is int


CU = torch.tensor([0, 2])
REFUSED = {
    "values-type": (lambda: Jagged([1], CU), "values must be a tensor, got list"),
    "values-nested": (lambda: Jagged(example().to_nested(), CU), "use Jagged.from_nested"),
    "values-shape": (lambda: Jagged(torch.zeros(2), CU), r"values must have shape \(T, C\), got \(2,\)"),
    "cu-none": (lambda: Jagged(torch.zeros(2, 1), None), "cu_seqlens must be a tensor, got NoneType"),
    "cu-dtype": (lambda: Jagged(torch.zeros(2, 1), CU.float()), "cu_seqlens must be int32 or int64"),
    "cu-shape": (lambda: Jagged(torch.zeros(2, 1), CU[None]), r"cu_seqlens must have shape \(B\+1,\)"),
    "max-type": (lambda: Jagged(torch.zeros(2, 1), CU, CU), "max_seqlen must be an int"),
    "max-value": (lambda: Jagged(torch.zeros(2, 1), CU, -1), "max_seqlen must lie in .* got -1"),
    "lengths-type": (lambda: Jagged.from_lengths(torch.zeros(2, 1), [2]), "lengths must be a tensor, got list"),
    "lengths-dtype": (lambda: Jagged.from_lengths(torch.zeros(2, 1), CU.float()), "lengths must be int32 or int64"),
    "lengths-shape": (lambda: Jagged.from_lengths(torch.zeros(2, 1), CU[None]), r"lengths must have shape \(B,\)"),
    "sequences-none": (lambda: Jagged.from_sequences([]), "sequences is empty"),
    "sequences-shape": (lambda: Jagged.from_sequences([torch.zeros(2)]), r"sequences\[0\] must have shape \(L, C\)"),
    "nested-dense": (lambda: Jagged.from_nested(torch.zeros(2, 1, 1)), "must be a nested tensor"),
    "nested-dim": (lambda: Jagged.from_nested(example().to_nested().unsqueeze(-1)), "it has 4 dimensions"),
    "nested-holes": (lambda: Jagged.from_nested(narrowed()), "has holes"),
    "rows": (lambda: example().with_values(torch.zeros(3, 1)), "values must have 9 rows"),
    "lengths-sum": (lambda: Jagged.from_lengths(torch.zeros(3, 1), CU), "must add up to the 3 rows"),
    "lengths-negative": (lambda: Jagged.from_lengths(torch.zeros(2, 1), torch.tensor([-1, 3])), "must not be negative"),
    "offsets-beyond": (lambda: Jagged(torch.zeros(1, 1), CU).unbind(), "must not end after the last of the 1 rows"),
    "padded-beyond": (lambda: Jagged(torch.zeros(1, 1), CU).to_padded(), "must not end after the last of the 1 rows"),
    "nested-beyond": (lambda: Jagged(torch.zeros(1, 1), CU).to_nested(), "must not end after the last of the 1 rows"),
    "padded-shorter": (lambda: example().to_padded(2), "length=2 is less than the longest sequence's"),
    "padded-float": (lambda: example().to_padded(9.0), "length must be an int or None, got 9.0"),
    "sequences-once": (lambda: Jagged.from_sequences(iter([CU])), "sequences must be a list of tensors, got list_iter"),
    "widths": (
        lambda: Jagged.from_sequences([torch.zeros(1, 2), torch.zeros(1, 3)]),
        r"sequences\[0\] has 2 and sequences\[1\] 3",
    ),
    "to-dtype": (lambda: example().to(torch.float16), r"takes only a device, got torch\.float16: x\.with_values"),
    "to-tensor": (lambda: example().to(torch.zeros(1)), "takes only a device, got a tensor"),
    "values-list": (lambda: example().with_values([1]), "values must be a tensor, got list"),
    "padded": (lambda: example(max_seqlen=4).to_padded(3), "length=3 is less than max_seqlen=4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=words):
        call()
