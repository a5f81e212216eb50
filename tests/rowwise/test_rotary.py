"""gdpa::rotary against long doubles: in place and out of place, packed and strided, at places and at time stamps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gdpa
import gdpa.nn as gnn
from gdpa.rowwise import rotary
from support import INTERPRET

pytestmark = [pytest.mark.triton] if INTERPRET else []
DTYPES = [torch.float32, torch.float16, *([] if INTERPRET else [torch.bfloat16, torch.float64])]
BASE = 10000.0
SECONDS = 1_700_000_000


def exact(x: Tensor, positions: Tensor, base: float = BASE) -> Tensor:
    """The formula in long doubles, pair by pair."""
    half = x.shape[-1] // 2
    wide = np.longdouble
    place = np.broadcast_to(positions.double().numpy().astype(wide), x.shape[:-2])
    first, second = (t.double().numpy().astype(wide) for t in (x[..., :half], x[..., half:]))
    angle = place[..., None, None] * wide(base) ** (-np.arange(half).astype(wide) / half)
    turned = (first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle))
    return torch.from_numpy(np.concatenate(turned, -1).astype(np.float64))


def layouts() -> dict[str, tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(37, 6, 16, generator=g)
    dense = torch.randn(3, 5, 4, 12, generator=g)
    return {
        "packed": (rows, torch.arange(37)),
        "strided": (rows[:, 2:4], torch.arange(37) % 7),
        "seconds": (rows, torch.randint(SECONDS, (37,), generator=g)),
        "backwards": (rows, -torch.rand(37, generator=g) * 1e6),
        "pairs": (torch.randn(300, 2, 2, generator=g), torch.arange(300).float()),
        "dense, by place": (dense, torch.arange(5)),
        "dense, by row": (dense, torch.randn(3, 5, generator=g)),
        "dense, by sequence": (dense, torch.tensor([[3], [1000], [0]])),
        "heads first": (dense.transpose(1, 2).contiguous().transpose(1, 2), torch.arange(5, dtype=torch.int32)),
        "features apart": (dense.mT.contiguous().mT, torch.arange(5)),
        "no rows": (rows[:0], torch.arange(0)),
    }


LAYOUTS = layouts()
every_layout = pytest.mark.parametrize("name", LAYOUTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@every_layout
@every_dtype
def test_values(name: str, dtype: torch.dtype) -> None:
    """Angles are exact to float32's last digits, those of time stamps too; each result is rounded once."""
    x, positions = LAYOUTS[name]
    x = x.to(dtype)  # keeps the layout
    heads = x.shape[-2] - 1
    want, size = exact(x[..., :heads, :], positions), x.double().abs().max() if x.numel() else 0.0
    y = torch.ops.gdpa.rotary(x, positions, heads, BASE, False)
    allowed = (6e-7 if dtype != torch.float64 else 2e-6 if name == "seconds" else 1e-9) + torch.finfo(dtype).eps / 2
    torch.testing.assert_close(y[..., :heads, :].double(), want, rtol=0, atol=1.5 * float(size) * allowed)
    assert torch.equal(y[..., heads:, :], x[..., heads:, :])
    inside = x.clone(memory_format=torch.preserve_format)
    torch.ops.gdpa.rotary_(inside, positions, heads, BASE, False)
    assert torch.equal(inside, y)
    back = torch.ops.gdpa.rotary(y.float(), positions, heads, BASE, True)
    torch.testing.assert_close(back, x.float(), rtol=0, atol=4 * float(size) * (1e-6 + torch.finfo(dtype).eps))


def test_in_place_touches_nothing_else() -> None:
    whole = torch.full((9, 8, 16), torch.nan)
    whole[:, 2:5] = torch.randn(9, 3, 16)
    before = whole.clone()
    torch.ops.gdpa.rotary_(whole[:, 2:], torch.arange(9), 2, BASE, False)
    assert not torch.equal(whole[1:, 2:4], before[1:, 2:4])
    assert torch.equal(whole[:, 4], before[:, 4])
    assert whole[:, :2].isnan().all()
    assert whole[:, 5:].isnan().all()


@every_layout
def test_gradients(name: str) -> None:
    x, positions = LAYOUTS[name]
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    (got,) = torch.autograd.grad((torch.ops.gdpa.rotary(mine, positions, 1, BASE, False) * weights).sum(), mine)
    turned = rotary.formula(theirs[..., :1, :], positions, BASE)
    (want,) = torch.autograd.grad((torch.cat([turned, theirs[..., 1:, :]], -2) * weights).sum(), theirs)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=5e-6)


def test_opcheck() -> None:
    x, positions = LAYOUTS["strided"]
    for inverse in (False, True):
        torch.library.opcheck(torch.ops.gdpa.rotary, (x.clone().requires_grad_(), positions, 1, BASE, inverse))
        torch.library.opcheck(torch.ops.gdpa.rotary_, (x.clone(), positions, 1, BASE, inverse))


def test_compiled_models_turn_in_place() -> None:
    """What a projection has made, and what attention's backward has: nothing is copied."""
    from torch._inductor.utils import run_fw_bw_and_get_code

    weight, cu = torch.randn(48, 16, requires_grad=True), torch.tensor([0, 5, 9, 20])

    def attend(x: Tensor, positions: Tensor) -> Tensor:
        heads = rotary.rotate(F.linear(x, weight).unflatten(-1, (-1, 8)), positions, 4, BASE)
        return gdpa.attention_varlen_qkvpacked(heads.unflatten(-2, (3, 2)), cu, "silu", backend="cpu")

    x, positions = torch.randn(20, 16), torch.arange(20)
    want = attend(x, positions)
    (gradient,) = torch.autograd.grad(want.sum(), weight)
    found = torch.compile(attend, fullgraph=True)
    got, codes = run_fw_bw_and_get_code(lambda: found(x, positions))
    torch.testing.assert_close(got, want)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, gradient)
    assert len(codes) == 2
    for code in codes:
        assert code.count("torch.ops.gdpa.rotary_.default(") == 1
        assert "clone" not in code.split("def call")[1]
        assert code.split("def call")[1].count("cpp_fused") == 0


# ---- the layer -------------------------------------------------------------------------------------------------------
def test_some_heads() -> None:
    x, positions = LAYOUTS["packed"]
    layer = gnn.Rotary(16)
    both = layer(x, positions, heads=4)
    torch.testing.assert_close(both, torch.cat([layer(x[:, :4], positions), x[:, 4:]], 1), rtol=0, atol=1e-6)
    assert torch.equal(layer(x, positions, heads=0), x)
    with pytest.raises(ValueError, match="heads must be between 0 and the 6 of x, got 7"):
        layer(x, positions, heads=7)


def test_positions_may_have_gradients() -> None:
    """Only by the formula: the operator has none."""
    x, _ = LAYOUTS["packed"]
    positions = torch.rand(37, requires_grad=True)
    gnn.Rotary(16)(x, positions).sum().backward()
    assert positions.grad is not None
    assert positions.grad.abs().sum() > 0


@pytest.mark.parametrize("kv", [None, 2])
@pytest.mark.parametrize("norm", [False, True])
def test_self_attention(kv: int | None, norm: bool) -> None:
    """q, k and v that lie in one tensor, turned there, against tensors of their own."""
    torch.manual_seed(0)
    layer = gnn.SelfAttention(32, 4, rotary=100.0, num_kv_heads=kv, qk_norm=norm, backend="cpu")
    x = gnn.Jagged.from_lengths(torch.randn(9, 32), torch.tensor([4, 0, 5]))
    place = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
    q, k, v = layer.qkv(x.values).unflatten(-1, (-1, 8)).split([4, kv or 4, kv or 4], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    q, k = (rotary.formula(t, place, 100.0) for t in (q, k))
    cu = x.cu_seqlens
    want = layer.out(gdpa.attention_varlen(q, k, v, cu, cu, backend="cpu").flatten(1))
    torch.testing.assert_close(layer(x).values, want, rtol=1e-5, atol=1e-5)
