"""nn.Modules as functions: their parameters are params of the operator, and parts of the layers that hold them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gdpa
from gdpa.functions import activation as activations
from gdpa.spec import load, load_function
from support import takes_modules

H = 4


class Gate(nn.Module):
    """relu(s)^power + slope * s."""

    def __init__(self, shape=(), power=2):
        super().__init__()
        self.slope = nn.Parameter(
            torch.full(shape, 0.3) + 0.1 * torch.arange(4.0)[: torch.Size(shape).numel()].view(shape)
        )
        self.power = power

    def forward(self, s):
        return torch.relu(s) ** self.power + self.slope * s


class Mixed(nn.Module):
    """A param, a parameter, a table and a position."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, s, shift, table, *, kv_idx):
        return F.silu(s + shift) * self.weight + table[kv_idx]


def tensors(*shape, n=3):
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for _ in range(n)]


def dense():
    return tensors(2, H, 6, 8)


def compare(module, function, per_head=()):
    """Values and gradients of attention with ``module`` and of the formula."""
    q, k, v = dense()
    out = gdpa.attention(q, k, v, module)
    own = list(module.parameters())
    grads = torch.autograd.grad(out.sin().sum(), [q, k, v, *own])
    s = q @ k.mT / 8**0.5
    numbers = [p if p.dim() == 0 or p.numel() == 1 else p[:, None, None] for p in own]
    want = function(s, *numbers) @ v
    assert torch.allclose(out, want, rtol=1e-6)
    for got, expected in zip(grads, torch.autograd.grad(want.sin().sum(), [q, k, v, *own]), strict=True):
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (H,)], ids=str)
def test_gradients_reach_the_parameters(shape):
    compare(Gate(shape).double(), lambda s, slope: torch.relu(s) ** 2 + slope * s)


@pytest.mark.parametrize("count", [1, H])
def test_prelu_has_a_weight_per_head_as_torch_has_it_per_channel(count):
    module = nn.PReLU(count).double()
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.1, 0.4, count))
    q, k, v = dense()
    out = gdpa.attention(q, k, v, module)
    assert torch.allclose(out, module(q @ k.mT / 8**0.5) @ v, rtol=1e-6)  # (B, H, Lq, Lk): heads are channels


def test_a_prelu_with_a_forward_of_its_own_is_not_taken_for_prelu():
    class Squared(nn.PReLU):
        def forward(self, s):
            return torch.where(s > 0, s * s, self.weight * s)

    compare(Squared().double(), lambda s, w: torch.where(s > 0, s * s, w * s))


def test_parts_of_a_module_are_lifted_in_the_order_of_its_parameters():
    module = nn.Sequential(Gate(), nn.PReLU(), nn.Tanh(), Gate((H,), power=3)).double()
    compare(
        module,
        lambda s, a, b, c: (lambda t: torch.relu(t) ** 3 + c * t)(
            torch.tanh((lambda t: torch.where(t > 0, t, b * t))(torch.relu(s) ** 2 + a * s))
        ),
    )


def test_params_come_first_then_parameters_then_tables():
    module, (q, k, v) = Mixed().double(), tensors(5, 2, 8)
    shift, table = torch.tensor([0.2, 0.4], dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    cu = torch.tensor([0, 2, 5])
    found = gdpa.attention_varlen(q, k, v, cu, cu, module, params=(shift,), tables=(table,))

    def plain(s, shift, weight, table, *, kv_idx):
        return F.silu(s + shift) * weight + table[kv_idx]

    want = gdpa.attention_varlen(q, k, v, cu, cu, plain, params=(shift, module.weight), tables=(table,))
    assert torch.equal(found, want)
    found.sum().backward()
    assert module.weight.grad is not None


def test_a_module_is_traced_once_and_again_when_its_settings_change(monkeypatch):
    traced = []
    monkeypatch.setattr(activations, "_trace", lambda *a, real=activations._trace: traced.append(a) or real(*a))
    monkeypatch.setattr(activations, "_stored", lambda *a: None)
    module, (q, k, v) = Gate(power=2.25), dense()
    module.double()
    outs = []
    for power in (2.25, 2.25, 2.5, 2.25):
        module.power = power
        outs.append(gdpa.attention(q, k, v, module))
    assert len(traced) == 2
    assert torch.equal(outs[0], outs[3])
    assert not torch.equal(outs[0], outs[2])


def test_parts_of_a_module_are_traced_once_and_again_when_their_settings_change(monkeypatch):
    traced = []
    monkeypatch.setattr(activations, "_trace", lambda *a, real=activations._trace: traced.append(a) or real(*a))
    monkeypatch.setattr(activations, "_stored", lambda *a: None)
    module, (q, k, v) = nn.Sequential(nn.Sequential(), Gate(power=2.125), nn.PReLU(), nn.Tanh()).double(), dense()
    outs = []
    for power in (2.125, 2.125, 2.5, 2.125):
        module[1].power = power
        outs.append(gdpa.attention(q, k, v, module))
    assert len(traced) == 2
    assert torch.equal(outs[0], outs[3])
    assert not torch.equal(outs[0], outs[2])


def test_which_parameters_are_one_is_part_of_a_module():
    """Of three parts two share theirs: the parameters have the same names whichever of the two it is."""
    q, k, v = dense()
    for tied in (0, 1):
        parts = [Gate(power=1.75).double() for _ in range(3)]
        with torch.no_grad():
            parts[1].slope.fill_(0.75)
        parts[2].slope = parts[tied].slope
        module = nn.Sequential(*parts)
        assert torch.allclose(gdpa.attention(q, k, v, module), module(q @ k.mT / 8**0.5) @ v)


@pytest.mark.parametrize("learned", [True, False])
def test_settings_that_begin_with_an_underscore_count_too(learned):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self._factor = 2.0
            self.weight = nn.Parameter(torch.ones(())) if learned else None

        def forward(self, s):
            return torch.relu(s) * self._factor * (self.weight if learned else 1.0)

    module, (q, k, v) = Scaled(), dense()
    first = gdpa.attention(q, k, v, module)
    module._factor = 6.0
    assert torch.allclose(gdpa.attention(q, k, v, module), 3 * first)


def test_one_activation_of_a_module():
    """gdpa.activation takes the parameters as params; explain and warm_up take modules as attention does."""
    module, (q, k, v) = Gate(), dense()
    module.power = 7  # as no other test has it: functions of one graph are one, under the name of the first
    act = gdpa.activation(module)
    assert act.n_params == 1
    assert act.name == "Gate"
    assert torch.equal(gdpa.attention(q, k, v, act, params=(module.slope,)), gdpa.attention(q, k, v, module))
    assert "cpu" in gdpa.explain(q, k, v, module)
    assert gdpa.warm_up(module, device="cpu").activation == "Gate"


@takes_modules
def test_compiled_calls_follow_the_module():
    module, (q, k, v) = Gate((H,)), dense()
    compiled = torch.compile(lambda: gdpa.attention(q, k, v, module), fullgraph=True, backend="eager")
    for power in (2, 3):
        module.power = power
        out = compiled()
        assert torch.equal(out, gdpa.attention(q, k, v, module))
        (grad,) = torch.autograd.grad(out.sum(), [module.slope])
        assert grad.abs().min() > 0


@takes_modules
@pytest.mark.parametrize("make", [lambda: nn.PReLU(H), lambda: nn.PReLU().double(), lambda: nn.Sequential(nn.PReLU(H))])
def test_compiled_calls_take_parameters_of_any_shape_and_dtype(make):
    """torch.prelu alone takes neither one weight per head for a number, nor a weight of another dtype."""
    module, (q, k, v) = make(), dense()
    compiled = torch.compile(lambda: gdpa.attention(q, k, v, module), fullgraph=True, backend="eager")
    assert torch.equal(compiled(), gdpa.attention(q, k, v, module))


def test_lists_of_modules_are_refused():
    q, k, v = dense()
    with pytest.raises(gdpa.UnsupportedActivationError, match=r"PReLU in it owns parameters; .* shape \(4,\)"):
        gdpa.attention(q, k, v, [nn.PReLU() for _ in range(H)])


def test_layers_hold_the_module():
    layer = gdpa.nn.SelfAttention(8, H, Gate((H,)), normalize="abs", sink=0.5)
    assert "attention.function.slope" in layer.state_dict()
    x, start = torch.randn(2, 5, 8), layer.attention.function.slope.detach().clone()
    layer(x).sum().backward()
    assert layer.attention.function.slope.grad.abs().min() > 0
    other = gdpa.nn.SelfAttention(8, H, Gate((H,)), normalize="abs", sink=0.5)
    with torch.no_grad():
        layer.attention.function.slope.mul_(2)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    layer.reset_parameters()
    assert torch.equal(layer.attention.function.slope, start)
    twin = copy.deepcopy(other)
    assert twin.attention.function is not other.attention.function
    assert torch.equal(torch.compile(twin, fullgraph=True, backend="eager")(x), other(x))


def test_layers_with_a_bias_and_a_module():
    layer = gdpa.nn.SelfAttention(8, H, nn.PReLU(H), score_bias=gdpa.nn.ALiBi(H, learned=True)).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    core = layer.attention
    q, k, v = layer.qkv(x).unflatten(-1, (3, H, 2)).permute(2, 0, 3, 1, 4)
    far = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    scores = q @ k.mT / 2**0.5 - core.score_bias[0].slopes[:, None, None] * far
    want = layer.out((core.function(scores) @ v).transpose(1, 2).flatten(-2))
    assert torch.allclose(layer(x), want)


def test_layers_made_on_meta_start_as_the_module_does():
    layer = gdpa.nn.Attention(H, nn.PReLU(H, device="meta"), device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.function.weight.tolist() == [0.25] * H


def test_models_copy_the_module_for_each_layer():
    log = gdpa.data.SyntheticLog()
    for name in ("interformer", "hstu", "kunlun", "transformer"):
        model = gdpa.models.build(name, gdpa.models.Features.of(log), activation=nn.PReLU())
        cores = [m for m in model.modules() if isinstance(m, gdpa.nn.Attention)]
        assert len({id(core.function.weight) for core in cores}) == len(cores) > 1
        assert len(gdpa.nn.function_parameters(model)) == len(cores)


def test_function_parameters_are_those_of_functions_and_sinks():
    layer = gdpa.nn.SelfAttention(8, H, lambda s, a: s * a, params=(0.5,), normalize="abs", sink=1.0, learn_sink=True)
    pool = gdpa.nn.SeedPooling(8, H, 2, nn.PReLU(), score_bias=gdpa.nn.RelativeBias(4))
    found = gdpa.nn.function_parameters(nn.ModuleList([layer, pool, pool]))
    want = [layer.attention.params[0], layer.attention.sink_logits, pool.attention.function.weight]
    assert [id(p) for p in found] == [id(p) for p in want]


def test_modules_in_files(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "class Gate(torch.nn.Module):\n"
        "    def __init__(self, shape=()):\n"
        "        super().__init__()\n"
        "        self.slope = torch.nn.Parameter(torch.full(shape, 0.3))\n"
        "    def forward(self, s):\n"
        "        return torch.relu(s) + self.slope * s\n"
        "gate = Gate((3,))\n"
        "class Sized(torch.nn.Module):\n"
        "    def __init__(self, size): super().__init__()\n"
    )
    for name in ("Gate", "gate"):
        loaded = load_function(f"{file}:{name}")
        assert loaded.n_params == 1
        assert loaded.params == pytest.approx((0.3,))
        assert loaded.compile().n_params == 1
    with pytest.raises(ValueError, match="cannot be made without arguments"):
        load_function(f"{file}:Sized")
    assert load(f"{file}:Sized").function.__name__ == "Sized"  # for whoever makes models of it


class Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.5))

    def forward(self, s):
        return torch.tanh(s * self.a)


@pytest.mark.parametrize("part", [Once, nn.PReLU])
def test_a_part_that_occurs_twice(part):
    """It has one parameter, which is left as it was."""
    shared = part()
    both, (own,) = nn.Sequential(shared, nn.Sigmoid(), shared), shared.parameters()
    q = torch.randn(1, 2, 5, 4)
    out = gdpa.attention(q, q, q, both)
    torch.testing.assert_close(out, both(q @ q.mT / 2) @ q)
    (found,) = torch.autograd.grad(out.sum(), own)
    (want,) = torch.autograd.grad((both(q @ q.mT / 2) @ q).sum(), own)
    torch.testing.assert_close(found, want.reshape(found.shape))
    assert next(shared.parameters()) is own
    layer = gdpa.nn.SelfAttention(8, 2, both)
    assert all(p.numel() == 1 for n, p in layer.state_dict().items() if ".function." in n)


def test_a_module_is_not_changed_while_it_is_traced():
    """Other threads may be calling it."""

    class Watching(Once):
        def forward(self, s):
            assert all(isinstance(p, nn.Parameter) for p in watched.parameters())
            return super().forward(s)

    watched = Watching()
    gdpa.attention(*torch.randn(3, 1, 1, 3, 4), watched)


def test_training_learns_and_saves_them(tmp_path):
    from gdpa.train import load_model, make_config, train

    file = tmp_path / "mine.py"
    file.write_text("import torch\n\n\nclass Slope(torch.nn.PReLU):\n    pass\n")
    options = {"activation": f"{file}:Slope", "depth": 1, "dim": 8}
    settings = {
        "out": str(tmp_path / "run"), "batch_size": 16, "optimizer": "adamw", "weight_decay": 0.5,
        "eval_every": 2,
        "data": {"source": "synthetic", "size": 64, "valid_size": 32, "test_size": 0, "longest": 6},
        "model": {"name": "transformer", "options": options},
    }  # fmt: skip
    train(make_config({**settings, "steps": 2}))
    result = train(make_config({**settings, "steps": 4}), resume=True)
    learned = {n: p for n, p in result.model.named_parameters() if ".function." in n}
    assert len(learned) == 2
    assert all(p.item() != 0.25 for p in learned.values())
    saved = load_model(tmp_path / "run" / "checkpoints" / "best.pt", trust=True)
    assert {n for n, _ in saved.named_parameters() if ".function." in n} == set(learned)
