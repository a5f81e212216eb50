"""Per-head functions become slices of heads, each with one function, that cover every query head once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gdpa
from gdpa.functions.activation import from_name
from gdpa.masks.band import Band
from gdpa.ops.heads import head_slices, progressions, shared_key_heads
from gdpa.problem import Operands, make_problem
from support import Target, f32, targets

NAMES = ("relu", "gelu", "silu")


def problem(names: list[str], heads_k: int) -> Any:
    q, k = torch.empty(1, len(names), 3, 8), torch.empty(1, heads_k, 3, 8)
    return make_problem(Operands(q, k, k), tuple(map(from_name, names)), 1.0, 1.0, Band())


@given(st.sets(st.integers(0, 40)))
def test_progressions_are_the_heads_in_order(heads: set[int]) -> None:
    wanted = sorted(heads)
    slices = list(progressions(wanted))
    assert [h for s in slices for h in range(64)[s]] == wanted
    assert len(slices) <= max(1, len(wanted)) if wanted else slices == []


@pytest.mark.parametrize(
    ("heads", "count"), [([0, 1, 2, 3], 1), ([0, 2, 4, 6], 1), ([1, 3, 5], 1), ([0, 2, 4, 5], 2), ([0, 1, 5, 9], 2)]
)
def test_few_slices_suffice(heads: list[int], count: int) -> None:
    assert len(list(progressions(heads))) == count


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_slices_cover_every_head_once_with_its_function_and_key_head(heads_k: int, group: int, data: Any) -> None:
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=heads_k * group, max_size=heads_k * group))
    whole = problem(names, heads_k)
    seen = []
    for part in head_slices(whole):
        q_heads, k_heads = range(64)[part.q], range(64)[part.k]
        inner = len(q_heads) // len(k_heads)
        for i, h in enumerate(q_heads):
            assert part.activation is from_name(names[h])
            assert k_heads[i // inner] == h // group
        seen += q_heads
        sub = part.problem(whole)
        assert (sub.heads_q, sub.heads_k) == (len(q_heads), len(k_heads))
    assert sorted(seen) == list(range(len(names)))


def test_slices_are_views() -> None:
    whole = problem(["relu", "gelu"] * 2, 4)
    x = Operands(*(torch.randn(2, 4, 3, 8) for _ in range(3)), params=torch.randn(2, 4))
    for part in head_slices(whole):
        mine = part.operands(x)
        for view, tensor in ((mine.q, x.q), (mine.k, x.k), (mine.v, x.v)):
            assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_one_function_is_one_slice() -> None:
    assert len(head_slices(problem(["relu"], 1))) == 1
    alternating = head_slices(problem(["relu", "gelu"] * 4, 8))
    assert [(s.q.start, s.q.step) for s in alternating] == [(0, 2), (1, 2)]


def test_shared_key_heads() -> None:
    assert not shared_key_heads(head_slices(problem(["relu", "gelu"], 2)), 2)
    assert shared_key_heads(head_slices(problem(["relu", "gelu"], 1)), 1)
    assert not shared_key_heads(head_slices(problem(["relu", "relu", "gelu", "gelu"], 2)), 2)


@pytest.mark.parametrize("heads_k", [1, 2, 4])
@pytest.mark.parametrize("varlen", [False, True])
def test_attention_equals_each_head_alone(heads_k: int, varlen: bool) -> None:
    functions = ["relu", lambda s: torch.sin(s), "relu", gdpa.activation(lambda s: s * s)]
    q, k, v = (torch.randn(3, h, 5, 8, dtype=torch.float64, requires_grad=True) for h in (4, heads_k, heads_k))
    cu = torch.arange(0, 16, 5)

    def attend(q: Tensor, k: Tensor, v: Tensor, activation: Any) -> Tensor:
        if not varlen:
            return gdpa.attention(q, k, v, activation, causal=True)
        packed = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        out = gdpa.attention_varlen(*packed, cu, cu, activation, causal=True)
        return out.unflatten(0, (3, 5)).transpose(1, 2)

    out = attend(q, k, v, functions)
    group = 4 // heads_k
    alone = [
        attend(q[:, h : h + 1], k[:, h // group : h // group + 1], v[:, h // group : h // group + 1], f)
        for h, f in enumerate(functions)
    ]
    want = torch.cat(alone, dim=1)
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    got, wanted = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, want))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_equal_functions_in_a_list_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from gdpa.backends.cpu import CpuBackend

    calls = []
    forward = CpuBackend.forward
    monkeypatch.setattr(CpuBackend, "forward", lambda *args: calls.append(1) or forward(*args))
    x = torch.randn(1, 3, 4, 8)
    listed = gdpa.attention(x, x, x, ["relu", torch.relu, lambda s: torch.relu(s)])
    assert len(calls) == 1
    assert torch.equal(listed, gdpa.attention(x, x, x, "relu"))


@pytest.mark.parametrize("target", targets(f32, backends=("cpu", "triton")))
def test_params_of_alternating_functions(target: Target) -> None:
    """A function on every other head reads the params of its own heads."""

    def left(s: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return torch.tanh(a * s)

    def right(s: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return a * torch.sin(s)

    rng = torch.Generator(device=target.device).manual_seed(0)
    q, k, v = (torch.randn(1, 4, 10, 16, generator=rng, device=target.device, requires_grad=True) for _ in range(3))
    a = torch.tensor([0.5, -1.0, 2.0, 3.0], device=target.device, requires_grad=True)
    results = []
    for backend in (target.backend, "reference"):
        out = gdpa.attention(q, k, v, [left, right, left, right], params=(a,), backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, a))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
