"""Modules, which a layer calls again and again, found again at a look.

The fingerprint of a module takes tens of microseconds. A look takes a few: it compares by identity what the module and
its classes hold with what they held before, as glance.py does for functions. Of a module that holds anything but
numbers, strings, parameters and other such modules there is no look, and it is left to its fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from gdpa.functions.fingerprint import HOOKS, OF_ALL_CLASSES, OF_ALL_MODULES, SCALARS, UNREAD, _package, _UnknownError
from gdpa.functions.isolation import hooks_change_modules
from gdpa.functions.recent.glance import MISSING, reading_of

END = object()


class Look:
    """What a module holds: ``marks``, and its parameters by name, one that it holds twice by its first."""

    def __init__(self, module: nn.Module) -> None:
        self.marks: list[Any] = [torch.get_default_dtype()]
        self.parameters: dict[str, Tensor] = {}
        self._first: dict[int, int] = {}  # which parameters are one, whichever they are
        self._add(module, "")

    def _add(self, module: nn.Module, path: str) -> None:
        held, marks = module.__dict__, self.marks
        if any([held[hooks] for hooks in HOOKS]) or held["_buffers"]:
            raise _UnknownError
        marks += (type(module), type(module).__mro__)
        for name, value in held.items():
            if name not in OF_ALL_MODULES:
                if type(value) not in SCALARS:
                    raise _UnknownError
                marks += (name, value)
        for name, p in held["_parameters"].items():
            if p is not None and id(p) not in self._first:
                self.parameters[path + name] = p
            marks += (name, None if p is None else self._first.setdefault(id(p), len(self._first)))
        for name, part in held["_modules"].items():
            marks.append(name)
            if part is not None:
                self._add(part, f"{path}{name}.")
        marks.append(END)


def look_at(module: nn.Module) -> Look | None:
    """None of one that only its fingerprint can tell from others."""
    try:
        return None if hooks_change_modules() else Look(module)
    except (_UnknownError, KeyError, RecursionError):
        return None


class _Class:
    """A class that is the user's, and what its functions read."""

    def __init__(self, kind: type) -> None:
        self.kind, self.names, self.values = kind, tuple(vars(kind)), tuple(vars(kind).values())
        read = [value for name, value in vars(kind).items() if name not in UNREAD]
        self.functions = [_Function(value) for value in read if type(value) is FunctionType]
        if any(type(value) not in (FunctionType, *SCALARS) for value in read):
            raise _UnknownError

    def is_as_before(self) -> bool:
        now = vars(self.kind)
        same = len(now) == len(self.names) and tuple(now) == self.names and all(map(is_, now.values(), self.values))
        return same and all([one.is_as_before() for one in self.functions])


class _Function:
    def __init__(self, fn: FunctionType) -> None:
        reading = reading_of(fn)
        if reading is None or reading.cells:
            raise _UnknownError
        self.fn, self.code, self.reading = fn, fn.__code__, reading

    def is_as_before(self) -> bool:
        fn = self.fn
        if fn.__code__ is not self.code or fn.__defaults__ or fn.__kwdefaults__ or fn.__dict__:
            return False
        get = fn.__globals__.get
        return all([get(name, MISSING) is value for name, value in self.reading.read])


class Seen:
    """What a look saw of a module, and of its classes. ``found`` is what came of it."""

    found: Any

    def __init__(self, look: Look, n_params: int) -> None:
        self.marks, self.n_params = look.marks, n_params
        self.classes = [_Class(kind) for kind in _users(look.marks)]

    def is_again(self, look: Look | None, n_params: int) -> bool:
        if look is None or len(look.marks) != len(self.marks) or n_params != self.n_params:
            return False
        return all(map(is_, look.marks, self.marks)) and all([one.is_as_before() for one in self.classes])


def seen(look: Look | None, n_params: int) -> Seen | None:
    """None of a module whose classes only a fingerprint can tell from others."""
    try:
        return None if look is None else Seen(look, n_params)
    except _UnknownError:
        return None


def _users(marks: Iterable[Any]) -> list[type]:
    kinds = dict.fromkeys(kind for mark in marks if isinstance(mark, type) for kind in mark.__mro__)
    return [kind for kind in kinds if _package(kind.__module__) not in OF_ALL_CLASSES]
