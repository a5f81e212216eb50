"""Cores in the place of gdpa's attention: padded eager is equal to it, padded softmax to softmax by sequence."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa.models.cores import PaddedEager, PaddedSoftmax, replace
from gdpa.nn import Attention, RelativeBias, SelfAttention, TimeBias
from models.cases import PAIRS, batch, leaky, made, outputs

LENGTHS_Q, LENGTHS_K = (3, 0, 5, 1, 4), (6, 2, 0, 1, 3)
BANDS: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (1, 2)}, {"window": (2, None), "scale": 0.3}]


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def operands(q: tuple[int, ...], k: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Of the given leading shapes; 4 heads over 2, width 6, values of width 3."""
    torch.manual_seed(0)
    shapes = ((*q, 4, 6), (*k, 2, 6), (*k, 2, 3))
    return tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)  # type: ignore[return-value]


def forms() -> dict[str, tuple[tuple[Tensor, ...], dict[str, Any], list[int], list[int]]]:
    """Operands, the offsets, and the lengths of the two sides, for each way in which Attention is called."""
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    both = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 7}
    return {
        "packed": (operands((13,), (12,)), both, list(LENGTHS_Q), list(LENGTHS_K)),
        "no bounds": (operands((13,), (12,)), {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, [*LENGTHS_Q], [*LENGTHS_K]),
        "shared queries": (operands((2,), (12,)), {"cu_seqlens_k": cu_k, "max_seqlen_k": 6}, [2] * 5, list(LENGTHS_K)),
        "generated keys": (
            operands((13,), (5, 4)),
            {"cu_seqlens_q": cu_q, "max_seqlen_q": 5},
            list(LENGTHS_Q),
            [4] * 5,
        ),
        "dense": (operands((5, 3), (5, 4)), {}, [3] * 5, [4] * 5),
    }


FORMS = list(forms())


def values_and_gradients(core: Any, x: tuple[Tensor, ...], options: dict[str, Any]) -> list[Tensor]:
    out = core(*x, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), [*x, *core.parameters()])]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(
    "function", ["sigmoid", ["gelu", "silu", "relu", "sigmoid"], leaky], ids=["one", "list", "params"]
)
def test_padded_eager_is_gdpa(form: str, band: dict[str, Any], function: Any) -> None:
    x, options, _, _ = forms()[form]
    params = (0.2,) if function is leaky else ()
    core = Attention(4, function, params=params, out_scale=0.5, dtype=torch.float64, **band)
    padded = PaddedEager(core)
    assert padded.state_dict().keys() == core.state_dict().keys()
    torch.testing.assert_close(values_and_gradients(padded, x, options), values_and_gradients(core, x, options))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options",
    [
        {"activation": "softmax", "sink": 0.7, "learn_sink": True},
        {"activation": ["softmax", "silu", "relu", "gelu"], "normalize": ["sum", "abs", "sum", None], "sink": 0.2},
        {"activation": "tanh", "normalize": "abs", "window": (2, 1)},
    ],
    ids=["sink", "heads", "abs"],
)
def test_padded_eager_divides_by_sums(form: str, options: dict[str, Any]) -> None:
    x, given, _, _ = forms()[form]
    core = Attention(4, out_scale=0.5, dtype=torch.float64, **options)
    torch.testing.assert_close(values_and_gradients(PaddedEager(core), x, given), values_and_gradients(core, x, given))


def test_padded_eager_has_biases_and_masks() -> None:
    """Of packed sequences of different lengths on both sides."""
    x, given, _, _ = forms()["packed"]
    bias = [RelativeBias(3, 4, dtype=torch.float64), TimeBias(9, dtype=torch.float64)]
    mask = gdpa.masks.prefix(torch.tensor([2, 1, 0, 1, 9])) | gdpa.masks.causal()
    core = Attention(4, ["silu", "softmax"] * 2, score_bias=bias, mask=mask, dtype=torch.float64)
    given |= {"times": (torch.arange(13) ** 2, torch.arange(12) * 3), "mask": gdpa.masks.dilated(2)}
    torch.testing.assert_close(values_and_gradients(PaddedEager(core), x, given), values_and_gradients(core, x, given))


def softmax(x: tuple[Tensor, ...], lengths_q: list[int], lengths_k: list[int], band: dict[str, Any]) -> Tensor:
    """Sequence by sequence and query by query."""
    q, k, v = (t.flatten(0, 1) if t.dim() == 4 else t for t in x)
    shared = q.shape[0] < sum(lengths_q)
    left, right = band.get("window", (None, None))
    right = 0 if band.get("causal") else right
    rows, at_q, at_k = [], 0, 0
    for nq, nk in zip(lengths_q, lengths_k, strict=True):
        for i in range(nq):
            kept = [
                j for j in range(nk)
                if (left is None or j - i - (nk - nq) >= -left) and (right is None or j - i - (nk - nq) <= right)
            ]  # fmt: skip
            here = [at_k + j for j in kept]
            for h in range(4):
                s = k[here, h // 2] @ q[i if shared else at_q + i, h] * band.get("scale", 1 / math.sqrt(6))
                rows.append(s.softmax(0) @ v[here, h // 2])
        at_q, at_k = at_q + nq, at_k + nk
    return torch.stack(rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_padded_softmax_is_softmax(form: str, band: dict[str, Any]) -> None:
    x, options, lengths_q, lengths_k = forms()[form]
    core = PaddedSoftmax(Attention(4, "identity", out_scale=2.0, **band))
    formula = lambda *x, **_: 2.0 * softmax(x, lengths_q, lengths_k, band)
    formula.parameters = list  # type: ignore[attr-defined]
    got, want = values_and_gradients(core, x, options), values_and_gradients(formula, x, options)
    torch.testing.assert_close([got[0].reshape(want[0].shape), *got[1:]], want)


@pytest.mark.parametrize("core", [PaddedEager, PaddedSoftmax])
def test_all_sequences_empty(core: Any) -> None:
    empty = torch.zeros(4, dtype=torch.int32)
    x = tuple(torch.randn(0, 2, 4, requires_grad=True) for _ in range(3))
    assert core(Attention(2))(*x, empty, empty, max_seqlen_q=0, max_seqlen_k=0).shape == (0, 2, 4)
    pooled = core(Attention(2))(torch.randn(3, 2, 4), *x[1:], None, empty, max_seqlen_k=0)
    assert torch.equal(pooled, torch.zeros(3, 3, 2, 4))


@pytest.mark.parametrize(
    ("model", "layout"), [*((m, "two") for m, layout in PAIRS if layout == "two"), ("hstu", "usual")]
)
def test_models_with_padded_eager(model: str, layout: str) -> None:
    m, b = made(model, layout), batch(layout)
    padded = replace(copy.deepcopy(m), PaddedEager)
    assert not any(isinstance(part, Attention) for part in padded.modules())
    assert padded.state_dict().keys() == m.state_dict().keys()
    torch.testing.assert_close(outputs(padded, [b]), outputs(m, [b]))
    padded.reset_parameters()


def test_padded_softmax_has_no_biases() -> None:
    with pytest.raises(ValueError, match="neither biases of scores nor a sink"):
        PaddedSoftmax(Attention(2, "softmax", sink=1.0))


def test_replace_shows_every_core_the_attention_it_replaces() -> None:
    layers = torch.nn.ModuleList([SelfAttention(8, 2, "silu", window=(3, 3)), Attention(4)])
    seen: list[str] = []

    def make(attention: Attention) -> torch.nn.Module:
        seen.append(attention.extra_repr())
        return torch.nn.Identity()

    replace(layers, make)
    assert sorted(seen) == ["num_heads=2, activation='silu', window=(3, 3)", "num_heads=4, activation='gelu'"]
    assert "PaddedSoftmax(\n    num_heads=2" in repr(replace(SelfAttention(8, 2), PaddedSoftmax))
