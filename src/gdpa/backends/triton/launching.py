"""Launches that go to the compiled kernel itself.

Triton's own way, ``kernel[grid](*args, **constants)``, looks at every argument anew, writes down what it finds as a
string and looks that up: 20 to 100 us. Here a kernel and its compile-time arguments are bound once, and a launch only
computes what Triton specialises its code by:

    pointers    dtype, and whether the address is a multiple of 16
    integers    whether it is 1, a multiple of 16, and how wide it is
    None        that it is None
    tuples      the same of every element

The first launch of each combination goes Triton's own way, which compiles it and hands the compiled kernel back. What
is not known here, and whatever somebody watches (a profiler), goes that way too.

Where a caller can tell that all but some addresses and integers are those of an earlier launch, ``Repeated`` fills
these in and calls the C function under Triton's launcher.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from triton.runtime.jit import JITFunction

from gdpa.backends.triton import compat

MOST = 256  # combinations of one bound kernel that are remembered; a program has a handful

NARROW = 2**31
TENSORS = (Tensor, Parameter)


class _Mode(threading.local):
    """Of this thread: the kernels compiled so far, if launches only compile (see ``compiling``)."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, float]] | None = None


_mode = _Mode()
_lock = threading.Lock()


@contextmanager
def compiling() -> Iterator[list[tuple[str, float]]]:
    """Launches of this thread inside the block compile their kernels and launch nothing; yields the names of kernels
    and the seconds each took. Tensors may be on the meta device, and count as aligned."""
    before, _mode.compiled = _mode.compiled, []
    try:
        yield _mode.compiled
    finally:
        _mode.compiled = before


class Description:
    """What a tensor descriptor is to a compiled kernel: the tensor, its extents and strides. ``make`` makes Triton's
    own descriptor of it, for the first launch; ``kind`` stands for all that Triton specialises code by."""

    __slots__ = ("base", "kind", "make", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], kind: Any, make: Any) -> None:
        self.base = base
        self.shape = shape
        self.strides = strides
        self.kind = kind
        self.make = make
        self.padding = "zero"
        self.round_f32_to_tf32 = False

    def of(self, other: Any) -> Description:
        """The same of a tensor that is laid out alike."""
        return Description(other, self.shape, self.strides, self.kind, self.make)


def specialisation(args: tuple[Any, ...]) -> Callable[..., Hashable] | None:
    """A function of arguments of the same types that returns what the code of a kernel may depend on in them; None if
    that is not known. It is written out once for a kind of launch: looking at every type each time takes as long as
    the launch."""
    parts = [_part(f"a{i}", a) for i, a in enumerate(args)]
    if None in parts:
        return None
    names = ", ".join(f"a{i}" for i in range(len(args)))
    scope: dict[str, Any] = {"nested": nested}
    exec(f"def key({names}):\n    return ({', '.join(map(str, parts))},)", scope)
    made: Callable[..., Hashable] = scope["key"]
    return made


def _part(name: str, a: Any) -> str | None:
    """The expression for one argument. Numbers inside tuples are taken as they are, which is more than is needed: they
    are strides and bounds, of which a program has few."""
    kind = type(a)
    if a is None or kind is float:
        return "None"
    if kind is int:  # one that does not fit 32 bits changes its type, too
        return f"'1' if {name} == 1 else {name} & 15 == 0 if {-NARROW} <= {name} < {NARROW} else {name}"
    if kind is Description:
        return f"{name}.kind"
    if kind in TENSORS:
        return f"({name}.dtype, {name}.data_ptr() & 15 == 0)"
    if isinstance(a, tuple) and all(x is None or type(x) is int for x in a):
        return name
    if isinstance(a, tuple) and type(a[0]) in TENSORS and all(type(x) is int for x in a[1:]):
        return f"({name}[0].dtype, {name}[0].data_ptr() & 15 == 0, {name}[1:])"
    return f"nested({name})" if isinstance(a, tuple) and is_nested(a) else None


def is_nested(a: Any) -> bool:
    """Whether ``nested`` takes it."""
    return all(map(is_nested, a)) if isinstance(a, tuple) else a is None or type(a) is int or type(a) in TENSORS


def nested(a: Any) -> Hashable:
    """Of a tuple of any form (tables and their sizes, which change from batch to batch), and of what is in it."""
    if a is None:
        return None
    if type(a) is int:
        return "1" if a == 1 else a & 15 == 0 if -NARROW <= a < NARROW else a
    if isinstance(a, tuple):
        return tuple(map(nested, a))
    return a.dtype, a.data_ptr() & 15 == 0


class Bound:
    """A kernel with its compile-time arguments and options, ready for launches: ``bound(grid, *args)``."""

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel = kernel
        self.constants = constants
        self.direct = type(kernel).__mro__.count(JITFunction) == 1 and not compat.missing()
        self.keys: dict[Hashable, Callable[..., Hashable] | None] = {}  # by the types of arguments
        self.found: dict[Hashable, tuple[Any, ...]] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        if _mode.compiled is not None:
            start = time.perf_counter()
            self.kernel.warmup(*_triton_args(args), grid=grid, **self.constants)
            _mode.compiled.append((self.kernel.__name__, time.perf_counter() - start))
            return
        key_of = self._key_of(args) if self.direct and not compat.is_watched(self.kernel) else None
        if key_of is None:
            self.kernel[grid](*_triton_args(args), **self.constants)
            return
        device, stream = compat.device_and_stream()
        key = (device, key_of(*args))
        found = self.found.get(key)
        if found is None:
            self._first(key, grid, args)
            return
        run, function, metadata, after, _ = found
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        run(x, y, z, stream, function, metadata, None, None, None, *args, *after)

    def _key_of(self, args: tuple[Any, ...]) -> Callable[..., Hashable] | None:
        types = tuple(map(type, args))
        found = self.keys.get(types)
        if found is None and types not in self.keys:
            found = self.keys[types] = specialisation(args)
        return found

    def _first(self, key: Hashable, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        compiled = self.kernel[grid](*_triton_args(args), **self.constants)
        if compat.is_compiled(compiled):
            after = self._after(len(args))
            with _lock:
                while len(self.found) >= MOST:
                    del self.found[next(iter(self.found))]
                # The kernel itself, too: with it goes its code on the device.
                self.found[key] = (compiled.run, compiled.function, compiled.packed_metadata, after, compiled)

    def compiled(self, device: int, args: tuple[Any, ...]) -> Any:
        """The compiled kernel that a launch with ``args`` on ``device`` has used; None if that is not known."""
        key_of = self._key_of(args) if self.direct else None
        found = None if key_of is None else self.found.get((device, key_of(*args)))
        return None if found is None else found[-1]

    def _after(self, n_args: int) -> tuple[Any, ...]:
        """The arguments behind the first ``n_args`` in the order of the kernel's own."""
        parameters = self.kernel.signature.parameters
        return tuple(self.constants.get(name, parameters[name].default) for name in self.kernel.arg_names[n_args:])


def _triton_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.make(a) if type(a) is Description else a for a in args)


class Known(NamedTuple):
    """A launch that can be repeated: all arguments of the C function, and where in them tensors and integers go. Of a
    tensor that is its address, by itself or at the head of a tuple, or that address encoded in a descriptor; a ``slot``
    stands for all else that is encoded."""

    below: compat.Below
    args: list[Any]
    described: list[tuple[int, int, int]]  # number of the tensor, place, slot
    pointers: list[tuple[int, int]]  # number of the tensor, place
    tuples: list[tuple[int, int, tuple[int, ...]]]  # number of the tensor, place, what follows the address
    numbers: list[int]  # places
    descriptions: dict[int, tuple[Description, Any]]  # by slot, and what the compiler says of it
    compiled: Any  # with it goes its code on the device


MOST_MAPS = 16384  # encoded descriptors, of about 400 bytes each
_maps: dict[tuple[int, int], Any] = {}  # by slot and address: they hold neither the tensor nor its memory
_slots = count()


def _remember_map(key: tuple[int, int], made: Any) -> None:
    with _lock:
        while len(_maps) >= MOST_MAPS:
            del _maps[next(iter(_maps))]
        _maps[key] = made


class Repeated:
    """Launches of one bound kernel on a grid of one dimension. ``names``: its arguments that change from one to the
    next, the tensors among them first, then the integers, which no code depends on."""

    def __init__(self, bound: Bound, names: Sequence[str]) -> None:
        self.bound = bound
        self.kernel = bound.kernel
        self.names = names
        self.found: dict[Hashable, Known | None] = {}

    def __call__(
        self, grid: int, layout: Hashable, tensors: tuple[Any, ...], numbers: tuple[int, ...],
        arguments: Callable[[], tuple[Any, ...]],
    ) -> None:  # fmt: skip
        """Launch with ``tensors``, of which only addresses are read, and ``numbers``. ``layout`` stands for all else:
        two launches with the same one agree in every argument but these, in the tensors' strides and dtypes, and in
        which addresses are multiples of 16. ``arguments()`` makes those of a launch that is not known yet."""
        if _mode.compiled is not None or not self.bound.direct or compat.is_watched(self.kernel):
            self.bound((grid,), *arguments())
            return
        device, stream = compat.device_and_stream()
        known = self.found.get((device, layout))
        if known is None:
            self._first(device, layout, grid, len(tensors), arguments())
            return
        under, args, described, pointers, tuples, places, _, _ = known
        args = args.copy()
        for i, place, slot in described:
            address = tensors[i].data_ptr()
            made = _maps.get((slot, address))
            args[place] = self._encode(known, slot, tensors[i]) if made is None else made
        for i, place in pointers:
            args[place] = tensors[i].data_ptr()
        for i, place, tail in tuples:
            args[place] = (tensors[i].data_ptr(), *tail)
        for place, number in zip(places, numbers, strict=True):
            args[place] = number
        under.call(grid, stream, args)

    def _first(self, device: int, layout: Hashable, grid: int, n_tensors: int, args: tuple[Any, ...]) -> None:
        self.bound((grid,), *args)
        if (device, layout) in self.found:  # and cannot be repeated
            return
        compiled = self.bound.compiled(device, args)
        under = None if compiled is None else compat.below(compiled)
        known = None if under is None else self._known(compiled, under, n_tensors, args)
        with _lock:
            while len(self.found) >= MOST:
                del self.found[next(iter(self.found))]
            self.found[device, layout] = known

    def _known(self, compiled: Any, under: compat.Below, n_tensors: int, args: tuple[Any, ...]) -> Known:
        made: list[Any] = []
        starts: list[int] = []  # where each argument begins
        descriptions: dict[int, tuple[Description, Any]] = {}
        slots: dict[int, int] = {}  # by the place of a descriptor
        tiled = iter(under.tiled)
        for a in (*args, *self.bound._after(len(args))):
            starts.append(len(made))
            if type(a) is Description:
                slot, meta = next(_slots), next(tiled)
                slots[len(made)], descriptions[slot] = slot, (a.of(None), meta)
                made += compat.encoded(a, meta)
            else:
                made.append(a)
        found = Known(under, made, [], [], [], [], descriptions, compiled)
        for i, name in enumerate(self.names):
            number = self.kernel.arg_names.index(name)
            place, a = starts[number], args[number]
            if i >= n_tensors:
                found.numbers.append(place)
            elif place in slots:
                found.described.append((i, place, slots[place]))
            elif isinstance(a, tuple):
                found.tuples.append((i, place, a[1:]))
            elif a is not None:
                found.pointers.append((i, place))
            if i < n_tensors:
                made[place] = None  # no tensor is held
        return found

    def _encode(self, known: Known, slot: int, t: Any) -> Any:
        description, meta = known.descriptions[slot]
        made = compat.encoded(description.of(t), meta)[0]
        _remember_map((slot, t.data_ptr()), made)
        return made


def bind(holder: dict[Hashable, Any], kernel: Any, **constants: Any) -> Bound:
    """The one ``Bound`` of a kernel with these constants in ``holder``, what it lives as long as: the ``derived`` of an
    Activation, whose code is among the constants, of a Problem, or a table of a module's own."""
    key = (bind, id(kernel), *constants, *constants.values())
    found: Bound | None = holder.get(key)
    if found is None:
        found = holder.setdefault(key, Bound(kernel, constants))
    return found


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's own takes 2 us on the host."""
    return -(-a // b)
