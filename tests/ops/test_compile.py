"""torch.compile(fullgraph=True): one graph, the right numbers, and no second compilation for other lengths.

Dynamo compiles once for the first shapes and once more, with dynamic shapes, when it sees them change; then never.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import gdpa
from gdpa.testing.cases import offsets
from support import FULL, guards_defaults, takes_modules

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CAN_BUILD = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
SLOPE = 0.25
SQUARE = gdpa.activation(lambda s: torch.relu(s) ** 2)
POWER = gdpa.activation(lambda s, a: torch.relu(s) ** a)


def leaky(s: Tensor) -> Tensor:
    return torch.where(s > 0, s, 0.1 * s)


def leaky_global(s: Tensor) -> Tensor:
    return torch.where(s > 0, s, SLOPE * s)


def times(c: float) -> Callable[[Tensor], Tensor]:
    return lambda s: c * torch.sigmoid(s)


def times_default(c: float) -> Callable[[Tensor], Tensor]:
    return lambda s, c=c: c * torch.sigmoid(s)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn: Callable[..., Tensor], **kwargs: Any) -> tuple[Callable[..., Tensor], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(fn, fullgraph=True, backend=counter, **kwargs), counter


def same(fast: Callable[..., Tensor], slow: Callable[..., Tensor], leaves: tuple[Tensor, ...], *rest: Any) -> None:
    """Values and gradients of both are equal to rounding."""
    results = []
    for fn in (fast, slow):
        out = fn(*leaves, *rest)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


# ---- dense -----------------------------------------------------------------------------------------------------------
SHAPES = [(2, 5, 6), (3, 7, 9), (5, 16, 3)]  # (B, Lq, Lk)


def dense_leaves(batch: int, len_q: int, len_k: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, 2, n, 8, requires_grad=True) for n in (len_q, len_k, len_k))


ACTIVATIONS = {
    "partial": partial(F.leaky_relu, negative_slope=0.3),
    "list of functions": [leaky, F.silu],
    "tuple of one function twice": (leaky, leaky),
}
# Below, or in lists.
OTHERS = {"name": "gelu", "activation": SQUARE, "function": leaky, "torch function": F.silu, "list": ["gelu", SQUARE]}


@pytest.mark.parametrize("name", [*ACTIVATIONS, *(OTHERS if FULL else ())])
def test_dense(name: str) -> None:
    check_dense({**ACTIVATIONS, **OTHERS}[name])


@takes_modules
def test_module() -> None:
    check_dense(nn.LeakyReLU(0.3))


def check_dense(activation: Any) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdpa.attention(q, k, v, activation, causal=True)

    fast, counter = compiled(attend)
    for shape in SHAPES:
        same(fast, attend, dense_leaves(*shape))
    assert counter.frame_count == 2


NUMBERS = {
    "out_scale": lambda q, k, v: gdpa.attention(q, k, v, out_scale=1 / k.shape[2]),
    "scale": lambda q, k, v: gdpa.attention(q, k, v, scale=k.shape[2] ** -0.5),
    "window": lambda q, k, v: gdpa.attention(q, k, v, window=(k.shape[2] // 2, None)),
}


NUMBERED = [*NUMBERS] if FULL else ["out_scale", "window"]  # scale goes the way of out_scale


@pytest.mark.parametrize("attend", [NUMBERS[n] for n in NUMBERED], ids=NUMBERED)
def test_numbers_made_of_shapes_do_not_recompile(attend: Any) -> None:
    fast, counter = compiled(attend)
    for shape in SHAPES:
        same(fast, attend, dense_leaves(*shape))
    assert counter.frame_count == 2


def test_dynamic_from_the_start() -> None:
    fast, _ = compiled(gdpa.attention, dynamic=True)
    same(fast, gdpa.attention, dense_leaves(5, 6, 7))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in SHAPES[1:]:
            same(fast, gdpa.attention, dense_leaves(*shape))


def test_params_and_gqa_and_strides() -> None:
    a = torch.rand(4, requires_grad=True)

    def attend(x: Tensor, a: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), dim=1)  # (B, L, 64) as a projection gives it
        return gdpa.attention(q, k, v, POWER, params=(a,)).transpose(1, 2).flatten(2)

    fast, counter = compiled(attend)
    for batch, length in ((2, 5), (3, 7), (4, 9)):
        same(fast, attend, (torch.randn(batch, length, 64, requires_grad=True), a))
    assert counter.frame_count == 2


def test_the_reference() -> None:
    fast, counter = compiled(partial(gdpa.attention, backend="reference"))
    for shape in SHAPES:
        same(fast, gdpa.attention, dense_leaves(*shape))
    assert counter.frame_count == 2


@pytest.mark.skipif(not CAN_BUILD, reason="Inductor needs a C++ compiler and Python's headers")
@torch._inductor.config.patch(cpp_cache_precompile_headers=False)  # of two small files that takes longer than they do
def test_inductor() -> None:
    """Which chooses the strides of what it computes, and must leave those of q, k and v as the operator was traced."""
    a = torch.rand(2, requires_grad=True)

    def attend(x: Tensor, a: Tensor) -> Tensor:
        q, k, v = (2 * x).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, dim=1)
        return gdpa.attention(q, k, v, POWER, params=(a,), out_scale=1 / x.shape[1])

    fast = torch.compile(attend, fullgraph=True, dynamic=True)
    same(fast, attend, (torch.randn(3, 5, 48, requires_grad=True), a))
    with torch._dynamo.config.patch(error_on_recompile=True):
        same(fast, attend, (torch.randn(4, 7, 48, requires_grad=True), a))


def test_autocast() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return gdpa.attention(q, k, v)

    x = dense_leaves(*SHAPES[0])
    out = compiled(attend)[0](*x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attend(*x))


# ---- varlen and nested -----------------------------------------------------------------------------------------------
LENGTHS = [((3, 5, 2), (4, 1, 6)), ((7, 3, 2, 9), (1, 5, 3, 8)), ((11, 3), (4, 13))]


def packed_leaves(len_q: tuple[int, ...], len_k: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(sum(n), 2, 8, requires_grad=True) for n in (len_q, len_k, len_k))


def nest(t: Tensor, cu: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(t, cu).transpose(1, 2)


def varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Tensor:
    return gdpa.attention_varlen(q, k, v, cu_q, cu_k, "silu")


def varlen_bounded(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Tensor:
    return gdpa.attention_varlen(
        q, k, v, cu_q, cu_k, leaky, max_seqlen_q=max_q, max_seqlen_k=max_k, out_scale=1 / max_k, causal=True
    )


def nested_inside(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Tensor:
    out = gdpa.attention(nest(q, cu_q), nest(k, cu_k), nest(v, cu_k), ["silu", SQUARE])
    return out.transpose(1, 2).values()


@pytest.mark.parametrize("attend", [varlen_bounded, nested_inside, *([varlen] if FULL else [])])
def test_packed(attend: Callable[..., Tensor]) -> None:
    fast, counter = compiled(attend)
    for len_q, len_k in LENGTHS:
        cu_q, cu_k = (offsets(n, dtype=torch.int64) for n in (len_q, len_k))
        same(fast, attend, packed_leaves(len_q, len_k), cu_q, cu_k, max(len_q), max(len_k))
    assert counter.frame_count == 2


def test_shared_queries_and_dense_keys() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        pooled = gdpa.attention_varlen(q, k, v, None, cu, "silu")  # (B * Lq, H, D)
        blocks = pooled.unflatten(0, (cu.shape[0] - 1, q.shape[0]))
        return gdpa.attention_varlen(k, blocks, blocks, cu, None, "relu")

    fast, counter = compiled(attend)
    for n, (lengths, _) in enumerate(LENGTHS):
        q, k, v = (torch.randn(rows, 2, 8, requires_grad=True) for rows in (3 + n, sum(lengths), sum(lengths)))
        same(fast, attend, (q, k, v), offsets(lengths))
    assert counter.frame_count == 2


def test_nested_arguments() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdpa.attention(q, k, v) + q

    fast, counter = compiled(attend)
    for len_q, len_k in LENGTHS:
        leaves = packed_leaves(len_q, len_k)
        cu_q, cu_k = (offsets(n, dtype=torch.int64) for n in (len_q, len_k))

        def on_rows(fn: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, cu: Any = (cu_q, cu_k)) -> Tensor:
            return fn(nest(q, cu[0]), nest(k, cu[1]), nest(v, cu[1])).values()

        same(partial(on_rows, fast), partial(on_rows, attend), leaves)
    assert counter.frame_count == 2


# ---- functions that read something -----------------------------------------------------------------------------------
def attend_with(q: Tensor, k: Tensor, v: Tensor, activation: Any) -> Tensor:
    return gdpa.attention(q, k, v, activation)


def changing(name: str, functions: list[Any], *marks: Any) -> Any:
    return pytest.param(functions, marks=marks, id=name)


@pytest.mark.parametrize(
    "functions",
    [
        changing("closure", [times(c) for c in (2.0, 3.0, 4.0, 2.0)]),
        changing("closure over an int", [times(c) for c in (2, 3, 4, 2)]),
        changing("default argument", [times_default(c) for c in (2.0, 3.0, 4.0, 2.0)], guards_defaults),
        changing("module", [nn.LeakyReLU(c) for c in (0.1, 0.2, 0.3, 0.1)], takes_modules),
        changing("activation", [gdpa.activation(times(c)) for c in (2.0, 3.0, 2.0)]),
        changing("name", ["relu", "silu", "relu"]),
    ],
)
def test_another_function_of_the_same_code_is_another_function(functions: list[Any]) -> None:
    """Dynamo guards a function's code, not what it closes over: compiled code would go on with the first one."""
    fast, _ = compiled(attend_with)
    x = dense_leaves(*SHAPES[0])
    for function in functions:
        torch.testing.assert_close(fast(*x, function), attend_with(*x, function))


def test_a_changed_global_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, _ = compiled(partial(gdpa.attention, activation=leaky_global))
    x = dense_leaves(*SHAPES[0])
    for slope in (0.25, 0.5, 0.75, 0.25):
        monkeypatch.setitem(globals(), "SLOPE", slope)
        torch.testing.assert_close(fast(*x), gdpa.attention(*x, leaky_global))


@takes_modules
def test_a_changed_module_is_noticed() -> None:
    module = nn.LeakyReLU(0.1)
    fast, _ = compiled(partial(gdpa.attention, activation=module))
    x = dense_leaves(*SHAPES[0])
    for slope in (0.1, 0.2, 0.3):
        module.negative_slope = slope
        torch.testing.assert_close(fast(*x), gdpa.attention(*x, module))


def test_the_same_function_made_anew_does_not_recompile() -> None:
    fast, counter = compiled(attend_with)
    x = dense_leaves(*SHAPES[0])
    for _ in range(4):
        fast(*x, times(2.0))
    assert counter.frame_count == 1


def test_a_lambda_in_compiled_code() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdpa.attention(q, k, v, lambda s: torch.relu(s) * 2)

    fast, counter = compiled(attend)
    for shape in SHAPES:
        same(fast, attend, dense_leaves(*shape))
    assert counter.frame_count == 2


def attend_inner(q: Tensor, k: Tensor, v: Tensor, c: float) -> Tensor:
    return gdpa.attention(q, k, v, lambda s: c * torch.sigmoid(s))


def attend_partial(q: Tensor, k: Tensor, v: Tensor, c: float) -> Tensor:
    return gdpa.attention(q, k, v, partial(F.leaky_relu, negative_slope=c))


@pytest.mark.parametrize("attend", [attend_inner, attend_partial])
def test_a_closure_made_in_compiled_code_is_right_or_refused(attend: Callable[..., Tensor]) -> None:
    """A number that Dynamo leaves open (the second value it sees) cannot go into a graph; params can."""
    fast, _ = compiled(attend)
    x = dense_leaves(*SHAPES[0])
    torch.testing.assert_close(fast(*x, 2.0), attend(*x, 2.0))
    for c in (3.0, 4.0):
        try:
            out = fast(*x, c)
        except torch._dynamo.exc.TorchDynamoException:
            continue
        torch.testing.assert_close(out, attend(*x, c))


@takes_modules
@pytest.mark.parametrize("activation", [leaky, nn.LeakyReLU(0.2), nn.PReLU(2)], ids=["function", "module", "learned"])
def test_functions_inside_of_activation_checkpointing(activation: Any) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = lambda q_idx, kv_idx: q_idx >= kv_idx
        inner = lambda *x: gdpa.attention(*x, activation, mask=causal)
        return checkpoint(inner, q, k, v, use_reentrant=False)

    fast, _ = compiled(attend)
    same(fast, attend, dense_leaves(*SHAPES[0]))


def test_a_number_that_changes_inside_of_checkpointing_is_right_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo takes no mode there, by which it would be made a constant."""
    attend = lambda *x: checkpoint(lambda *y: gdpa.attention(*y, leaky_global), *x, use_reentrant=False)
    fast, _ = compiled(attend)
    x = dense_leaves(*SHAPES[0])
    torch.testing.assert_close(fast(*x), attend(*x))
    for slope in (0.5, 0.75, 0.25):
        monkeypatch.setitem(globals(), "SLOPE", slope)
        try:
            out = fast(*x)
        except torch._dynamo.exc.TorchDynamoException:
            continue
        torch.testing.assert_close(out, attend(*x))


class Scaled:
    scale = 1.0

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, s: Tensor) -> Tensor:
        return torch.relu(s) * self.scale


LEAKY, SETTINGS = nn.LeakyReLU(0.1), {"scale": 1.0}
scaled = lambda s: torch.relu(s) * SETTINGS["scale"]


def make_module() -> Any:
    return nn.Sequential(nn.ReLU(), nn.Tanh())


def make_object() -> Any:
    return Scaled(3.0)


def change_module() -> Any:
    LEAKY.negative_slope = 0.5
    return LEAKY


def change_setting() -> Any:
    SETTINGS["scale"] = 3.0
    return scaled


def change_global() -> Any:
    global SLOPE
    SLOPE = 0.75
    return leaky_global


@takes_modules
@pytest.mark.parametrize("change", [make_module, make_object, change_module, change_setting, change_global])
def test_what_compiled_code_makes_or_changes_is_refused(
    change: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo keeps it back until the code has run: Python sees an empty Sequential, and the old numbers."""
    monkeypatch.setattr(LEAKY, "negative_slope", 0.1)
    monkeypatch.setitem(SETTINGS, "scale", 1.0)
    monkeypatch.setitem(globals(), "SLOPE", 0.25)
    fast, _ = compiled(lambda *x: gdpa.attention(*x, change()))
    with pytest.raises(Exception, match="the activation reads what the code being compiled makes or changes itself"):
        fast(*dense_leaves(*SHAPES[0]))


@takes_modules
def test_an_attribute_that_is_not_there_yet_is_explained() -> None:
    fast, _ = compiled(lambda *x: gdpa.attention(*x, nn.GELU()))
    with pytest.raises(Exception, match="If it is what the code being compiled makes"):
        fast(*dense_leaves(*SHAPES[0]))


def in_place(s: Tensor) -> Tensor:
    return s.mul_(0.5).sigmoid_()


def test_other_changes_of_compiled_code_refuse_nothing() -> None:
    state = {"calls": 0}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state["calls"] += 1
        return gdpa.attention(q, k, v, in_place)

    fast, _ = compiled(attend)
    x = dense_leaves(*SHAPES[0])
    torch.testing.assert_close(fast(*x), gdpa.attention(*x, in_place))
    assert state["calls"] == 1


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"activation": "swosh"}, "activation='swosh' is unknown"),
        ({"activation": lambda s: torch.softmax(s, -1)}, "softmax"),
        ({"activation": ["relu"]}, "activation is a list of length 1"),
        ({"window": (-1, 0)}, "window's left bound"),
        ({"scale": float("nan")}, "scale must be finite"),
    ],
)
def test_bad_arguments_are_refused_while_compiling(kwargs: dict[str, Any], words: str) -> None:
    fast, _ = compiled(partial(gdpa.attention, **kwargs))
    with pytest.raises(Exception, match=words):
        fast(*dense_leaves(*SHAPES[0]))


def test_bad_offsets_are_refused_by_compiled_code() -> None:
    fast, _ = compiled(varlen)
    cu = offsets((3, 4))
    x = packed_leaves((3, 4), (3, 4))
    fast(*x, cu, cu, 4, 4)
    with pytest.raises(ValueError, match="cu_seqlens_q must start at 0"):
        fast(*x, cu + 1, cu, 4, 4)


def test_double_backward_is_refused() -> None:
    x = dense_leaves(*SHAPES[0])
    (dq,) = torch.autograd.grad(compiled(gdpa.attention)[0](*x).sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(dq.sum(), x[1])


# ---- export ----------------------------------------------------------------------------------------------------------
def test_export() -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return gdpa.attention(q, k, v, SQUARE, out_scale=1 / k.shape[2])

    batch, len_q, len_k = (torch.export.Dim(name, min=2) for name in ("batch", "len_q", "len_k"))
    dims = ({0: batch, 2: len_q}, {0: batch, 2: len_k}, {0: batch, 2: len_k})
    program = torch.export.export(Model(), dense_leaves(*SHAPES[0]), dynamic_shapes=dims)
    x = dense_leaves(*SHAPES[1])
    torch.testing.assert_close(program.module()(*x), Model()(*x))
