"""What a function reads is seen, through decorators, named tuples and modules, or the function is traced anew."""

from __future__ import annotations

import builtins
import functools
import types
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gdpa
from gdpa.functions.activation import from_function
from gdpa.functions.fingerprint import fingerprint

W = 2.0
pkg = types.ModuleType("pkg")
pkg.sub = types.ModuleType("pkg.sub")
pkg.sub.pkg, pkg.sub.C = pkg, 2.0  # as a module that imports its package


def value(fn: Callable[..., Tensor]) -> float:
    return from_function(fn, 0)(torch.ones(1)).item()


def scaled(s: Tensor) -> Tensor:
    return s * W


DECORATED = {
    "enable_grad": torch.enable_grad()(scaled),
    "autocast": torch.autocast("cpu", enabled=False)(scaled),
    "vmap": torch.vmap(scaled),
}


@pytest.mark.parametrize("name", DECORATED)
def test_what_a_decorator_of_torch_hides_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = DECORATED[name]
    assert value(fn) == 2.0
    monkeypatch.setitem(globals(), "W", 3.0)
    assert value(fn) == 3.0
    assert value(lambda s: fn(s) + 1) == 4.0


class Doubled(NamedTuple):
    x: float

    @property
    def twice(self) -> float:
        return self.x * W


def test_fields_of_named_tuples_are_told_apart() -> None:
    first, second = namedtuple("Pair", "x y"), namedtuple("Pair", "y x")
    fn = lambda pair: lambda s: s * pair.x
    assert value(fn(first(2.0, 3.0))) == 2.0
    assert value(fn(second(2.0, 3.0))) == 3.0
    assert fingerprint(fn(first(2.0, 3.0))) == fingerprint(fn(first(2.0, 3.0))) is not None
    first.x = property(lambda self: 7.0)
    assert value(fn(first(2.0, 3.0))) == 7.0


def test_what_tuples_compute_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Doubled(1.0)
    fn = lambda s: s * pair.twice
    assert value(fn) == 2.0
    monkeypatch.setitem(globals(), "W", 3.0)
    assert value(fn) == 3.0


def test_masks_see_fields_of_named_tuples() -> None:
    first, second = namedtuple("Pair", "x y"), namedtuple("Pair", "y x")
    q, v = torch.ones(1, 1, 4, 1), torch.ones(1, 1, 4, 1)
    for pair, seen in ((first(1, 3), 1), (second(1, 3), 3)):
        mask = gdpa.Mask(lambda kv_idx, pair=pair: kv_idx < pair.x)
        assert gdpa.attention(q, q, v, "identity", mask=mask, scale=1.0)[0, 0, 0, 0] == seen


def through(module: Any, s: Tensor) -> Tensor:
    return s * module.C


def renamed(s: Tensor) -> Tensor:
    other = pkg.sub
    return s * other.C


PATHS = {
    "by name": lambda s: s * pkg.sub.C,
    "a helper's argument": lambda s: through(pkg.sub, s),
    "a default": lambda s, module=pkg.sub: s * module.C,
    "another name": renamed,
    "a nested function": lambda s: (lambda t: t * pkg.sub.C)(s),
    "builtins": lambda s: s * builtins.globals()["pkg"].sub.C,
    "a partial": functools.partial(lambda s, module: s * module.C, module=pkg.sub),
    "a partial's attribute": lambda s: s * held.C,
}
held = functools.partial(max)


@pytest.mark.parametrize("name", PATHS)
def test_what_is_read_of_a_module_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (2.0, 3.0):
        monkeypatch.setattr(pkg.sub, "C", number)
        held.C = number  # type: ignore[attr-defined]
        assert value(PATHS[name]) == number


def test_modules_in_a_closure_are_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(module: Any) -> Callable[[Tensor], Tensor]:
        return lambda s: s * module.sub.C

    assert fingerprint(make(pkg)) == fingerprint(make(pkg)) is not None
    before = fingerprint(make(pkg))
    monkeypatch.setattr(pkg.sub, "C", 3.0)
    assert fingerprint(make(pkg)) != before


def twice(module: nn.Module, *grads: Any) -> Any:
    return tuple(2 * g for g in grads[0])


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("make", [lambda: nn.Hardtanh(-1.25, 1.5), nn.PReLU, lambda: nn.Sequential(nn.PReLU())])
def test_a_backward_hook_put_on_later_is_refused(make: Callable[[], nn.Module], register: str) -> None:
    act, q = make(), torch.ones(1, 1, 2, 4)
    gdpa.attention(q, q, q, act)
    getattr(list(act.modules())[-1], register)(twice)
    with pytest.raises(gdpa.UnsupportedActivationError, match="a hook"):
        gdpa.attention(q, q, q, act)


def test_a_forward_hook_of_a_prelu_is_run() -> None:
    act, q = nn.PReLU(), torch.ones(1, 1, 2, 4)
    before = gdpa.attention(q, q, q, act)
    act.register_forward_hook(lambda module, args, out: 2 * out)
    assert torch.equal(gdpa.attention(q, q, q, act), 2 * before)


class Scaled(nn.Softplus):
    factor = 2.0

    def forward(self, s: torch.Tensor) -> torch.Tensor:
        return __class__.factor * super().forward(s)  # type: ignore[name-defined]


class Raised(Scaled):
    def forward(self, s: torch.Tensor) -> torch.Tensor:
        return super().forward(s) + 1


def test_methods_may_call_those_of_their_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """super() closes over the class, of which all that the module has from it is read anyway."""
    act = Raised()
    before = fingerprint(act)
    assert before is not None
    assert fingerprint(Raised()) == before
    monkeypatch.setattr(Scaled, "factor", 3.0)
    changed = fingerprint(act)
    assert changed is not None
    assert changed != before
    monkeypatch.setattr(Scaled, "forward", lambda self, s: s)
    assert fingerprint(act) not in (before, changed)


def test_a_hook_of_all_modules_put_on_later_is_seen() -> None:
    act = nn.Hardtanh(-1.25, 1.5)
    s = torch.tensor([1.0])
    assert from_function(act, 0)(s) == 1.0
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        assert from_function(act, 0)(s) == 2.0
    finally:
        hook.remove()


@np.vectorize
def vectorized(x: float) -> float:
    return x * W


def test_objects_of_numpy_are_not_all_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    polynomial = np.poly1d([2.0, 1.0])
    by_polynomial = lambda s: s * float(polynomial.coef[0])
    by_function = lambda s: s * float(vectorized(1.0))
    assert (value(by_polynomial), value(by_function)) == (2.0, 2.0)
    polynomial.coef[0] = 3.0
    monkeypatch.setitem(globals(), "W", 3.0)
    assert (value(by_polynomial), value(by_function)) == (3.0, 3.0)
    sine, norm, relu = np.sin, np.linalg.norm, torch.ops.aten.relu
    assert fingerprint(lambda s: relu(s) * float(sine(1.0) + norm([3.0, 4.0]))) is not None


def test_relative_imports_are_not_those_of_python():
    scope: dict[str, Any] = {"__name__": "package.module", "__package__": "package"}
    for where in (".math", "math"):
        exec(f"def f(s):\n    from {where} import pi\n    return s * pi", scope)
        assert (fingerprint(scope["f"]) is None) == (where == ".math")
