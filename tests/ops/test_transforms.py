"""torch.func: reverse mode and vmap work, forward mode is refused, and a function may be met first inside of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gdpa
from processes import run_program

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8, dtype=torch.float64, generator=rng) for n in (3, 4, 4))
    return q, k, v


def loss(backend: str | None, **kwargs: Any) -> Any:
    return lambda q, k, v: gdpa.attention(q, k, v, "silu", backend=backend, **kwargs).square().sum()


def same(transform: Any, *args: Tensor) -> None:
    """``transform`` of the loss gives the same with the fused backend as with the reference."""
    got, want = (transform(loss(backend))(*args) for backend in (None, "reference"))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_grad(qkv: tuple[Tensor, ...]) -> None:
    same(lambda f: torch.func.grad(f, argnums=(0, 1, 2)), *qkv)


def test_vjp(qkv: tuple[Tensor, ...]) -> None:
    same(lambda f: lambda *x: torch.func.vjp(f, *x)[1](torch.tensor(2.0, dtype=torch.float64)), *qkv)


def test_jacrev(qkv: tuple[Tensor, ...]) -> None:
    same(lambda f: torch.func.jacrev(lambda *x: torch.stack([f(*x), 2 * f(*x)])), *qkv)


def test_vmap(qkv: tuple[Tensor, ...]) -> None:
    q, k, v = qkv
    same(lambda f: torch.vmap(f, in_dims=(0, None, None)), torch.stack([q, 2 * q, q - 1]), k, v)


def test_gradients_per_sample(qkv: tuple[Tensor, ...]) -> None:
    same(lambda f: torch.vmap(torch.func.grad(f, argnums=(0, 1, 2))), *(torch.stack([t, 2 * t, t - 1]) for t in qkv))


def test_grad_of_params(qkv: tuple[Tensor, ...]) -> None:
    def gradient(backend: str | None) -> Tensor:
        def of_power(a: Tensor) -> Tensor:
            return gdpa.attention(*qkv, lambda s, a: torch.relu(s) ** a, params=(a,), backend=backend).sum()

        return torch.func.grad(of_power)(torch.tensor([1.5, 2.0], dtype=torch.float64))

    torch.testing.assert_close(gradient(None), gradient("reference"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian])
def test_forward_mode_is_refused_not_zero(transform: Any, qkv: tuple[Tensor, ...]) -> None:
    with pytest.raises(NotImplementedError, match=r"forward-mode.*backend='reference'"):
        transform(loss(None))(*qkv)
    transform(loss("reference"))(*qkv)


def test_jvp_is_refused_not_zero(qkv: tuple[Tensor, ...]) -> None:
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(loss(None), qkv, qkv)


def test_dual_numbers_are_refused_not_dropped(qkv: tuple[Tensor, ...]) -> None:
    q, k, v = qkv
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, v)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            gdpa.attention(q, k, dual)
        gdpa.attention(q, k, v)  # no tangents, no harm


@pytest.mark.parametrize("options", [{}, {"normalize": "abs"}], ids=("plain", "sums"))
def test_batched_gradients_are_refused(options: Any, qkv: tuple[Tensor, ...]) -> None:
    q, k, v = qkv
    refused = pytest.raises(NotImplementedError, match=r"batched gradients.*torch\.func\.jacrev.*backend='reference'")

    def of(backend: str | None = None) -> Any:
        return lambda q: gdpa.attention(q, k, v, "silu", backend=backend, **options).sum((0, 1, 2))

    with refused:
        torch.autograd.functional.jacobian(of(), q, vectorize=True)
    with refused:
        torch.autograd.functional.jacobian(
            lambda rows: gdpa.attention_qkvpacked(rows, "silu", **options).sum((0, 1, 2)),
            torch.randn(1, 4, 3, 2, 8, dtype=torch.float64),
            vectorize=True,
        )
    a = q.clone().requires_grad_()
    with refused:
        torch.autograd.grad(of()(a), a, torch.eye(8, dtype=torch.float64), is_grads_batched=True)
    found = torch.autograd.functional.jacobian(of("reference"), q, vectorize=True)
    torch.testing.assert_close(torch.func.jacrev(of())(q), found)


def test_grad_of_grad_is_refused(qkv: tuple[Tensor, ...]) -> None:
    q, k, v = qkv
    with pytest.raises(RuntimeError, match="double backward is not available"):
        torch.func.grad(lambda q: torch.func.grad(loss(None))(q, k, v).sum())(q)


COMPILED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "grad": (lambda f: lambda q, k, v: torch.func.grad(f)(q, k, v), {}, "eager"),
    "grad, aot": (lambda f: lambda q, k, v: torch.func.grad(f)(q, k, v), {}, "aot_eager"),
    "gradients per sample": (lambda f: lambda *x: torch.vmap(torch.func.grad(f))(*(t[None] for t in x)), {}, "eager"),
    "sums": (lambda f: lambda q, k, v: torch.func.grad(f)(q, k, v), {"normalize": "abs"}, "eager"),
    "jvp of the reference": (lambda f: lambda *x: torch.func.jvp(f, x, x), {"backend": "reference"}, "eager"),
    "around": (None, {}, "eager"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_transforms(name: str, qkv: tuple[Tensor, ...]) -> None:
    transform, options, compiler = COMPILED[name]
    f = loss(**{"backend": None, **options})
    torch._dynamo.reset()
    if transform is None:
        compiled, eager = torch.func.grad(torch.compile(f, backend=compiler)), torch.func.grad(f)
    else:
        compiled, eager = torch.compile(transform(f), fullgraph=True, backend=compiler), transform(f)
    torch.testing.assert_close(compiled(*qkv), eager(*qkv), rtol=1e-9, atol=1e-9)


def test_compiled_forward_mode_is_refused_not_zero(qkv: tuple[Tensor, ...]) -> None:
    """Neither where Dynamo sees it nor where compiled code meets it later."""
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.compile(lambda *x: torch.func.jvp(loss(None), x, x), backend="eager")(*qkv)
    for compiler in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(loss(None), backend=compiler)
        want = compiled(*qkv)
        with torch.autograd.forward_ad.dual_level():
            assert compiled(*qkv) == want
            with pytest.raises(NotImplementedError, match="forward-mode"):
                compiled(*(torch.autograd.forward_ad.make_dual(t, t) for t in qkv))


@pytest.mark.parametrize("options", [{}, {"normalize": "abs"}], ids=("plain", "sums"))
def test_tangents_of_gradients_are_refused_not_dropped(options: Any, qkv: tuple[Tensor, ...]) -> None:
    q, k, v = qkv
    with torch.autograd.forward_ad.dual_level():
        out = gdpa.attention(q.requires_grad_(), k, v, **options)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.autograd.grad(out, q, torch.autograd.forward_ad.make_dual(v[:, :, :3], v[:, :, :3]))


@pytest.mark.parametrize("options", [{}, {"normalize": "abs"}], ids=("plain", "sums"))
def test_vmap_over_nothing(options: Any, qkv: tuple[Tensor, ...]) -> None:
    q, k, v = qkv
    f, nothing = lambda q: gdpa.attention(q, k, v, **options), q.new_zeros(0, *q.shape)
    assert torch.vmap(f)(nothing).shape == (0, 2, 2, 3, 8)
    assert torch.vmap(f, in_dims=2, out_dims=1)(nothing.movedim(0, 2)).shape == (2, 0, 2, 3, 8)
    assert torch.vmap(torch.func.grad(lambda q: f(q).sum()))(nothing).shape == nothing.shape


# A function is traced where it is first met. Whatever surrounds that call must not get into the graph.
def in_grad(f: Any, x: Tensor) -> None:
    torch.func.grad(lambda x: f(x).sum())(x)


def in_vmap(f: Any, x: Tensor) -> None:
    torch.vmap(f)(x[None])


def in_fake_mode(f: Any, x: Tensor) -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        f(mode.from_tensor(x))


def in_mode(mode: Any) -> Any:
    def run(f: Any, x: Tensor) -> None:
        with mode():
            f(x)

    return run


def in_compile(f: Any, x: Tensor) -> None:
    torch.compile(f, fullgraph=True, backend="aot_eager")(x)


def in_export(f: Any, x: Tensor) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return f(x)

    program = torch.export.export(Model(), (x,))
    torch.testing.assert_close(program.module()(x), f(x))


def in_checkpoint(f: Any, x: Tensor) -> None:
    checkpoint(f, x.requires_grad_(), use_reentrant=False)
    x.requires_grad_(False)


def with_default_dtype(f: Any, x: Tensor) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        f(x)
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS = {
    "grad": in_grad,
    "vmap": in_vmap,
    "fake tensors": in_fake_mode,
    "flop counter": in_mode(lambda: FlopCounterMode(display=False)),
    "inference mode": in_mode(torch.inference_mode),
    "autocast": in_mode(lambda: torch.autocast("cpu", torch.bfloat16)),
    "default device": in_mode(lambda: torch.device("meta")),
    "default dtype": with_default_dtype,
    "activation checkpointing": in_checkpoint,
    "saved tensors on the CPU": in_mode(torch.autograd.graph.save_on_cpu),
    "anomaly mode": in_mode(torch.autograd.detect_anomaly),
    "compile": in_compile,
    "export": in_export,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("number", range(len(SURROUNDINGS)), ids=SURROUNDINGS.keys())
def test_a_function_met_first_inside(number: int) -> None:
    factor = 1.0 + number / 16  # in no other graph, so that this one is traced here

    def mine(s: Tensor) -> Tensor:
        return factor * F.softplus(s) + torch.zeros(())

    def attend(x: Tensor) -> Tensor:
        return gdpa.attention(x, x, x, mine)

    x = torch.randn(2, 2, 3, 8)
    list(SURROUNDINGS.values())[number](attend, x)
    want = factor * F.softplus(x @ x.mT / math.sqrt(8)) @ x
    torch.testing.assert_close(attend(x), want, rtol=1e-4, atol=1e-4)


def test_hooks_on_saved_tensors_are_there_again_after_tracing() -> None:
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(1) or t, lambda t: t):
        gdpa.attention(*torch.randn(3, 1, 1, 2, 8), lambda s: 0.8125 * s.sin())
        assert not seen, "the function's own tracing went through them"
        torch.randn(2, requires_grad=True).exp()
    assert seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_is_not_the_functions(dtype: torch.dtype) -> None:
    """Scores are float32 (float64 in float64 calls) whatever PyTorch makes new tensors of; a process of its own, since
    built-ins are traced once."""
    program = f"""
import torch, gdpa
from gdpa.functions.activation import from_name
torch.set_default_dtype({dtype})
for name in ("gelu", "softplus"):
    source = from_name(name).source()
    assert ".to(tl.float64)" not in source and "tl.bfloat16" not in source.split("forward_packed")[0], source
q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
exact = torch.nn.functional.gelu(q @ q.mT / 8**0.5) @ q
torch.testing.assert_close(gdpa.attention(q, q, q, "gelu"), exact, rtol=1e-12, atol=1e-12)
"""
    run_program(program)


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean")
@pytest.mark.parametrize("before", [False, True])
def test_torch_jit_cannot_record_it(qkv: tuple[Tensor, ...], before: bool) -> None:
    """Not even a call whose plan is there."""
    call = lambda q, k, v: gdpa.attention(q, k, v, "silu")
    if before:
        call(*qkv)
    with pytest.raises(NotImplementedError, match=r"torch.jit.trace cannot record .* torch.export"):
        torch.jit.trace(call, qkv)
