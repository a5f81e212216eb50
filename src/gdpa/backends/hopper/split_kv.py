"""Split-KV: a forward whose keys are divided into parts, and the kernel that adds up their results.

A tile of queries is one program's work, so a call with few of them (one batch entry, or few sequences with few queries
and very many keys, as in pooling) would leave most of the chip idle. There each part of a tile's keys is an item of its
own, whose result is float32, and one more kernel adds the parts in their order: results do not change from run to run.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
from torch import Tensor

from gdpa.backends.hopper import config
from gdpa.backends.hopper.config import Config
from gdpa.backends.hopper.scheduling.work import layout_of
from gdpa.backends.triton import arguments as portable
from gdpa.backends.triton.launching import Repeated, bind, cdiv
from gdpa.device.split_kv import add_parts_kernel
from gdpa.problem import Problem, kept, kept_for_any_rows

# Sums in float32 take twice the room of a 16-bit result in shared memory, so at D 128 there is less for keys.
IN_PARTS = {64: Config(128, 128, stages=4), 128: Config(128, 64, stages=3)}
LEAST_KEYS = 4096  # of a part, on average: less is not worth the second kernel, nor the host's time for it
MOST_ROWS = 2**30  # that a descriptor reaches


@kept
def parts_of(problem: Problem, processors: int) -> int:
    """Into how many parts the keys are divided, so that there is work for all processors. It depends on the shape alone
    and not on hints (max_seqlen), which must never change a result."""
    c = IN_PARTS[config.width(problem)]
    if problem.packed_q:
        tiles = problem.rows_q // c.block_m + problem.n_seqs
    else:
        tiles = problem.n_seqs * cdiv(problem.rows_q, c.block_m)
    rows = problem.rows_q * problem.out_batch * problem.heads_q
    parts = min(
        processors // max(tiles * problem.heads_q, 1), problem.mean_keys // LEAST_KEYS, MOST_ROWS // max(rows, 1)
    )
    return max(parts, 1)


def empty_parts(out: Tensor, parts: int) -> Tensor:
    """An empty tensor for the float32 results of all parts, (parts * B, H, L, D)."""
    batch, heads, rows, d = out.shape
    return torch.empty(parts * batch, heads, rows, d, dtype=torch.float32, device=out.device)


def add_parts(problem: Problem, kind: Hashable, sums: Tensor, out: Tensor) -> None:
    """out = the sum of the parts. Unused rows get whatever the memory held: the caller zeroes them afterwards.
    ``kind``: see Operands.kind."""
    batch, heads, rows, _ = out.shape
    many, parts = batch * heads * rows, sums.shape[0] // batch
    repeated_addition(problem)(
        grid_of_addition(many), with_parts(layout_of(kind, (out,)), parts, rows), (sums, out), (),
        lambda: (sums, out, *out.stride()[:3], heads, rows, many, parts),
    )  # fmt: skip


@kept_for_any_rows
def repeated_addition(problem: Problem) -> Repeated:
    d = problem.head_dim_v
    bound = bind(portable.BOUND, add_parts_kernel, D=d, BLOCK_D=triton.next_power_of_2(d), ROWS=ROWS, num_warps=4,
                 enable_fp_fusion=True)  # fmt: skip
    return Repeated(bound, ("p_sums", "p_out"))


def with_parts(layout: Hashable, parts: int, rows_q: int) -> Hashable:
    """The layout of a launch (see Repeated) that has such sums among its arguments."""
    return layout, parts, rows_q


def grid_of_addition(many: int) -> tuple[int, int, int]:
    return cdiv(many, ROWS), 1, 1


ROWS = 16  # of a program
