"""What a Python function depends on, as a hashable value: equal fingerprints mean equal functions.

Tracing takes milliseconds, so calls look their function up first. Identity would not do: a lambda re-created at every
step is a new object, and a known object may read a global that has changed since. A fingerprint is None where the
function reads something that may change unseen; such a function is traced at every call.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Hashable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from gdpa.functions.kept import KEPT
from gdpa.functions.modules import Lifted

SCALARS = (bool, int, float, complex, str, bytes, type(None))
NAMESPACES = (types.ModuleType, type)
TRUSTED_PACKAGES = ("torch", "math", "numpy")
OF_ALL_MODULES = vars(nn.Module()).keys() - {"training"}  # parameters, hooks and such
OF_ALL_CLASSES = ("torch", "builtins")  # packages of base classes that do not change
UNREAD = {"__init__", "__doc__", "__module__", "__qualname__", "__annotations__", "__annotate__", "__annotate_func__",
          "__annotations_cache__", "__static_attributes__", "__firstlineno__", "__parameters__", "reset_parameters",
          "extra_repr"}  # fmt: skip
DYNAMIC = {"getattr", "globals", "vars", "eval", "exec", "__import__"}  # built-ins that read what no name tells


class _UnknownError(Exception):
    """Something was met whose value may change without notice."""


def fingerprint(fn: Any) -> Hashable | None:
    """Everything ``fn`` reads (code, defaults, closure, globals, attributes), or None if that cannot be known."""
    try:
        return _value(fn, frozenset())
    except _UnknownError:
        return None


def _value(x: Any, seen: frozenset[int]) -> Hashable:
    if type(x) in SCALARS:
        return (type(x), repr(x))  # repr tells 0.0 from -0.0 and makes nan equal to itself
    if isinstance(x, tuple):
        return (tuple, tuple(_value(item, seen) for item in x))
    if isinstance(x, types.FunctionType):
        return _function(x, seen)
    if isinstance(x, partial):
        return (partial, _value(x.func, seen), _value(x.args, seen), _mapping(x.keywords, seen))
    if isinstance(x, Lifted):  # whose parameters are arguments
        return (Lifted, x.n_params, x.names, _module(x.module, seen))
    if isinstance(x, nn.Module):
        if next(x.parameters(), None) is not None:
            raise _UnknownError
        return _module(x, seen)
    if isinstance(x, types.BuiltinFunctionType):
        return _builtin(x)
    if isinstance(x, torch.dtype) or (_package(type(x).__module__) in TRUSTED_PACKAGES and callable(x)):
        return x
    raise _UnknownError


def _builtin(fn: types.BuiltinFunctionType) -> Hashable:
    """A function written in C. As the method of an object (``settings.get``) it reads what may change."""
    if isinstance(fn.__self__, types.ModuleType | type | None):
        return fn
    raise _UnknownError


def _package(module: str | None) -> str:
    return (module or "").split(".")[0]


def _namespace(x: Any, code: types.CodeType, seen: frozenset[int]) -> Hashable:
    """A module or class that ``code`` reads: the values of its attributes that the code names."""
    if _package(x.__name__ if isinstance(x, types.ModuleType) else x.__module__) in (*TRUSTED_PACKAGES, "builtins"):
        return x
    if isinstance(x, type):
        raise _UnknownError
    read = [name for name in _names(code) if hasattr(x, name)]
    return (x, tuple((name, _named(getattr(x, name), code, seen)) for name in read))


def _named(x: Any, code: types.CodeType, seen: frozenset[int]) -> Hashable:
    return _namespace(x, code, seen) if isinstance(x, NAMESPACES) else _value(x, seen)


def _mapping(items: dict[str, Any], seen: frozenset[int]) -> Hashable:
    return tuple((key, _value(items[key], seen)) for key in sorted(items))


def _function(fn: types.FunctionType, seen: frozenset[int]) -> Hashable:
    where = fn.__globals__.get("__name__")  # not __module__, which functools.wraps copies
    if _package(where) in TRUSTED_PACKAGES:
        return fn
    if id(fn) in seen:  # recursion: the outer visit covers it
        return (types.FunctionType, fn.__qualname__)
    seen = seen | {id(fn)}
    return (
        fn.__code__,
        _value(fn.__defaults__ or (), seen),
        _mapping(fn.__kwdefaults__ or {}, seen),
        tuple(_named(_cell(cell), fn.__code__, seen) for cell in fn.__closure__ or ()),
        _globals(fn, seen),
        _mapping({name: value for name, value in vars(fn).items() if name != "__wrapped__"}, seen),
    )


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        raise _UnknownError from None


def _globals(fn: types.FunctionType, seen: frozenset[int]) -> Hashable:
    """The globals that ``fn`` names (co_names also holds attribute names, which match none or do no harm)."""
    found = []
    for name in _names(fn.__code__):
        if name in fn.__globals__:
            found.append((name, _named(fn.__globals__[name], fn.__code__, seen)))
        elif name in DYNAMIC:
            raise _UnknownError
    return tuple(found)


@lru_cache(maxsize=KEPT)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names read in ``code`` and in the functions nested in it."""
    imported = {i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}
    if any(_package(module) not in TRUSTED_PACKAGES for module in imported):
        raise _UnknownError
    nested = (name for c in code.co_consts if isinstance(c, types.CodeType) for name in _names(c))
    return tuple(dict.fromkeys((*code.co_names, *nested)))


def _module(module: nn.Module, seen: frozenset[int]) -> Hashable:
    """A module is its class and its scalar settings. Those of PyTorch compute nothing else; of others it is all that
    their classes hold, but for how they are made."""
    if module._forward_hooks or module._forward_pre_hooks or next(module.buffers(), None) is not None:
        raise _UnknownError
    settings = {k: v for k, v in vars(module).items() if k not in OF_ALL_MODULES}
    children = module._modules
    return (
        type(module),
        tuple(_members(kind, seen) for kind in type(module).__mro__ if _package(kind.__module__) not in OF_ALL_CLASSES),
        _mapping(settings, seen),
        tuple((name, _value(child, seen)) for name, child in children.items()),
    )


def _members(kind: type, seen: frozenset[int]) -> Hashable:
    """What a class of modules gives its objects to read."""
    return _mapping({name: value for name, value in vars(kind).items() if name not in UNREAD}, seen)
