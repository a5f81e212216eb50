"""Functions made anew at every call, found again at a glance.

A lambda in a training loop is a new object at every step, with the code and, nearly always, the very objects of the
step before. Comparing these takes a microsecond, where its fingerprint takes fifteen. Only what cannot change in place
is compared by identity: numbers, strings, and modules and functions of PyTorch and its like. A function that reads
anything else is left to its fingerprint.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Hashable
from typing import Any, NamedTuple, TypeVar

from gdpa.functions.fingerprint import SCALARS, _is_trusted, _reads, _UnknownError
from gdpa.functions.kept import Recent

T = TypeVar("T")
MISSING = object()


class Seen(NamedTuple):
    """What a function read, and what came of it. ``read``: names, with the globals of that name, or MISSING."""

    code: types.CodeType  # held, so that no other one can be where it is
    globals: dict[str, Any]
    read: tuple[tuple[str, Any], ...]
    cells: tuple[Any, ...]
    others: Hashable  # of the call
    found: Any


class Reading(NamedTuple):
    """The objects that a function reads: globals, as in Seen, and what its closure holds."""

    read: tuple[tuple[str, Any], ...]
    cells: tuple[Any, ...]

    def objects(self) -> list[Any]:
        return [*(value for _, value in self.read), *self.cells]


def reading_of(fn: Any) -> Reading | None:
    """What ``fn`` reads now; None if that may be something else later, although the objects are the same."""
    if not _is_bare(fn):
        return None
    try:
        names = dict.fromkeys(name for name, is_free, _ in _reads(fn.__code__) if not is_free)
    except _UnknownError:
        return None
    read = tuple((name, fn.__globals__.get(name, MISSING)) for name in names)
    found = Reading(read, tuple(map(_contents, fn.__closure__ or ())))
    return found if all(map(_is_constant, found.objects())) else None


class RecentFunctions(Recent[T]):
    """What came of the functions that were used last, by their fingerprints, and at a glance by their code."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: Recent[Seen] = Recent()

    def glance(self, fn: Any, others: Hashable) -> T | None:
        """What was noted of a function that reads the same objects as ``fn``, in a call with the same ``others``."""
        seen = self._seen.find(id(fn.__code__)) if _is_bare(fn) else None  # to hash code takes as long as all the rest
        if seen is None or seen.globals is not fn.__globals__ or seen.others != others:
            return None
        get = seen.globals.get
        for name, value in seen.read:
            if get(name, MISSING) is not value:
                return None
        for cell, value in zip(fn.__closure__ or (), seen.cells, strict=True):
            held = _contents(cell)
            if held is not value and not _same_number(held, value):
                return None
        found: T = seen.found
        return found

    def note(self, fn: Any, others: Hashable, found: T, reading: Reading | None) -> None:
        """``found`` came of the fingerprint of ``fn``, which read ``reading`` before that was taken. If it still does,
        no other thread has changed what it reads in between."""
        now = None if reading is None else reading_of(fn)
        if reading is None or now is None or not all(map(operator.is_, reading.objects(), now.objects())):
            return
        self._seen.put(id(fn.__code__), Seen(fn.__code__, fn.__globals__, *reading, others, found))

    def clear(self) -> None:
        super().clear()
        self._seen.clear()


def _is_bare(fn: Any) -> bool:
    """Whether it is a function that has nothing but its code, its globals and its closure."""
    return type(fn) is types.FunctionType and not (fn.__defaults__ or fn.__kwdefaults__ or fn.__dict__)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return MISSING


def _same_number(x: Any, y: Any) -> bool:
    """A number that a closure holds may be computed anew at every call. (0.0 may be -0.0.)"""
    return type(x) is float and type(y) is float and x == y and x != 0.0


def _is_constant(x: Any) -> bool:
    """Whether the same object is the same value for ever, as far as functions read it."""
    if x is MISSING or type(x) in SCALARS:
        return True
    return type(x) is types.ModuleType and _is_trusted(x.__name__)
