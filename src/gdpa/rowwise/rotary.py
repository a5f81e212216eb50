"""gdpa::rotary, rotary positions of all heads of a row in one pass, and gdpa::rotary_, the same in place.

Turning back is turning by the negative angle, so backward is the same pass over the gradient and needs nothing but the
positions. What is in no head that is turned (v beside q and k) stays as it is: of a tensor that is turned in place it
is neither read nor written, and the gradient of all of it is one tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gdpa.backends import interpreting, on_device_of
from gdpa.rowwise import PLAIN

NARROW = (torch.float16, torch.bfloat16, torch.float32)  # what the kernel takes
PLACES = (torch.int32, torch.int64, torch.float32, torch.float64)
BLOCK = 2048  # angles of a program: 16 for each of 128 threads

ARGUMENTS = "Tensor positions, SymInt heads, float base, bool inverse"
torch.library.define("gdpa::rotary", f"(Tensor x, {ARGUMENTS}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
torch.library.define("gdpa::rotary_", f"(Tensor(a!) x, {ARGUMENTS}) -> ()", tags=torch.Tag.pt2_compliant_tag)


def formula(x: Tensor, positions: Tensor, base: float, inverse: bool = False) -> Tensor:
    """The definition, of all heads: x (..., H, D), positions (...). Angles are reduced to less than a turn in float64,
    where a time stamp in seconds still has its angle; cos, sin and the products are float32 (float64 for float64)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = x.shape[-1] // 2
    # A compiled kernel computes all of this anew for every element: powers of 2 are cheap, and with the halves as a
    # dimension, one read backwards, it needs one sine and one cosine where joining two results would need two each.
    exponents = torch.arange(half, device=x.device, dtype=torch.float64) * (-math.log2(base) / half)
    turns = positions.to(torch.float64)[..., None] * (exponents.exp2() / (2 * math.pi))
    angles = ((turns - turns.round()) * (2 * math.pi)).to(wide)[..., None, None, :]  # (..., 1, 1, D/2)
    signs = torch.arange(-1, 2, 2, device=x.device, dtype=wide) * (-1.0 if inverse else 1.0)
    halves = x.to(wide).unflatten(-1, (2, -1))
    turned = torch.addcmul(halves * angles.cos(), halves.flip(-2), angles.sin() * signs[:, None])
    return turned.flatten(-2).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, heads: int, base: float) -> Tensor:
    """x (..., H, D) with its first ``heads`` heads turned; ``positions`` (...) may lack leading dimensions of x."""
    if torch.compiler.is_compiling():
        return _Turn.apply(x, positions, heads, base)
    return torch.ops.gdpa.rotary(x, positions, heads, base, False)


class _Turn(torch.autograd.Function):
    """For compilers, which see that nobody needs what a projection, or attention's backward, has made: they drop the
    copies, and half of what is read and written out of place need not be touched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, heads: int, base: float) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.heads, ctx.base = heads, base
        y = x.clone()
        torch.ops.gdpa.rotary_(y, positions, heads, base, False)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (positions,) = ctx.saved_tensors
        dx = grad.clone()
        torch.ops.gdpa.rotary_(dx, positions, ctx.heads, ctx.base, True)
        return dx, None, None, None


@torch.library.impl("gdpa::rotary", "CompositeExplicitAutograd")
def _rotary(*args: Any) -> Tensor:
    return _turned(*args)


def _turned(x: Tensor, positions: Tensor, heads: int, base: float, inverse: bool) -> Tensor:
    if not has_kernel(x):
        turned = formula(x[..., :heads, :], positions, base, inverse)
        return torch.cat([turned, x[..., heads:, :]], dim=-2)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(_rows(x), _rows(out), positions, x.shape[:-2], heads, base, inverse)
    return out


@torch.library.impl("gdpa::rotary_", "CompositeExplicitAutograd")
def _rotary_in_place(x: Tensor, positions: Tensor, heads: int, base: float, inverse: bool) -> None:
    mine = x[..., :heads, :]
    rows = _rows(mine) if has_kernel(x) else None
    if rows is None or rows.data_ptr() != mine.data_ptr():  # dimensions that cannot be counted as rows: a copy of them
        mine.copy_(_turned(mine, positions, heads, base, inverse))
    else:
        _launch(rows, rows, positions, x.shape[:-2], heads, base, inverse)


def has_kernel(x: Tensor) -> bool:
    """Whether rows of ``x`` are turned by a kernel; else it is the formula. The interpreter's bfloat16 is wrong."""
    where = x.is_cuda or (interpreting() and x.dtype != torch.bfloat16)
    return where and x.dtype in NARROW and type(x) in PLAIN


def _rows(x: Tensor) -> Tensor:
    """(rows, H, D), features side by side: a view where there can be one."""
    rows = x.reshape(-1, *x.shape[-2:]) if x.numel() else x.new_empty(0, *x.shape[-2:])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _launch(
    x: Tensor, y: Tensor, positions: Tensor, shape: torch.Size, heads: int, base: float, inverse: bool
) -> None:  # fmt: skip
    """From x (rows, H, D) into y, of rows that are counted by ``shape``."""
    if x.numel() == 0:
        return
    from gdpa.backends.triton.launching import bind, cdiv
    from gdpa.device.rotary import turn_kernel

    if positions.shape != shape[len(shape) - positions.dim() :]:  # ones in it are more than missing dimensions
        positions = positions.expand(shape)
    if positions.dtype not in PLACES:
        positions = positions.to(torch.float32 if positions.is_floating_point() else torch.int64)
    positions = positions.contiguous()
    half = x.shape[-1] // 2
    block_half = 1 << (half - 1).bit_length()
    block_rows = max(1, BLOCK // block_half)
    turn = bind(
        _BOUND, turn_kernel, STEP=-math.log2(base) / half, INVERSE=inverse, REPEATED=positions.numel() != x.shape[0],
        HALF=half, BLOCK_ROWS=block_rows, BLOCK_HALF=block_half, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    with on_device_of(x):
        turn(
            (cdiv(x.shape[0], block_rows),), x, y, positions, x.shape[0], positions.numel(), x.stride(0), x.stride(1),
            y.stride(0), y.stride(1), heads, x.shape[1],
        )  # fmt: skip


_BOUND: dict[Any, Any] = {}  # the kernel, ready for launches


@torch.library.register_fake("gdpa::rotary")
def _rotary_fake(x: Tensor, positions: Tensor, heads: int, base: float, inverse: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("gdpa::rotary_")
def _rotary_in_place_fake(x: Tensor, positions: Tensor, heads: int, base: float, inverse: bool) -> None:
    pass


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, positions, *ctx.settings = inputs
    ctx.save_for_backward(positions)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (positions,), (heads, base, inverse) = ctx.saved_tensors, ctx.settings
    return torch.ops.gdpa.rotary(grad, positions, heads, base, not inverse), None, None, None, None


torch.library.register_autograd("gdpa::rotary", _gradient, setup_context=_save)
