"""Triton's inner names that a launch past its binder needs (see launching.py): one spelling, in one place.

``missing()`` tells which of them this Triton lacks. Then every launch takes Triton's ordinary way, which costs the host
20 to 100 us more per launch and computes the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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
