"""Functions that cannot run inside a kernel are refused by name, before anything is launched."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gdpa
from gdpa import backends

ROW = torch.randn(8)
SCALAR = torch.tensor(2.0)


class StraightThrough(torch.autograd.Function):
    """A custom gradient, which tracing does not see."""

    @staticmethod
    def forward(ctx, s):
        return s.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Composable(torch.autograd.Function):
    """The same, in the form torch.func can take."""

    generate_vmap_rule = True

    @staticmethod
    def forward(s):
        return s.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("slope", torch.tensor(0.5))

    def forward(self, s):
        return s * self.slope


def without_grad(s):
    with torch.no_grad():
        gate = torch.sigmoid(s)
    return s * gate


def hooked(s):
    y = s * 1
    if y.requires_grad:
        y.register_hook(lambda grad: 2 * grad)
    return y


def counting(s, calls=[0]):  # noqa: B006  the state is the point
    calls[0] += 1
    return s * calls[0]


def looping(s):
    while s.sum() > 1:
        s = s / 2
    return s


def assigned(s):
    s[0] = 0.0
    return s


@torch.library.custom_op("gdpa_tests::twice", mutates_args=())
def twice(s: torch.Tensor) -> torch.Tensor:
    return 2 * s


@twice.register_fake
def _(s):
    return torch.empty_like(s)


# The function, and what the message must name.
UNSUPPORTED = {
    # not element-wise
    "sum": (lambda s: s / s.sum(-1, keepdim=True), "sum"),
    "mean": (lambda s: s - s.mean(), "mean"),
    "max": (lambda s: s - s.max(), "max"),
    "amax": (lambda s: s - s.amax(-1, keepdim=True), "amax"),
    "any": (lambda s: torch.where((s > 0).any(), s, -s), "any"),
    "std": (lambda s: s / s.std(), "std"),
    "norm": (lambda s: F.normalize(s, dim=-1), "norm"),
    "layer_norm": (lambda s: F.layer_norm(s, s.shape[-1:]), "layer_norm"),
    "softmax": (lambda s: torch.softmax(s, -1), "softmax"),
    "log_softmax": (lambda s: F.log_softmax(s, -1), "softmax"),
    "logsumexp": (lambda s: s - torch.logsumexp(s, -1, True), "logsumexp"),
    "cumsum": (lambda s: s.cumsum(-1), "cumsum"),
    "cumprod": (lambda s: s.cumprod(-1), "cumprod"),
    "flip": (lambda s: s.flip(-1), "flip"),
    "sort": (lambda s: s.sort(-1).values, "sort"),
    "topk": (lambda s: torch.topk(s, s.shape[-1]).values, "topk"),
    "matmul": (lambda s: s @ torch.ones(s.shape[-1], s.shape[-1]), "mm"),
    "triu": (lambda s: s.triu(), "triu"),
    "position": (lambda s: s * torch.arange(s.shape[-1]), "arange"),
    "roll": (lambda s: s.roll(1, -1), "roll"),
    # indexing and shapes
    "slice": (lambda s: s - s[..., :1], "slice"),
    "select": (lambda s: s * s[0, 0], "select"),
    "gather": (lambda s: s.gather(-1, torch.zeros_like(s, dtype=torch.long)), "gather"),
    "boolean index": (lambda s: s[s > 0], "control flow"),
    "index_put": (lambda s: s.index_put((s > 0,), torch.tensor(0.0)), "index_put"),
    "assignment": (assigned, "select"),
    "transpose": (lambda s: s.mT, "shape"),
    "transposed twice": (lambda s: s.mT.exp().mT, "transpose"),
    "flatten": (lambda s: s.flatten(), "shape"),
    "reshape": (lambda s: s.reshape(-1).reshape(s.shape), "view"),
    "unsqueeze": (lambda s: s[None], "shape"),
    "cat": (lambda s: torch.cat([s, s]), "shape"),
    "stack": (lambda s: torch.stack([s, s]).sum(0), "stack"),
    "pad": (lambda s: F.pad(s, (1, 0))[..., :-1], "pad"),
    "bits": (lambda s: s.view(torch.int32).view(torch.float32), "view"),
    # the shape of the scores is not the function's business
    "length": (lambda s: F.silu(s) / s.shape[-1], "shape"),
    "numel": (lambda s: s * s.numel(), "shape"),
    "ndim": (lambda s: s * s.dim(), "shape"),
    "dtype": (lambda s: s * (2.0 if s.dtype == torch.float64 else 1.0), "dtype of the scores"),
    "fixed shape": (lambda s: s + torch.zeros(3, 5).add(1).mul(s), "shape"),
    # what nobody has written
    "empty_like": (lambda s: torch.empty_like(s), "whatever was in memory"),
    "filled in parts": (lambda s: torch.empty_like(s).masked_fill_(s > 0, 1.0), "whatever was in memory"),
    "empty positions": (lambda s, *, q_idx: s + torch.empty_like(q_idx), "whatever was in memory"),
    # random
    "dropout": (lambda s: F.dropout(s, 0.5), "random"),
    "nn.Dropout": (nn.Dropout(0.1), "random"),
    "rand_like": (lambda s: s * torch.rand_like(s), "rand_like"),
    "randn": (lambda s: s + torch.randn(()), "randn"),
    "bernoulli": (lambda s: s * torch.bernoulli(torch.sigmoid(s)), "bernoulli"),
    "rrelu": (lambda s: F.rrelu(s, training=True), "random"),
    "normal_": (lambda s: s.normal_(), "random"),
    "python random": (lambda s: s * random.random(), "changed between two calls"),
    "numpy random": (lambda s: s * float(np.random.rand()), "changed between two calls"),
    # control flow that depends on data
    "if": (lambda s: s if s.sum() > 0 else -s, "control flow"),
    "if any": (lambda s: s if (s > 0).any() else -s, "control flow"),
    "while": (looping, "control flow"),
    "item": (lambda s: s * s[0, 0].item(), "select"),
    "float": (lambda s: s * float(s.sum()), "control flow"),
    "tolist": (lambda s: torch.tensor(s.tolist()), "tolist"),
    "numpy": (lambda s: torch.from_numpy(np.sin(s.detach().numpy())), "torch.exp for np.exp"),
    "numpy on tensors": (lambda s: np.exp(s), "torch.exp for np.exp"),
    "numpy of a position": (lambda s, *, q_idx: s + np.exp(q_idx), "torch.exp for np.exp"),
    "nonzero": (lambda s: s * s.nonzero().numel(), "nonzero"),
    "torch.cond": (lambda s: torch.cond(torch.tensor(True), torch.sin, torch.cos, (s,)), "cond"),
    # tensors from outside
    "captured row": (lambda s: s * ROW[: s.shape[-1]], "captures a tensor"),
    "captured scalar": (lambda s: s * SCALAR, "captures a tensor"),
    "buffer": (WithBuffer(), "captures a tensor"),
    "batch norm": (nn.BatchNorm1d(5, affine=False), "captures a tensor"),
    "constant row": (lambda s: s * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), "constant tensor"),
    "batch norm with weights": (nn.BatchNorm1d(5), "'running_mean'"),
    "Linear": (nn.Linear(5, 5), "'weight' has shape (5, 5)"),
    "weight per channel": (nn.Sequential(nn.ReLU(), nn.PReLU(7)), "'1.weight' has shape (7,)"),
    # gradients that tracing does not see
    "autograd.Function": (StraightThrough.apply, "autograd.Function"),
    "composable autograd.Function": (lambda s: Composable.apply(s), "autograd.Function"),
    "no_grad": (without_grad, "no_grad"),
    "hook": (hooked, "hook"),
    "no derivative": (lambda s: torch.heaviside(s, torch.tensor(0.5)), "heaviside"),
    "nextafter": (lambda s: torch.nextafter(s, torch.zeros_like(s)), "nextafter"),
    # outside of the table
    "lgamma": (torch.lgamma, "lgamma"),
    "bessel": (torch.special.bessel_j0, "bessel_j0"),
    "erfinv": (lambda s: torch.erfinv(torch.tanh(s)), "erfinv"),
    "frexp": (lambda s: torch.frexp(s)[0], "frexp"),
    "bit operations": (lambda s: s * (s.int() & 1), "bitwise_and"),
    "fake_quantize": (lambda s: torch.fake_quantize_per_tensor_affine(s, 0.1, 0, -128, 127), "fake_quantize"),
    "custom operator": (twice, "gdpa_tests::twice"),
    "torch.compile": (torch.compile(torch.sin, backend="eager"), "compile"),
    "complex": (lambda s: torch.exp(1j * s).real, "complex"),
    "complex abs": (lambda s: torch.complex(s, s).abs(), "complex"),
    # what is returned
    "returns a tuple": (lambda s: (s, s), "tuple"),
    "returns None": (lambda s: None, "NoneType"),
    "returns a number": (lambda s: 1.0, "float"),
    "returns bool": (lambda s: s > 0, "torch.bool"),
    "returns int": (lambda s: s.int(), "torch.int32"),
    "returns complex": (lambda s: torch.complex(s, s), "complex"),
    "returns one value": (lambda s: torch.tensor(1.0), "shape"),
    "argmax": (lambda s: s.argmax(-1), "shape"),
    # failures of its own
    "raises": (lambda s: s * (1 // 0), "ZeroDivisionError"),
    "state": (counting, "changed between two calls"),
}


@pytest.fixture
def no_launch(monkeypatch):
    """Fail if any backend is asked to compute."""

    def launched(*args):
        raise AssertionError("a backend was launched")

    for name in ("cpu", "reference", "triton"):
        monkeypatch.setattr(type(backends.get(name)), "forward", launched)
    monkeypatch.setattr("gdpa.reference.attention", launched)


def attend(fn, params=(), backend=None):
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    return gdpa.attention(q, k, v, fn, params=params, backend=backend)


@pytest.mark.parametrize(("fn", "named"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
@pytest.mark.filterwarnings("ignore")
def test_unsupported_function_is_refused_by_name(fn, named, no_launch):
    with pytest.raises(gdpa.UnsupportedActivationError) as caught:
        attend(fn)
    message = str(caught.value)
    assert named in message
    assert len(message) < 1500, "the message should be readable"


def test_refusal_holds_for_every_way_in(no_launch):
    bad = lambda s: s.softmax(-1)
    for attempt in (
        lambda: attend(bad, backend="reference"),
        lambda: attend([bad, bad]),
        lambda: attend(["gelu", bad]),
        lambda: gdpa.activation(bad),
        lambda: gdpa.explain(*torch.randn(3, 1, 2, 6, 8), bad),
    ):
        with pytest.raises(gdpa.UnsupportedActivationError, match="softmax"):
            attempt()


def test_a_bad_function_is_refused_every_time(no_launch):
    bad = lambda s: s.cumsum(-1)
    for _ in range(3):
        with pytest.raises(gdpa.UnsupportedActivationError, match="cumsum"):
            attend(bad)


def test_bad_functions_with_params(no_launch):
    a = torch.tensor(0.5)
    with pytest.raises(gdpa.UnsupportedActivationError, match="sum"):
        attend(lambda s, a: s * a.sum(), (a,))
    with pytest.raises(gdpa.UnsupportedActivationError, match="control flow"):
        attend(lambda s, a: s if a.max() > 0 else -s, (a,))


WRONG_TYPE = {
    "number": (3, TypeError, "3"),
    "tensor": (torch.ones(3), TypeError, "tensor"),
    "None": (None, TypeError, "None"),
    "dict": ({"gelu": 1}, TypeError, "gelu"),
    "unknown name": ("softmin", ValueError, "softmin"),
    "misspelt name": ("GELU", ValueError, "built-ins"),
    "empty list": ([], ValueError, "per query head"),
    "too short a list": (["gelu"], ValueError, "per query head"),
    "list of numbers": ([1, 2], TypeError, "1"),
    "no argument": (lambda: torch.ones(()), TypeError, "cannot be called"),
    "one argument too many": (lambda s, a: s * a, TypeError, "cannot be called"),
    "keyword only": (lambda s, *, a: s * a, TypeError, "keyword-only argument .a.; those are positions"),
}


@pytest.mark.parametrize(("activation", "error", "named"), WRONG_TYPE.values(), ids=WRONG_TYPE.keys())
def test_what_is_not_a_function_of_a_score(activation, error, named, no_launch):
    with pytest.raises(error, match=named):
        attend(activation)


def test_an_elementwise_operation_without_device_code_is_called_that():
    with pytest.raises(gdpa.UnsupportedActivationError, match=r"lgamma.* no device code"):
        gdpa.activation(lambda s: F.hardswish(s) + torch.lgamma(s.abs() + 1))
    with pytest.raises(gdpa.UnsupportedActivationError, match=r"lgamma.* no device code"):
        gdpa.activation(lambda s: (s > 0).float() + torch.lgamma(s))


def test_arguments_that_would_be_ignored():
    act = gdpa.activation(lambda s: s**3)
    for wrong in ({"name": "cube"}, {"triton": gdpa.TritonSource("p = s", "p = s; ds = s")}):
        with pytest.raises(TypeError, match="already"):
            gdpa.activation(act, **wrong)
    with pytest.raises(TypeError, match="name must be a string"):
        gdpa.activation(lambda s: s**3, name=5)
    with pytest.raises(TypeError, match="'gelu' is a name"):
        gdpa.activation("gelu")
    with pytest.raises(ValueError, match="dtype must be one of"):
        act.source(torch.int32)
    with pytest.raises(ValueError, match="target must be one of"):
        act.source(torch.bfloat16, "sm_90")


def test_wrong_number_of_params(no_launch):
    a = torch.tensor(0.5)
    with pytest.raises(TypeError, match="2 params"):
        attend(lambda s, a: s * a, (a, a))
    with pytest.raises(ValueError, match="takes 0"):
        attend("gelu", (a,))
    with pytest.raises(ValueError, match="takes 1"):
        attend(gdpa.activation(lambda s, a: s * a))


def test_arguments_that_nobody_gives_are_pointed_to_params_and_tables(no_launch):
    a = torch.tensor(0.5)
    pointed = r"missing a required argument: 'b'; what follows .* params=\(\.\.\.\), or by tables=\(\.\.\.\) if"
    with pytest.raises(TypeError, match=pointed):
        attend(lambda s, b, *, q_idx, kv_idx: s + b[q_idx - kv_idx + 5])
    with pytest.raises(TypeError, match=pointed):
        attend(lambda s, a, b: s * a + b, (a,))
    with pytest.raises(TypeError, match=r"too many positional arguments$"):
        attend(lambda s: s, (a,))


def test_a_tensor_of_one_calls_size_is_pointed_to_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own traceback of the failure stays out of the log."""
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", logged.append)
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [handler])
    q = torch.randn(1, 1, 8, 16)
    with pytest.raises(gdpa.UnsupportedActivationError, match="is a table, indexed by the keyword-only"):
        gdpa.attention(q, q, q, lambda s: s * torch.arange(8))
    assert not logged


@pytest.mark.parametrize(
    "fill", [lambda t: t.fill_(2.0), lambda t: t.zero_().add_(2.0), lambda t: torch.full_like(t, 2)]
)
def test_what_was_empty_and_is_filled_counts(fill) -> None:
    act = gdpa.activation(lambda s: s * fill(torch.empty_like(s)))
    s = torch.linspace(-2, 2, 7)
    assert torch.equal(act.eager(s), 2 * s)
