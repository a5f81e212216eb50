"""A layer whose function is a module computes what the module is at the call, as gdpa.attention does."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import gdpa
import gdpa.nn as gnn
from gdpa.functions import activation as activations
from gdpa.functions import fingerprint as fingerprints
from gdpa.nn import function as functions

H = 4
FACTOR = 2.0  # which a module reads
ways = pytest.mark.parametrize("way", ["eager", "compiled"])


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(0.1, 0.4, H))
        self.power = 2

    def forward(self, s: Tensor) -> Tensor:
        return torch.relu(s) ** self.power + self.slope * s


class Switch(nn.Module):
    """Another function in training."""

    kind = "tanh"

    def forward(self, s: Tensor) -> Tensor:
        if self.training:
            return torch.tanh(s) if self.kind == "tanh" else torch.sin(s)
        return s * s


class LearnedSwitch(Switch):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.3))

    def forward(self, s: Tensor) -> Tensor:
        return torch.tanh(self.slope * s) if self.training else self.slope * s * s


class ReadsGlobal(nn.Module):
    def forward(self, s: Tensor) -> Tensor:
        return torch.tanh(s) * FACTOR


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def heads() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 5, H, 8)


def called(layer: nn.Module, way: str) -> Callable[..., Tensor]:
    return torch.compile(layer, fullgraph=True, backend="eager") if way == "compiled" else layer


def expected(layer: gnn.Attention) -> Tensor:
    """What gdpa.attention makes of the module as it is now."""
    assert layer.function is not None
    x = heads().transpose(1, 2)
    return gdpa.attention(x, x, x, layer.function).transpose(1, 2)


def follows(layer: gnn.Attention, call: Callable[..., Tensor], *changes: Callable[[], Any]) -> None:
    """After each of the changes the layer computes something else than before, and what is expected."""
    x = heads()
    before = call(x, x, x)
    torch.testing.assert_close(before, expected(layer))
    for change in changes:
        change()
        now = call(x, x, x)
        torch.testing.assert_close(now, expected(layer))
        assert not torch.equal(now, before)
        before = now


@ways
@pytest.mark.parametrize(
    ("make", "name"), [(Gate, "slope"), (nn.PReLU, "weight"), (lambda: nn.PReLU(H), "weight")], ids=["own", "one", "H"]
)
def test_parametrizations(make: Any, name: str, way: str) -> None:
    layer = gnn.Attention(H, make())
    follows(
        layer, called(layer, way),
        lambda: parametrize.register_parametrization(layer.function, name, nn.Softplus()),
        lambda: parametrize.register_parametrization(layer.function, name, nn.Tanh()),
        lambda: parametrize.remove_parametrizations(layer.function, name, leave_parametrized=False),
    )  # fmt: skip


def test_gradients_of_parametrized_functions() -> None:
    layer, s = gnn.Attention(H, nn.PReLU(H)).double(), heads().double().transpose(1, 2)
    parametrize.register_parametrization(layer.function, "weight", nn.Softplus())
    (own,) = layer.function.parameters()
    x = heads().double()
    want = (layer.function(s @ s.mT / 8**0.5) @ s).transpose(1, 2)  # (B, H, L, L): heads are PReLU's channels
    found = layer(x, x, x)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), own)[0] for t in (found, want)))


@ways
@pytest.mark.parametrize("make", [Switch, LearnedSwitch])
def test_training(make: Any, way: str) -> None:
    layer = gnn.Attention(H, make())
    follows(layer, called(layer, way), layer.eval, layer.train, layer.eval)


@ways
def test_settings(way: str) -> None:
    layer = gnn.Attention(H, nn.Sequential(nn.LeakyReLU(0.1), nn.PReLU()))
    follows(layer, called(layer, way), lambda: setattr(layer.function[0], "negative_slope", 0.9))
    torch._dynamo.reset()
    layer = gnn.Attention(H, nn.Softplus())
    follows(layer, called(layer, way), lambda: setattr(layer.function, "beta", 2.0))


@ways
def test_parts(way: str) -> None:
    layer = gnn.Attention(H, nn.Sequential(nn.Tanh(), nn.PReLU()))
    follows(
        layer, called(layer, way),
        lambda: layer.function.append(nn.Softsign()),
        lambda: layer.function.__setitem__(0, nn.SiLU()),
    )  # fmt: skip


def test_what_classes_and_modules_read(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = gnn.Attention(H, Switch())
    follows(layer, layer, lambda: monkeypatch.setattr(Switch, "kind", "sin"))
    follows(layer, layer, lambda: monkeypatch.setattr(Switch, "forward", lambda self, s: torch.relu(s)))
    layer = gnn.Attention(H, ReadsGlobal())
    follows(layer, layer, lambda: monkeypatch.setitem(globals(), "FACTOR", 3.0))


def test_hooks() -> None:
    layer = gnn.Attention(H, nn.Tanh())
    follows(layer, layer, lambda: layer.function.register_forward_hook(lambda module, args, out: 2 * out))


@ways
def test_another_module(way: str) -> None:
    """Also in the place of a name, and by the name under which a layer shows its function."""
    layer = gnn.Attention(H, Gate())
    follows(
        layer, called(layer, way),
        lambda: setattr(layer, "function", nn.PReLU()),
        lambda: setattr(layer, "function", nn.SiLU()),
        lambda: setattr(layer, "activation", nn.PReLU(H)),
    )  # fmt: skip
    assert [name for name, _ in layer.named_parameters()] == ["function.weight"]
    torch._dynamo.reset()
    layer = gnn.Attention(H, "gelu")
    call, x = called(layer, way), heads()
    named = call(x, x, x)
    layer.function = nn.SiLU()
    torch.testing.assert_close(call(x, x, x), expected(layer))
    layer.function = None
    torch.testing.assert_close(call(x, x, x), named)
    layer.function = nn.SiLU()
    layer.activation = gdpa.activation(torch.tanh)
    assert layer.function is None
    torch.testing.assert_close(call(x, x, x), gnn.Attention(H, torch.tanh)(x, x, x))


def test_no_function_is_refused() -> None:
    layer = gnn.Attention(H, nn.SiLU())
    layer.function = None
    with pytest.raises(RuntimeError, match="function is None: the layer was made from a module"):
        layer(*[heads()] * 3)
    with pytest.raises(TypeError, match="cannot assign"):
        layer.function = torch.tanh  # type: ignore[assignment]


@ways
def test_modules_of_single_heads(way: str) -> None:
    shared = nn.LeakyReLU(0.1)
    layer = gnn.Attention(H, [shared, "softmax", Switch(), shared])
    call, x = called(layer, way), heads()

    def check() -> None:
        parts = layer.function
        given = [parts["0"], "softmax", parts["2"], parts["3"]]
        s = x.transpose(1, 2)
        torch.testing.assert_close(call(x, x, x), gdpa.attention(s, s, s, given).transpose(1, 2))

    check()
    shared.negative_slope = 0.5
    check()
    layer.eval()
    check()
    layer.function["3"] = nn.SiLU()
    check()
    assert "['LeakyReLU', 'exp', 'Switch', 'SiLU']" in repr(layer)
    layer.function["3"] = nn.PReLU()
    with pytest.raises(gdpa.UnsupportedActivationError, match="PReLU in it owns parameters"):
        layer(x, x, x)


@ways
def test_biases_stay_inside(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function and the biases are traced once for each state of the module."""
    traced: list[Any] = []
    real = functions.resolve
    monkeypatch.setattr(functions, "resolve", lambda *a: traced.append(a) or real(*a))
    layer = gnn.Attention(H, LearnedSwitch(), score_bias=gnn.ALiBi(H))
    call, x = called(layer, way), heads()
    outs = []
    for training in (True, False, True, False):
        layer.train(training)
        outs.append(call(x, x, x))
    assert len(traced) == 2
    for out, training in zip(outs, (True, False) * 2, strict=True):
        other = gnn.Attention(H, LearnedSwitch().train(training), score_bias=gnn.ALiBi(H))
        torch.testing.assert_close(out, other(x, x, x))


class Tilt(gnn.ScoreBias):
    """A bias that reads a number of its own."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by
        self.weight = nn.Parameter(torch.ones(1))

    def tables(self, times: Any = None) -> tuple[Tensor, ...]:
        return (self.weight,)

    def bias(self, weight: Tensor, *, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # type: ignore[override]
        return weight[0] * self.by * (q_idx - kv_idx)


PAIRS: dict[str, tuple[Callable[[], gnn.Attention], Callable[[], gnn.Attention]]] = {
    "fixed functions of other heads": (
        lambda: gnn.Attention(H, ["silu", "gelu", nn.Tanh(), "silu"]),
        lambda: gnn.Attention(H, ["gelu", "silu", nn.Tanh(), "silu"]),
    ),
    "biases": (
        lambda: gnn.Attention(H, Gate(), score_bias=[gnn.ALiBi(H), Tilt(1.0)]),
        lambda: gnn.Attention(H, Gate(), score_bias=[gnn.ALiBi(H), Tilt(-1.0)]),
    ),
    "biases of a module without parameters": (
        lambda: gnn.Attention(H, nn.Tanh(), score_bias=Tilt(1.0)),
        lambda: gnn.Attention(H, nn.Tanh(), score_bias=Tilt(-1.0)),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_compiled_code_is_shared_by_layers_that_compute_the_same(name: str) -> None:
    """One code object runs both, as it does where every block of a model is compiled by itself."""
    counter, x = CompileCounter(), heads()
    call = torch.compile(lambda layer, x: layer(x, x, x), fullgraph=True, backend=counter)
    layers = [make() for make in (*PAIRS[name], *PAIRS[name])]
    for layer in layers:
        torch.testing.assert_close(call(layer, x), layer(x, x, x))
    assert not torch.allclose(layers[0](x, x, x), layers[1](x, x, x))
    assert counter.frame_count == 2


LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "self": lambda f: gnn.SelfAttention(8, 2, f),
    "pma": lambda f: gnn.PMA(8, 2, 3, f),
    "seeds": lambda f: gnn.SeedPooling(8, 2, 3, f),
    "hstu": lambda f: gnn.HSTU(8, 2, 16, f, time_buckets=None),
    "pffn": lambda f: gnn.PFFN(8, 2, 5, 3, 8, f),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(name: str) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name](Switch()), [torch.randn(2, 5, 8), torch.randn(2, 3, 8)][: 2 if name == "pffn" else 1]
    first = layer(*x)
    layer.eval()
    second = layer(*x)
    fresh = LAYERS[name](Switch().eval())
    fresh.load_state_dict(layer.state_dict())
    assert not torch.equal(first, second)
    assert torch.equal(second, fresh.eval()(*x))


def test_nothing_is_traced_or_read_again_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    functions_of = (nn.Softplus(), Gate(), nn.Sequential(nn.PReLU(H), nn.SiLU(), Gate()), [nn.SiLU(), *["gelu"] * 3])
    layers = [gnn.Attention(H, f) for f in functions_of]
    x, read = heads(), []
    outs = [layer(x, x, x) for layer in layers]
    for where in (fingerprints, functions, activations):
        monkeypatch.setattr(where, "fingerprint", lambda *a: read.append(a))
    for layer, out in zip(layers, outs, strict=True):
        assert torch.equal(layer(x, x, x), out)
    assert not read


def test_parameters_that_become_one() -> None:
    """Names and shapes stay as they are, and so does every setting."""
    one, other = Gate(), Gate()
    with torch.no_grad():
        other.slope.mul_(-2)
    layer = gnn.Attention(H, nn.Sequential(one, other))
    follows(layer, layer, lambda: setattr(other, "slope", one.slope))


def test_copies_have_functions_of_their_own() -> None:
    layer, x, file = gnn.Attention(H, Gate(), score_bias=gnn.ALiBi(H)), heads(), io.BytesIO()
    start = layer(x, x, x)
    torch.save(layer, file)
    file.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x, x, x), start)
        twin.function.power = 3
        assert not torch.equal(twin(x, x, x), start)
        assert torch.equal(layer(x, x, x), start)
        file.seek(0)


def test_weights_by_functional_call() -> None:
    layer, x = gnn.Attention(H, Gate()), heads()
    doubled = {name: 2 * p.detach() for name, p in layer.named_parameters()}
    found = torch.func.functional_call(layer, doubled, (x, x, x))
    layer.load_state_dict(doubled)
    assert torch.equal(found, layer(x, x, x))


def test_reset_parameters_of_functions_that_changed() -> None:
    layer = gnn.Attention(H, Gate())
    layer.function = nn.PReLU(init=0.75)
    with torch.no_grad():
        layer.function.weight.zero_()
    layer.reset_parameters()
    assert layer.function.weight.item() == 0.75
    parametrize.register_parametrization(layer.function, "weight", nn.Softplus())
    with pytest.raises(RuntimeError, match=r"function \(ParametrizedPReLU\) is parametrized"):
        layer.reset_parameters()
    layer = gnn.Attention(H, nn.Sequential(nn.PReLU(init=0.75)))
    layer.function.append(nn.PReLU())
    layer.function[0].weight.data.zero_()
    layer.reset_parameters()
    assert [p.item() for p in layer.function.parameters()] == [0.75, 0.25]
    layer.function = nn.Sequential(Gate())
    layer.function.append(Gate())
    with pytest.raises(RuntimeError, match=r"function\.0 \(Gate\) has other parameters than when the layer took it"):
        layer.reset_parameters()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_programs_keep_the_function_they_were_exported_with(strict: bool, biased: bool) -> None:
    layer, x = (
        gnn.SelfAttention(8, H, LearnedSwitch(), score_bias=gnn.ALiBi(H) if biased else None),
        torch.randn(2, 5, 8),
    )
    layer.eval()(x)
    layer.train()
    want = layer(x)
    program = torch.export.export(layer, (x,), strict=strict)
    assert not [node for node in program.graph.nodes if "ones" in str(node.target)]  # of guards
    layer.eval()
    torch.testing.assert_close(program.module()(x), want)
    assert not torch.allclose(layer(x), want)


def test_padded_cores_follow_too() -> None:
    from gdpa.models.cores import PaddedEager

    layer, x = gnn.Attention(H, LearnedSwitch()), heads()
    core = PaddedEager(layer)
    torch.testing.assert_close(core(x, x, x), layer(x, x, x))
    layer.function.eval()
    torch.testing.assert_close(core(x, x, x), layer(x, x, x))
