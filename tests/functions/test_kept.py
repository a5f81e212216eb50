"""Functions with a new number at every call: memory stays flat, and whoever still needs one finds it."""

from __future__ import annotations

import gc
import linecache
import warnings
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import gdpa
from gdpa.functions import activation as registry
from gdpa.functions import kept
from gdpa.functions.activation import Activation, from_function, from_key, from_name
from gdpa.functions.graph import Graph, Ref
from gdpa.functions.recent.glance import RecentFunctions

FEW = 3


@pytest.fixture
def few(monkeypatch):
    """Only FEW functions are kept."""
    monkeypatch.setattr(kept, "KEPT", FEW)
    registry._by_fingerprint.clear()


@pytest.fixture
def unwarned(monkeypatch):
    monkeypatch.setattr(kept, "_warned", [])


def scaled(c, shift=0.0):
    return lambda s: torch.tanh(s * c) + shift


def use_others(n=2 * FEW):
    for i in range(n):
        from_function(scaled(3.0 + i, 0.125), 0)
    gc.collect()


def test_many_functions_do_not_stay(monkeypatch):
    """3000 of them, without the time that tracing takes."""

    def make(fn, *args):
        act = Activation("f", f"key {fn(0.0)}", None, Graph(1, (), (Ref(0),)))
        return registry._by_key.setdefault(act.key, act)

    monkeypatch.setattr(registry, "_trace", make)
    monkeypatch.setattr(registry, "_by_key", weakref.WeakValueDictionary())
    monkeypatch.setattr(registry, "_by_fingerprint", RecentFunctions())
    for i in range(3000):
        from_function(lambda s, i=i: s + i, 0)
        from_function(lambda s: s - 1.0, 0)  # in use all the time
    assert len(registry._by_fingerprint) == kept.KEPT
    assert len(registry._by_key) == kept.KEPT + 1  # with the one that is found at a glance
    assert "key -1.0" in registry._by_key, "one that is used again and again is kept"


def test_what_is_made_of_a_function_goes_with_it(few):
    pytest.importorskip("triton")
    from gdpa.functions.emit import jit_functions

    act = from_function(scaled(0.59), 0)
    assert jit_functions(act, torch.float32, "cuda") is jit_functions(act, torch.float32, "cuda")
    key, seen = act.key, weakref.ref(act)
    assert any(key in filename for filename in linecache.cache)
    del act
    use_others()
    assert seen() is None
    assert not any(key in filename for filename in linecache.cache)
    with pytest.raises(RuntimeError, match=key):
        from_key(key)


def test_what_others_hold_is_found(few):
    mine, key = gdpa.activation(scaled(0.61)), from_name("mish").key
    use_others()
    assert from_key(mine.key) is mine
    assert from_function(scaled(0.61), 0) is mine, "traced again, it is the same"
    assert from_key(key) is from_name("mish")


@pytest.mark.parametrize("transformed", [False, True])
def test_backward_after_many_other_functions(few, transformed):
    q, k, v = torch.randn(3, 1, 2, 5, 8, requires_grad=True)
    call = lambda q: gdpa.attention(q, k, v, scaled(0.67), backend="cpu").square().sum()
    (expected,) = torch.autograd.grad(call(q), q)
    if transformed:
        value, backward = torch.func.vjp(call, q)
    else:
        value = call(q)
    use_others()
    (dq,) = backward(torch.ones_like(value)) if transformed else torch.autograd.grad(value, q)
    assert torch.equal(dq, expected)


def test_a_compiled_program_keeps_its_functions(few):
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    step = torch.compile(lambda q: gdpa.attention(q, k, v, scaled(0.73), backend="cpu"), backend="aot_eager")
    expected = step(q)
    use_others()
    assert torch.equal(step(q), expected)


def test_a_recorded_program_keeps_its_functions(few):
    """On real tensors, where no operator is asked what its result will look like."""
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    make_step = lambda mask: make_fx(lambda q: gdpa.attention(q, k, v, scaled(0.71), mask=mask, backend="cpu"))(q)
    step = make_step(gdpa.Mask(lambda *, kv_idx: kv_idx != 1))
    expected = step(q)
    use_others()
    assert torch.equal(step(q), expected)


def test_more_functions_in_one_call_than_are_kept(few):
    q, k, v = torch.randn(3, 1, 2 * FEW, 5, 8)
    functions = [scaled(0.79 + 0.01 * h) for h in range(2 * FEW)]
    out = gdpa.attention(q, k, v, functions, backend="cpu")
    assert torch.allclose(out, gdpa.attention(q, k, v, functions, backend="reference"), atol=1e-6)


def test_one_warning(few, unwarned, monkeypatch):
    monkeypatch.setattr(kept, "MANY_VARIANTS", 4)
    other = lambda c: lambda s: s * c - 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(4):
            from_function(other(i + 0.5), 0)
            from_function(other(0.5), 0)  # no new number
    with pytest.warns(UserWarning, match=r"5 different constants.*through params"):
        from_function(other(4.5), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_function(other(5.5), 0)


def test_a_module_of_which_an_attribute_changes(few, unwarned, monkeypatch):
    """It is traced at every call, and each new value is a function of its own."""

    class Scaled(torch.nn.Module):
        c = 0.0

        def forward(self, s):
            return s * self.c + 0.7

    monkeypatch.setattr(kept, "MANY_VARIANTS", 2)
    module = Scaled()
    for module.c in (0.5, 1.0):
        from_function(module, 0)
    module.c = 1.5
    with pytest.warns(UserWarning, match="'Scaled' has been traced with 3 different"):
        from_function(module, 0)
