"""Functions made anew are found without their fingerprint, and only if they read the same as before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gdpa.functions import activation, kept
from gdpa.functions.activation import resolve_one

FACTOR: Any = 2.0


@pytest.fixture
def fingerprints(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions of which one was taken."""
    taken: list[Any] = []
    real = activation.fingerprint
    monkeypatch.setattr(activation, "fingerprint", lambda fn: taken.append(fn) or real(fn))
    activation._by_fingerprint.clear()
    return taken


def value(act: Any) -> float:
    return act(torch.ones(1)).item()


def scaled(c: Any) -> Callable[..., Any]:
    return lambda s: s * c


MADE_ANEW: dict[str, Callable[[], Any]] = {
    "torch": lambda: lambda s: F.softplus(s) ** 2 * torch.sigmoid(s),
    "a global number": lambda: lambda s: s * FACTOR,
    "built-ins": lambda: lambda s: s * abs(min(-2.0, 1.0)) * math.pi,
    "a closure": lambda: scaled(3.0),
    "a closure's new number": lambda: scaled(float("3.25")),
}


@pytest.mark.parametrize("name", MADE_ANEW)
def test_a_function_made_anew_is_found_at_a_glance(name: str, fingerprints: list[Any]) -> None:
    make = MADE_ANEW[name]
    first = resolve_one(make(), 0)
    assert resolve_one(make(), 0) is first
    taken = len(fingerprints)
    assert all(resolve_one(make(), 0) is first for _ in range(3))
    assert len(fingerprints) == taken


def test_what_it_reads_is_looked_at(fingerprints: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda: lambda s: s * FACTOR
    for number in (2.0, 2.0, 3.0, 3.0, -0.0, 0.0, math.nan, True, 1, 1.0):
        monkeypatch.setitem(globals(), "FACTOR", number)
        got = value(resolve_one(make(), 0))
        assert math.isnan(got) if number != number else math.copysign(1, got) * got == math.copysign(1, number) * number
    monkeypatch.setitem(globals(), "abs", lambda x: 7.0)  # shadows a built-in
    assert value(resolve_one(MADE_ANEW["built-ins"](), 0)) == pytest.approx(7 * math.pi)
    monkeypatch.delitem(globals(), "abs")
    assert value(resolve_one(MADE_ANEW["built-ins"](), 0)) == pytest.approx(2 * math.pi)


@pytest.mark.parametrize("numbers", [(2.0, 3.0), (0.0, -0.0), (1.0, 1), (1, True), (math.nan, 1.0)])
def test_closures_are_told_apart(numbers: tuple[Any, Any], fingerprints: list[Any]) -> None:
    for number in numbers * 3:
        got = resolve_one(scaled(number), 0)(torch.ones(1))
        want = scaled(number)(torch.ones(1))
        assert torch.equal(torch.signbit(got), torch.signbit(want))
        assert torch.equal(got, want) or number != number


def test_what_may_change_in_place_is_not_compared_by_identity(fingerprints: list[Any]) -> None:
    def helper(s: torch.Tensor) -> torch.Tensor:
        return s * FACTOR

    table = {"c": 2.0}
    for make in (lambda: lambda s: helper(s), lambda: lambda s, c=2.0: s * c, lambda: lambda s: s * table["c"]):
        for _ in range(4):
            resolve_one(make(), 0)
    assert len(fingerprints) == 12


def test_calls_of_other_kinds_are_other_functions(fingerprints: list[Any]) -> None:
    make = lambda: lambda s, *more: s * sum(more, 1.0)
    plain = [resolve_one(make(), 0) for _ in range(3)]
    given = [resolve_one(make(), 2) for _ in range(3)]
    assert [act.n_params for act in (*plain, *given)] == [0, 0, 0, 2, 2, 2]


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT", 2)
    activation._by_fingerprint.clear()
    made = [eval(f"lambda: lambda s: s * 5.125 + {n}.375") for n in range(6)]
    keys = [{resolve_one(make(), 0).key for _ in range(3)}.pop() for make in made]
    assert [key in activation._by_key for key in keys] == [False] * 4 + [True] * 2
    activation._by_fingerprint.clear()
    assert not any(key in activation._by_key for key in keys)


def test_a_global_that_changes_meanwhile(fingerprints: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, after the fingerprint was taken: nothing is noted."""
    make = lambda: lambda s: s * FACTOR
    monkeypatch.setitem(globals(), "FACTOR", 2.5)
    resolve_one(make(), 0)
    real = activation.fingerprint

    def meanwhile(fn: Any) -> Any:
        found = real(fn)
        monkeypatch.setitem(globals(), "FACTOR", 3.5)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(activation, "fingerprint", meanwhile)
        resolve_one(make(), 0)
    assert value(resolve_one(make(), 0)) == 3.5
