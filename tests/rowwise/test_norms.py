"""Backward of norms in one pass, against PyTorch's own in float64; and the layers and models that use it."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gdpa.nn as gnn
from gdpa import rowwise
from gdpa.bench.functions import benchmark_function
from gdpa.bench.models import cases as model_cases
from gdpa.models import joining
from gdpa.nn import pffn
from gdpa.nn import rowwise as nn_rowwise
from gdpa.rowwise import norms, rotary
from support import FULL, GPU, INTERPRET

pytestmark = [pytest.mark.triton] if INTERPRET else []
TINY = replace(
    model_cases.CPU_SCALE, batch=4, rows=16, dim=16, units=4, window=3, seeds=4, tokens=2, context=8, hidden=8,
    items=100, batches=2,
)  # fmt: skip
F32, F16 = torch.float32, torch.float16
SHAPES = {"few columns": (23, 5), "a power of 2": (9, 512), "more": (11, 1032), "one row": (1, 96), "dense": (2, 3, 40)}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = F32, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * scale + shift).to(dtype)


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [t.double().requires_grad_() for t in tensors]


def close(got: Tensor, want: Tensor, dtype: torch.dtype = F32) -> None:
    """To the rounding of the result, and a few of float32 on the way."""
    assert got.dtype == dtype
    scale = float(want.square().mean().sqrt()) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=4e-6 * scale)


# ---- operators -------------------------------------------------------------------------------------------------------
@every_shape
@pytest.mark.parametrize("dtypes", [(F32, F32), (F16, F32), (F32, F16)], ids=["wide", "x narrow", "dz narrow"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_norm_backward(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], beside: bool) -> None:
    """Rows that are far from centred, as sums of many layers may be."""
    x, dz = draw(shape, 0, dtypes[0], 3.0, 5.0), draw(shape, 1, dtypes[1])
    weight, bias, more = draw(shape[-1:], 2, shift=1.0), draw(shape[-1:], 3), draw(shape, 4) if beside else None
    exact = doubles(x, weight, bias)
    F.layer_norm(exact[0], shape[-1:], exact[1], exact[2], 1e-5).backward(dz.double())
    dx, dw, db = torch.ops.gdpa.norm_backward(dz, x, weight, more, 1e-5, True)
    close(dx, exact[0].grad + (0 if more is None else more.double()), dtypes[0])
    close(dw, exact[1].grad)
    close(db, exact[2].grad)


@every_shape
def test_norm_backward_without_weights_or_means(shape: tuple[int, ...]) -> None:
    x, dz, weight = draw(shape, 0, shift=1.0), draw(shape, 1), draw(shape[-1:], 2)
    (exact,) = doubles(x)
    F.layer_norm(exact, shape[-1:], eps=1e-3).backward(dz.double())
    dx, dw, db = torch.ops.gdpa.norm_backward(dz, x, None, None, 1e-3, True)
    close(dx, exact.grad)
    assert dw.numel() == db.numel() == 0
    exact, exact_w = doubles(x, weight)
    F.rms_norm(exact, shape[-1:], exact_w, 1e-3).backward(dz.double())
    dx, dw, _ = torch.ops.gdpa.norm_backward(dz, x, weight, None, 1e-3, False)
    close(dx, exact.grad)
    close(dw, exact_w.grad)


@every_shape
@pytest.mark.parametrize("dtype", [F32, F16], ids=["wide", "o narrow"])
def test_add_normed_backward(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, o, weight, dy = draw(shape, 0, scale=2.0, shift=-3.0), draw(shape, 1, dtype), draw(shape[-1:], 2), draw(shape, 3)
    exact, exact_o, exact_w = doubles(x, o, weight)
    n = F.layer_norm(exact, shape[-1:], eps=1e-4)
    (exact + F.rms_norm(exact_o + n, shape[-1:], exact_w, 1e-3)).backward(dy.double())
    dx, do, dw, *none = torch.ops.gdpa.add_normed_backward(dy, x, o, weight, None, None, 1e-4, 1e-3, 0.0)
    close(dx, exact.grad)
    close(do, exact_o.grad, dtype)
    close(dw, exact_w.grad)
    assert [t.numel() for t in none] == [0, 0]


@every_shape
@pytest.mark.parametrize("dtype", [F32, F16], ids=["wide", "o and dz narrow"])
def test_add_normed_backward_with_what_follows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, o, dy, dz = draw(shape, 0, scale=2.0, shift=-3.0), draw(shape, 1, dtype), draw(shape, 3), draw(shape, 4, dtype)
    c = shape[-1:]
    weight, weight_z, bias_z = draw(c, 2), draw(c, 5), draw(c, 6)
    exact, exact_o, *exact_w = doubles(x, o, weight, weight_z, bias_z)
    y = exact + F.rms_norm(exact_o + F.layer_norm(exact, c, eps=1e-4), c, exact_w[0], 1e-3)
    z = F.layer_norm(y, c, exact_w[1], exact_w[2], 1e-2)
    torch.autograd.backward((y, z), (dy.double(), dz.double()))
    dx, do, *dw = torch.ops.gdpa.add_normed_backward(dy, x, o, weight, dz, weight_z, 1e-4, 1e-3, 1e-2)
    close(dx, exact.grad)
    close(do, exact_o.grad, dtype)
    for got, want in zip(dw, exact_w, strict=True):
        close(got, want.grad)


def test_any_strides_and_no_rows() -> None:
    x, weight = draw((6, 8), 0), draw((8,), 1)
    apart, expanded = draw((8, 6), 2).mT, torch.ones(()).expand(6, 8)
    for dz in (apart, expanded):
        for got, want in zip(
            torch.ops.gdpa.norm_backward(dz, x.mT.contiguous().mT, weight, apart, 1e-5, True),
            torch.ops.gdpa.norm_backward(dz.contiguous(), x, weight, apart.contiguous(), 1e-5, True),
            strict=True,
        ):
            torch.testing.assert_close(got, want)
    dx, dw, db = torch.ops.gdpa.norm_backward(x[:0], x[:0], weight, None, 1e-5, True)
    assert dx.shape == (0, 8)
    assert dw.abs().sum() == db.abs().sum() == 0
    dx, do, *dw = torch.ops.gdpa.add_normed_backward(x[:0], x[:0], x[:0], weight, x[:0], weight, 1e-5, 1e-5, 1e-5)
    assert dx.shape == do.shape == (0, 8)
    assert all(t.shape == (8,) and t.abs().sum() == 0 for t in dw)


def test_opcheck() -> None:
    x, weight = draw((6, 8), 0), draw((8,), 1)
    torch.library.opcheck(torch.ops.gdpa.norm_backward, (x, x.half(), weight, x, 1e-5, True))
    torch.library.opcheck(torch.ops.gdpa.norm_backward, (x, x, None, None, 1e-5, True))
    for more in ((None, None), (x.half(), weight)):
        args = (x, x, x.half(), weight, *more, 1e-5, 1e-5, 1e-5)
        torch.library.opcheck(torch.ops.gdpa.add_normed_backward, args)


def test_double_backward_is_refused() -> None:
    x, weight = draw((6, 8), 0).requires_grad_(), draw((8,), 1)
    (dx,) = torch.autograd.grad(norms.normed(x, weight, None, 1e-5).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="norms on a GPU cannot be differentiated again"):
        dx.sum().backward()


# ---- functions, eager and compiled -----------------------------------------------------------------------------------
def chain(x: Tensor, o: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """All functions, one after another."""
    x = norms.add_normed(x, o, F.layer_norm(x, x.shape[-1:]), w, 1e-5, 1e-5)
    x, z = norms.normed_beside(x, w, b, 1e-5)
    x = x + norms.normed(torch.tanh(z), w, b, 1e-5)
    x, z = norms.add_normed_beside(x, o, F.layer_norm(x, x.shape[-1:]), w, 1e-5, 1e-5, 2 * w, b, 1e-5)
    return x * torch.tanh(z)


def plain_chain(x: Tensor, o: Tensor, w: Tensor, b: Tensor) -> Tensor:
    c = x.shape[-1:]
    x = x + F.rms_norm(o + F.layer_norm(x, c), c, w, 1e-5)
    x = x + F.layer_norm(torch.tanh(F.layer_norm(x, c, w, b)), c, w, b)
    x = x + F.rms_norm(o + F.layer_norm(x, c), c, w, 1e-5)
    return x * torch.tanh(F.layer_norm(x, c, 2 * w, b))


def gradients(f: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = f(*leaves)
    return [y.detach(), *torch.autograd.grad((y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum(), leaves)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_functions(compiled: bool) -> None:
    inputs = [draw((7, 24), 0), draw((7, 24), 1), draw((24,), 2, shift=1.0), draw((24,), 3)]
    # Without a GPU Inductor would compile torch's own operations, for 20 s, or call an interpreted kernel as it stands.
    backend = "inductor" if FULL or (GPU and not INTERPRET) else "aot_eager"
    found = gradients(torch.compile(chain, fullgraph=True, backend=backend) if compiled else chain, *inputs)
    for got, want in zip(found, gradients(plain_chain, *(t.double() for t in inputs)), strict=True):
        close(got, want)


def test_what_goes_to_a_layer_is_narrow_under_autocast() -> None:
    x, weight = draw((7, 24), 0), draw((24,), 1)
    with torch.autocast("cpu", torch.bfloat16):
        pairs = norms.normed_beside(x, weight, None, 1e-5), gnn.LayerNorm(24)(x, beside=True)
    for same, z in pairs:
        assert (same.dtype, z.dtype) == (torch.float32, torch.bfloat16)


def test_the_layer_is_nn_layer_norm() -> None:
    x, mine, theirs = draw((7, 24), 0), gnn.LayerNorm(24), torch.nn.LayerNorm(24)
    mine.load_state_dict(theirs.state_dict())
    assert torch.equal(mine(x), theirs(x))
    same, z = mine(x, beside=True)
    assert torch.equal(same, x)
    assert torch.equal(z, theirs(x))
    with torch.no_grad():
        assert torch.equal(mine(x), theirs(x))


def test_norms_of_more_dimensions_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn_rowwise, "has_kernel", lambda *tensors: True)
    x, norm = draw((7, 3, 8), 0), gnn.LayerNorm((3, 8), elementwise_affine=False)
    assert torch.equal(norm(x), F.layer_norm(x, (3, 8)))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm(x[..., :5])


@pytest.mark.parametrize("norm", [False, True])
def test_pffn_with_what_follows(norm: bool) -> None:
    torch.manual_seed(0)
    layer, then = gnn.PFFN(16, 2, 4, 2, 8, norm=norm, backend="cpu"), gnn.LayerNorm(16)
    x, context = draw((9, 16), 0), draw((2, 2, 8), 1)
    parameters = [*layer.parameters(), *then.parameters()]

    def run(together: bool) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        rows = gnn.Jagged.from_lengths(leaf, torch.tensor([4, 5]))
        if together:
            y, z = (t.values for t in layer(rows, context, then=then))
        else:
            y = layer(rows, context).values
            z = then(y)
        grads = torch.autograd.grad((y * torch.tanh(z)).sum(), (leaf, *parameters), allow_unused=True)
        return [y, z, *(g for g in grads if g is not None)]

    for got, want in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_pffn_joins_norms_of_one_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are narrower than weights y may not be: the norm that follows has a pass of its own."""
    joined: list[Any] = []
    inner = pffn.add_normed_beside
    monkeypatch.setattr(pffn, "has_kernel", lambda *tensors: True)
    monkeypatch.setattr(pffn, "add_normed_beside", lambda *args: joined.append(args) or inner(*args))
    rows = gnn.Jagged.from_lengths(draw((9, 16), 0, dtype), torch.tensor([4, 5]))
    with torch.autocast("cpu", torch.bfloat16):
        _, z = gnn.PFFN(16, 2, 4, 2, 8, backend="cpu")(rows, draw((2, 2, 8), 1), then=gnn.LayerNorm(16))
    assert z.values.dtype == torch.bfloat16
    assert bool(joined) == (dtype == F32)


# ---- in models -------------------------------------------------------------------------------------------------------
def losses(name: str, steps: int) -> list[float]:
    """Of a tiny model that trains."""
    case = model_cases.ModelCase(name, "uniform", TINY)
    model: Any = model_cases.make_model(name, TINY, benchmark_function("gelu"), "cpu", backend="cpu")
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    batches = model_cases.make_batches(case, "cpu")
    for i in range(steps):
        batch = batches[i % len(batches)]
        loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("name", model_cases.MODELS)
def test_losses_are_those_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels (where they are interpreted), and of rows that are picked: over some steps."""
    steps = 8 if FULL else 6
    with_them = losses(name, steps)
    monkeypatch.setattr(norms, "has_kernel", lambda *tensors: False)
    monkeypatch.setattr(rotary, "has_kernel", lambda x: False)
    monkeypatch.setattr(joining, "pick", lambda x, index: (x, x.index_select(0, index)))
    without = losses(name, steps)
    assert without[-2] < without[0]  # it learns
    torch.testing.assert_close(torch.tensor(with_them), torch.tensor(without), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", rowwise.CHOICES)
def test_where_operators_are_used(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all kinds, in a layer that is compiled, as a GPU would have it."""
    monkeypatch.setattr(rowwise, "where", where)
    assert rowwise.wanted() == (where != "off")
    for module in (norms, rotary):
        monkeypatch.setattr(module, "has_kernel", lambda *tensors: torch.compiler.is_compiling())
    norm, attention = gnn.LayerNorm(16), gnn.SelfAttention(16, 2, rotary=100.0, backend="cpu")
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.append("\n".join(m.code for m in graph.modules() if isinstance(m, torch.fx.GraphModule)))
        return graph.forward

    def layer(x: Tensor) -> Tensor:
        x, z = norm(x, beside=True)
        return x + attention(z)

    torch._dynamo.reset()
    torch.compile(layer, backend=backend, fullgraph=True)(draw((2, 5, 16), 0).requires_grad_())
    assert ("norm_backward" in seen[0]) == ("rotary_" in seen[0]) == (where == "on")


def test_other_choices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rowwise.VARIABLE, "compiled")
    with pytest.raises(ValueError, match="GDPA_ROWWISE must be one of on, eager, off, got 'compiled'"):
        runpy.run_path(rowwise.__file__)


def test_ends_of_sequences() -> None:
    lengths, parts = [5, 3, 6], [[2, 1], [0, 1], [1, 3]]  # of each sequence: two tokens before them, then two parts
    x = gnn.Jagged.from_lengths(draw((14, 4), 0).requires_grad_(), torch.tensor(lengths))
    starts = torch.tensor([[2, 7, 10], [4, 7, 11]], dtype=torch.int32)
    same, cls, recent = joining.ends(x, 2, starts, 2)
    assert torch.equal(same.values, x.values)
    for b, sequence in enumerate(x.unbind()):
        assert torch.equal(cls[b], sequence[:2])
        first, second = sequence[2:].split(parts[b])
        for part, got in ((first, recent[b, :2]), (second, recent[b, 2:])):
            want = torch.cat([part.flip(0), torch.zeros(2, 4)])[:2]
            torch.testing.assert_close(got, want)
    (got,) = torch.autograd.grad((same.values.square().sum() + (3 * cls).sum() + (5 * recent).sum()), x.values)
    counts = torch.tensor([3, 3, 5, 5, 5, 3, 3, 5, 3, 3, 5, 0, 5, 5]).float()
    torch.testing.assert_close(got, 2 * x.values.detach() + counts[:, None])
