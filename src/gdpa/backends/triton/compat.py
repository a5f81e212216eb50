"""Triton's inner names that a launch past its binder needs (see launching.py): one spelling, in one place.

``missing()`` tells which of them this Triton lacks. Then every launch takes Triton's ordinary way, which costs the host
20 to 100 us more per launch and computes the same. ``below()`` goes one step further, to the C function under Triton's
launcher; where that looks otherwise than here, repeated launches only get as far as the launcher.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

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
    """Whether somebody (a profiler) wants to be told of launches, which only Triton's ordinary way does."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # In place of the chain somebody may have put a function of his own, which has no list of calls.
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
