"""Launches that go to the compiled kernel itself.

Triton's own way, ``kernel[grid](*args, **constants)``, looks at every argument anew, writes down what it finds as a
string and looks that up: 20 to 100 us. Here a kernel and its compile-time arguments are bound once, and a launch only
computes what Triton specialises its code by:

    pointers    dtype, and whether the address is a multiple of 16
    integers    whether it is 1, a multiple of 16, and how wide it is
    None        that it is None
    tuples      their class and the same of every element

The first launch of each combination goes Triton's own way, which compiles it and hands the compiled kernel back. What
is not known here, and whatever somebody watches (a profiler), goes that way too.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from triton.runtime.jit import JITFunction

from gdpa.backends.triton import compat

MOST = 256  # combinations of one bound kernel that are remembered; a program has a handful

NARROW = 2**31


class Description:
    """What a tensor descriptor is to a compiled kernel: the tensor, its extents and strides. ``make`` makes Triton's own
    descriptor of it, for the first launch; ``kind`` stands for all that Triton specialises code by."""

    __slots__ = ("base", "kind", "make", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], kind: Any, make: Any) -> None:
        self.base = base
        self.shape = shape
        self.strides = strides
        self.kind = kind
        self.make = make
        self.padding = "zero"
        self.round_f32_to_tf32 = False


def specialisation(args: tuple[Any, ...]) -> tuple[Hashable, ...] | None:
    """What the code of a kernel may depend on in its run-time arguments; None if that is not known."""
    found: list[Hashable] = []
    for a in args:
        kind = type(a)
        if kind is int:
            wide = not -NARROW <= a < NARROW
            found.append(1 if a == 1 else (wide and (2 if a < 2**63 else 3), a % 16 == 0))
        elif a is None:
            found.append(None)
        elif kind is Description:
            found.append(a.kind)
        elif kind is Tensor or kind is Parameter:
            found.append((a.dtype, a.data_ptr() % 16 == 0))
        elif kind is float:
            found.append(float)
        elif isinstance(a, tuple):
            inner = specialisation(a)
            if inner is None:
                return None
            found.append((kind, inner))
        else:
            return None
    return tuple(found)


class Bound:
    """A kernel with its compile-time arguments and options, ready for launches: ``bound(grid, *args)``."""

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel = kernel
        self.constants = constants
        self.direct = type(kernel).__mro__.count(JITFunction) == 1 and not compat.missing()
        self.found: dict[Hashable, tuple[Any, ...]] = {}
        self.after: dict[int, tuple[Any, ...]] = {}  # the compile-time arguments, by how many come before them

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        known = specialisation(args) if self.direct and not compat.is_watched(self.kernel) else None
        if known is None:
            self.kernel[grid](*_triton_args(args), **self.constants)
            return
        device, stream = compat.device_and_stream()
        found = self.found.get((device, known))
        if found is None:
            self._first((device, known), grid, args)
            return
        run, function, metadata, after = found
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        run(x, y, z, stream, function, metadata, None, None, None, *args, *after)

    def _first(self, key: Hashable, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        compiled = self.kernel[grid](*_triton_args(args), **self.constants)
        if compat.is_compiled(compiled):
            while len(self.found) >= MOST:
                self.found.pop(next(iter(self.found), None), None)
            after = self._after(len(args))
            self.found[key] = (compiled.run, compiled.function, compiled.packed_metadata, after)

    def _after(self, n_args: int) -> tuple[Any, ...]:
        """The arguments behind the first ``n_args`` in the order of the kernel's own."""
        parameters = self.kernel.signature.parameters
        return tuple(self.constants.get(name, parameters[name].default) for name in self.kernel.arg_names[n_args:])


def _triton_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.make(a) if type(a) is Description else a for a in args)


def bind(holder: dict[Hashable, Any], kernel: Any, **constants: Any) -> Bound:
    """The one ``Bound`` of a kernel with these constants in ``holder``, what it lives as long as: the ``derived`` of an
    Activation, whose code is among the constants, or a table of a module's own."""
    values = (id(v) if isinstance(v, JITFunction) else v for v in constants.values())  # its own hash reads its source
    key = (bind, id(kernel), *constants, *values)
    found = holder.get(key)
    if found is None:
        found = holder.setdefault(key, Bound(kernel, constants))
    bound: Bound = found
    return bound
