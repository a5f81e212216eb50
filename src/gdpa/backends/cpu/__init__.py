"""The CPU backend: blocked, memory-lean, threaded by torch's own kernels.

For the sequences and heads of a chunk (schedule.py), tile by tile of queries x keys, with s recomputed in backward:

    forward    o  = out_scale * sum_j P_j V_j
    backward   dV = out_scale * P^T dO    dP = out_scale * dO V^T    dS = dP * f'(S)
               dQ = scale * dS K          dK = scale * dS^T Q        dparam = sum dP * df/dparam

No Lq x Lk matrix exists: a tile of a few MiB is the largest temporary, so S, P, dP and dS stay in cache between the
matrix products and f. Both scales ride on the products (the alpha of baddbmm). The query heads that share a key head
are further rows of its query block, so that K is never repeated and dK sums over them by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from gdpa.backends.cpu.normalized import BlockTerms, RunningSums, divided
from gdpa.backends.cpu.places import place
from gdpa.backends.cpu.rows import RowAccess, zero_unused
from gdpa.backends.cpu.schedule import Chunk, chunks
from gdpa.backends.cpu.tiles import gradients, value
from gdpa.backends.cpu.visible import visible_tiles
from gdpa.problem import Divided, Operands, Problem, sums_dtype

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class CpuBackend:
    """Runs every problem whose tensors are on the CPU."""

    name = "cpu"

    def supports(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return f"it runs on CPU tensors, but these are on {problem.device}"
        if problem.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            return f"it computes in {known}, but these are {problem.dtype}"
        return None

    def forward(self, problem: Problem, x: Operands, out: Tensor, sums: Tensor | None = None) -> None:
        with _plain_arithmetic():
            zero_unused(out, x.cu_q, x.used_q)
            for chunk in chunks(problem, x):
                _forward_chunk(problem, x, chunk, out, sums)

    def backward(
        self, problem: Problem, x: Operands, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor | None,
        dtables: Sequence[Tensor | None] = (), sums: Divided | None = None,
    ) -> None:  # fmt: skip
        with _plain_arithmetic():
            zero_unused(dq, x.cu_q, x.used_q)
            for t in (dk, dv):
                zero_unused(t, x.cu_k, x.used_k)
            # Shared queries sum over sequences, parameters over everything: neither may round at each step.
            sum_dq = torch.zeros_like(dq, dtype=_compute_dtype(problem)) if problem.shared_q else dq
            sum_dparams = None if dparams is None else torch.zeros_like(dparams, dtype=torch.float64)
            dsink = None if sums is None else sums.dsink
            if sums is not None and dsink is not None:
                sums = replace(sums, dsink=torch.zeros_like(dsink, dtype=torch.float64))
            totals = [None if t is None else torch.zeros_like(t, dtype=torch.float64) for t in dtables]
            for chunk in chunks(problem, x):
                _backward_chunk(problem, x, do, chunk, sum_dq, dk, dv, sum_dparams, totals, sums)
            if problem.shared_q:
                dq.copy_(sum_dq)
            if sums is not None and sums.dsink is not None and dsink is not None:
                dsink.copy_(sums.dsink)
            if dparams is not None and sum_dparams is not None:
                dparams.copy_(sum_dparams)
            for into, total in zip(dtables, totals, strict=True):
                if into is not None and total is not None:
                    into += total


@contextmanager
def _plain_arithmetic() -> Iterator[None]:
    """No gradients, and no autocast: it has chosen the dtype before the op, here it would undo the fp32 arithmetic.

    Made anew for each call: as a decorator, one autocast object would mix up the states of concurrent threads.
    """
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _forward_chunk(problem: Problem, x: Operands, chunk: Chunk, out: Tensor, sums: Tensor | None = None) -> None:
    k = _key_blocks(problem, chunk, x.k)
    v = _key_blocks(problem, chunk, x.v)
    params = _chunk_params(problem, chunk, x)
    known = visible_tiles(problem, x, chunk)
    for q0, q1 in chunk.q_blocks:
        q = _fold(problem, chunk, chunk.q.take(x.q, chunk.heads_q, q0, q1))
        o: Tensor | None = None
        running = None if sums is None else _running_sums(problem, x, chunk, q1 - q0)
        for j, k0, k1 in chunk.visible_blocks(q0, q1):
            tile = place(problem, x, chunk, known, (q0, q1), (k0, k1))
            if tile.empty:
                continue
            s = _unfold(chunk, _product(q, k[j].mT, problem.scale), q1 - q0)
            if running is None:
                p = value(problem.activation, s, params, tile.keep, tile.places)
            else:
                p, shrink = running.add(problem.activation.eager(s, *params, places=tile.places), tile.keep)
                o = o if o is None or shrink is None else o * _fold(problem, chunk, shrink)
            o = _add_product(o, _fold(problem, chunk, p.to(problem.dtype)), v[j], problem.out_scale)
        if running is not None and sums is not None:
            inverse, kept = running.finish()
            o = None if o is None else divided(problem.norm, _unfold(chunk, o, q1 - q0), inverse, kept)
            _write(chunk, chunk.out, sums.unsqueeze(-1), chunk.heads_q, q0, q1, kept)
        _write(chunk, chunk.out, out, chunk.heads_q, q0, q1, o)


def _running_sums(problem: Problem, x: Operands, chunk: Chunk, rows: int) -> RunningSums:
    dtype, heads = sums_dtype(problem.dtype), chunk.heads_q
    sink = None if x.sink is None else x.sink[heads, None, None].to(dtype)
    return RunningSums(problem.norm, sink, torch.empty(chunk.n_seqs, heads.stop - heads.start, rows, 1, dtype=dtype))


def _backward_chunk(
    problem: Problem,
    x: Operands,
    do: Tensor,
    chunk: Chunk,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dparams: Tensor | None,
    dtables: Sequence[Tensor | None],
    sums: Divided | None,
) -> None:
    k = _key_blocks(problem, chunk, x.k)
    v = _key_blocks(problem, chunk, x.v)
    params = _chunk_params(problem, chunk, x)
    known = visible_tiles(problem, x, chunk)
    dk_blocks: list[Tensor | None] = [None] * len(chunk.k_blocks)
    dv_blocks: list[Tensor | None] = [None] * len(chunk.k_blocks)
    for q0, q1 in chunk.q_blocks:
        q_block = _fold(problem, chunk, chunk.q.take(x.q, chunk.heads_q, q0, q1))
        do_block = _fold(problem, chunk, chunk.out.take(do, chunk.heads_q, q0, q1))
        terms = None if sums is None else _row_terms(problem, chunk, do, sums, q0, q1)
        dq_block: Tensor | None = None
        for j, k0, k1 in chunk.visible_blocks(q0, q1):
            tile = place(problem, x, chunk, known, (q0, q1), (k0, k1), bool(dtables))
            if tile.empty:
                continue
            s = _unfold(chunk, _product(q_block, k[j].mT, problem.scale), q1 - q0)
            dp = _unfold(chunk, _product(do_block, v[j].mT, problem.out_scale), q1 - q0)
            p, ds, dparams_tile = gradients(
                problem.activation, s, dp, params, tile.keep, dparams is not None, tile.places, dtables, terms
            )
            p, ds = _fold(problem, chunk, p.to(problem.dtype)), _fold(problem, chunk, ds)
            dv_blocks[j] = _add_product(dv_blocks[j], p.mT, do_block, problem.out_scale)
            dk_blocks[j] = _add_product(dk_blocks[j], ds.mT, q_block, problem.scale)
            dq_block = _add_product(dq_block, ds, k[j], problem.scale)
            if dparams is not None:
                dparams[:, chunk.heads_q] += torch.stack(dparams_tile)
        _write(chunk, chunk.q, dq, chunk.heads_q, q0, q1, dq_block)
    for (k0, k1), dk_block, dv_block in zip(chunk.k_blocks, dk_blocks, dv_blocks, strict=True):
        _write(chunk, chunk.k, dk, chunk.heads_k, k0, k1, dk_block)
        _write(chunk, chunk.k, dv, chunk.heads_k, k0, k1, dv_block)


def _row_terms(problem: Problem, chunk: Chunk, do: Tensor, sums: Divided, q0: int, q1: int) -> BlockTerms:
    """Of one block of queries; adds what they give to the gradient of the sink."""
    dsums = None if sums.dsums is None else sums.dsums.unsqueeze(-1)
    tensors = (do, sums.out, sums.sums.unsqueeze(-1), dsums)
    dtype = _compute_dtype(problem)
    wide = (None if t is None else chunk.out.take(t, chunk.heads_q, q0, q1).to(dtype) for t in tensors)
    terms = BlockTerms.of(problem.norm, *wide)  # type: ignore[arg-type]  # only the last may be None
    if sums.dsink is not None:
        sums.dsink[chunk.heads_q] += terms.dsink()
    return terms


def _compute_dtype(problem: Problem) -> torch.dtype:
    return sums_dtype(problem.dtype)


def _key_blocks(problem: Problem, chunk: Chunk, t: Tensor) -> tuple[Tensor, ...]:
    """All of the chunk's keys or values, cut into blocks of (n * Hk, keys, D)."""
    rows = chunk.k.take(t, chunk.heads_k, 0, chunk.spans.max_k)
    return _fold(problem, chunk, rows).split(chunk.block_k, dim=1)


def _fold(problem: Problem, chunk: Chunk, t: Tensor) -> Tensor:
    """(n, H, rows, *) to (n * Hk, group * rows, *) in the compute dtype: one matrix per sequence and key head."""
    n, heads, rows, columns = t.shape
    heads_k = chunk.heads_k.stop - chunk.heads_k.start
    t = t.to(_compute_dtype(problem), memory_format=torch.contiguous_format)
    return t.reshape(n * heads_k, heads // heads_k * rows, columns)


def _unfold(chunk: Chunk, t: Tensor, rows: int) -> Tensor:
    """The inverse: (n * Hk, group * rows, *) to (n, H, rows, *)."""
    return t.view(chunk.n_seqs, -1, rows, t.shape[-1])


def _product(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """alpha * a @ b, the factor at no cost."""
    if alpha == 0:  # some BLAS then leaves the memory as it was allocated, though beta is 0 too
        return a.new_zeros(a.shape[0], a.shape[1], b.shape[2])
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2]).baddbmm_(a, b, beta=0, alpha=alpha)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """total + alpha * a @ b in place. None is the empty sum: short sequences are spared a pass of writing zeros."""
    return _product(a, b, alpha) if total is None else total.baddbmm_(a, b, alpha=alpha)


def _write(chunk: Chunk, rows: RowAccess, t: Tensor, heads: slice, start: int, stop: int, total: Tensor | None) -> None:
    """Write rows start:stop of a chunk; a sum that stayed empty, as nothing was visible, is zero."""
    shape = (chunk.n_seqs, heads.stop - heads.start, stop - start, t.shape[-1])
    rows.put(t, heads, start, stop, t.new_zeros(()).expand(shape) if total is None else total.view(shape))


def _chunk_params(problem: Problem, chunk: Chunk, x: Operands) -> list[Tensor]:
    """The parameters of the chunk's heads, (Hq, 1, 1) each."""
    if x.params is None:
        return []
    return list(x.params[:, chunk.heads_q, None, None].to(_compute_dtype(problem)))
