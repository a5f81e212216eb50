"""What a Python function depends on, as a hashable value: equal fingerprints mean equal functions.

Tracing takes milliseconds, so calls look their function up first. Identity would not do: a lambda re-created at every
step is a new object, and a known object may read a global that has changed since. A fingerprint is None where the
function reads something that may change unseen; such a function is traced at every call.
"""

from __future__ import annotations

import dis
import sys
import types
from collections import namedtuple
from collections.abc import Hashable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from gdpa.compat import OpOverload, OpOverloadPacket
from gdpa.functions.isolation import hooks_change_modules
from gdpa.functions.kept import KEPT
from gdpa.functions.modules import Lifted

SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})
NAMESPACES = (types.ModuleType, type)
TRUSTED_PACKAGES = ("torch", "math", "numpy")
UNCHANGING = (torch.dtype, OpOverload, OpOverloadPacket, torch.jit.ScriptFunction)
OF_ALL_MODULES = vars(nn.Module()).keys() - {"training"}  # parameters, hooks and such
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_ALL_CLASSES = ("torch", "builtins")  # packages of base classes that do not change
UNREAD = {"__init__", "__doc__", "__module__", "__qualname__", "__annotations__", "__annotate__", "__annotate_func__",
          "__annotations_cache__", "__static_attributes__", "__firstlineno__", "__parameters__", "reset_parameters",
          "extra_repr"}  # fmt: skip
_Tuple = namedtuple("_Tuple", "field")
FIELD = type(vars(_Tuple)["field"])
OF_NAMED_TUPLES = {*vars(_Tuple), *UNREAD, "__orig_bases__"} - {"field"}  # whose meaning is that of the fields
DYNAMIC = {"getattr", "globals", "vars", "eval", "exec", "__import__"}  # built-ins that read what no name tells
ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
NAMED = frozenset({*dis.hasname, *dis.hasfree})
NO_NAME_IS_READ = {*ATTRIBUTE, "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR", "IMPORT_NAME", "IMPORT_FROM",
                   "LOAD_CLOSURE", "MAKE_CELL"}  # fmt: skip


class _UnknownError(Exception):
    """Something was met whose value may change without notice."""


def fingerprint(fn: Any) -> Hashable | None:
    """Everything ``fn`` reads (code, defaults, closure, globals, attributes), or None if that cannot be known."""
    try:
        return _value(fn, frozenset())
    except (_UnknownError, RecursionError):
        return None


def _value(x: Any, seen: frozenset[int]) -> Hashable:
    kind = type(x)
    if kind in SCALARS:
        return (kind, repr(x))  # repr tells 0.0 from -0.0 and makes nan equal to itself
    if kind is types.FunctionType:
        return _function(x, seen)
    if isinstance(x, NAMESPACES):
        return x if id(x) in seen else _namespace(x)
    if isinstance(x, tuple):
        return (_kind_of_tuple(kind), tuple(_value(item, seen) for item in x))
    if kind is partial:
        named = _mapping(x.keywords, seen), _mapping(vars(x), seen)
        return (partial, _value(x.func, seen), _value(x.args, seen), *named)
    if isinstance(x, Lifted):  # whose parameters are arguments
        return (Lifted, x.n_params, x.names, x.ties, _module(x.module, seen, lifted=True))
    if isinstance(x, nn.Module):
        if next(x.parameters(), None) is not None:
            raise _UnknownError
        return _module(x, seen)
    if isinstance(x, types.BuiltinFunctionType):
        return _builtin(x)
    if isinstance(x, UNCHANGING) or _is_of_numpy(x):
        return x
    raise _UnknownError


def _kind_of_tuple(kind: type) -> Hashable:
    """Of a named tuple it is the names, too. A class that says more of its tuples may compute anything of them."""
    if kind is tuple or kind is torch.Size:
        return kind
    fields = getattr(kind, "_fields", None)
    if kind.__bases__ != (tuple,) or type(fields) is not tuple:
        raise _UnknownError
    members = vars(kind)
    says_more = not OF_NAMED_TUPLES.issuperset(members.keys() - fields)
    if says_more or any(type(members.get(field)) is not FIELD for field in fields):
        raise _UnknownError
    return kind, fields


def _builtin(fn: types.BuiltinFunctionType) -> Hashable:
    """A function written in C. As the method of an object (``settings.get``) it reads what may change."""
    if isinstance(fn.__self__, types.ModuleType | type | None):
        return fn
    raise _UnknownError


def _is_of_numpy(x: Any) -> bool:
    """Whether numpy has it by its name. Of its types are also functions of the user's (np.vectorize), and what can be
    written to (np.poly1d)."""
    if _package(type(x).__module__) != "numpy":
        return False
    where, name = getattr(x, "__module__", None), getattr(x, "__name__", None)
    if not isinstance(where, str) or not isinstance(name, str) or not _is_trusted(where):
        return False
    return getattr(sys.modules.get(where), name, None) is x


@lru_cache(maxsize=KEPT)
def _package(module: str | None) -> str:
    return (module or "").split(".")[0]


def _is_trusted(module: str | None) -> bool:
    return _package(module) in TRUSTED_PACKAGES


def _namespace(x: types.ModuleType | type) -> Hashable:
    """A module or class as such, of which anything may be read."""
    package = _package(x.__name__ if isinstance(x, types.ModuleType) else x.__module__)
    if package in TRUSTED_PACKAGES or package == "builtins":
        return x
    raise _UnknownError


def _mapping(items: dict[str, Any], seen: frozenset[int]) -> Hashable:
    return tuple((key, _value(items[key], seen)) for key in sorted(items))


def _function(fn: types.FunctionType, seen: frozenset[int]) -> Hashable:
    trusted = _is_trusted(fn.__globals__.get("__name__"))  # not __module__, which functools.wraps copies
    if trusted and fn.__closure__ is None:
        return fn
    if id(fn) in seen:  # recursion: the outer visit covers it
        return (types.FunctionType, fn.__qualname__)
    seen = seen | {id(fn)}
    if trusted:  # what it closes over may be the user's: torch.enable_grad()(f), torch.vmap(f)
        return (fn.__code__, tuple(_value(_cell(cell), seen) for cell in fn.__closure__ or ()))
    return (
        fn.__code__,
        _value(fn.__defaults__, seen),
        _mapping(fn.__kwdefaults__, seen) if fn.__kwdefaults__ else (),
        _read(fn, seen),
        _mapping({name: value for name, value in vars(fn).items() if name != "__wrapped__"}, seen),
    )


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        raise _UnknownError from None


def _read(fn: types.FunctionType, seen: frozenset[int]) -> Hashable:
    """What ``fn`` reads of its closure and of the globals; None stands for built-ins."""
    found: list[Hashable] = []
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    for name, is_free, attributes in _reads(fn.__code__):
        if is_free:
            if name in cells:  # else it is a local name of fn that a nested function reads
                found.append(_attribute(_cell(cells[name]), attributes, seen))
        elif name in fn.__globals__:
            found.append(_attribute(fn.__globals__[name], attributes, seen))
        elif name in DYNAMIC:
            raise _UnknownError
        else:
            found.append(None)
    return tuple(found)


def _attribute(x: Any, attributes: tuple[str, ...], seen: frozenset[int]) -> Hashable:
    """``x.name.name...`` as far as what has the name is a module, else that. A module whose attributes are not read
    right there goes elsewhere, and what is read of it there is unknown."""
    for name in attributes:
        if not isinstance(x, types.ModuleType) or _is_trusted(x.__name__):
            break
        try:
            x = getattr(x, name)
        except AttributeError:
            raise _UnknownError from None
    return _value(x, seen)


@lru_cache(maxsize=KEPT)
def _reads(code: types.CodeType) -> tuple[tuple[str, bool, tuple[str, ...]], ...]:
    """The names read in ``code`` and in the functions nested in it: each with whether it is one of a closure, and the
    attributes that are read of it right there (those of ``pkg.sub.C`` are sub and C)."""
    found = dict.fromkeys(_reads_here(code))
    for nested in code.co_consts:
        if isinstance(nested, types.CodeType):
            found.update(dict.fromkeys(_reads(nested)))
    free = {name for name, is_free, _ in found if is_free}
    return (*found, *((name, True, ()) for name in code.co_freevars if name not in free))


def _reads_here(code: types.CodeType) -> Iterator[tuple[str, bool, tuple[str, ...]]]:
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for i, step in enumerate(steps):
        if step.opname == "IMPORT_NAME" and (steps[i - 2].argval != 0 or not _is_trusted(step.argval)):
            raise _UnknownError  # two instructions before is the level: `from .math import k` is not Python's math
        if step.opname in ATTRIBUTE and step.argval in DYNAMIC:  # of the module builtins
            raise _UnknownError
        if step.opcode in NAMED and step.opname not in NO_NAME_IS_READ:
            attributes = []
            for following in steps[i + 1 :]:
                if following.opname not in ATTRIBUTE:
                    break
                attributes.append(following.argval)
            yield step.argval, step.opcode in dis.hasfree, tuple(attributes)


def _module(module: nn.Module, seen: frozenset[int], lifted: bool = False) -> Hashable:
    """A module is its class and its scalar settings. Those of PyTorch compute nothing else; of others it is all that
    their classes hold, but for how they are made. ``lifted``: it is called with other parameters, as its parts are."""
    if any(getattr(module, hooks) for hooks in HOOKS) or hooks_change_modules():
        raise _UnknownError
    if any(buffer is not None for buffer in module._buffers.values()):
        raise _UnknownError
    # What methods read of these, as super() does, is among the members.
    seen = seen.union(id(kind) for kind in type(module).__mro__ if type(kind) is type)
    settings = {k: v for k, v in vars(module).items() if k not in OF_ALL_MODULES}
    parts = module._modules.items()
    return (
        type(module),
        tuple(_members(kind, seen) for kind in type(module).__mro__ if _package(kind.__module__) not in OF_ALL_CLASSES),
        _mapping(settings, seen),
        tuple((name, _part(part, seen, lifted)) for name, part in parts),
    )


def _part(part: nn.Module | None, seen: frozenset[int], lifted: bool) -> Hashable:
    return _module(part, seen, lifted) if lifted and part is not None else _value(part, seen)


def _members(kind: type, seen: frozenset[int]) -> Hashable:
    """What a class of modules gives its objects to read."""
    return _mapping({name: value for name, value in vars(kind).items() if name not in UNREAD}, seen)
