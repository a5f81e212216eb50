"""Functions recorded without PyTorch's compiler: the same graphs as with it, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa import UnsupportedActivationError
from gdpa.functions.builtin import BUILTINS
from gdpa.functions.isolation import isolated
from gdpa.functions.keys import recorded_key
from gdpa.functions.tracing import trace as tracing
from gdpa.functions.tracing.record import record
from gdpa.functions.tracing.trace import numbers, trace, trace_joint

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{fn.__name__: fn for fn in BUILTINS},
    "params": lambda s, a, b: torch.where(s > 0, s, a * s) + b.exp(),
    "in place": lambda s: s.clone().mul_(2).relu_(),
    "in place in the derivative": lambda s: s.clamp(-1, 1) + torch.maximum(s, torch.zeros(())),
    "results that are saved": lambda s: torch.tanh(s) * torch.sigmoid(s) * torch.exp(-s).sqrt(),
    "constant": torch.zeros_like,
    "made inside": lambda s: torch.full_like(s, 3.0) * s + torch.ones(()),
    "another dtype": lambda s: (s.double() ** 2).float(),
    "composite": lambda s: F.softplus(s) + F.selu(s) + F.celu(s) + torch.lerp(s, s * s, 0.5),
    "masked": lambda s: s.masked_fill(s < 0, 0.0) + torch.nan_to_num(s),
    "the same numbers twice": lambda s: s.square() + s * s + torch.pow(2.0, s),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_are_those_of_make_fx(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = FUNCTIONS[name]
    n_params = 2 if name == "params" else 0
    with isolated():
        slow = trace(fn, n_params)
        want = trace_joint(slow, n_params)
        monkeypatch.setattr(tracing, "make_graph", lambda *args: pytest.fail("PyTorch's compiler was asked"))
        quick = trace(fn, n_params, quick=True)
        assert recorded_key(quick) == recorded_key(slow)
        assert trace_joint(quick, n_params, quick=True) == want


def asks(s: Tensor) -> Tensor:
    return s * 2 if s.sum() > 0 else s


CAPTURED = torch.ones(3, 5)
UNUSUAL: dict[str, Callable[[Tensor], Any]] = {
    "a value": asks,
    "a tensor from elsewhere": lambda s: s * CAPTURED,
    "a constant tensor": lambda s: s * torch.tensor(2.0),
    "detached": lambda s: s.detach() * s,
    "several results": F.logsigmoid,
    "an error": lambda s: s.no_such_thing,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_anything_unusual_is_left_to_make_fx(name: str) -> None:
    with isolated():
        assert record(UNUSUAL[name], numbers(0), {}) is None


def test_what_make_fx_takes_is_taken() -> None:
    """A constant tensor, and gradients that stop."""
    from gdpa.functions.activation import from_function

    act = from_function(lambda s: s.detach() * s * torch.tensor(2.0), 0)
    s = torch.tensor([1.5], requires_grad=True)
    (grad,) = torch.autograd.grad(act(s).sum(), s)
    assert grad.item() == 3.0


def test_what_numbers_tell_python_is_refused() -> None:
    """tolist() reads the memory without anybody seeing it."""
    from gdpa.functions.activation import from_function

    with pytest.raises(UnsupportedActivationError):
        from_function(lambda s: s * (1 + s.tolist()[0][0]), 0)
