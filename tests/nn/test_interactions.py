"""Layers on feature tokens and rotary positions, in float64, against loops over their formulas, gradients included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gdpa.nn as gnn
from nn import formulas as f
from nn.cases import stirred
from nn.test_layers import agree

B, N, C = 3, 5, 6
Formula = Callable[[dict[str, Tensor], Tensor], Tensor]


def kron(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return f.sum_kron(p["z"], p["w"], x)


def dots(diagonal: bool) -> Formula:
    def formula(p: dict[str, Tensor], x: Tensor) -> Tensor:
        pairs = [(i, j) for i in range(N) for j in range(N) if i < j or (diagonal and i == j)]
        return torch.stack([(x[:, i] * x[:, j]).sum(-1) for i, j in pairs], dim=1)

    return formula


def cross(p: dict[str, Tensor], x: Tensor) -> Tensor:
    y = x
    for i in range(2):
        weight = p[f"u.{i}.weight"]
        weight = weight @ p[f"v.{i}.weight"] if f"v.{i}.weight" in p else weight
        y = x * (y @ weight.T + p[f"u.{i}.bias"]) + y
    return y


def machine(p: dict[str, Tensor], x: Tensor, name: str = "") -> Tensor:
    outs = []
    for one in x:  # (N, C)
        products = (one @ one.T) @ p[f"{name}y"]
        outs.append(f.mlp(f.layer_norm(products.reshape(-1), p, f"{name}norm"), p, f"{name}mlp").reshape(-1, C))
    return torch.stack(outs)


def wukong(p: dict[str, Tensor], x: Tensor) -> Tensor:
    compressed = torch.einsum("on,bnc->boc", p["lc.weight"], x)
    residual = torch.einsum("on,bnc->boc", p["residual.weight"], x) if "residual.weight" in p else x
    return f.layer_norm(torch.cat([machine(p, x, "fm."), compressed], 1) + residual, p, "norm")


CASES: dict[str, tuple[Callable[[], nn.Module], Formula]] = {
    "kron": (lambda: gnn.SumKronLinear(N, 2, C, 4, 3), kron),
    "dot": (lambda: gnn.DotInteraction(N), dots(False)),
    "dot-self": (lambda: gnn.DotInteraction(N, self_interaction=True), dots(True)),
    "cross": (lambda: gnn.CrossNet(C, 2), cross),
    "cross-rank": (lambda: gnn.CrossNet(C, 2, rank=3), cross),
    "mlp": (lambda: gnn.MLP([C, 7, 8, 2]), lambda p, x: f.mlp(x, {f"m.{n}": t for n, t in p.items()}, "m")),
    "tokens": (lambda: gnn.TokenLinear(N, 2), lambda p, x: torch.einsum("on,bnc->boc", p["weight"], x)),
    "machine": (lambda: gnn.FactorizationMachine(C, N, 4, 3, [7]), machine),
    "wukong": (lambda: gnn.WukongBlock(C, N, 3, 2, 4, [7]), wukong),
    "wukong-fewer": (lambda: gnn.WukongBlock(C, N, 2, 1, 4, []), wukong),
}


@pytest.mark.parametrize("name", CASES)
def test_formula(name: str) -> None:
    make, formula = CASES[name]
    torch.manual_seed(0)
    layer = stirred(make().double())
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    agree(layer(x), formula(dict(layer.named_parameters()), x), [x, *layer.parameters()])
    if isinstance(layer, gnn.DotInteraction):
        assert layer(x).shape[1] == layer.out_features


def test_kron_is_a_sum_of_kronecker_products() -> None:
    layer, h = gnn.SumKronLinear(N, 2, C, 4, 3).double(), torch.randn(N, C, dtype=torch.float64)
    full = sum(torch.kron(layer.z[:, i].contiguous(), layer.w[i].T.contiguous()) for i in range(3))
    torch.testing.assert_close(layer(h).flatten(), full @ h.flatten())


def test_rotary_sees_differences_only_and_turns_in_the_known_way() -> None:
    q, k = torch.randn(2, 1, 9, 2, 8, dtype=torch.float64).unbind(0)  # (1, L, H, D)
    rotary, place = gnn.Rotary(8, 100.0), torch.arange(9)
    torch.testing.assert_close(rotary(q, place), f.rotate(q.transpose(1, 2), place, 100.0).transpose(1, 2))
    near, far = (torch.einsum("blhd,bmhd->bhlm", rotary(q, p), rotary(k, p)) for p in (place, place + 1000))
    torch.testing.assert_close(near, far)


def test_rotary_angles_are_wide_in_16_bits() -> None:
    """At position 4097, which bfloat16 does not have."""
    x, place = torch.randn(1, 1, 8).bfloat16(), torch.tensor([4097])
    exact = gnn.Rotary(8)(x.double(), place)
    assert (gnn.Rotary(8)(x, place).double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gnn.SumKronLinear(N, 2, C, 4, 3)(torch.zeros(B, C, N)), r"h must have shape \(\.\.\., 5, 6\)"),
        (lambda: gnn.DotInteraction(N)(torch.zeros(B, 2, C)), r"x must have shape \(B, 5, C\), got \(3, 2, 6\)"),
        (lambda: gnn.WukongBlock(C, N, 3, 2, 4, [])(torch.zeros(B, N, 2)), r"x must have shape \(B, 5, 6\)"),
        (lambda: gnn.TokenLinear(N, 2)(None), "x must be a dense tensor"),
        (lambda: gnn.CrossNet(C, 2)(torch.zeros(B, 2)), "x must have 6 features"),
        (lambda: gnn.CrossNet(C, 0), "num_layers must be at least 1, got 0"),
        (lambda: gnn.CrossNet(C, 1, rank=1.5), "rank must be an int, got 1.5"),
        (lambda: gnn.MLP([3]), "widths must contain at least"),
        (lambda: gnn.MLP([3, 0]), r"widths\[1\] must be at least 1"),
        (lambda: gnn.Rotary(7), "head_dim must be even"),
        (lambda: gnn.Rotary(8, -1.0), "base must be positive, got -1"),
        (lambda: gnn.Rotary(8)(torch.zeros(1, 1, 4), torch.zeros(1)), "head dimension 8"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], Tensor], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call()
