"""The internal names of Triton that launches without its binder need (see launching.py), all in one place.

``missing()`` lists those that this Triton lacks. If there are any, every launch takes Triton's ordinary way, which
computes the same and costs the host 20 to 100 us more per launch. ``below()`` goes one step further, to the C function
under Triton's launcher; where a Triton is built differently there, repeated launches go through the launcher.

``cannot_find()`` lists what is missing of the names that compiled/finding.py needs to find compiled kernels again. If
anything is, they are found by Triton's own key.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from importlib import import_module
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.language import constexpr, dtype
from triton.runtime import cache as kernels
from triton.runtime import driver, jit
from triton.runtime.errors import PTXASError
from triton.runtime.jit import JITFunction

__all__ = ["JITCallable", "PTXASError", "constexpr", "dtype"]  # that other modules take from here, besides its own
JITCallable: Any = getattr(jit, "JITCallable", JITFunction)

LAUNCHER = ("run", "function", "packed_metadata")  # of a compiled kernel


@cache
def missing() -> tuple[str, ...]:
    """The names that this Triton lacks; none in 3.6 to 3.9."""
    from triton.compiler import CompiledKernel

    found = {
        "JITFunction.arg_names": hasattr(JITFunction(_probe), "arg_names"),
        "JITFunction.pre_run_hooks": hasattr(JITFunction(_probe), "pre_run_hooks"),
        "CompiledKernel.run": isinstance(getattr(CompiledKernel, "run", None), property),
        "knobs.runtime.launch_enter_hook.calls": hasattr(knobs.runtime.launch_enter_hook, "calls"),
        "knobs.runtime.launch_exit_hook.calls": hasattr(knobs.runtime.launch_exit_hook, "calls"),
    }
    return tuple(name for name, there in found.items() if not there)


def _probe(x: Any) -> None:
    """A function to look at a JITFunction of."""


def is_compiled(kernel: Any) -> bool:
    """Whether ``kernel``, what a launch returned, can be launched again by itself (not one still being compiled)."""
    return all(hasattr(kernel, name) for name in LAUNCHER)


def is_watched(kernel: JITFunction[Any]) -> bool:
    """Whether a hook, such as a profiler's, is called at launches: only Triton's ordinary way calls it."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # A user may have replaced the chain of hooks by a function, which has no list of calls.
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True) or kernel.pre_run_hooks)


def device_and_stream() -> tuple[int, int]:
    """Where a launch made now goes: the current device and its current stream."""
    active = driver.active
    device = active.get_current_device()
    return device, active.get_current_stream(device)


class Below(NamedTuple):
    """What is under the launcher of a compiled kernel."""

    launch: Callable[..., None]  # takes the grid and the stream, ``head``, then the arguments
    head: tuple[Any, ...]
    nested: bool  # the arguments are one tuple
    tiled: tuple[Any, ...]  # what the compiler says of each tensor descriptor, for ``encoded``


def below(compiled: Any) -> Below | None:
    """The launcher takes a microsecond for each descriptor, which ``launch`` takes encoded. None if it does anything
    besides, like allocating memory."""
    launcher = compiled.run
    does_more = [getattr(launcher, name, True) for name in ("global_scratch_size", "profile_scratch_size")]
    launch = _unwrapped(getattr(launcher, "launch", None))
    if any(does_more) or getattr(launcher, "gsan_enabled", False) or launch is None:
        return None
    seen: list[tuple[Any, ...]] = []
    probe = copy.copy(launcher)  # asked what it would hand on
    probe.launch = lambda *args: seen.append(args)
    where, mark = (3, 5, 7, 11), object()
    probe(*where, compiled.function, compiled.packed_metadata, None, None, None, mark)
    handed = seen[0] if seen else (None,)
    nested = isinstance(handed[-1], tuple) and handed[-1] == (mark,)
    if handed[:4] != where or not (nested or handed[-1] is mark):
        return None
    return Below(launch, handed[4:-1], nested, tuple(getattr(compiled.metadata, "tensordesc_meta", None) or ()))


def _unwrapped(launch: Any) -> Any:
    """The C function inside of what encodes descriptors, if anything does."""
    cells = getattr(launch, "__closure__", None)
    if not cells:
        return launch
    return dict(zip(launch.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True)).get("launcher")


def encoded(description: Any, tiled: Any) -> list[Any]:
    """A tensor descriptor as a kernel takes it: 128 bytes, which hold the address, then its extents and strides."""
    encode, more = _encode()
    found: list[Any] = encode(description, tiled, *more)
    return found


@cache
def _encode() -> tuple[Callable[..., list[Any]], tuple[None, ...]]:
    encode = import_module("triton.backends.nvidia.driver").make_tensordesc_arg
    return encode, (None,) * (len(inspect.signature(encode).parameters) - 2)  # newer ones take a third, unused


# ---- compiled kernels found again (see compiled/finding.py) ----------------------------------------------------------
UNCHANGED = ("cache", "redis", "autotuning", "proton")  # groups of knobs that change no code
OTHERWISE = ("override", "dump_ir", "always_compile", "use_ir_loc", "listener")  # knobs of compilation


@cache
def cannot_find() -> tuple[str, ...]:
    """The names that this Triton lacks; none in 3.6 to 3.9."""
    from triton import compiler

    probe = JITFunction(_probe)
    found = {
        "JITCallable": hasattr(jit, "JITCallable"),
        "JITCallable.raw_src": hasattr(probe, "raw_src"),
        "JITCallable.src": hasattr(probe, "src"),
        "JITFunction.device_caches": hasattr(probe, "device_caches"),
        "JITFunction.create_binder": hasattr(probe, "create_binder"),
        "CompiledKernel": hasattr(compiler, "CompiledKernel"),
        "cache.get_cache_manager": hasattr(kernels, "get_cache_manager"),
        "cache.triton_key": hasattr(kernels, "triton_key"),
        "knobs.base_knobs.knob_descriptors": hasattr(getattr(knobs, "base_knobs", None), "knob_descriptors"),
        "get_cache_invalidating_env_vars": hasattr(jit, "get_cache_invalidating_env_vars"),
    }
    return tuple(name for name, there in found.items() if not there)


class Through:
    """Calls ``compile(ordinary, src, target, options)`` for ``ordinary(src, target=..., options=...)``."""

    def __init__(self, ordinary: Callable[..., Any], compile: Callable[..., Any]) -> None:
        self.ordinary = ordinary
        self.compile = compile

    def __call__(self, src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        if more or target is None or options is None:  # compiled in the background, by Triton's own means
            return self.ordinary(src, target=target, options=options, **more)
        return self.compile(self.ordinary, src, target, options)


def compile_through(kernel: Any, compile: Callable[..., Any]) -> None:
    """``kernel`` calls ``compile`` where it would call ``triton.compile``."""
    kernel.device_caches[driver.active.get_current_device()]  # asked for, it is made, and ``kernel.compile`` with it
    if not isinstance(kernel.compile, Through):
        kernel.compile = Through(kernel.compile, compile)


def compiles_otherwise() -> bool:
    """Whether something is to be seen, kept or changed while kernels are compiled."""
    settings, hook = knobs.compilation, getattr(knobs.runtime, "add_stages_inspection_hook", None)
    return hook is not None or any(getattr(settings, name, None) for name in OTHERWISE)


def settings() -> Any:
    """What knobs and environment variables say that may change code, and of files that they name size and time."""
    groups = {name: group for name, group in sorted(vars(knobs).items()) if isinstance(group, knobs.base_knobs)}
    found: list[tuple[str, Any]] = []
    for name, group in groups.items():
        if name not in UNCHANGED:
            found += [(d.key, os.environ.get(d.key)) for d in group.knob_descriptors.values()]
            found += [(f"{name}.{key}", repr(value)) for key, value in sorted(vars(group).items()) if _is_plain(value)]
    found += sorted(jit.get_cache_invalidating_env_vars().items())
    return found, stat_of(value for _, value in found if value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def stat_of(paths: Iterable[str]) -> list[tuple[str, int, int]]:
    """Size and time of those that are files."""
    found = []
    for path in paths:
        with suppress(OSError, ValueError):
            stat = os.stat(path)
            found.append((path, stat.st_size, stat.st_mtime_ns))
    return found


def installation() -> Any:
    """Triton's version, and all of its files. Reading them takes a second or two, and this some milliseconds."""
    from triton.backends import backends

    folders = {os.path.dirname(os.path.abspath(triton.__file__))}
    folders |= {os.path.dirname(os.path.abspath(inspect.getfile(backend.compiler))) for backend in backends.values()}
    paths = []
    for folder in sorted(folders):
        for where, inside, names in os.walk(folder, followlinks=True):
            inside[:] = sorted(name for name in inside if name != "__pycache__")
            paths += [os.path.join(where, name) for name in sorted(names)]
    return triton.__version__, stat_of(paths)


class _Quick(threading.local):
    key: str | None = None


_quick = _Quick()


@contextmanager
def quick_key(key: str) -> Iterator[None]:
    """In this thread ``key`` stands for Triton's installation, instead of a hash of its contents."""
    _install()
    before, _quick.key = _quick.key, key
    try:
        yield
    finally:
        _quick.key = before


@cache
def _install() -> None:
    ordinary = kernels.triton_key

    @wraps(ordinary)
    def triton_key() -> str:
        return _quick.key or ordinary()

    kernels.triton_key = triton_key


def kept_files(key: str, name: str) -> dict[str, str] | None:
    """The files that Triton keeps of the kernel called ``name`` under ``key``."""
    name = f"{name[:150]}.json"
    with suppress(OSError, ValueError):
        found: dict[str, str] | None = kernels.get_cache_manager(key).get_group(name)
        return found if found and name in found else None
    return None


def remove_kept(key: str, name: str) -> None:
    """Triton compiles it again: what it keeps is damaged, which it would not see."""
    group = kernels.get_cache_manager(key).get_file(f"__grp__{name[:150]}.json")
    with suppress(OSError, TypeError):
        os.remove(group)


def kept_as(compiled: Any) -> tuple[str, dict[str, str]]:
    """The key and the files of a compiled kernel."""
    return compiled.hash, compiled.metadata_group


def load(src: Any, kept: dict[str, str], key: str) -> Any:
    """The compiled kernel of these files."""
    from triton.compiler import CompiledKernel

    return CompiledKernel(src, kept, key)


# ---- launchers -------------------------------------------------------------------------------------------------------
class _Unknown:
    """Stands for what is known of a kernel once it is compiled."""

    def __init__(self, descriptors: int) -> None:
        self.tensordesc_meta: list[dict[str, Any]] = [{}] * descriptors

    def __getattr__(self, name: str) -> int:
        return 0


@contextmanager
def launcher_beside(src: Any) -> Iterator[None]:
    """Until Triton 3.6 the launcher of every new signature is written in C and compiled, 0.5 to 0.7 s, when its kernel
    is launched for the first time. Here that goes on beside the block, which compiles the kernel; Triton then finds the
    launcher on the disk. What fails is met again, and told of, when Triton makes it."""
    if not hasattr(import_module("triton.backends.nvidia.driver"), "make_launcher"):
        yield
        return
    descriptors = sum(isinstance(kind, str) and kind.startswith("tensordesc") for kind in src.signature.values())

    def make() -> None:
        with suppress(Exception):
            driver.active.launcher_cls(src, _Unknown(descriptors))

    thread = threading.Thread(target=make, name="gdpa-launcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


# ---- kernels filled with other functions (see compiled/outlines.py) --------------------------------------------------
@cache
def cannot_fill() -> tuple[str, ...]:
    """The names that this Triton lacks for it; none in 3.6 to 3.9."""
    from triton import compiler

    found = {
        "make_backend": hasattr(compiler, "make_backend"),
        "ASTSource.parse_options": hasattr(compiler.ASTSource, "parse_options"),
        "CacheManager.put_group": hasattr(getattr(kernels, "CacheManager", None), "put_group"),
    }
    return tuple(name for name, there in found.items() if not there)


def keep_filled(
    src: Any, target: Any, options: dict[str, Any], like: dict[str, str], key: str, ptx: str
) -> dict[str, str]:
    """Assemble ``ptx`` and keep it under ``key`` where Triton keeps kernels; returns its files. All else that is to be
    known of the kernel is what is known of the one whose files are ``like``."""
    from triton.compiler import make_backend

    backend = make_backend(target)
    stages: dict[str, Callable[..., Any]] = {}
    backend.add_stages(stages, backend.parse_options({**options, **src.parse_options()}), src.language)
    name = src.name[:150]
    with open(like[f"{name}.json"]) as file:
        metadata = {**json.load(file), "hash": key}
    made = {"ptx": ptx, "cubin": stages["cubin"](ptx, metadata), "json": json.dumps(metadata)}
    manager = kernels.get_cache_manager(key)
    files = {f"{name}.{kind}": manager.put(data, f"{name}.{kind}", kind == "cubin") for kind, data in made.items()}
    manager.put_group(f"{name}.json", files)
    return files
