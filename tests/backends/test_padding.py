"""Head dimensions that are no multiples of 8 run on the kernels, padded, and are told of where nothing else will do."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa import backends
from gdpa.backends import padding
from gdpa.functions.activation import resolve_one
from gdpa.masks.band import Band
from gdpa.problem import Operands, is_regular, make_problem
from support import Target, bf16, f16, f32, skipping_refusals, targets

NAMES = ("out", "dq", "dk", "dv", "da", "dsink")


def temperature(s: Tensor, a: Tensor) -> Tensor:
    return torch.tanh(a * s)


def results(leaves: list[Tensor], do: Tensor, normalize: str | None, backend: str) -> list[Tensor]:
    q, k, v, a, sink = leaves
    cu_q, cu_k = (torch.tensor(n, dtype=torch.int32, device=q.device) for n in ((0, 9, 9, 30), (0, 20, 25, 40)))
    out = gdpa.attention_varlen(
        q, k, v, cu_q, cu_k, temperature, params=(a,), normalize=normalize, sink=sink if normalize else 0.0,
        causal=True, backend=backend,
    )  # fmt: skip
    return [out, *torch.autograd.grad(out, leaves if normalize else leaves[:4], do)]


@pytest.mark.parametrize("normalize", [None, "abs"])
@pytest.mark.parametrize("dims", [(50, 50), (13, 5)], ids=str)
@pytest.mark.parametrize("target", targets(f16, bf16, f32, backends=("triton", "hopper"), interpret=(f16,)))
def test_any_head_dimension(target: Target, dims: tuple[int, int], normalize: str | None) -> None:
    """Rows of no sequence, a param and a learned sink on the way."""
    rng = torch.Generator().manual_seed(0)
    d, dv = dims
    shapes = ((33, 2, d), (40, 1, d), (40, 1, dv), (33, 2, dv))
    *given, do = (torch.randn(shape, generator=rng).to(target.device, target.dtype) for shape in shapes)
    learned = [torch.tensor([0.5, 1.5], device=target.device), torch.tensor([0.1, 1.0], device=target.device)]
    leaves = [t.requires_grad_() for t in (*given, *learned)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wanted = results(exact, do.double(), normalize, "reference")
    with skipping_refusals(target):
        found = results(leaves, do, normalize, target.backend)
    for name, got, want in zip(NAMES, found, wanted, strict=False):
        assert got.shape == want.shape
        # Terms of da mostly cancel, and the rounding of the output is in each: the cpu backend's error is as large.
        allowed = {f32: 1e-5, f16: 2e-3, bf16: 1e-2}[target.dtype] * {"da": 10, "dsink": 3}.get(name, 1)
        assert (got.double() - want).norm() <= allowed * want.norm(), name
    assert found[0][30:].count_nonzero() == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (0, 2, 1)], ids=["heads", "sequences", "rows"])
@pytest.mark.parametrize(("heads", "d"), [(2, 50), (2, 64), (1, 1), (1, 8)])
def test_copies_are_such_as_descriptors_express(heads: int, d: int, order: tuple[int, int, int]) -> None:
    """Whatever the caller's layout: (B, H, L, D), (L, B, H, D) or (B, L, H, D), D padded or not."""
    shape = (3, heads, 7)
    t = torch.randn(*(shape[order.index(i)] for i in range(3)), d).permute(*order, 3).to(bf16)
    wide = padding._pad(t)
    assert is_regular(wide)
    assert torch.equal(wide[..., :d], t)
    assert wide[..., d:].count_nonzero() == 0


def problem_of(d: int, dtype: torch.dtype = bf16) -> Any:
    q = torch.empty(1, 2, 3, d, dtype=dtype)
    return make_problem(Operands(q, q, q), (resolve_one("relu", 0),), 1.0, 1.0, Band())


def test_copies_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(backends.get("triton")), "supports", lambda self, problem: None)
    said = backends.explain(problem_of(50), None)
    assert "head dimensions: 50 and 50, padded to 56 and 56 in copies" in said
    assert "head dimensions" not in backends.explain(problem_of(56), None)
    assert "head dimensions" not in backends.explain(problem_of(50), "cpu")  # which needs none


def test_plain_code_on_a_gpu_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hopper", "triton", "cpu"):
        monkeypatch.setattr(type(backends.get(name)), "supports", lambda self, problem: "D is 300")
    problem = problem_of(300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.select(problem, None).name == "reference"
        on_gpu = replace(problem, device=torch.device("cuda"))
        assert backends.select(on_gpu, "reference").name == "reference"  # somebody asked for it
        with pytest.raises(UserWarning, match=r"plain PyTorch, .* no kernel takes it: D is 300"):
            backends.select(on_gpu, None)
