"""A machine as if it had a Hopper GPU: kernels are compiled for it, and launches are recorded instead of run.

Tensors stay on the CPU and keep whatever is in them; what is real is everything the host does for a call. Kernels are
compiled down to Triton's own code for GPUs, which says all that a launch depends on, and kept in a folder of their own:
LLVM and the assembler would take most of the time, and nobody looks at what they make here (tests that do compile with
aot.py). With GDPA_FULL_GRID=1 LLVM makes PTX of it as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from gdpa.backends.hopper import HopperBackend, launch
from gdpa.backends.padding import padded_problem
from gdpa.backends.triton import TritonBackend
from gdpa.problem import Problem
from support import FULL


class Launcher(nvidia.CudaLauncher):
    """Triton's own, down to the function in C that it ends at. For that function a kernel is its hash."""

    def __init__(self, src: Any, metadata: Any) -> None:
        super().__init__(src, metadata)
        self.hash = metadata.hash
        FAKE.known[self.hash] = src.signature, metadata

    def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        super().__call__(x, y, z, stream, self.hash, *rest)


class FakeDriver:
    """What Triton asks of a driver, with one device and one stream."""

    launcher_cls = Launcher

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = []
        self.stream, self.device = 7, 0
        self.known: dict[str, tuple[dict[str, Any], Any]] = {}  # by hash: a kernel's signature, and its metadata
        self.run: Callable[..., None] | None = None  # a launch; else it is only remembered
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, *rest: (object(), name, 32, 0, 1024),
            unload_module=lambda module: None,
            fill_tma_descriptor=encode,
            fill_tma_descriptor_tiled=encode,
            build_signature_metadata=tuple,
            launch=self.launch,
        )

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launch(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
        """Stands in for the code in C that calls cuLaunchKernelEx."""
        *_, args = rest if IN_ONE_TUPLE else (rest[8:],)  # behind the options, scratch memory and hooks
        if self.run is not None:
            self.run(function, (x, y, z), args)
            return
        self.launches.append((function, (x, y, z, stream), tuple(args)))


def encode(address: int, *layout: Any) -> tuple[Any, ...]:
    """Stands in for cuTensorMapEncodeTiled."""
    return ("map", address, *(tuple(a) if isinstance(a, list) else a for a in layout))


IN_ONE_TUPLE = not hasattr(nvidia, "make_launcher")  # how a launcher hands on the arguments, since Triton 3.7
NAMES = {  # of what is compiled with a C compiler at the first use
    "PyKernelArg": SimpleNamespace, "ARG_CONSTEXPR": 0, "ARG_KERNEL": 1, "ARG_TUPLE": 2,
    "compile_module_from_src": lambda *args, **kwargs: SimpleNamespace(launch=FAKE.launch),
    "library_dirs": list,
}  # fmt: skip


def no_machine_code(*args: Any) -> bytes:
    return b"none"


def no_llvm(self: CUDABackend, src: Any, metadata: dict[str, Any], *rest: Any) -> str:
    """What LLVM's part would tell of a kernel without scratch memory."""
    sizes = {"shared": 1024, "tmem_size": 0, "global_scratch_size": 0, "profile_scratch_size": 0}
    metadata |= sizes | {"global_scratch_align": 1, "profile_scratch_align": 1, "name": src.get_entry_func_name()}
    return "none"


def no_ptx(*args: Any) -> str:
    return "none"


NO_CUBIN = {"make_cubin": no_machine_code}
NO_PTX = NO_CUBIN | {"make_llir": no_llvm, "make_ptx": no_ptx}


def capability(device: Any) -> tuple[int, int]:
    return (9, 0)


FAKE = FakeDriver()  # the only one: Triton keeps compiled kernels, which launch where they were loaded


@contextmanager
def fake_hopper(
    run: Callable[..., None] | None = None, processors: int = 132, device: int = 0, left_out: Any = NO_CUBIN if FULL
    else NO_PTX,
) -> Iterator[FakeDriver]:  # fmt: skip
    """Calls inside run on the Hopper or the Triton backend of no machine. ``run``: what becomes of a launch (see
    simulator/launching.py). Triton keeps what it compiles for a ``device``."""
    before = driver._active
    FAKE.launches.clear()
    FAKE.stream, FAKE.device, FAKE.run = 7, device, run

    def supports(self: HopperBackend, problem: Problem) -> str | None:
        if problem.mask is not None and (reason := launch.unlisted(problem)):
            return reason
        return None if problem.regular or padded_problem(problem) else "rows must begin at multiples of 16 bytes"

    driver.set_active(FAKE)
    try:
        with (
            mock.patch.multiple(nvidia, create=True, **NAMES),
            mock.patch.multiple(CUDABackend, **left_out),
            mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(Path(knobs.cache.dir) / "-".join(left_out))),
            mock.patch.object(HopperBackend, "supports", supports),
            mock.patch.object(TritonBackend, "supports", return_value=None),
            mock.patch.object(launch, "processors", return_value=processors),
            mock.patch.object(launch.portable, "capability", new=capability),
        ):
            yield FAKE
    finally:
        driver._active, FAKE.run = before, None
