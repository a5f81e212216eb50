"""Who compiles first where two threads compile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gdpa.backends.triton.compiled import turns
from gdpa.backends.triton.compiled.turns import expect, first, in_turn


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    assert not turns._expected
    assert not turns._making


def started(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_who_is_expected_goes_first() -> None:
    order: list[str] = []
    ticket = expect()
    other = started(lambda: in_turn(order.append)("forward"))
    time.sleep(0.05)
    assert order == []
    with first(ticket):
        in_turn(order.append)("backward")
        other.join()  # it does not wait for the rest of the compilation
    assert order == ["backward", "forward"]


@pytest.mark.parametrize("error", [True, False])
def test_who_makes_nothing_is_not_waited_for(error: bool) -> None:
    """It was found, or something went wrong before."""
    done = threading.Event()
    ticket = expect()
    other = started(in_turn(done.set))
    try:
        with first(ticket):
            if error:
                raise ValueError
    except ValueError:
        pass
    other.join()
    assert done.is_set()


def test_one_at_a_time() -> None:
    inside: list[int] = []
    most: list[int] = []

    def make() -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()

    threads = [started(in_turn(make)) for _ in range(5)]
    for thread in threads:
        thread.join()
    assert most == [1] * 5


def test_nobody_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a thread that never came."""
    monkeypatch.setattr(turns, "LONGEST", 0.01)
    ticket = expect()
    assert in_turn(len)("abc") == 3
    turns._leave(ticket)


def test_errors_are_handed_on() -> None:
    with pytest.raises(TypeError):
        in_turn(len)(3)
