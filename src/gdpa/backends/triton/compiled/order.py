"""In which order threads compile.

The first half of a compilation (Triton's key of the kernel, and the way from the syntax tree to IR) is Python, which
one thread runs at a time; the second half (passes, assembler) runs beside other threads. If two threads go through the
first half at once, both get to the second half late. So they take turns: first the backward, whose second half takes
longer, and while its assembler works, the forward's IR is made.

This only saves time and changes no result, so no thread waits for long.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 5.0  # seconds; making IR takes one

_changed = threading.Condition()
_expected: set[object] = set()  # of those who go first, and have not been yet
_making: set[object] = set()
_own = threading.local()
_pauses = 0  # of garbage collection
_resume = False


def expect() -> object:
    """A ticket for a thread that will go first: see ``first``, which must follow."""
    ticket = object()
    with _changed:
        _expected.add(ticket)
    return ticket


@contextmanager
def first(ticket: object) -> Iterator[None]:
    """This thread goes before others until it has made its IR, or leaves."""
    _own.ticket = ticket
    try:
        yield
    finally:
        _own.ticket = None
        _leave(ticket)


def _leave(*tickets: object) -> None:
    with _changed:
        _expected.difference_update(tickets)
        _making.difference_update(tickets)
        _changed.notify_all()


@contextmanager
def turn() -> Iterator[None]:
    """The first half of a compilation goes inside this block, which waits for other threads'."""
    ticket, mine = getattr(_own, "ticket", None), object()
    with _changed:
        _changed.wait_for(lambda: not _making and (ticket is not None or not _expected), LONGEST)
        _making.add(mine)
    try:
        yield
    finally:
        _leave(mine, ticket)


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collection inside the block, in any thread. Making IR allocates some 50,000 objects, so that Python
    searches all objects of the process for garbage once or twice, a tenth of a second and more each time, and finds
    none: they die with their IR."""
    global _pauses, _resume
    with _changed:
        if _pauses == 0:
            _resume = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _changed:
            _pauses -= 1
            if _pauses == 0 and _resume:
                gc.enable()
