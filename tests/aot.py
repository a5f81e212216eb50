"""Compile GPU kernels for a real architecture on a machine without a GPU, and read what the assembler says of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

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
class Resources:
    """Registers per thread, bytes spilled, shared memory, how many tensor core instructions the code has, and the
    numbers of ptxas's advice about them (C7510 to C7514: products wait for each other)."""

    registers: int
    spills: int
    shared: int
    hgmma: int
    hmma: int
    advice: tuple[str, ...]


def compile_for(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arch: int) -> Any:
    """The compiled kernel of one launch, specialised as the launch would specialise it."""
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(backend, kwargs, bound, specialization, options)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=target, options=options.__dict__)


def resources(compiled: Any) -> Resources:
    arch = compiled.metadata.target.arch
    name = f"sm_{arch}{'a' if arch >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        ptx.write_text(compiled.asm["ptx"])
        command = [get_ptxas(arch).path, "-v", *REGISTER_ALLOCATION, f"--gpu-name={name}", str(ptx), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        log = done.stderr + done.stdout
        dump = [knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
        sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert registers is not None, log
    assert spills is not None, log
    return Resources(
        int(registers[1]), int(spills[1]) + int(spills[2]), compiled.metadata.shared,
        len(re.findall(r"\bHGMMA", sass)), len(re.findall(r"\bHMMA", sass)),
        tuple(sorted(set(re.findall(r"C75\d\d", log)))),
    )  # fmt: skip
