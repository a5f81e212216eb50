"""Compiled kernels found again in a later process, without Triton's own key.

Triton keeps compiled kernels on disk under a key for which it reads and hashes its whole installation (400 MB) and
walks through the syntax trees of a kernel and all that it calls: a second of every process. And the key of a kernel
depends on which kernels had theirs computed before it, so that it may not be found at all
(``DependenciesFinder._update_hash`` merges the globals of a callee before it has found them).

Here a file of a few hundred bytes (see gdpa.functions.stored) says under which key Triton has kept what. It is found by
all that the code depends on:

    Triton         version, and place, size and time of every file of the installation, ptxas among them
    this package   the files that kernels come from; the functions and constants of a kernel's modules as they are now
    the function   the source that was emitted for it
    the launch     signature, constants, alignment, options, target
    settings       what Triton's knobs and environment variables say

A kernel that cannot be named like that is compiled in Triton's own way, and so is one whose files are missing or
damaged; unless the same kernel was compiled for another function, and can be filled with this one (see outlines.py).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from gdpa.backends.triton import compat
from gdpa.backends.triton.compiled import outlines, sharing
from gdpa.backends.triton.compiled.order import no_collections, turn
from gdpa.functions import stored

OWN = "gdpa."
SOURCES = ("backends", "device")  # folders of this package that device code comes from; emitted code is its own name
CHECKED = (".json", ".cubin", ".hsaco")  # what a launch needs of all that Triton keeps
FILLED = (".json", ".ptx")  # and what a kernel that is filled with another function is made from


class _UnnamedError(Exception):
    """A constant that has no name by which another process would know it."""


def attach(kernel: Any) -> None:
    """Have the next compilations of ``kernel``, on the current device, look here first."""
    if kernel.__module__.startswith(OWN) and stored.folder() is not None and not compat.cannot_find():
        compat.compile_through(kernel, find_or_compile)


def find_or_compile(ordinary: Callable[..., Any], src: Any, target: Any, options: dict[str, Any]) -> Any:
    """In place of ``triton.compile`` (``ordinary``): the compiled kernel, found on disk, filled, or compiled."""
    names = names_of(src, target, options)
    if names is None:
        return ordinary(src, target=target, options=options)
    found = _read(names.kernel, src)
    if found is None:
        with compat.launcher_beside(src):
            found = _fill(names, src, target, options) or _compile(names, ordinary, src, target, options)
    return found


def _compile(names: Names, ordinary: Callable[..., Any], src: Any, target: Any, options: dict[str, Any]) -> Any:
    """Compile in Triton's own way, and write down under which name the result can be found."""
    make = src.make_ir
    with compat.quick_key(_installation()), ExitStack() as first_half:
        first_half.enter_context(turn())
        first_half.enter_context(no_collections())

        def make_ir(*args: Any, **kwargs: Any) -> Any:
            with first_half:  # which ends with it
                return make(*args, **kwargs)

        src.make_ir = make_ir
        found = _share(names, ordinary, src, target, options) or ordinary(src, target=target, options=options)
    _write(names.kernel, found)
    _write_outline(names, src, found)
    return found


def _share(names: Names, ordinary: Callable[..., Any], src: Any, target: Any, options: dict[str, Any]) -> Any:
    """The kernel with one copy of its consumers' code (sharing.py); None if it asks for none, or if that failed."""
    if not sharing.is_wanted(src.constants.values()) or compat.cannot_fill():
        return None
    try:
        whole = ordinary(src, target=target, options={**options, "ptx_options": sharing.QUICKLY})
        ptx = sharing.shared(whole.asm["ptx"])
        if ptx is None:
            return None
        key = hashlib.sha256(names.kernel.stem.encode()).hexdigest()
        files = compat.keep_filled(src, target, options, compat.kept_as(whole)[1], key, ptx)
    except compat.PTXASError:  # Triton has written what nobody expected: two copies are right, too
        return None
    return compat.load(src, files, key)


# ---- names -----------------------------------------------------------------------------------------------------------
class Names(NamedTuple):
    """Files with the keys of compiled kernels: of this one, and of one with its outline, if it has any
    (outlines.py)."""

    kernel: Path
    outline: Path | None


def names_of(src: Any, target: Any, options: dict[str, Any]) -> Names | None:
    """None if the kernel has no name, or is compiled in some other way."""
    if compat.compiles_otherwise():
        return None
    functions = [src.fn, *_functions_in(src.constants.values())]
    try:
        whole, outline = (_constants(src, of_emitted) for of_emitted in (outlines.whole, outlines.outline))
        reads = (
            _installation(), _own_files(), _named(src.fn, outlines.whole), src.signature, src.attrs,
            _modules(functions), target, sorted(options.items()),
            compat.stat_of(path for _, path in options.get("extern_libs") or ()), compat.settings(),
        )  # fmt: skip
    except _UnnamedError:
        return None
    kernel, other = (stored.file_of((kind, repr((reads, c)))) for kind, c in (("kernel", whole), ("outline", outline)))
    if kernel is None:
        return None
    return Names(kernel, other if outlines.texts(functions) and not compat.cannot_fill() else None)


def _constants(src: Any, of_emitted: Callable[[Any], str]) -> tuple[Any, ...]:
    return tuple((place, _named(value, of_emitted)) for place, value in sorted(src.constants.items()))


def _named(x: Any, of_emitted: Callable[[Any], str]) -> Any:
    """A constant in terms that are the same in every process; ``of_emitted`` is asked for those of emitted
    functions."""
    if x is None or isinstance(x, str | int | float | compat.constexpr | compat.dtype):
        return type(x).__name__, repr(x)
    if isinstance(x, tuple):
        return type(x).__name__, *(_named(entry, of_emitted) for entry in x)
    if is_dataclass(x) and not isinstance(x, type):
        return type(x).__qualname__, *((f.name, _named(getattr(x, f.name), of_emitted)) for f in fields(x))
    if isinstance(x, compat.JITCallable):
        if outlines.is_emitted(x):
            return x.__module__, x.__qualname__, of_emitted(x)
        if x.__module__.startswith(OWN):
            return x.__module__, x.__qualname__
    raise _UnnamedError


def _functions_in(constants: Iterable[Any]) -> Iterator[Any]:
    """The JIT functions among ``constants``, and in dataclasses of them (see code.py)."""
    for x in constants:
        if isinstance(x, compat.JITCallable):
            yield x
        elif is_dataclass(x):
            yield from _functions_in(getattr(x, f.name) for f in fields(x))


def _modules(functions: list[Any]) -> str:
    """A digest of the JIT functions and constants in the modules of ``functions``, and in all modules that these use:
    as they were imported, since the files may have changed since then. Emitted functions are named by themselves."""
    found = hashlib.sha256()
    scopes, seen = [f.__globals__ for f in functions], set()
    while scopes:
        scope = scopes.pop()
        if id(scope) in seen:
            continue
        seen.add(id(scope))
        for name, value in sorted(scope.items()):
            if isinstance(value, compat.JITCallable) and outlines.is_emitted(value):
                continue
            if isinstance(value, compat.JITCallable) and value.__module__.startswith(OWN):
                found.update(f"{value.__module__} {name} {''.join(value.raw_src)} {value.src}\n".encode())
                scopes.append(value.__globals__)
            elif isinstance(value, compat.constexpr):
                found.update(f"{scope['__name__']} {name} {value!r}\n".encode())
            elif isinstance(value, ModuleType) and value.__name__.startswith(OWN):
                scopes.append(vars(value))
    return found.hexdigest()


@cache
def _own_files() -> str:
    """A digest of all files beside device code, host code included: it makes kernels' arguments, and runs while they
    are compiled."""
    package = Path(sys.modules["gdpa"].__path__[0])
    found = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((package / folder).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


@cache
def _installation() -> str:
    return hashlib.sha256(repr(compat.installation()).encode()).hexdigest()


# ---- files -----------------------------------------------------------------------------------------------------------
def _read(file: Path, src: Any) -> Any:
    """The compiled kernel whose key is in ``file``; None if there is none, or if it is damaged."""
    known = stored.read(file)
    if known is None:
        return None
    kept = compat.kept_files(known["key"], src.name)
    if kept is None:
        return None
    if _digests(kept) != known["files"]:
        compat.remove_kept(known["key"], src.name)
        return None
    return compat.load(src, kept, known["key"])


def _write(file: Path, compiled: Any) -> None:
    key, kept = compat.kept_as(compiled)
    stored.write(file, {"key": key, "files": _digests(kept)})


def _digests(kept: dict[str, str], checked: tuple[str, ...] = CHECKED) -> dict[str, str | None]:
    return {name: _digest(path) for name, path in sorted(kept.items()) if name.endswith(checked)}


def _digest(path: str) -> str | None:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


# ---- outlines --------------------------------------------------------------------------------------------------------
def _write_outline(names: Names, src: Any, compiled: Any) -> None:
    """Write down that this kernel may be filled with other functions, if it may."""
    key, kept = compat.kept_as(compiled)
    texts, files = outlines.texts(_functions_in(src.constants.values())), _digests(kept, FILLED)
    if names.outline is not None and len(files) == len(FILLED) and None not in files.values():
        stored.write(names.outline, {"key": key, "files": files, "texts": texts})


def _fill(names: Names, src: Any, target: Any, options: dict[str, Any]) -> Any:
    """A kernel that was compiled for another function, filled with the one of ``src``; None if there is none."""
    known = stored.read(names.outline)
    kept = compat.kept_files(known["key"], src.name) if known else None
    if kept is None or _digests(kept, FILLED) != known["files"]:
        return None
    texts = outlines.texts(_functions_in(src.constants.values()))
    ptx = outlines.filled(Path(kept[f"{src.name[:150]}.ptx"]).read_text(), known["texts"], texts)
    if ptx is None:
        return None
    key = hashlib.sha256(names.kernel.stem.encode()).hexdigest()
    found = compat.load(src, compat.keep_filled(src, target, options, kept, key, ptx), key)
    _write(names.kernel, found)
    return found
