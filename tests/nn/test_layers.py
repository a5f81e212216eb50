"""Sequence layers in float64 against their formulas: every form of batch, values and all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gdpa.nn as gnn
from nn.cases import LAYERS, LENGTHS, C, H, context, made, rows, values

layers = pytest.mark.parametrize("name", LAYERS)
LENGTHS_T = torch.tensor(LENGTHS)
FORMS = {
    "jagged": lambda v: gnn.Jagged.from_lengths(v, LENGTHS_T),
    "bounded": lambda v: gnn.Jagged(v, nn.functional.pad(LENGTHS_T.cumsum(0), (1, 0)), max_seqlen=9),
    "nested": lambda v: gnn.Jagged.from_lengths(v, LENGTHS_T).to_nested(),
}


def gradients(y: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return list(
        torch.autograd.grad((y * weights).sum() + (y * y).sum(), leaves, materialize_grads=True, allow_unused=True)
    )


def agree(got: Tensor, want: Tensor, leaves: Sequence[Tensor]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    for g, w in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-8)


def by_sequence(name: str, layer: nn.Module, v: Tensor, extra: tuple[Tensor, ...]) -> Tensor:
    """The formula on one sequence after the other."""
    p = dict(layer.named_parameters())
    outs = []
    for b, x in enumerate(v.split(LENGTHS)):
        keep = torch.ones(1, len(x), dtype=torch.bool)
        outs.append(LAYERS[name].formula(p, x[None], keep, *(c[b : b + 1] for c in extra)))
    return torch.cat(outs) if LAYERS[name].pools else torch.cat([o[0] for o in outs])


@pytest.mark.parametrize("form", FORMS)
@layers
def test_a_jagged_batch_is_a_loop_over_its_sequences(name: str, form: str) -> None:
    layer, v, extra = made(name), values(), context(name, len(LENGTHS))
    x = FORMS[form](v)
    y = layer(x, *extra)
    if not LAYERS[name].pools:
        assert type(y) is type(x)
    agree(rows(y), by_sequence(name, layer, v, extra), [v, *extra, *layer.parameters()])


@layers
def test_a_jagged_batch_is_a_padded_and_masked_one(name: str) -> None:
    layer, v, extra = made(name), values(), context(name, len(LENGTHS))
    x = FORMS["jagged"](v)
    keep = torch.arange(8) < LENGTHS_T[:, None]
    padded = x.to_padded(8) + torch.where(keep, 0.0, 3.0)[..., None]  # what is masked must not matter
    want = LAYERS[name].formula(dict(layer.named_parameters()), padded, keep, *extra)
    want = want if LAYERS[name].pools else want[keep]
    agree(rows(layer(x, *extra)), want, [v, *extra, *layer.parameters()])


@layers
def test_dense(name: str) -> None:
    layer, extra = made(name), context(name, 3)
    x = values((6,) * 3).detach().view(3, 6, C).requires_grad_()
    want = LAYERS[name].formula(dict(layer.named_parameters()), x, torch.ones(3, 6, dtype=torch.bool), *extra)
    agree(layer(x, *extra), want, [x, *extra, *layer.parameters()])


@pytest.mark.parametrize("name", [n for n in LAYERS if n not in ("gating", "masknet")])
def test_the_comparison_notices_another_function(name: str) -> None:
    """Or else it would show nothing."""
    layer, v, extra = made(name), values(), context(name, len(LENGTHS))
    core = next(m for m in layer.modules() if isinstance(m, gnn.Attention))
    other = gnn.Attention(
        H, lambda s, *p: torch.tanh(s) + sum(p) * 0, params=list(core.params), score_bias=list(core.score_bias)
    )
    core.activation = other.activation
    with pytest.raises(AssertionError):
        agree(rows(layer(FORMS["jagged"](v), *extra)), by_sequence(name, layer, v, extra), [v])


@layers
def test_a_sequence_does_not_see_the_others(name: str) -> None:
    layer, v, extra = made(name), values().detach(), context(name, len(LENGTHS))
    spoiled = v.clone()
    spoiled[:5] = torch.nan
    clean, other = (rows(layer(FORMS["jagged"](t), *extra)) for t in (v, spoiled))
    first = 1 if LAYERS[name].pools else 5
    torch.testing.assert_close(other[first:], clean[first:], rtol=0, atol=1e-12)


@layers
def test_nothing_in_a_batch(name: str) -> None:
    """No sequences, sequences without rows, both forms: shapes are right and gradients zero or those of the biases."""
    layer = made(name)
    for sequences, x in (
        (0, gnn.Jagged(torch.zeros(0, C).double(), torch.zeros(1, dtype=torch.int32))),
        (3, gnn.Jagged(torch.zeros(0, C).double(), torch.zeros(4, dtype=torch.int32))),
        (0, torch.zeros(0, 3, C).double()),
        (3, torch.zeros(3, 0, C).double()),
    ):
        y = rows(layer(x, *context(name, sequences)))
        assert y.shape[0] == (sequences if LAYERS[name].pools else rows(x).shape[0])
        grads = torch.autograd.grad(y.sum(), list(layer.parameters()), materialize_grads=True, allow_unused=True)
        assert all(g.isfinite().all() for g in grads)


@layers
def test_rows_of_no_sequence(name: str) -> None:
    """A batch of fixed capacity: the rows of sequences are what they are without the others."""
    layer, v, extra = made(name), values(), context(name, len(LENGTHS))
    x = FORMS["jagged"](v)
    roomy = gnn.Jagged(torch.cat([v, v[:9] + 3]), x.cu_seqlens)
    want = rows(layer(x, *extra))
    torch.testing.assert_close(rows(layer(roomy, *extra))[: len(want)], want, rtol=0, atol=1e-12)


def test_rows_of_no_sequence_beside_times_and_memory() -> None:
    v = values()
    x, times = FORMS["jagged"](v), torch.arange(len(v)) ** 2
    roomy = gnn.Jagged(torch.cat([v, v[:9] + 3]), x.cu_seqlens)
    hstu = gnn.HSTU(C, H, 8, dtype=torch.float64)
    got = hstu(roomy, times=torch.cat([times, times[:9]])).values[: len(v)]
    torch.testing.assert_close(got, hstu(x, times=times).values)
    layer = gnn.SelfAttention(C, H, "silu", rotary=100.0, dtype=torch.float64)
    torch.testing.assert_close(layer.read(roomy, roomy).values[: len(v)], layer.read(x, x).values)


def test_positions_of_ones_own() -> None:
    """Times in place of positions; those of a Jagged are one per row, those of a dense batch (B, L)."""
    layer, v = made("self-hstu"), values()
    x = FORMS["jagged"](v)
    torch.testing.assert_close(layer(x, x.positions() + 5.0).values, layer(x).values)  # only differences matter
    times = torch.log1p(torch.rand(len(v), dtype=torch.float64) * 100)
    y = layer(x, times).values
    assert not torch.allclose(y, layer(x).values)
    for got, one, t in zip(y.split(LENGTHS), v.split(LENGTHS), times.split(LENGTHS), strict=True):
        torch.testing.assert_close(got, layer(one[None], t[None])[0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a, x: a(x, torch.zeros(3)), "positions must have one entry per row"),
        (lambda a, x: a(x, [1]), "positions must be a tensor, got list"),
        (lambda a, x: a(x, 1j * torch.ones(16)), "positions must be real numbers, got torch.complex64"),
        (lambda a, x: a(x.values), r"x must have shape \(B, L, 16\), got \(16, 16\).*Jagged"),
        (lambda a, x: a(torch.zeros(1, 2, 3)), "x must have 16 features"),
        (lambda a, x: a([x]), "x must be a dense tensor, a nested tensor .* got list"),
        (lambda a, x: made("self")(x, torch.zeros(16)), "made without rotary"),
        (lambda a, x: made("pffn")(x, torch.zeros(2, 2, 6)), r"context must have shape \(5, 2, 6\), got \(2, 2, 6\)"),
        (lambda a, x: made("pffn")(x, None), "context must be a dense tensor"),
        (lambda a, x: made("gating")(torch.zeros(3)), "x must have 16 features"),
        (lambda a, x: gnn.Attention(2)(torch.zeros(1, 5, 3, 2, 4), v=torch.zeros(1, 5, 2, 4)), "v was given without k"),
    ],
)
def test_bad_inputs_are_refused(call: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call(made("self-hstu"), FORMS["jagged"](values()))
