"""Tile sizes by measurement: each branch says what it was measured on (docs/kernels-log.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import torch

from gdpa.backends import tuning
from gdpa.backends.tuning import ShapeClass
from gdpa.problem import Problem


@dataclass(frozen=True)
class Config:
    """Queries and keys per tile, warps per program, stages of the software pipeline.

    ``tma`` reads tiles through tensor descriptors (Hopper): fewer registers per element, but each program first has to
    write its descriptors. ``max_registers`` caps registers per thread, so that more programs share an SM. ``products``:
    of float32, on the FMA units ("ieee") or on tensor cores, whose numbers have 10 bits ("tf32"), or three of those for
    one ("tf32x3"). ``part``: columns that products of q, k, do and v take at a time, 0 for all.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    max_registers: int | None = None
    products: str = "tf32"
    part: int = 0


INTERPRETED = Config(16, 16, 1, 1, products="ieee")  # small, so that short test sequences span several tiles
INTERPRETED_PARTS = replace(INTERPRETED, part=16)  # of float32


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


def is_hopper(capability: tuple[int, int]) -> bool:
    """What was measured nowhere else, and may not fit elsewhere: descriptors of 256 columns take more shared memory on
    Blackwell, and three TF32 products for one do not compile for it with 128."""
    return capability[0] == 9


# Ways of float32 products, see fp32_way.
FMA, FAST, THREE, THREE_IN_PARTS = "ieee", "tf32", "tf32x3", "tf32x3 in parts"
MANY_TERMS = {64: 512, 128: 2048}  # by columns
ENOUGH_TERMS = 320


def fp32_way(problem: Problem, capability: tuple[int, int]) -> str:
    """TF32 is what "fast" means. Three such products for one, of the leading bits of both numbers and of what these
    leave, are nearly as exact as IEEE ones, but tensor cores cut off where they should round, once in 8 terms: the
    error of a sum over all columns is 4e-7 and does not shrink with the number of keys, while that of IEEE sums grows
    with it. Of plain PyTorch's error it is 0.3 to 0.5 with 4096 keys and queries; with 512 0.7 to 0.9 with 64 columns
    and up to 1.1 with 128; with 16 up to 3.4. Added up in parts of 16 or 32 columns it is 0.5 to 0.95 with 256 to 512
    keys (32 columns 1.07 with 256), and 0.6 to 0.9 in causal attention on 512. Softmax has 1.0 to 1.3 in any case."""
    if problem.precision == "fast":
        return FAST
    width = widest(problem)
    known = problem.mask is None and not (problem.used_q or problem.used_k)  # how much is summed
    if not (is_hopper(capability) and width <= 128 and known) or problem.norms:
        return FMA
    terms = terms_of(problem)
    if problem.band.unbounded and terms >= MANY_TERMS[64 if width <= 64 else 128]:
        return THREE
    in_parts = terms >= ENOUGH_TERMS and not problem.gathers  # whose tiles have no parts
    return THREE_IN_PARTS if in_parts else FMA


def terms_of(problem: Problem) -> int:
    """How many are summed, on average, in a row or a column of the scores; at least so many, in a band."""
    rows, band = min(problem.mean_queries, problem.mean_keys), problem.band
    if band.unbounded:
        return rows
    sides = [rows if side is None else side for side in (band.left, band.right)]
    return max(min(rows // 2, sum(sides) + 1), 0) if min(sides) >= 0 else 0


# By kernel, and whether a tile has up to 64 columns. Times of 8 x 8 x 1024 rows, us, forward, backward, dq by itself:
# D 64 1487, 3543, 2805 by FMA (2930, 5740, 5190 with all columns at once, in tiles of 32 x 32), 615, 2067, 797 with
# three TF32 products in parts, 500, 1230 without, 350, 950 with single ones; D 128 3068, 7209, 5749 (5480, 11100,
# 10750), 1267, 5339, 3360, then 1030, 2650 and 510, 2050.
FP32 = {
    FMA: {
        "fwd": {True: Config(64, 64, 8, 1, part=16), False: Config(64, 32, 8, 1, part=16)},
        "bwd": {True: Config(32, 32, 4, 1, part=16), False: Config(32, 32, 4, 1, part=16)},
        "dq": {True: Config(64, 32, 4, 1, part=16), False: Config(64, 32, 8, 1, part=16)},
    },
    THREE_IN_PARTS: {
        "fwd": {True: Config(64, 32, 4, 1, part=32), False: Config(128, 32, 8, 2, part=32)},
        "bwd": {True: Config(32, 32, 4, 1, part=16), False: Config(32, 32, 4, 1, part=16)},
        "dq": {True: Config(64, 32, 4, 1, part=32), False: Config(64, 32, 8, 1, part=32)},
    },
    THREE: {
        "fwd": {True: Config(128, 64, 8, 2), False: Config(128, 32, 8, 2)},
        "bwd": {True: Config(32, 32, 4, 1), False: Config(32, 32, 4, 1)},
        "dq": {True: Config(128, 32, 8, 1), False: Config(32, 32, 4, 1)},
    },
    FAST: {
        "fwd": {True: Config(128, 64, 8, 2), False: Config(128, 64, 8, 2)},
        "bwd": {True: Config(64, 64, 8, 1), False: Config(32, 64, 8, 1)},
        "dq": {True: Config(64, 32, 4, 1), False: Config(64, 32, 4, 1)},
    },
}


def fp32_config(problem: Problem, which: str, capability: tuple[int, int]) -> Config:
    way, width = fp32_way(problem, capability), widest(problem)
    if width > 128 or (way == FAST and not is_hopper(capability)):
        found = Config(32 if width <= 128 else 16, 32, 8, 1)  # fully unrolled: larger tiles spill by the 100 KB
    elif problem.gathers:
        found = Config(32, 32, 8 if way == FMA else 4, 1)
    else:
        found = FP32[way][which][width <= 64]
    return replace(found, products=way.split()[0])


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
        return fp32_config(problem, "fwd", capability)
    if is_datacenter(capability):
        # Two programs of 128 registers per SM hide each other's start and end: at Lk 256 333 TFLOP/s against 234
        # with one. Descriptors cost more than they give below about 1024 keys (D 128: 333 against 280 at Lk 256,
        # 466 against 485 at 2048).
        tma = problem.mean_keys >= 1024
        if problem.gathers:  # with 128 registers 0.7 to 1.5 KB of addresses and entries spill, without a cap none
            return Config(128, 64, 8, 2) if width <= 128 else Config(64, 64, 8, 2)
        return Config(128, 64, 8, 2, tma, 128) if width <= 128 else Config(128, 64, 8, 2, tma or is_hopper(capability))
    if problem.gathers:  # one stage: entries on their way would take the rest of the shared memory
        return Config(64, 64, 8, 1) if width <= 128 else Config(32, 32, 4, 1)
    return Config(128, 64, 4 if width <= 64 else 8, 2) if width <= 128 else Config(64, 32, 4, 2)


def backward_default(problem: Problem, capability: tuple[int, int]) -> Config:
    width = widest(problem)
    if problem.dtype == torch.float32:
        return fp32_config(problem, "bwd", capability)
    if is_datacenter(capability):
        # D 128, lengths 2048 / 512 / Lk 256: three stages 354 / 273 / 259 TFLOP/s, two 348 / 249 / 235; with
        # descriptors and their reduction instead of plain atomics 337 / 223 / 222.
        if problem.gathers:  # 64 x 128 would take more than the shared memory, or spill 6 to 12 KB; this 2 KB
            return Config(64, 64, 8, 2) if width <= 128 else Config(32, 32, 8, 1)
        if has_dq_of_its_own(problem, capability):
            return Config(64, 64, 8, 2, tma=True)
        return Config(64, 128, 8, 3) if width <= 128 else Config(32, 64, 8, 2)
    if problem.gathers:
        return Config(32, 64, 8, 1) if width <= 128 else Config(32, 32, 4, 1)
    return Config(32, 128, 8, 1) if width <= 128 else Config(32, 32, 4, 1)


def has_dq_of_its_own(problem: Problem, capability: tuple[int, int]) -> bool:
    """Whether a kernel of its own computes dq, though two products are done twice: beside dk and dv of 256 columns
    there are no registers for it. (D 256, 16 x 8 x 1024 rows: 966 us for dk and dv and 397 for dq, against 2617 for all
    at once in tiles of 32 x 64, the best of five.) Queries that sequences share would need a dq for each of these."""
    wide = problem.dtype != torch.float32 and widest(problem) > 128
    return wide and is_hopper(capability) and not problem.gathers and not problem.shared_q


def dq_config(problem: Problem, capability: tuple[int, int]) -> Config:
    width = widest(problem)
    if problem.dtype == torch.float32:
        return fp32_config(problem, "dq", capability)
    if is_datacenter(capability):
        # Whole deterministic backward at 2048 / 512: 352 / 218 with descriptors, 316 / 221 with pointers.
        if problem.gathers:
            return Config(64, 64, 8, 2) if width <= 128 else Config(64, 32, 8, 1)
        tma = problem.mean_keys >= 1024
        if width <= 128:
            return Config(128, 64, 8, 3, tma)
        return Config(128, 32, 8, 3, tma=True) if is_hopper(capability) else Config(64, 64, 8, 2)
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
    if shape.columns > 128:  # one that does not fit is refused
        return tuple(Config(m, 64, 8, stages, tma) for m, stages, tma in product((64, 32), (2, 3), (False, True)))
    return tuple(Config(m, n, 8, stages) for (m, n), stages in product(((64, 128), (64, 64), (32, 64)), (2, 3)))


def portable_candidates(shape: ShapeClass) -> tuple[Config, ...]:
    if shape.dtype == "float32":
        return ()
    if shape.which == "fwd":
        tiles: tuple[tuple[int, int], ...] = ((128, 64), (128, 32), (64, 64), (64, 32))
        return tuple(Config(m, n, warps, stages) for (m, n), warps, stages in product(tiles, (4, 8), (2, 3)))
    tiles = ((32, 128), (32, 64), (64, 64), (32, 32))
    return tuple(Config(m, n, warps, stages) for (m, n), warps, stages in product(tiles, (4, 8), (1, 2)))
