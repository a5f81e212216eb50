"""How long functions stay in memory.

An operator is handed the key of a function's graph, a string, and looks the Activation up. So whoever needs one later
holds it: the user's own Activation, a call while it runs, an autograd graph until its backward. Beyond these only the
KEPT functions that were used last are kept (and as many that were found at a glance, see recent/), so that a function
with a new number in its closure at every call neither leaks nor is lost. What is made of an Activation (source, JIT
functions) lives as long as it does.
"""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

KEPT = 512  # functions; one takes about 0.1 MB
MANY_VARIANTS = 64  # of one function, from which on it is told of

T = TypeVar("T")


class Recent(Generic[T]):
    """A cache of the KEPT things that were put or found last."""

    def __init__(self) -> None:
        self._items: OrderedDict[Hashable, T] = OrderedDict()

    def find(self, key: Hashable) -> T | None:
        found = self._items.get(key)
        if found is not None:
            self._items.move_to_end(key)
        return found

    def put(self, key: Hashable, item: T) -> None:
        self._items[key] = item
        self._items.move_to_end(key)
        while len(self._items) > KEPT:
            self._items.popitem(last=False)

    def clear(self) -> None:
        self._items.clear()

    def __len__(self) -> int:
        return len(self._items)


def kept_with_activation(make: Callable[..., T]) -> Callable[..., T]:
    """Like functools.cache on ``make(act, *args)``, whose results live as long as ``act``."""

    @functools.wraps(make)
    def find_or_make(act: Any, *args: Hashable, **named: Hashable) -> T:
        key = (make, args, *named.items())
        if key not in act.derived:
            with act.lock:  # forward and backward are compiled at the same time (see gdpa.calling.warming)
                if key not in act.derived:
                    act.derived[key] = make(act, *args, **named)
        found: T = act.derived[key]
        return found

    return find_or_make


_variants: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_warned: list[str] = []


def count_variant(fn: Any, name: str) -> None:
    """``fn`` became a graph of its own: warn, once per process, if its code has become very many of them."""
    while isinstance(fn, functools.partial | types.MethodType):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    origin = getattr(fn, "__code__", type(fn))
    _variants[origin] = _variants.get(origin, 0) + 1
    if _variants[origin] > MANY_VARIANTS and not _warned:
        _warned.append(name)
        warnings.warn(
            f"gdpa: the activation {name!r} has been traced with {_variants[origin]} different constants (numbers that "
            "it reads from a closure, a default, a global or an attribute); each takes time to trace, and on a GPU "
            "seconds to compile. Pass the number through params instead: a kernel then takes it as data",
            stacklevel=2,
        )
