"""A function is its traced graph: re-created lambdas are one Activation, changed numbers make another."""

from __future__ import annotations

import functools
import gc
import math
import threading
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gdpa
from gdpa.functions import activation as registry
from gdpa.functions.activation import from_function, from_name
from gdpa.functions.fingerprint import fingerprint
from gdpa.functions.tracing import trace as tracing

SLOPE = 0.5
settings = types.ModuleType("settings")


class Config:
    slope = 0.5


def key(fn, n_params=0):
    return from_function(fn, n_params).key


@pytest.fixture
def traces(monkeypatch):
    """How often a function was traced, as a list that grows."""
    calls = []
    original = tracing.trace

    def counted(fn, n_params, *quick):
        calls.append(fn)
        return original(fn, n_params, *quick)

    monkeypatch.setattr(tracing, "trace", counted)
    return calls


def sizes():
    return len(registry._by_key), len(registry._by_fingerprint)


def test_attributes_of_functions_are_read():
    def helper(s):
        return s * helper.slope

    def mine(s):
        return helper(s) + mine.shift

    helper.slope, mine.shift = 0.5, 1.0
    first = key(mine)
    helper.slope = 0.25
    second = key(mine)
    mine.shift = 2.0
    assert len({first, second, key(mine)}) == 3


def test_functools_wraps_does_not_hide_where_a_function_is_from(monkeypatch):
    @functools.wraps(F.relu)
    def mine(s):
        return s * SLOPE

    first = key(mine)
    monkeypatch.setitem(globals(), "SLOPE", 0.125)
    assert key(mine) != first


def test_lambda_made_anew_is_traced_once_and_does_not_leak(traces):
    q, k, v = torch.randn(3, 1, 2, 5, 8)

    def step(scale=0.625):
        return gdpa.attention(q, k, v, lambda s: torch.tanh(s * scale) * SLOPE, backend="cpu")

    first = step()
    before = sizes()
    for _ in range(20):
        assert torch.equal(step(), first)
    assert len(traces) == 1
    assert sizes() == before


def test_functions_are_not_kept_alive():
    class Big:
        """Something a closure may hold."""

    def make():
        held = Big()
        fn = lambda s: s * (0.123 if held else 1.0)
        from_function(fn, 0)
        return weakref.ref(fn), weakref.ref(held)

    references = make()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_equal_graphs_are_one_activation():
    def spelled_out(score):
        """Another name, another shape of the code."""
        half = score * 0.5
        return torch.tanh(half)

    assert from_function(spelled_out, 0) is from_function(lambda s: torch.tanh(s * 0.5), 0)
    assert from_function(nn.ReLU(), 0) is from_function(torch.relu, 0) is from_name("relu")
    assert from_function(F.silu, 0) is from_name("silu")
    assert from_function(lambda s: F.gelu(s, approximate="tanh"), 0) is from_name("gelu_tanh")
    act = from_name("gelu")
    assert from_function(act, 0) is act


def test_a_closure_is_what_it_holds():
    def scaled(c):
        return lambda s: s * c

    assert key(scaled(0.25)) == key(scaled(0.25))
    assert key(scaled(0.25)) != key(scaled(0.5))
    assert key(scaled(1)) != key(scaled(-1))
    assert key(scaled(0.1)) != key(scaled(0.1 + 1e-9)), "every digit counts"


def test_a_changed_global_is_seen(monkeypatch):
    fn = lambda s: s * SLOPE
    nested = lambda s: (lambda t: t * SLOPE)(s)
    before = key(fn), key(nested)
    monkeypatch.setitem(globals(), "SLOPE", 0.75)
    assert key(fn) != before[0]
    assert key(nested) != before[1]


def test_a_changed_attribute_of_a_module_or_class_is_seen(monkeypatch):
    monkeypatch.setattr(settings, "slope", 0.5, raising=False)
    by_module, by_class = (lambda s: s * settings.slope), (lambda s: s * Config.slope)
    before = key(by_module), key(by_class)
    assert key(by_module) == before[0]
    monkeypatch.setattr(settings, "slope", 0.75)
    monkeypatch.setattr(Config, "slope", 0.75)
    assert key(by_module) != before[0]
    assert key(by_class) != before[1]


def test_a_changed_helper_is_seen(monkeypatch):
    namespace = {"torch": torch, "helper": lambda s: s * 2.0}
    exec("def fn(s):\n    return helper(s) + 1", namespace)
    before = key(namespace["fn"])
    namespace["helper"] = lambda s: s * 3.0
    assert key(namespace["fn"]) != before


def test_a_changed_object_is_seen():
    """Objects may change unseen, so functions that read them are traced at every call, and still share their graph."""
    config = types.SimpleNamespace(slope=0.5)
    fn = lambda s: s * config.slope
    assert fingerprint(fn) is None
    first = from_function(fn, 0)
    assert from_function(fn, 0) is first
    config.slope = 0.75
    assert key(fn) != first.key


def test_what_a_bound_method_reads_is_seen():
    """A method written in C has no code to look into."""
    settings = {"slope": 0.5}
    get = settings.get
    fn = lambda s: s * get("slope")
    first = key(fn)
    settings["slope"] = 0.75
    assert key(fn) != first
    assert fingerprint(lambda s: torch.sin(s) * math.sqrt(2)) is not None  # functions of modules read nothing


def test_a_number_that_prints_as_another():
    class Rounded(float):
        def __repr__(self):
            return "1"

    one, two = Rounded(1.25), Rounded(1.5)
    assert key(lambda s: s * one) != key(lambda s: s * two)


def test_defaults_partials_and_modules_count():
    def fn(s, slope=0.5, *, shift=0.1):
        return s * slope + shift

    variants = [fn, functools.partial(fn, slope=0.25), functools.partial(fn, shift=0.2), nn.LeakyReLU(0.1)]
    variants += [nn.LeakyReLU(0.2), nn.Softplus(beta=2.0), nn.Softplus(beta=3.0), nn.GELU(), nn.GELU("tanh")]
    keys = [key(v) for v in variants]
    assert len(set(keys)) == len(keys)
    assert keys == [key(v) for v in variants]
    assert key(functools.partial(fn, slope=0.5)) == keys[0]
    fn.__defaults__ = (0.75,)
    assert key(fn) != keys[0]


def test_constant_tensors_count_to_the_last_digit():
    assert key(lambda s: s * torch.tensor(0.12341)) != key(lambda s: s * torch.tensor(0.12342))
    assert key(lambda s: s * torch.tensor(2.0)) != key(lambda s: s * torch.tensor(2))


def test_params_count():
    fn = lambda s, *p: s * sum(p)
    assert key(fn, 1) != key(fn, 2)


def test_threads_share_one_activation():
    def work(found):
        found.append(from_function(lambda s: torch.sigmoid(s * 1.0625) + 0.5, 0))

    found = []
    threads = [threading.Thread(target=work, args=(found,)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_tracing_leaves_no_trace():
    """Neither random numbers nor global modes of the caller change."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with torch.no_grad():
        from_function(lambda s: torch.sin(s * 1.0375), 0)
        assert not torch.is_grad_enabled()
    with pytest.raises(gdpa.UnsupportedActivationError):
        from_function(lambda s: s * torch.rand_like(s), 0)
    assert torch.equal(torch.rand(4), expected)


def test_same_function_inside_and_outside_of_autocast_and_grad_modes():
    fn = lambda s: torch.tanh(s * 1.0125)
    outside = from_function(fn, 0)
    registry._by_fingerprint.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert from_function(fn, 0) is outside
    registry._by_fingerprint.clear()
    with torch.inference_mode():
        assert from_function(fn, 0) is outside


def test_decorator_makes_an_activation():
    @gdpa.activation
    def leaky(s, slope):
        return torch.where(s > 0.0625, s, slope * s)

    @gdpa.activation(name="named")
    def other(s):
        return s * 0.375

    assert isinstance(leaky, gdpa.Activation)
    assert leaky.n_params == 1
    assert leaky.name == "leaky"
    assert other.name == "named"
    s, slope = torch.randn(5), torch.tensor(0.1)
    assert torch.equal(leaky(s, slope), torch.where(s > 0.0625, s, slope * s))


def test_defaults_are_not_params():
    assert gdpa.activation(lambda s, a, b=2.0: s * a * b).n_params == 1
    assert gdpa.activation(functools.partial(lambda s, a, b: s * a * b, b=2.0)).n_params == 1
    assert gdpa.activation(torch.sigmoid).n_params == 0


def test_builtin_names():
    names = gdpa.activations()
    assert names == sorted(names)
    assert {"identity", "relu", "relu_squared", "leaky_relu", "gelu", "gelu_tanh", "silu", "hardswish", "sigmoid",
            "tanh", "softplus", "elu", "mish", "laplace", "exp"} <= set(names)  # fmt: skip
    assert all(from_name(name).name == name for name in names)


@pytest.mark.parametrize(
    ("call", "words"),
    [(lambda: gdpa.activation(lambda s, p: s * p)(torch.ones(3)), "takes a tensor of scores and 1 params, got 0"),
     (lambda: gdpa.activation(lambda s: s * 3)(1.0), "takes a tensor of scores and 0 params, got float"),
     (lambda: gdpa.activation(lambda s, *, q_idx: s * q_idx)(torch.ones(3)), "takes positions or tables")],
)  # fmt: skip
def test_what_an_activation_is_called_with(call, words):
    with pytest.raises(TypeError, match=words):
        call()
