"""Jagged nested tensors in and out, as F.scaled_dot_product_attention takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa.testing.cases import offsets

LEN_Q, LEN_K = (3, 0, 5, 2), (2, 4, 1, 0)
H, D = 2, 8


def rows(lengths: tuple[int, ...], heads: int = H) -> Tensor:
    return torch.randn(sum(lengths), heads, D, dtype=torch.float64, requires_grad=True)


def nest(t: Tensor, cu: Tensor, **kwargs: Any) -> Tensor:
    """(rows, H, D) as a nested (B, H, j, D)."""
    return torch.nested.nested_tensor_from_jagged(t, cu, **kwargs).transpose(1, 2)


class Jagged:
    """Packed leaves, and nested tensors made of them."""

    def __init__(self, heads_k: int = H, **kwargs: Any) -> None:
        self.leaves = (rows(LEN_Q), rows(LEN_K, heads_k), rows(LEN_K, heads_k))
        self.cu_q, self.cu_k = (offsets(n, dtype=torch.int64) for n in (LEN_Q, LEN_K))
        self.q, self.k, self.v = (
            nest(t, cu, **kwargs) for t, cu in zip(self.leaves, (self.cu_q, self.cu_k, self.cu_k), strict=True)
        )


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("heads_k", [1, 2])
@pytest.mark.parametrize("band", [{}, {"causal": True}, {"window": (2, 0)}], ids=str)
def test_values_and_gradients_are_those_of_packed_tensors(backend: str | None, heads_k: int, band: Any) -> None:
    x = Jagged(heads_k)
    out = gdpa.attention(x.q, x.k, x.v, "silu", backend=backend, **band)
    assert out.is_nested
    assert out.layout == torch.jagged
    assert out.shape == x.q.shape
    packed = gdpa.attention_varlen(*x.leaves, x.cu_q, x.cu_k, "silu", backend="reference", **band)
    close(out.transpose(1, 2).values(), packed)
    got = torch.autograd.grad(out.transpose(1, 2).values().square().sum(), x.leaves)
    want = torch.autograd.grad(packed.square().sum(), x.leaves)
    for g, w in zip(got, want, strict=True):
        close(g, w)


def test_the_result_fits_its_query() -> None:
    x = Jagged()
    out = gdpa.attention(x.q, x.k, x.v)
    close((out + x.q).values(), out.values() + x.q.values())
    back = out.transpose(1, 2)
    assert back._ragged_idx == 1
    assert back.values().shape == (sum(LEN_Q), H, D)
    assert back.values().is_contiguous()
    assert [t.shape[1] for t in out.unbind()] == list(LEN_Q)
    merged = back.flatten(2) @ torch.randn(H * D, 3, dtype=torch.float64)  # the usual output projection
    assert merged.values().shape == (sum(LEN_Q), 3)


def test_as_sdpa_takes_and_gives_them() -> None:
    x = Jagged()
    theirs = torch.nn.functional.scaled_dot_product_attention(*(t.detach().float() for t in (x.q, x.k, x.v)))
    ours = gdpa.attention(*(t.detach().float() for t in (x.q, x.k, x.v)))
    assert ours.shape == theirs.shape
    assert ours.values().shape == theirs.values().shape


def test_known_lengths_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Jagged(min_seqlen=0, max_seqlen=6)
    seen: list[tuple[Any, ...]] = []
    attention = gdpa.ops.attention
    monkeypatch.setattr(gdpa.ops, "attention", lambda *args: seen.append(args) or attention(*args))
    out = gdpa.attention(x.q, x.k, x.v)
    _, settings = gdpa.ops.records(seen[0])
    assert (settings.max_q, settings.max_k) == (6, 6)
    assert (out._maybe_min_seqlen, out._maybe_max_seqlen) == (0, 6)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_sequences_do_not_leak(backend: str, poison: float) -> None:
    clean, bad = Jagged(), Jagged()
    victim = 2  # rows 3:8 of q, row 6 of k and v
    with torch.no_grad():
        for mine, theirs, row in zip(bad.leaves, clean.leaves, (4, 6, 6), strict=True):
            mine.copy_(theirs)
            mine[row] = poison

    def run(x: Jagged) -> tuple[Tensor, ...]:
        out = gdpa.attention(x.q, x.k, x.v, "silu", backend=backend).transpose(1, 2).values()
        return (out, *torch.autograd.grad(out.sum(), x.leaves))

    for got, want, lengths in zip(run(bad), run(clean), (LEN_Q, LEN_Q, LEN_K, LEN_K), strict=True):
        for b, (g, w) in enumerate(zip(got.split(lengths), want.split(lengths), strict=True)):
            if b != victim:
                assert torch.equal(g, w)


def test_shared_queries_with_nested_keys_give_a_dense_result() -> None:
    x = Jagged()
    q = torch.randn(1, H, 5, D, dtype=torch.float64, requires_grad=True)
    out = gdpa.attention(q, x.k, x.v, "silu")
    assert not out.is_nested
    assert out.shape == (len(LEN_K), H, 5, D)
    packed = gdpa.attention_varlen(q[0].transpose(0, 1), *x.leaves[1:], None, x.cu_k, "silu", backend="reference")
    close(out.transpose(1, 2).flatten(0, 1), packed)
    leaves = (q, *x.leaves[1:])
    got, want = (torch.autograd.grad(t.square().sum(), leaves) for t in (out, packed))
    for g, w in zip(got, want, strict=True):
        close(g, w)


def test_dense_queries_with_nested_keys() -> None:
    x = Jagged()
    q = torch.randn(len(LEN_K), H, 5, D, dtype=torch.float64)
    out = gdpa.attention(q, x.k, x.v, "silu")
    for b, (k, v) in enumerate(zip(x.k.unbind(), x.v.unbind(), strict=True)):
        close(out[b], gdpa.attention(q[b][None], k[None], v[None], "silu", backend="reference")[0])


def test_nested_queries_with_dense_keys() -> None:
    x = Jagged()
    k, v = (torch.randn(len(LEN_Q), H, 6, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = gdpa.attention(x.q, k, v, "silu")
    assert out.is_nested
    assert out.shape == x.q.shape
    packed = gdpa.attention_varlen(
        x.leaves[0], k.transpose(1, 2), v.transpose(1, 2), x.cu_q, None, "silu", backend="reference"
    )
    leaves = (x.leaves[0], k, v)
    got = torch.autograd.grad(out.transpose(1, 2).values().square().sum(), leaves)
    want = torch.autograd.grad(packed.square().sum(), leaves)
    for g, w in zip(got, want, strict=True):
        close(g, w)


def test_params_and_functions_per_head() -> None:
    x = Jagged()
    a = torch.rand(H, dtype=torch.float64)
    functions = [lambda s, a: a * s, lambda s, a: torch.relu(s) ** a]
    out = gdpa.attention(x.q, x.k, x.v, functions, params=(a,)).transpose(1, 2).values()
    close(out, gdpa.attention_varlen(*x.leaves, x.cu_q, x.cu_k, functions, params=(a,), backend="reference"))


def test_autocast() -> None:
    x = Jagged()
    q, k, v = (t.detach().float() for t in (x.q, x.k, x.v))
    with torch.autocast("cpu", torch.bfloat16):
        assert gdpa.attention(q, k, v).dtype == torch.bfloat16


def strided() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(H, n, D) for n in (3, 4)])


def with_holes() -> Tensor:
    padded = torch.ones(2, 7, H * D)
    narrowed = torch.nested.narrow(padded, 1, torch.tensor([0, 1]), torch.tensor([3, 2]), layout=torch.jagged)
    return narrowed.unflatten(-1, (H, D)).transpose(1, 2)


def jagged(transpose: bool = True, lengths: tuple[int, ...] = (3, 4)) -> Tensor:
    t = torch.nested.nested_tensor_from_jagged(torch.ones(sum(lengths), H, D), offsets(lengths, dtype=torch.int64))
    return t.transpose(1, 2) if transpose else t


REFUSED = {
    "strided layout": (strided, TypeError, "q is a nested tensor of layout torch.strided.*layout=torch.jagged"),
    "holes": (with_holes, ValueError, r"q is a nested tensor with holes.*q.contiguous\(\)"),
    "wrong ragged dimension": (lambda: jagged(False), ValueError, r"q must be nested as \(B, H, j, D\).*dimension 1"),
    "too few dimensions": (
        lambda: torch.nested.nested_tensor_from_jagged(torch.ones(7, D), torch.tensor([0, 3, 7])),
        ValueError,
        r"q must be nested as \(B, H, j, D\).*3 dimensions",
    ),
    "other batch": (
        lambda: jagged(lengths=(3, 3, 1)),
        ValueError,
        "q and k disagree.*: 3 and 2",
    ),
    "integers": (lambda: jagged().long(), TypeError, "q must be float16.*torch.int64"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("make", "error", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(make: Any, error: type[Exception], match: str) -> None:
    k = jagged()
    with pytest.raises(error, match=match):
        gdpa.attention(make(), k, k)


def test_keys_and_values_must_share_their_offsets() -> None:
    k, v = jagged(), jagged()  # the same lengths, but nothing says so
    with pytest.raises(ValueError, match="k and v must share their offsets"):
        gdpa.attention(k, k, v)
    with pytest.raises(TypeError, match="k is a jagged nested tensor, so v must be one too"):
        gdpa.attention(k, k, torch.ones(2, H, 4, D))
    with pytest.raises(TypeError, match="v is a jagged nested tensor, so k must be one too"):
        gdpa.attention(k, torch.ones(2, H, 4, D), v)


def test_bad_offsets_are_refused() -> None:
    q = nest(rows((3, 4)), torch.tensor([0, 3, 8]))
    with pytest.raises(ValueError, match=r"cu_seqlens_q must not end after the last of the 7 rows, but it ends at 8"):
        gdpa.attention(q, q, q)
