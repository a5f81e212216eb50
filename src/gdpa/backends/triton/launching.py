"""Launches that go straight to the compiled kernel, past Triton's binder.

Triton's own way, ``kernel[grid](*args, **constants)``, inspects every argument at every launch, writes what it finds
into a string and looks that up: 20 to 100 us. Here a kernel and its compile-time arguments are bound once, and a launch
only computes what Triton specialises its code by:

    pointers    dtype, and whether the address is a multiple of 16
    integers    whether it is 1, a multiple of 16, and how wide it is
    None        that it is None
    tuples      the same of every element

The first launch of each combination goes Triton's own way, which compiles it and hands the compiled kernel back.
Launches that are not known here, and all launches while a profiler watches, go that way too.

Where a caller can tell that all but some addresses and integers are those of an earlier launch, ``Repeated`` fills
these in and calls the C function under Triton's launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from itertools import count, groupby
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from triton.runtime.jit import JITFunction

from gdpa.backends.triton import compat
from gdpa.backends.triton.compiled import ahead, finding

MOST = 256  # combinations of one bound kernel that are remembered; a program has a handful

NARROW = 2**31
TENSORS = (Tensor, Parameter)
Grid = tuple[int, int, int]


_lock = threading.Lock()


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
    """The expression for one argument. Integers inside tuples are part of the key as they are, which distinguishes more
    than is needed: they are strides and bounds, of which a program has few."""
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
    """What code may depend on in a tuple of any form, such as tables and their sizes, which change between batches."""
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
        if ahead.is_asked():
            self._look_for_code()
            is_large = "CODE" in self.constants  # it takes the function
            ahead.put(ahead.Job(self.kernel, is_large, lambda: self._compile(grid, args)))
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
        self._look_for_code()
        compiled = self.kernel[grid](*_triton_args(args), **self.constants)
        if compat.is_compiled(compiled):
            after = self._after(len(args))
            with _lock:
                while len(self.found) >= MOST:
                    del self.found[next(iter(self.found))]
                # The kernel itself, too: with it goes its code on the device.
                self.found[key] = (compiled.run, compiled.function, compiled.packed_metadata, after, compiled)

    def _compile(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        self.kernel.warmup(*_triton_args(args), grid=grid, **self.constants)

    def _look_for_code(self) -> None:
        if self.direct:
            finding.attach(self.kernel)

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
    """A launch that can be repeated: a function of the grid, the stream, the tensors' addresses (None for one that is
    not there) and the integers, one after the other. Whoever calls it holds the memory until it returns."""

    launch: Callable[..., None]
    compiled: Any  # with it goes its code on the device


class At:
    """Stands for a tensor of which only the address is known."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def addresses(tensors: Iterable[Any]) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in tensors]


MOST_MAPS = 16384  # encoded descriptors, of about 400 bytes each
_maps: dict[int, Any] = {}  # by slot and address, in one number: they hold neither the tensor nor its memory
_slots = count()
SLOT_BITS = 64  # above those of an address


def _remember_map(key: int, made: Any) -> None:
    with _lock:
        while len(_maps) >= MOST_MAPS:
            del _maps[next(iter(_maps))]
        _maps[key] = made


def unwatched(kernel: Any) -> tuple[int, int] | None:
    """The device and the stream of a launch made now; None if it has to take Triton's own way."""
    if ahead.is_asked() or compat.is_watched(kernel):
        return None
    return compat.device_and_stream()


class Repeated:
    """Launches of one bound kernel that differ in a few arguments only. ``names`` has these: tensors (and descriptors)
    first, then integers. "terms.1" is entry 1 of the argument ``terms``, a tuple, "places.0.2" entry 2 of its entry 0;
    a tuple's name alone means its entry 0. Compiled code may depend on them only through the ``layout`` of a call."""

    def __init__(self, bound: Bound, names: Sequence[str]) -> None:
        self.bound = bound
        self.kernel = bound.kernel
        self.names = names
        self.found: dict[Hashable, Known | None] = {}

    def __call__(
        self, grid: Grid, layout: Hashable, tensors: tuple[Any, ...], numbers: tuple[int, ...],
        arguments: Callable[[], tuple[Any, ...]],
    ) -> None:  # fmt: skip
        """Launch with ``tensors``, of which only addresses are read, and ``numbers``, in the order of ``names``.
        ``layout`` is a key for everything else: launches with equal layouts agree in all other arguments, in the
        tensors' strides and dtypes, and in which addresses are multiples of 16. ``arguments()`` makes the arguments of
        the kernel, for a launch that is not known yet."""
        where = unwatched(self.kernel) if self.bound.direct else None
        if where is None:
            self.bound(grid, *arguments())
            return
        device, stream = where
        known = self.found.get((device, layout))
        if known is None:
            self._first(device, layout, grid, len(tensors), len(tensors) + len(numbers), arguments())
            return
        known.launch(grid, stream, *addresses(tensors), *numbers)

    def _first(
        self, device: int, layout: Hashable, grid: Grid, n_tensors: int, n_changing: int, args: tuple[Any, ...]
    ) -> None:
        self.bound(grid, *args)
        assert len(self.names) == n_changing, f"{self.kernel.__name__}: {n_changing} values for {self.names}"
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
        """Writes the function that launches: Python that calls the C function with constants, and the changing
        arguments at their places. Of a tensor the C function takes the address, alone or in a tuple, or a descriptor
        encoded with it: encoded ones are remembered by address and ``slot``, a number for all else that is encoded."""
        changing = {self._place(name): i for i, name in enumerate(self.names)}
        scope: dict[str, Any] = {"find": _maps.get, "start": under.launch}
        scope |= {f"h{i}": part for i, part in enumerate(under.head)}
        lines: list[str] = []

        def part(value: Any, place: tuple[int, ...], name: str) -> str:
            """What stands for one argument, or for one entry of a tuple."""
            if isinstance(value, tuple) and any(other[: len(place)] == place for other in changing):
                entries = [part(entry, (*place, j), f"{name}_{j}") for j, entry in enumerate(value)]
                return f"({', '.join(entries)},)"
            i = changing.get(place if len(place) > 1 else (*place, 0))
            if value is None or i is None:
                scope[name] = value
                return name
            return f"t{i}" if i < n_tensors else f"n{i - n_tensors}"

        handed, tiled = list(scope)[2:], iter(under.tiled)
        given: list[str] = []
        for number, a in enumerate((*args, *self.bound._after(len(args)))):
            if type(a) is Description:
                i, meta = changing[number, 0], next(tiled)
                slot = next(_slots) << SLOT_BITS
                scope |= {f"slot{i}": slot, f"encode{i}": _encoder(slot, a.of(None), meta)}
                lines += [f"d{i} = find(slot{i} + t{i})", f"if d{i} is None: d{i} = encode{i}(t{i})"]
                rest = compat.encoded(a, meta)[1:]
                scope |= {f"c{number}_{j}": value for j, value in enumerate(rest)}
                given += [f"d{i}", *(f"c{number}_{j}" for j in range(len(rest)))]
            else:
                given.append(part(a, (number,), f"c{number}"))
        handed += [f"({_in_runs(given, scope)},)"] if under.nested else given
        lines.append(f"start(*grid, stream, {_in_runs(handed, scope)})")
        exec(_written("\n".join(lines), n_tensors, len(self.names) - n_tensors), scope)
        return Known(scope["launch"], compiled)

    def _place(self, name: str) -> tuple[int, ...]:
        """The number of an argument, and of its entry where it is a tuple."""
        name, *entries = name.split(".")
        return self.kernel.arg_names.index(name), *(map(int, entries) if entries else (0,))


def _in_runs(names: list[str], scope: dict[str, Any]) -> str:
    """``names`` as arguments of a call. Those that are in ``scope`` never change: what stands together of them becomes
    one tuple, since to load a hundred names, most of them extents and strides, takes two microseconds."""
    found: list[str] = []
    for fixed, run in groupby(names, scope.__contains__):
        some = list(run)
        if fixed and len(some) > 1:
            scope[some[0] + "_on"] = tuple(scope.pop(name) for name in some)
            some = [f"*{some[0]}_on"]
        found += some
    return ", ".join(found)


@cache
def _written(body: str, n_tensors: int, n_numbers: int) -> Any:
    """The code of a launch, written out once for a kind of kernel: going through lists takes twice as long."""
    names = [f"{kind}{i}" for kind, n in (("t", n_tensors), ("n", n_numbers)) for i in range(n)]
    lines = [f"def launch(grid, stream, {', '.join(names)}):", *body.split("\n")]
    return compile("\n    ".join(lines), "<launch>", "exec")


def _encoder(slot: int, description: Description, meta: Any) -> Callable[[int], Any]:
    def encode(address: int) -> Any:
        made = compat.encoded(description.of(At(address)), meta)[0]
        _remember_map(slot + address, made)
        return made

    return encode


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
