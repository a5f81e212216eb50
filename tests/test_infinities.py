"""inf and NaN in the operands: a result is finite wherever the definition says so, whatever the lengths are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gdpa
from support import FULL, INTERPRET, Target, f16, f32, targets

LENGTHS = (5, 16, 23)  # of the sequences; tiles of the interpreter have 16 rows
H, D = 2, 40  # padded to 64 columns


def bounded(s: Tensor) -> Tensor:
    """1 / (1 + s^2): f and f' are 0 at both infinities, and f(0) is not."""
    return 1 / (1 + s * s)


def sigmoid_of(s: Tensor, shift: Tensor) -> Tensor:
    return torch.sigmoid(s - shift)


def run(x: dict[str, Tensor], cu: Tensor, fn, backend: str, **band) -> dict[str, Tensor]:
    q, k, v = (x[name].detach().requires_grad_() for name in "qkv")
    params = (torch.full((H,), 0.5, device=q.device, requires_grad=True),) if fn is sigmoid_of else ()
    out = gdpa.attention_varlen(q, k, v, cu, cu, fn, params=params, backend=backend, **band)
    grads = torch.autograd.grad(out, (q, k, v, *params), x["do"])
    return dict(zip(("out", "dq", "dk", "dv", "dparam"), (out, *grads), strict=False))


@pytest.mark.parametrize("target", targets(f32, f16, backends=("cpu", "triton"), interpret=(f32,)))
@pytest.mark.parametrize(
    ("fn", "deterministic"),
    [
        pytest.param(sigmoid_of, False, id="param"),
        pytest.param(bounded, True, id="fixed-order"),
        *([] if INTERPRET and not FULL else [pytest.param(bounded, False, id="bounded")]),
    ],
)
def test_finite_where_the_definition_is(fn, deterministic: bool, target: Target) -> None:
    """One infinite row in each sequence: its scores are infinite, but those with the zeros past the end are NaN."""
    torch.use_deterministic_algorithms(deterministic)
    rng = torch.Generator().manual_seed(3)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    clean = {name: torch.randn(sum(LENGTHS), H, D, generator=rng).to(target.dtype) for name in ("q", "k", "v", "do")}
    for name in clean:
        x = {**clean, name: clean[name].clone()}
        x[name][cu[1:].long() - 1, :, 0] = torch.inf  # the last row of each
        on_device = {key: t.to(target.device) for key, t in x.items()}
        got = run(on_device, cu.to(target.device), fn, target.backend)
        for what, expected in run(x, cu, fn, "reference").items():
            usable, mine = expected.isfinite(), got[what].cpu()
            assert torch.equal(mine.isfinite(), usable), f"{what} with inf in {name}"
            torch.testing.assert_close(mine[usable], expected[usable], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("target", targets(f32, backends=("cpu", "triton", "hopper")))
@pytest.mark.parametrize("name", ["k", "do", *([] if INTERPRET and not FULL else ["q", "v"])])
def test_columns_and_rows_beside_a_view_do_not_matter(name: str, target: Target) -> None:
    """q, k, v cut out of a wider tensor: what surrounds them may hold anything."""
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(target.device)
    rows = sum(LENGTHS)
    clean = {n: torch.randn(rows, H, D).to(target.device, target.dtype) for n in ("q", "k", "v", "do")}
    around = torch.full((rows + 40, H, D + 24), torch.nan, device=target.device, dtype=target.dtype)
    view = around[:rows, :, 8 : 8 + D]
    view.copy_(clean[name])
    expected = run(clean, cu, torch.sigmoid, target.backend)
    got = run({**clean, name: view}, cu, torch.sigmoid, target.backend)
    for what, t in expected.items():
        torch.testing.assert_close(got[what], t, rtol=1e-2, atol=1e-2)


def of_the_past(s: Tensor, power: Tensor, table: Tensor, *, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Finite for keys up to the query; beyond it f, f' and the derivatives by param and table are inf or NaN."""
    distance = q_idx - kv_idx
    return torch.exp(s / (distance + 1)) * torch.pow(distance + 0.5, power) + table[distance + 7] * torch.log1p(
        distance
    )


@pytest.mark.parametrize("normalize", [None, "sum"])
@pytest.mark.parametrize("target", targets(f32, backends=("cpu", "triton", "reference")))
def test_gradients_know_nothing_of_masked_pairs(target: Target, normalize: str | None) -> None:
    rng = torch.Generator().manual_seed(4)
    shapes = [(2, H, 8, 16)] * 3 + [(H,), (16,)]
    given = [torch.rand(shape, generator=rng, dtype=torch.float64) for shape in shapes]

    def results(function, *leaves: Tensor) -> tuple[Tensor, ...]:
        out = function(*leaves)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    def by_hand(q: Tensor, k: Tensor, v: Tensor, power: Tensor, table: Tensor) -> Tensor:
        i, j = torch.tril_indices(8, 8)  # no other pair is looked at
        s = (q[:, :, i] * k[:, :, j]).sum(-1) / 4
        pairs = of_the_past(s, power[:, None], table, q_idx=i, kv_idx=j)
        p = torch.zeros(2, H, 8, 8, dtype=q.dtype).index_put(
            (torch.arange(2)[:, None, None], torch.arange(H)[:, None], i, j), pairs
        )
        return p @ v / (p.sum(-1, keepdim=True) if normalize else 1)

    def here(q: Tensor, k: Tensor, v: Tensor, power: Tensor, table: Tensor) -> Tensor:
        return gdpa.attention(
            q, k, v, of_the_past, params=(power,), tables=(table,), causal=True, normalize=normalize,
            backend=target.backend,
        )  # fmt: skip

    expected = results(by_hand, *(t.requires_grad_() for t in given))
    got = results(here, *(t.detach().to(target.device, target.dtype).requires_grad_() for t in given))
    for mine, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.cpu().double(), exact, rtol=1e-3, atol=1e-3)
