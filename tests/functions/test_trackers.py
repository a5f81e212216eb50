"""What tracks which modules run, as FLOP counters do, sees the modules of the model, and none that tracing runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

import gdpa
from gdpa.functions import activation as activations
from gdpa.functions.isolation import isolated


class Gate(nn.Module):
    def forward(self, s: Tensor) -> Tensor:
        return torch.tanh(s) * torch.sigmoid(s)


class Calling(nn.Module):
    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return gdpa.attention(q, q, q, self.f).transpose(1, 2).flatten(-2)


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.attention, self.last = nn.Linear(8, 8), attention, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(self.first(x)))


def rows(model: nn.Module) -> dict[str, int]:
    """The FLOPs of each module, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(2, 5, 8)).sum().backward()
    return {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}


def hooked() -> nn.Module:
    """Traced at every call."""
    module = nn.Tanh()
    module.register_forward_hook(lambda module, args, out: 2 * out)
    return module


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "parameters": nn.PReLU,
    "none": Gate,
    "parts": lambda: nn.Sequential(nn.Softsign(), nn.PReLU(2)),
    "heads": lambda: [nn.Softplus(beta=1.5), "silu"],
    "hooks": hooked,
    "function": lambda: lambda s: nn.ELU(0.7)(s),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("make", [lambda f: gdpa.nn.SelfAttention(8, 2, f), Calling], ids=["layer", "call"])
def test_flops_of_modules(name: str, make: Callable[[Any], nn.Module]) -> None:
    """Those of the same model with a built-in function, also where it is traced at the first call."""
    want = rows(Model(make("gelu")))
    model = Model(make(FUNCTIONS[name]()))
    assert want["Model.attention"] > 0
    for _ in range(2):
        assert rows(model) == want


def test_modules_are_found_again_while_they_are_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = gdpa.nn.SelfAttention(8, 2, Gate()), torch.ones(2, 5, 8)
    layer(x)
    traced: list[Any] = []
    monkeypatch.setattr(activations, "_trace", lambda *a: traced.append(a))
    with ModuleTracker():
        layer(x)
    assert not traced


def test_other_hooks_of_all_modules_run_beside_a_tracker() -> None:
    layer, x = gdpa.nn.Attention(1, nn.Hardtanh(-1.25, 1.5)), torch.full((1, 2, 1, 4), 0.25)
    want = layer(x, x, x)
    only_function = lambda module, args, out: out * 2 if isinstance(module, nn.Hardtanh) else None
    with ModuleTracker():
        hook = register_module_forward_hook(only_function)
        try:
            torch.testing.assert_close(layer(x, x, x), 2 * want)
        finally:
            hook.remove()
        torch.testing.assert_close(layer(x, x, x), want)


def test_other_threads_are_tracked_while_one_traces() -> None:
    module, seen = nn.Tanh(), []
    with ModuleTracker() as tracker:
        hooks = nn.modules.module._global_forward_pre_hooks
        before = dict(hooks)
        module.register_forward_pre_hook(lambda *_: seen.append(set(tracker.parents)))
        with isolated(), isolated():
            module(torch.ones(1))
            thread = threading.Thread(target=module, args=(torch.ones(1),))
            thread.start()
            thread.join()
        module(torch.ones(1))
        assert hooks == before
    assert seen == [{"Global"}, {"Global", "Tanh"}, {"Global", "Tanh"}]


def test_a_tracker_that_ends_meanwhile_is_gone() -> None:
    tracker = ModuleTracker()
    tracker.__enter__()
    with isolated():
        tracker.__exit__()
    assert not nn.modules.module._global_forward_pre_hooks
    assert not nn.modules.module._global_forward_hooks
