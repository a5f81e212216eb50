"""Compile GPU kernels for a real architecture on a machine without a GPU, and read what the assembler says of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import create_function_from_signature

from gdpa.backends.triton.compiled import sharing

# What Triton itself adds to the call of ptxas from 3.8 on.
RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))
REGISTER_ALLOCATION = ["--regAllocOptLevel=2"] if RELEASE >= (3, 8) else []


@dataclass
class Recorder:
    """Stands in for a kernel: remembers the arguments of a launch instead of launching."""

    kernel: Any
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


@dataclass(frozen=True)
class Compiled:
    """A kernel with its number of bytes of shared memory and what ptxas said of it."""

    ptx: str
    shared: int
    log: str


@dataclass(frozen=True)
class Resources:
    """Registers per thread, bytes spilled, shared memory, how many tensor core instructions the code has, and the
    numbers of ptxas's advice about them (C7510 to C7514: products wait for each other)."""

    registers: int
    spills: int
    shared: int
    hgmma: int
    hmma: int
    advice: tuple[str, ...]


def compile_for(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int) -> Compiled:
    """The compiled kernel of one launch, specialised as the launch would specialise it."""
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(backend, kwargs, bound, specialization, options)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)
    quickly = {"ptx_options": sharing.QUICKLY} if sharing.is_wanted(kwargs.values()) else {}  # as finding.py does
    with knobs.nvidia.scope(), redirect_stdout(StringIO()) as printed:
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options={**options.__dict__, **quickly})
    ptx, log = compiled.asm["ptx"], log_of(compiled, printed.getvalue(), arch)
    if quickly:
        shared = sharing.shared(ptx)
        assert shared is not None
        ptx, log = shared, assemble(shared, arch)
    return Compiled(ptx, compiled.metadata.shared, log)


def log_of(compiled: Any, printed: str, arch: int) -> str:
    """What ptxas said of a kernel: it says nothing of one from Triton's cache, so that its words are kept there too."""
    cache = get_cache_manager(compiled.hash)
    kept = cache.get_file("ptxas.log")
    if kept and not printed:
        return Path(kept).read_text()
    log = printed or assemble(compiled.asm["ptx"], arch)
    cache.put(log, "ptxas.log", binary=False)
    return log


def assemble(ptx: str, arch: int) -> str:
    """What ptxas says of ``ptx``, called as Triton calls it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "k.ptx")
        file.write_text(ptx)
        name = f"sm_{arch}{'a' if arch >= 90 else ''}"
        command = [get_ptxas(arch).path, "-v", *REGISTER_ALLOCATION, f"--gpu-name={name}", "-o", "/dev/null", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr + done.stdout


def resources(compiled: Compiled) -> Resources:
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", compiled.log)
    registers = re.search(r"Used (\d+) registers", compiled.log)
    assert registers is not None, compiled.log
    assert spills is not None, compiled.log
    # One instruction of the GPU for each of PTX: wgmma becomes HGMMA, mma HMMA.
    return Resources(
        int(registers[1]), int(spills[1]) + int(spills[2]), compiled.shared,
        compiled.ptx.count("wgmma.mma_async"), len(re.findall(r"\bmma\.sync", compiled.ptx)),
        tuple(sorted(set(re.findall(r"C75\d\d", compiled.log)))),
    )  # fmt: skip
