"""Gradients of embedding tables: gdpa::embedding_backward, of a whole table, and sums of the rows that were read.

PyTorch adds rows up where they are in the table, in whatever order they come, and so do compilers: an id that thousands
of events have is thousands of additions to the same place, and the sum is another one every time. Here ids are sorted,
and the rows of each id are added up in float32 in a fixed order, however many there are (device/segments.py). No row
is moved: several columns may read one table, and each has its gradients where backward has left them.

A step of the benchmark's InterFormer has 1.2 million rows of 512 bfloat16 (1.22 GB) and reads 115,000 rows of float32
tables (0.24 GB). Row-wise Adagrad must move 1.7 GB and Adam 2.6, at 4 TB/s 0.42 and 0.66 ms; here it is 2.5 and 3.4,
with the sums written and read (0.47), those that chunks leave (0.15) and the sorting (0.2). A gradient that is
clipped needs the sums before the first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.backends import interpreting, on_device_of
from gdpa.rowwise import PLAIN

NARROW = (torch.float16, torch.bfloat16, torch.float32)  # what the kernels take
WIDEST = 4096  # entries of a row that registers hold
OF_WARP = 512  # entries that a warp has at a time, 16 for a thread
MOST_WARPS = 8
CHUNK = 64  # rows that a program adds up: 18,000 programs for InterFormer's 1.2 million rows, and 3 % more to write
NEXT_CHUNK = 32  # of the sums that they leave for the next launch, few, for programs wait there; at least 4
INT32 = 2**31 - 1

torch.library.define(
    "gdpa::embedding_backward",
    "(Tensor grad, Tensor ids, SymInt rows, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def has_kernel(table: Tensor) -> bool:
    """Whether gradients of ``table`` are summed up, and its rows updated, by kernels; else all is PyTorch's. The
    interpreter's bfloat16 is wrong."""
    where = table.is_cuda or (interpreting() and table.dtype != torch.bfloat16)
    return where and table.dtype in NARROW and table.shape[-1] <= WIDEST and type(table) in PLAIN


# ---- functions -------------------------------------------------------------------------------------------------------
def look_up(table: Tensor, ids: Tensor, of_rows: torch.dtype) -> Tensor:
    """F.embedding, whose backward takes gradients of rows as ``of_rows`` and adds them up by the operator."""
    return _LookUp.apply(table, ids, of_rows)


def look_up_beside(table: Tensor, ids: Tensor, leaf: Tensor) -> Tensor:
    """F.embedding; the gradients of its rows become those of ``leaf`` (ids, dim), and the table gets none."""
    return _LookUpBeside.apply(table.detach(), ids, leaf)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, of_rows: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype, ctx.of_rows = table.shape[0], table.dtype, of_rows
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (ids,) = ctx.saved_tensors
        return torch.ops.gdpa.embedding_backward(grad.to(ctx.of_rows), ids, ctx.rows, ctx.dtype), None, None


class _LookUpBeside(torch.autograd.Function):
    """A compiler knows no sparse gradients, but that of a leaf is an ordinary tensor: the rows' own."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, leaf: Tensor) -> Tensor:
        ctx.dtype = leaf.dtype
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, grad.to(ctx.dtype)


# ---- gdpa::embedding_backward ----------------------------------------------------------------------------------------
@torch.library.impl("gdpa::embedding_backward", "CompositeExplicitAutograd")
def _embedding_backward(grad: Tensor, ids: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    if not has_kernel(grad):
        wide = grad.to(torch.promote_types(dtype, torch.float32))
        return torch.ops.aten.embedding_dense_backward(wide, ids, rows, -1, False).to(dtype)
    keys, values = ids.flatten().to(torch.int32 if rows <= INT32 else torch.int64), _rows(grad)
    sums = values.new_zeros(rows, values.shape[1], dtype=dtype)
    if keys.numel():
        keys, order = keys.sort(stable=True)
        _add_up(order * _pitch(values) + values.data_ptr(), keys, [values], sums, None)
    return sums


@torch.library.register_fake("gdpa::embedding_backward")
def _embedding_backward_fake(grad: Tensor, ids: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    return grad.new_empty(rows, grad.shape[-1], dtype=dtype)


def _refuse_double_backward(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError("gdpa: the backward of look-ups on a GPU cannot be differentiated again")


torch.library.register_autograd("gdpa::embedding_backward", _refuse_double_backward)


# ---- sums of rows ----------------------------------------------------------------------------------------------------
class Column(NamedTuple):
    """Rows that were read from the table of number ``table``: their ids (n,), and their gradients (n, dim)."""

    table: int
    ids: Tensor
    rows: Tensor


class Sums(NamedTuple):
    """The gradients of several tables, added up by row: how many rows of each there are, only the device knows.

    keys    (most,) rows in the order of tables and ids, counted through all tables
    sums    (most, dim) float32
    norm    () of all of them
    bounds  (tables + 1,): from where to where in ``keys`` the rows of a table are
    starts  of the tables, in what ``keys`` counts
    most    rows of each table that there can be, None of a table that has no gradient
    """

    keys: Tensor
    sums: Tensor
    norm: Tensor
    bounds: Tensor
    starts: Sequence[int]
    most: Sequence[int | None]


def sum_by_row(columns: Sequence[Column], sizes: Sequence[int]) -> Sums | None:
    """Of tables that have ``sizes`` rows. No step waits for the device. None if no row was read."""
    n = sum(column.ids.numel() for column in columns)
    if n == 0:
        return None
    starts = [0, *accumulate(sizes)]
    like, dtype = columns[0].rows, reduce(torch.promote_types, (column.rows.dtype for column in columns))
    rows = [_rows(column.rows.to(dtype)) for column in columns]
    keys = like.new_empty(n, dtype=torch.int32 if starts[-1] <= INT32 else torch.int64)
    places = like.new_empty(n, dtype=torch.int64)
    at = 0
    for column, values in zip(columns, rows, strict=True):
        stop, first, pitch = at + values.shape[0], values.data_ptr(), _pitch(values)
        torch.add(column.ids.flatten(), starts[column.table], out=keys[at:stop])
        torch.arange(first, first + pitch * values.shape[0], pitch, out=places[at:stop])
        at = stop
    keys, order = keys.sort(stable=True)
    codes = F.pad((keys[1:] != keys[:-1]).cumsum(0), (1, 0))
    most = [_most(columns, table, size) for table, size in enumerate(sizes)]
    capacity = sum(held or 0 for held in most)
    sums = like.new_empty(capacity, like.shape[-1], dtype=torch.float32)
    squares = like.new_zeros(capacity, _blocks(like.shape[-1]), dtype=torch.float32)
    _add_up(places[order], codes, rows, sums, squares)
    ends = torch.searchsorted(keys, _on_device(tuple(starts), keys.dtype, keys.device))
    return Sums(
        keys.new_empty(capacity).scatter_(0, codes, keys), sums, squares.sum().sqrt(), F.pad(codes + 1, (1, 0))[ends],
        starts, most,
    )  # fmt: skip


def _most(columns: Sequence[Column], table: int, size: int) -> int | None:
    read = [column.ids.numel() for column in columns if column.table == table]
    return min(sum(read), size) if read else None


@cache
def _on_device(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def _rows(t: Tensor) -> Tensor:
    """(rows, dim), entries side by side: a view where there can be one."""
    rows = t.reshape(-1, t.shape[-1])
    return rows if rows.stride(1) == 1 and rows.stride(0) > 0 else rows.contiguous()


def _pitch(rows: Tensor) -> int:
    """Bytes from one row to the next; something where there is no next."""
    return max(rows.stride(0) * rows.element_size(), 1)


# ---- launches --------------------------------------------------------------------------------------------------------
_BOUND: dict[Any, Any] = {}  # kernels, ready for launches


def _block(dim: int) -> int:
    return min(1 << (dim - 1).bit_length(), 2 * OF_WARP)


def _blocks(dim: int) -> int:
    return -(-dim // _block(dim))


def _add_up(places: Tensor, codes: Tensor, rows: Sequence[Tensor], sums: Tensor, squares: Tensor | None) -> None:
    """Into ``sums``: of the rows at the addresses ``places``, in the order of their segments ``codes``. ``rows``: the
    tensors that they are in."""
    import triton.language as tl

    from gdpa.backends.triton.launching import bind, cdiv
    from gdpa.device.segments import embedding_sum_kernel

    dim, n, chunk = sums.shape[1], codes.shape[0], CHUNK
    block, blocks = _block(dim), _blocks(dim)
    aligned = all(t.data_ptr() % 16 == 0 and _pitch(t) % 16 == 0 for t in rows)
    shape = {"D": dim, "ROW": getattr(tl, str(rows[0].dtype).removeprefix("torch.")), "ALIGNED": aligned}
    options = {"BLOCK_D": block, "num_warps": max(1, block // OF_WARP), "enable_fp_fusion": True}
    given: tuple[Tensor | None, Tensor | None] = places, None
    while True:
        launch = bind(_BOUND, embedding_sum_kernel, CHUNK=chunk, **shape, **options)
        chunks = cdiv(n, chunk)
        parts, part_codes = sums.new_empty(2 * chunks, dim, dtype=torch.float32), codes.new_empty(2 * chunks)
        with on_device_of(sums):
            launch((chunks, blocks, 1), *given, codes, sums, squares, parts, part_codes, n)
        if chunks == 1:
            return
        given, codes, n, chunk = (None, parts), part_codes, 2 * chunks, NEXT_CHUNK


def launch_update(
    kernel: Any, table: Tensor, state: Sequence[Tensor], found: Sums, number: int, clip: Tensor | None,
    lr: float | Tensor, **constants: Any,
) -> None:  # fmt: skip
    """``kernel`` for all rows of ``table``, of that number, that have a gradient."""
    from gdpa.backends.triton.launching import bind

    dim, most = table.shape[1], found.most[number]
    if not most:
        return
    block = 1 << (dim - 1).bit_length()
    warps = max(1, min(block // OF_WARP, MOST_WARPS))
    constants |= {"LR_HELD": isinstance(lr, Tensor), "D": dim, "BLOCK_D": block}
    launch = bind(_BOUND, kernel, **constants, num_warps=warps, enable_fp_fusion=True)
    with on_device_of(table):
        launch(
            (most, 1, 1), table, *state, found.sums, found.keys, found.bounds, clip, lr, number, found.starts[number]
        )  # fmt: skip
