"""Tile sizes by measurement: each branch says what it was measured on (docs/kernels-log.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from gdpa.backends import tuning
from gdpa.backends.tuning import ShapeClass
from gdpa.problem import Problem


@dataclass(frozen=True)
class Config:
    """Queries and keys per tile, warps per program, stages of the software pipeline.

    ``tma`` reads tiles through tensor descriptors (Hopper): fewer registers per element, but each program first has to
    write its descriptors. ``max_registers`` caps registers per thread, so that more programs share an SM.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    max_registers: int | None = None


INTERPRETED = Config(16, 16, 1, 1)  # small, so that short test sequences span several tiles


def padded(d: int, least: int = 16) -> int:
    """The power of two, at least ``least``, that holds a head dimension."""
    return max(least, 1 << (d - 1).bit_length())


# Rows that are not aligned to 16 bytes are loaded element by element. Triton 3.6 then miscompiles 16-bit tiles that are
# narrower than 64 columns and partly masked (D 40, Dv 8 gave wrong outputs, D 24, Dv 8 an illegal access on an H200);
# padded to 64 columns they are right (tests/test_alignment.py).
LEAST_UNALIGNED = 64


def widest(problem: Problem) -> int:
    return max(padded(problem.head_dim), padded(problem.head_dim_v))


def is_datacenter(capability: tuple[int, int]) -> bool:
    """Hopper and the large Blackwell: 227 KiB of shared memory per program and tensor descriptors. Consumer chips have
    99 KiB, whatever their generation, and share the smaller tiles of sm_80."""
    return capability[0] in (9, 10)


def fp32_config(width: int) -> Config:
    """IEEE products run on the FMA units, fully unrolled: larger tiles spill by the 100 KB and take a minute to
    compile. These do not spill (compiled for sm_90)."""
    return Config(32, 32, 8, 1) if width <= 128 else Config(16, 32, 8, 1)


def forward_config(problem: Problem, capability: tuple[int, int]) -> Config:
    """What `gdpa tune` found best on this machine, otherwise the built-in default."""
    return tuned(problem, "fwd", capability) or forward_default(problem, capability)


def backward_config(problem: Problem, capability: tuple[int, int]) -> Config:
    return tuned(problem, "bwd", capability) or backward_default(problem, capability)


def tuned(problem: Problem, which: str, capability: tuple[int, int]) -> Config | None:
    if problem.gathers or problem.norms:  # measured for functions without; shared memory would not suffice
        return None
    shape = tuning.shape_class("triton", which, problem, widest(problem))
    found: Config | None = tuning.choice(shape, problem.device, candidates(capability))
    return found


def forward_default(problem: Problem, capability: tuple[int, int]) -> Config:
    width = widest(problem)
    if problem.dtype == torch.float32:
        return fp32_config(width)
    if is_datacenter(capability):
        # Two programs of 128 registers per SM hide each other's start and end: at Lk 256 333 TFLOP/s against 234
        # with one. Descriptors cost more than they give below about 1024 keys (D 128: 333 against 280 at Lk 256,
        # 466 against 485 at 2048).
        tma = problem.mean_keys >= 1024
        if problem.gathers:  # with 128 registers 0.7 to 1.5 KB of addresses and entries spill, without a cap none
            return Config(128, 64, 8, 2) if width <= 128 else Config(64, 64, 8, 2)
        return Config(128, 64, 8, 2, tma, 128) if width <= 128 else Config(128, 64, 8, 2, tma)
    if problem.gathers:  # one stage: entries on their way would take the rest of the shared memory
        return Config(64, 64, 8, 1) if width <= 128 else Config(32, 32, 4, 1)
    return Config(128, 64, 4 if width <= 64 else 8, 2) if width <= 128 else Config(64, 32, 4, 2)


def backward_default(problem: Problem, capability: tuple[int, int]) -> Config:
    width = widest(problem)
    if problem.dtype == torch.float32:
        return fp32_config(width)
    if is_datacenter(capability):
        # D 128, lengths 2048 / 512 / Lk 256: three stages 354 / 273 / 259 TFLOP/s, two 348 / 249 / 235; with
        # descriptors and their reduction instead of plain atomics 337 / 223 / 222.
        if problem.gathers:  # 64 x 128 would take more than the shared memory, or spill 6 to 12 KB; this 2 KB
            return Config(64, 64, 8, 2) if width <= 128 else Config(32, 32, 8, 1)
        return Config(64, 128, 8, 3) if width <= 128 else Config(32, 64, 8, 2)
    if problem.gathers:
        return Config(32, 64, 8, 1) if width <= 128 else Config(32, 32, 4, 1)
    return Config(32, 128, 8, 1) if width <= 128 else Config(32, 32, 4, 1)


def dq_config(problem: Problem, capability: tuple[int, int]) -> Config:
    width = widest(problem)
    if problem.dtype == torch.float32:
        return fp32_config(width)
    if is_datacenter(capability):
        # Whole deterministic backward at 2048 / 512: 352 / 218 with descriptors, 316 / 221 with pointers.
        if problem.gathers:
            return Config(64, 64, 8, 2) if width <= 128 else Config(64, 32, 8, 1)
        tma = problem.mean_keys >= 1024
        return Config(128, 64, 8, 3, tma) if width <= 128 else Config(64, 64, 8, 2)
    if problem.gathers:
        return Config(64, 32, 8, 1) if width <= 128 else Config(32, 32, 4, 1)
    return Config(128, 32, 8, 1) if width <= 128 else Config(32, 32, 4, 1)


# ---- what `gdpa tune` may choose from: the neighbourhood of the defaults ---------------------------------------------
# How much shared memory they take is the compiler's affair; one that does not fit is refused when it is measured.
def candidates(capability: tuple[int, int]) -> Callable[[ShapeClass], tuple[Config, ...]]:
    return datacenter_candidates if is_datacenter(capability) else portable_candidates


def datacenter_candidates(shape: ShapeClass) -> tuple[Config, ...]:
    if shape.dtype == "float32":
        return ()
    if shape.which == "fwd":
        return tuple(
            Config(128, block_n, 8, stages, tma, registers)
            for block_n, stages, tma, registers in product((64, 128), (2, 3), (False, True), (128, None))
        )
    return tuple(Config(m, n, 8, stages) for (m, n), stages in product(((64, 128), (64, 64), (32, 64)), (2, 3)))


def portable_candidates(shape: ShapeClass) -> tuple[Config, ...]:
    if shape.dtype == "float32":
        return ()
    if shape.which == "fwd":
        tiles: tuple[tuple[int, int], ...] = ((128, 64), (128, 32), (64, 64), (64, 32))
        return tuple(Config(m, n, warps, stages) for (m, n), warps, stages in product(tiles, (4, 8), (2, 3)))
    tiles = ((32, 128), (32, 64), (64, 64), (32, 32))
    return tuple(Config(m, n, warps, stages) for (m, n), warps, stages in product(tiles, (4, 8), (1, 2)))
