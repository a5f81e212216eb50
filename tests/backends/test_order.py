"""Who compiles first where two threads compile, and what a pass compiles at once."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gdpa.backends.triton.compiled import order
from gdpa.backends.triton.compiled.ahead import Job, compiling, is_asked, put
from gdpa.backends.triton.compiled.order import expect, first, no_collections, turn


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    assert not order._expected
    assert not order._making


def in_turn(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any) -> Any:
        with turn():
            return make(*args)

    return made


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
    monkeypatch.setattr(order, "LONGEST", 0.01)
    ticket = expect()
    assert in_turn(len)("abc") == 3
    order._leave(ticket)


def test_errors_are_handed_on() -> None:
    with pytest.raises(TypeError):
        in_turn(len)(3)


# ---- garbage ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("before", [True, False])
def test_nothing_is_collected_until_the_last_one_leaves(before: bool) -> None:
    """And then only if something was before."""
    if not before:
        gc.disable()
    try:
        with no_collections():
            with pytest.raises(ValueError, match="IR"), no_collections():
                raise ValueError("IR")
            assert not gc.isenabled()
        assert gc.isenabled() == before
    finally:
        gc.enable()


# ---- several kernels -------------------------------------------------------------------------------------------------
def job(name: str, is_large: bool, compile: Callable[[], Any]) -> Job:
    return Job(SimpleNamespace(__name__=name), is_large, compile)


def test_kernels_of_a_pass_are_compiled_at_once() -> None:
    """The large one by the thread that asked."""
    together, threads = threading.Barrier(3, timeout=30), {}

    def compile(name: str) -> Callable[[], None]:
        def meet() -> None:
            assert not is_asked()
            together.wait()
            threads[name] = threading.current_thread(), inside()

        return meet

    entered = threading.local()

    def inside() -> bool:
        return getattr(entered, "yes", False)

    @contextmanager
    def around() -> Iterator[None]:
        entered.yes = True
        yield

    with compiling(around) as compiled:
        assert is_asked()
        for name in ("list", "zeros", "backward"):
            put(job(name, name == "backward", compile(name)))
        assert not compiled
    assert [name for name, _ in compiled] == ["backward", "list", "zeros"]
    assert threads.pop("backward") == (threading.current_thread(), False)
    assert all(thread is not threading.current_thread() and entered for thread, entered in threads.values())


def test_launches_of_one_kernel_are_compiled_one_after_the_other() -> None:
    """The second may find what the first has compiled."""
    order: list[int] = []
    one, other = (job(name, False, lambda: None).kernel for name in "ab")
    with compiling() as compiled:
        put(Job(other, False, lambda: None))
        put(Job(one, False, lambda: (time.sleep(0.05), order.append(1))))
        put(Job(one, False, lambda: order.append(2)))
    assert order == [1, 2]
    assert sorted(name for name, _ in compiled) == ["a", "a", "b"]


@pytest.mark.parametrize("which", [0, 1])
def test_errors_of_any_kernel_are_raised(which: int) -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("no such kernel")

    def compile() -> None:
        with compiling():
            for i in range(2):
                put(job(str(i), i == 0, fail if i == which else lambda: done.append(1)))

    with pytest.raises(ValueError, match="no such kernel"):
        compile()
    assert done == [1]


def test_nothing_is_compiled_after_an_error() -> None:
    def launch() -> None:
        put(job("kernel", True, lambda: pytest.fail("compiled")))
        raise ValueError("launch")

    with pytest.raises(ValueError, match="launch"), compiling():
        launch()
    assert not is_asked()
    with compiling() as compiled:
        pass
    assert compiled == []
