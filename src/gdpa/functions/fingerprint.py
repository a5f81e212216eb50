"""What a Python function depends on, as a hashable value: equal fingerprints mean equal functions.

Tracing takes milliseconds, so calls look their function up first. Identity would not do: a lambda re-created at every
step is a new object, and a known object may read a global that has changed since. A fingerprint is None where the
function reads something that may change unseen; such a function is traced at every call.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Hashable
from functools import partial
from typing import Any

from torch import nn

SCALARS = (bool, int, float, complex, str, bytes, type(None))
STABLE = (types.ModuleType, types.BuiltinFunctionType, type)
TRUSTED_PACKAGES = ("torch", "math", "numpy")


class _Unknown(Exception):
    """Something was met whose value may change without notice."""


def fingerprint(fn: Any) -> Hashable | None:
    """Everything ``fn`` reads (code, defaults, closure, globals), or None if that cannot be known."""
    try:
        return _value(fn, frozenset())
    except _Unknown:
        return None


def _value(x: Any, seen: frozenset[int]) -> Hashable:
    if isinstance(x, SCALARS):
        return (type(x), repr(x))  # repr tells 0.0 from -0.0 and makes nan equal to itself
    if isinstance(x, tuple):
        return (tuple, tuple(_value(item, seen) for item in x))
    if isinstance(x, types.FunctionType):
        return _function(x, seen)
    if isinstance(x, partial):
        return (partial, _value(x.func, seen), _value(x.args, seen), _mapping(x.keywords, seen))
    if isinstance(x, nn.Module):
        return _module(x, seen)
    if isinstance(x, STABLE) or type(x).__module__.split(".")[0] in TRUSTED_PACKAGES and callable(x):
        return x
    raise _Unknown


def _mapping(items: dict[str, Any], seen: frozenset[int]) -> Hashable:
    return tuple((key, _value(items[key], seen)) for key in sorted(items))


def _function(fn: types.FunctionType, seen: frozenset[int]) -> Hashable:
    if (fn.__module__ or "").split(".")[0] in TRUSTED_PACKAGES:
        return fn
    if id(fn) in seen:  # recursion: the outer visit covers it
        return (types.FunctionType, fn.__qualname__)
    seen = seen | {id(fn)}
    return (
        fn.__code__,
        _value(fn.__defaults__ or (), seen),
        _mapping(fn.__kwdefaults__ or {}, seen),
        tuple(_value(_cell(cell), seen) for cell in fn.__closure__ or ()),
        _globals(fn, fn.__code__, seen),
    )


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        raise _Unknown from None


def _globals(fn: types.FunctionType, code: types.CodeType, seen: frozenset[int]) -> Hashable:
    """The globals named in ``code`` and in the functions nested in it (co_names also holds attribute names)."""
    found = []
    for name in code.co_names:
        if name in fn.__globals__:
            found.append((name, _value(fn.__globals__[name], seen)))
        elif hasattr(builtins, name):
            found.append((name, name))
    nested = [_globals(fn, c, seen) for c in code.co_consts if isinstance(c, types.CodeType)]
    return (tuple(found), tuple(nested))


def _module(module: nn.Module, seen: frozenset[int]) -> Hashable:
    """PyTorch's own modules are their class and their scalar settings; others may compute anything."""
    if type(module).__module__.split(".")[0] != "torch" or next(module.parameters(), None) is not None:
        raise _Unknown
    settings = {k: v for k, v in vars(module).items() if not k.startswith("_") or k == "_modules"}
    children = settings.pop("_modules", {})
    return (
        type(module),
        _mapping(settings, seen),
        tuple((name, _value(child, seen)) for name, child in children.items()),
    )
