"""Launches of gdpa's kernels, simulated: tensors are on the CPU, and calls run as on a machine with a Hopper GPU."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, UntypedStorage
from torch.nn import Parameter
from triton.runtime.cache import get_cache_manager

from fake_gpu import FAKE, NO_CUBIN, fake_hopper
from simulator.code import Coder
from simulator.copies import TensorMap
from simulator.grid import Grid
from simulator.memory import Memory
from simulator.ptx import parse
from simulator.warp import PARAMS

DEVICE = 1  # of kernels with PTX; fake_gpu has others, without
NUMBERS = {"i1": "<i1", "i8": "<i1", "i16": "<i2", "i32": "<i4", "i64": "<i8", "u1": "<u1", "u8": "<u1", "u16": "<u2",
           "u32": "<u4", "u64": "<u8", "fp32": "<f4", "fp64": "<f8"}  # fmt: skip


@contextmanager
def simulated_hopper(processors: int = 4, seed: int = 0) -> Iterator[Simulator]:
    """Calls of gdpa inside run on the Hopper backend of a GPU with so few processors, where it supports them."""
    simulator = Simulator(processors, seed)
    with fake_hopper(simulator.run, processors, DEVICE, NO_CUBIN):
        yield simulator


class Simulator:
    """``launched``: the names of the kernels that have run, by what they are kept as."""

    def __init__(self, processors: int, seed: int) -> None:
        self.processors, self.seed = processors, seed
        self.memory = Memory()
        self.launched: dict[str, str] = {}
        self.launches = 0

    def run(self, kernel: str, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        signature, metadata = FAKE.known[kernel]
        coder = coder_of(kernel, metadata.name)
        types = _expanded(signature.values())
        given = [(kind, value) for kind, value in _pairs(types, args) if kind != "constexpr"]
        params, maps = self._params(coder, given)
        self.memory.allow(_tensors([value for _, value in given]))
        self.launched[kernel] = metadata.name
        self.launches += 1
        at_once = math.prod(grid) if metadata.launch_cooperative_grid else self.processors
        seed = self.seed + self.launches
        Grid(coder, grid, metadata.shared, params, maps, self.memory, seed, at_once).run()

    def _params(self, coder: Coder, given: list[tuple[str, Any]]) -> tuple[Any, dict[int, TensorMap]]:
        known = coder.kernel.params
        data = np.zeros(known[-1].offset + known[-1].size, np.uint8)
        maps = {}
        for param, (kind, value) in zip(known, given, strict=False):  # two for scratch memory follow
            if kind == "map":
                maps[PARAMS + param.offset] = TensorMap.of(value)
                continue
            number = _address(value) if kind.startswith("*") else value
            made = np.array(number).astype(NUMBERS["i64" if kind.startswith("*") else kind])
            assert made.nbytes == param.size, f"{kind} for {param.size} bytes of {param.name}"
            data[param.offset : param.offset + param.size] = np.frombuffer(made.tobytes(), np.uint8)
        return data, maps


def ptx_of(kernel: str, name: str) -> str:
    file = get_cache_manager(kernel).get_file(f"{name}.ptx")
    assert file is not None, f"{name} was compiled without PTX"
    return Path(file).read_text()


@lru_cache(maxsize=64)
def coder_of(kernel: str, name: str) -> Coder:
    return Coder(parse(ptx_of(kernel, name)))


def _expanded(types: Any) -> list[Any]:
    """As the launcher hands arguments on: a descriptor is 128 bytes, and its extents and strides."""
    found: list[Any] = []
    for kind in types:
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            n = kind.count(",", kind.index("["), kind.index("]")) + 1
            found += ["map", *["i32"] * n, *["i64"] * n]
        else:
            found.append(kind)
    return found


def _pairs(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(kind, (tuple, list)):
        for k, v in zip(kind, value, strict=True):
            yield from _pairs(k, v)
    else:
        yield kind, value


def _address(value: Any) -> int:
    if value is None:
        return 0
    return value if isinstance(value, int) else value.data_ptr()


def _tensors(given: Iterable[Any]) -> list[tuple[int, int]]:
    """Where all tensors of this process are, those ``given`` among them, which gc may not know, and bare memory.
    (Tracing leaves others behind, which have no memory, or no number of bytes.)"""
    found = []
    for x in chain(given, gc.get_objects()):  # tensors of modules are frozen (conftest.py)
        if type(x) in (Tensor, Parameter, UntypedStorage):
            try:
                storage = x if type(x) is UntypedStorage else x.untyped_storage()
                start, size = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError):
                continue
            if type(size) is int:
                found.append((start, start + size))
    return found
