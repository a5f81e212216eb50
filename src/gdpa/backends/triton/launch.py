"""Host side of the Triton backend: what to launch, with which tiles and buffers. No device data is read."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from gdpa import reference
from gdpa.backends import interpreting
from gdpa.backends.triton import config
from gdpa.backends.triton.arguments import (
    BOUND,
    Tiles,
    as_rows,
    key_tiles,
    laid_out,
    make_tile,
    query_tiles,
    zero_unused_keys,
    zero_unused_queries,
)
from gdpa.backends.triton.backward import backward_kernel, dq_kernel, other_dq_kernel
from gdpa.backends.triton.code import ProblemCode
from gdpa.backends.triton.config import Config
from gdpa.backends.triton.forward import forward_kernel
from gdpa.backends.triton.launching import Repeated, bind, cdiv, nested
from gdpa.backends.triton.normalized import normalized_kernel
from gdpa.backends.triton.row_sums import RowTerms, row_terms_kernel
from gdpa.backends.triton.tables import LearnedTables, places
from gdpa.backends.triton.tile import Tile
from gdpa.device.rows import Rows
from gdpa.device.sequences import BandBounds
from gdpa.functions.emission.masks import jit_mask
from gdpa.functions.emit import JitFunctions, jit_functions
from gdpa.problem import EXP, PLAIN, Divided, Operands, Problem, kept, kept_for_any_rows

INTERPRET = interpreting()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; AMD is treated as the portable baseline, whatever its own numbering says."""
    if INTERPRET or torch.version.hip:
        return (8, 0)
    return torch.cuda.get_device_capability(device)


def target(device: torch.device) -> str:
    """What the emitted code may use: PTX on NVIDIA only, and how exact its approximations are."""
    if INTERPRET:
        return "interpret"
    if torch.version.hip:
        return "hip"
    return "sm90" if capability(device) == (9, 0) else "cuda"


ROWS_OF_TERMS = 64  # that a program of row_terms_kernel has


@kept_for_any_rows
def function_of(problem: Problem) -> JitFunctions:
    # An error of an exponent is a relative one of p, so it must be small whatever p is rounded to.
    dtype = torch.float32 if problem.norm == EXP else problem.dtype
    return jit_functions(problem.activation, dtype, target(problem.device))


def factors(problem: Problem, factor: float) -> tuple[float, float]:
    """What becomes of the ``factor`` that the emitted function leaves out: (a factor of out_scale, the GAIN of row
    sums). Where the function is the exponent of p, it is not a factor of p."""
    return (1.0 if problem.norm == EXP else factor), (1.0 if problem.norm == PLAIN else factor)


def launch(
    problem: Problem, kernel: Any, grid: tuple[int, ...], c: Config, T: Tile, choices: tuple[Hashable, ...],
    code: Callable[[], ProblemCode], *args: Any, **constants: Any,
) -> None:  # fmt: skip
    """Run a kernel that contains the problem's function, and its mask if there is one. ``code()`` makes its CODE, and
    ``constants`` are the compile-time arguments besides CODE and T: all follow from the problem and ``choices``, which
    are quicker to compare. The bound kernel lives as long as the function; with a mask, as long as the plan, since a
    function may be used with any number of masks."""
    key = (launch, id(kernel), c, T, choices)
    bound = problem.of_any_rows.get(key)
    if bound is None:
        options = {"num_warps": c.num_warps, "num_stages": c.num_stages, "enable_fp_fusion": True}
        if c.max_registers is not None:  # an option of NVIDIA's compiler only
            options["maxnreg"] = c.max_registers
        holder = problem.activation.derived if problem.mask is None else problem.of_any_rows
        bound = problem.of_any_rows[key] = bind(holder, kernel, CODE=code(), T=T, **constants, **options)
    if T.TMA:
        contextvars.copy_context().run(with_scratch, bound, grid, *args)
    else:
        bound(grid, *args)


def with_scratch(bound: Any, grid: tuple[int, ...], *args: Any) -> None:
    """Run a kernel whose descriptors need scratch memory. To be called in a context of its own: it replaces Triton's
    allocator, which may be the caller's."""
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    bound(grid, *args)


@kept
def pick(problem: Problem, choose: Any) -> Config:
    if INTERPRET:
        return config.INTERPRETED_PARTS if problem.dtype == torch.float32 else config.INTERPRETED
    found: Config = choose(problem, capability(problem.device))
    return found


def sizes(problem: Problem, factor: float) -> tuple[Any, ...]:
    """rows_q, rows_k, band, scale, out_scale: the numbers every kernel takes. ``factor`` is the function's own."""
    band = BandBounds(problem.band.left, problem.band.right)
    return (problem.rows_q, problem.rows_k, band, problem.scale, problem.out_scale * factor)


def code_of(problem: Problem, **more: Any) -> ProblemCode:
    """The CODE of a kernel: what all kernels have (LOAD_PARAMS, NORM, the mask's code), and ``more``."""
    return ProblemCode(function_of(problem).load_params, NORM=problem.norm, **more, **mask_code(problem))


def mask_code(problem: Problem) -> dict[str, Any]:
    if problem.mask is None:
        return {"KEEP": None, "CLASSIFY": None}
    code = jit_mask(problem.mask)
    return {"KEEP": code.keep, "CLASSIFY": code.classify}


def stride_params(params: Tensor | None) -> int:
    return params.stride(0) if params is not None else 0


def forward(problem: Problem, x: Operands, out: Tensor, c: Config | None = None, sums: Tensor | None = None) -> None:
    c = c or pick(problem, config.forward_config)
    zero_unused_queries(problem, x, out)
    tiles = query_tiles(problem, x, c.block_m)
    if tiles.count == 0 or out.numel() == 0:
        return
    f = function_of(problem)
    (q, o, k, v), tile = laid_out(problem, c, (x.q, out), (x.k, x.v))
    factor, gain = factors(problem, f.factor)
    args = (x.cu_k, tiles.records, x.params, stride_params(x.params), *sizes(problem, factor), *places(problem, x))
    grid = (tiles.count, problem.heads_q)
    code = lambda: code_of(problem, FORWARD=f.forward, GAIN=gain)  # noqa: E731
    if sums is None:
        launch(problem, forward_kernel, grid, c, tile, (), code, q, k, v, o, *args)
    else:
        launch(problem, normalized_kernel, grid, c, tile, (), code, q, k, v, o, sums_rows(sums), x.sink, *args)


def sums_rows(sums: Tensor) -> Rows:
    """(out_batch, Hq, rows_q) as a kernel argument."""
    return Rows(sums, 0 if sums.shape[0] == 1 else sums.stride(0), sums.stride(1), sums.stride(2))


def row_terms(problem: Problem, x: Operands, do: Tensor, sums: Divided) -> RowTerms:
    """The two terms of every row that a backward with row sums needs (row_sums.py). Writes the sink's gradient, too,
    adding in a fixed order."""
    own, dsums, dsink, device = sums_rows(sums.sums), None, sums.dsink, do.device
    shape = sums.sums.shape
    delta, row = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    found = RowTerms(delta, row, 0 if shape[0] == 1 else delta.stride(0), delta.stride(1))
    # Rows of no sequence may get any terms, which nobody reads, but are no part of a sum over all rows.
    tiles = Tiles(problem.out_batch * cdiv(problem.rows_q, ROWS_OF_TERMS), None)
    parts = None
    if dsink is not None:
        tiles = query_tiles(problem, x, ROWS_OF_TERMS) if problem.packed_q else tiles
        parts = torch.zeros(tiles.count, problem.heads_q, dtype=torch.float32, device=device)
    if tiles.count and do.numel():
        dsums = None if sums.dsums is None else sums_rows(sums.dsums)
        aligned = (do.data_ptr() | sums.out.data_ptr()) & 15 == 0
        kernel = terms_kernel(problem, do.stride(), sums.out.stride(), aligned)
        unscale = 1.0 / problem.out_scale if problem.out_scale != 0 else 0.0
        code = terms_code(own, found, dsums, parts, tiles.records)
        tensors = (do, sums.out, own.p, dsums and dsums.p, delta, row, parts, tiles.records)
        numbers = (own.batch, own.head, found.batch, found.head, problem.rows_q)
        kernel(
            (tiles.count, problem.heads_q, 1), code, tensors, numbers,
            lambda: (
                *as_rows(problem, (do, sums.out), ())[0], own, dsums, found, parts, None, tiles.records, problem.rows_q,
                0, unscale, problem.heads_q,
            ),
        )  # fmt: skip
    if dsink is not None and parts is not None:
        dsink.copy_(parts.sum(0))
    return found


def terms_code(
    own: Rows, terms: RowTerms, dsums: Rows | None, parts: Tensor | None, records: Tensor | None
) -> Hashable:
    """What row_terms_kernel is specialised by in its arguments, but for do and the output."""
    more = None if dsums is None else (*dsums[1:], dsums.p.data_ptr() & 15 == 0)
    steps = nested((own.batch, own.head)), nested((terms.batch, terms.head))
    return steps, own.p.data_ptr() & 15 == 0, more, parts is None, records is None


@kept_for_any_rows
def terms_kernel(problem: Problem, do: tuple[int, ...], out: tuple[int, ...], aligned: bool) -> Repeated:
    """row_terms_kernel for these strides of do and of the output, and for whether both are aligned."""
    shape = (problem.out_batch, problem.heads_q, 1, problem.head_dim_v)
    rows, align = as_rows(
        problem, tuple(torch.empty_strided(shape, t, dtype=problem.dtype, device="meta") for t in (do, out)), ()
    )
    align = align if aligned else 1
    c = Config(ROWS_OF_TERMS, ROWS_OF_TERMS, 4, 1)
    bound = bind(
        BOUND, row_terms_kernel, NORM=problem.norm, T=make_tile(problem, c, rows, align), num_warps=c.num_warps,
        num_stages=c.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    tensors = ("do_rows", "out_rows", "sums", "dsums", "terms.0", "terms.1", "p_dsink", "p_records")
    return Repeated(bound, (*tensors, "sums.1", "sums.2", "terms.2", "terms.3", "rows_q"))


def backward(
    problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None,
    c: Config | None = None, dtables: Sequence[Tensor | None] = (), sums: Divided | None = None,
) -> None:  # fmt: skip
    c = c or pick(problem, config.backward_config)
    terms = None if sums is None else row_terms(problem, x, do, sums)
    zero_unused_keys(problem, x, dk, dv)
    mode = dq_mode(problem, c)
    buffer = torch.zeros_like(dq, dtype=torch.float32) if mode == "add" else dq
    if mode in ("store", "short"):
        unvisited = mode == "store" and (problem.used_k or problem.rows_k == 0)
        if unvisited or not problem.band.unbounded or problem.mask is not None:
            dq.zero_()  # no tile visits queries that see no key
        else:
            zero_unused_queries(problem, x, dq)
    if torch.are_deterministic_algorithms_enabled() and dtables:
        reference.add_table_gradients(problem, x, do, dtables, sums)  # the kernel's additions have no fixed order
        dtables = ()
    launch_backward(problem, x, do, buffer, dk, dv, dparams, mode, c, dtables, terms)
    if mode == "short":
        launch_other_dq(problem, x, do, dq, c.block_n, terms)
    elif mode == "none":
        launch_dq(problem, x, do, dq, terms)
    elif mode == "add":
        dq.copy_(buffer)


def dq_mode(problem: Problem, c: Config) -> str:
    """How dq is made: see backward_kernel. Hints (max_seqlen) may be wrong, and results must not depend on them."""
    if config.has_dq_of_its_own(problem, capability(problem.device)):
        return "none"
    if not problem.packed_k and problem.rows_k <= c.block_n and not problem.shared_q:
        return "store"
    if problem.packed_k and min(problem.mean_keys, problem.longest_keys) <= c.block_n and not problem.shared_q:
        return "short"
    return "none" if torch.are_deterministic_algorithms_enabled() else "add"


def launch_backward(
    problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None, mode: str,
    c: Config, dtables: Sequence[Tensor | None] = (), terms: RowTerms | None = None,
) -> None:  # fmt: skip
    """Compute dk, dv, dparams, and dq unless mode is "none"; gradients of tables are added to ``dtables``."""
    f, n_params = function_of(problem), problem.n_params
    tiles = key_tiles(problem, x, c.block_n)
    sums = None  # per tile and head; summed afterwards in a fixed order
    if dparams is not None:
        sums = torch.zeros(tiles.count, problem.heads_q, n_params, dtype=torch.float32, device=dq.device)
    learn = LearnedTables.of(problem, dtables)
    factor, gain = factors(problem, f.backward_factor)
    if tiles.count and dk.numel():
        (q, g, gq, k, v, gk, gv), tile = laid_out(problem, c, (x.q, do, dq), (x.k, x.v, dk, dv))

        def code() -> ProblemCode:
            return code_of(
                problem, BACKWARD=f.backward, LEARN=f.learn if learn.gradients else None, N_PARAMS=n_params,
                N_LEARNED=learn.lookups, BLOCK_P=triton.next_power_of_2(max(n_params, 1)), COPIES=learn.copies,
                GAIN=gain, DQ=mode,
            )  # fmt: skip

        launch(
            problem, backward_kernel, (tiles.count, problem.heads_k), c, tile,
            (mode, learn.copies, bool(learn.gradients), learn.lookups), code, q, k, v, g, gq, gk, gv, sums,
            (0, 0) if sums is None else sums.stride()[:2], x.cu_q, tiles.records, x.params, stride_params(x.params),
            *sizes(problem, factor), *places(problem, x, learn), terms,
        )  # fmt: skip
    if dparams is not None and sums is not None:
        dparams.copy_(sums.sum(0).T)
    learn.add_to(dtables)


def launch_dq(problem: Problem, x: Operands, do: Tensor, dq: Tensor, terms: RowTerms | None = None) -> None:
    """dq in a fixed order of additions. Shared queries get one partial dq per sequence, then a sum over them."""
    zero_unused_queries(problem, x, dq)
    c = pick(problem, config.dq_config)
    tiles = query_tiles(problem, x, c.block_m)
    target_dq = dq
    if problem.shared_q:
        target_dq = torch.empty((problem.n_seqs, *dq.shape[1:]), dtype=torch.float32, device=dq.device)
    if tiles.count and target_dq.numel():
        args, tile = dq_arguments(problem, x, do, target_dq, tiles, c, terms)
        grid = (tiles.count, problem.heads_q)
        launch(problem, dq_kernel, grid, c, tile, (), lambda: dq_code(problem), *args)
    if target_dq is not dq:
        dq.copy_(target_dq.sum(0, keepdim=True))


TILES_AT_A_GLANCE = 16
FULL_CHIP = 264  # programs, two for each of an H200's processors


def launch_other_dq(
    problem: Problem, x: Operands, do: Tensor, dq: Tensor, short: int, terms: RowTerms | None = None
) -> None:
    """dq of sequences with more than ``short`` keys, or none: those that DQ = "short" leaves out."""
    c = pick(problem, config.dq_config)
    tiles = query_tiles(problem, x, c.block_m, listed=True)
    if tiles.count and dq.numel():
        args, tile = dq_arguments(problem, x, do, dq, tiles, c, terms)
        glance = TILES_AT_A_GLANCE
        if cdiv(tiles.count, glance) * problem.heads_q < FULL_CHIP:
            glance = 1
        grid = (cdiv(tiles.count, glance), problem.heads_q)
        launch(
            problem, other_dq_kernel, grid, c, tile, (short, glance), lambda: dq_code(problem), *args, tiles.count,
            SHORT=short, GLANCE=glance,
        )  # fmt: skip


def dq_arguments(
    problem: Problem, x: Operands, do: Tensor, dq: Tensor, tiles: Tiles, c: Config, terms: RowTerms | None
) -> tuple[tuple[Any, ...], Tile]:
    (q, g, gq, k, v), tile = laid_out(problem, c, (x.q, do, dq), (x.k, x.v))
    factor, _ = factors(problem, function_of(problem).backward_factor)
    numbers = (*sizes(problem, factor), *places(problem, x), terms)
    return (q, k, v, g, gq, x.cu_k, tiles.records, x.params, stride_params(x.params), *numbers), tile


def dq_code(problem: Problem) -> ProblemCode:
    f = function_of(problem)
    return code_of(problem, BACKWARD=f.backward, GAIN=factors(problem, f.backward_factor)[1])
