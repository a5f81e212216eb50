"""Norms of rows whose backward is one pass: gdpa::norm_backward and gdpa::add_normed_backward.

Forward is plain PyTorch, which a compiler fuses with what is around it. Of backward it makes two passes, one along rows
for the gradient of the input and one along columns for those of weights, and stores in between what both need. These
operators read each row once, compute what forward knew of it again, and keep nothing but inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.backends import interpreting, on_device_of
from gdpa.rowwise import PLAIN, computed

NARROW = (torch.float16, torch.bfloat16, torch.float32)  # what the kernels take
WIDEST = 4096  # features of a row that registers hold
OF_WARP = 512  # elements that a warp has at a time, 16 for a thread; half as many where it holds more tensors
LEAST_WARPS = 1  # of a program: one warp that has all of a row waits for no other
WARPS = 16  # of a multiprocessor

for _schema in (
    "norm_backward(Tensor dz, Tensor x, Tensor? weight, Tensor? beside, float eps, bool centred) "
    "-> (Tensor, Tensor, Tensor)",
    "add_normed_backward(Tensor dy, Tensor x, Tensor o, Tensor weight, Tensor? dz, Tensor? weight_z, float eps_x, "
    "float eps, float eps_z) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    _name, _, _rest = _schema.partition("(")
    torch.library.define(f"gdpa::{_name}", f"({_rest}", tags=torch.Tag.pt2_compliant_tag)


def has_kernel(*tensors: Tensor | None) -> bool:
    """Whether backward of norms over the last dimension of these is a kernel's; else all is left to PyTorch."""
    given = [t for t in tensors if t is not None]
    where = all(t.is_cuda for t in given) or (interpreting() and all(t.dtype != torch.bfloat16 for t in given))
    return where and given[0].shape[-1] <= WIDEST and all(t.dtype in NARROW and type(t) in PLAIN for t in given)


# ---- functions -------------------------------------------------------------------------------------------------------
def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """F.layer_norm of the last dimension."""
    return _Norm.apply(x, weight, bias, eps)


def normed_beside(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x, and F.layer_norm of it, in the dtype of autocast if there is one: for a layer beside which x goes on. Backward
    adds the gradients of both up on its way."""
    return _NormBeside.apply(x, weight, bias, eps)


def add_normed(x: Tensor, o: Tensor, n: Tensor, weight: Tensor, eps_x: float, eps: float) -> Tensor:
    """x + F.rms_norm(o + n), with weight and eps, of n = F.layer_norm(x), with eps_x and no weight."""
    return _AddNormed.apply(x, o, n.detach(), weight, eps_x, eps)


def add_normed_beside(
    x: Tensor, o: Tensor, n: Tensor, weight: Tensor, eps_x: float, eps: float, weight_z: Tensor, bias_z: Tensor,
    eps_z: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y = add_normed(...), and ``normed_beside`` of it: backward of both is one pass, and y is not kept for it."""
    return _AddNormedBeside.apply(x, o, n.detach(), weight, eps_x, eps, weight_z, bias_z, eps_z)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.biased = eps, bias is not None
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        return _norm_gradients(ctx, dz, None)


class _NormBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.biased = eps, bias is not None
        return x.view_as(x), computed(F.layer_norm(x, x.shape[-1:], weight, bias, eps))

    @staticmethod
    def backward(ctx: Any, beside: Tensor, dz: Tensor) -> tuple[Any, ...]:
        return _norm_gradients(ctx, dz, beside)


def _norm_gradients(ctx: Any, dz: Tensor, beside: Tensor | None) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    dx, dw, db = torch.ops.gdpa.norm_backward(dz, x, weight, beside, ctx.eps, True)
    return dx, dw if weight is not None else None, db if ctx.biased else None, None


class _AddNormed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, o: Tensor, n: Tensor, weight: Tensor, eps_x: float, eps: float) -> Tensor:
        ctx.save_for_backward(x, o, weight)
        ctx.eps_x, ctx.eps = eps_x, eps
        return x + F.rms_norm(o + n, x.shape[-1:], weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, o, weight = ctx.saved_tensors
        dx, do, dw, _, _ = torch.ops.gdpa.add_normed_backward(dy, x, o, weight, None, None, ctx.eps_x, ctx.eps, 0.0)
        return dx, do, None, dw, None, None


class _AddNormedBeside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, o: Tensor, n: Tensor, weight: Tensor, eps_x: float, eps: float, weight_z: Tensor,
        bias_z: Tensor, eps_z: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(x, o, weight, weight_z)
        ctx.eps = eps_x, eps, eps_z
        y = x + F.rms_norm(o + n, x.shape[-1:], weight, eps)
        return y, computed(F.layer_norm(y, x.shape[-1:], weight_z, bias_z, eps_z))

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dz: Tensor) -> tuple[Any, ...]:
        x, o, weight, weight_z = ctx.saved_tensors
        found = torch.ops.gdpa.add_normed_backward(dy, x, o, weight, dz, weight_z, *ctx.eps)
        dx, do, dw, dw_z, db_z = found
        return dx, do, None, dw, None, None, dw_z, db_z, None


# ---- formulas --------------------------------------------------------------------------------------------------------
def _wide(*tensors: Tensor) -> list[Tensor]:
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _standardised(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    x = x - x.mean(-1, keepdim=True) if centred else x
    factor = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * factor, factor


def _standardised_gradient(g: Tensor, y: Tensor, factor: Tensor, centred: bool) -> Tensor:
    d = g - y * (g * y).mean(-1, keepdim=True)
    return (d - g.mean(-1, keepdim=True) if centred else d) * factor


def _over_rows(t: Tensor) -> Tensor:
    return t.flatten(0, -2).sum(0)


# ---- operators -------------------------------------------------------------------------------------------------------
@torch.library.impl("gdpa::norm_backward", "CompositeExplicitAutograd")
def _norm_backward(
    dz: Tensor, x: Tensor, weight: Tensor | None, beside: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if has_kernel(x, dz, weight, beside):
        return _launch_norm(dz, x, weight, beside, eps, centred)
    g, (y, factor) = _wide(dz)[0], _standardised(_wide(x)[0], eps, centred)
    dx = _standardised_gradient(g if weight is None else g * weight, y, factor, centred)
    dx = (dx if beside is None else dx + beside).to(x.dtype)
    if weight is None:
        return dx, x.new_empty(0), x.new_empty(0)
    return dx, _over_rows(g * y).to(weight.dtype), _over_rows(g).to(weight.dtype)


@torch.library.impl("gdpa::add_normed_backward", "CompositeExplicitAutograd")
def _add_normed_backward(
    dy: Tensor, x: Tensor, o: Tensor, weight: Tensor, dz: Tensor | None, weight_z: Tensor | None, eps_x: float,
    eps: float, eps_z: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    if has_kernel(x, dy, o, weight, dz, weight_z):
        return _launch_add_normed(dy, x, o, weight, dz, weight_z, eps_x, eps, eps_z)
    wide_x, wide_o, g, w = _wide(x, o, dy, weight)
    n, n_factor = _standardised(wide_x, eps_x, True)
    t, t_factor = _standardised(wide_o + n, eps, False)
    of_z = x.new_empty(0), x.new_empty(0)
    if dz is not None and weight_z is not None:
        z, z_factor = _standardised((wide_x + w * t).to(x.dtype).to(w.dtype), eps_z, True)
        gz, wz = _wide(dz, weight_z)
        of_z = _over_rows(gz * z).to(weight_z.dtype), _over_rows(gz).to(weight_z.dtype)
        g = g + _standardised_gradient(gz * wz, z, z_factor, True)
    dt = _standardised_gradient(g * w, t, t_factor, False)
    dx = g + _standardised_gradient(dt, n, n_factor, True)
    return dx.to(x.dtype), dt.to(o.dtype), _over_rows(g * t).to(weight.dtype), *of_z


@torch.library.register_fake("gdpa::norm_backward")
def _norm_backward_fake(
    dz: Tensor, x: Tensor, weight: Tensor | None, beside: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dw, db = (x.new_empty(0) if weight is None else torch.empty_like(weight) for _ in range(2))
    return torch.empty_like(x, memory_format=torch.contiguous_format), dw, db


@torch.library.register_fake("gdpa::add_normed_backward")
def _add_normed_backward_fake(
    dy: Tensor, x: Tensor, o: Tensor, weight: Tensor, dz: Tensor | None, weight_z: Tensor | None, eps_x: float,
    eps: float, eps_z: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    dx, do = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, o))
    of_z = (x.new_empty(0) if weight_z is None else torch.empty_like(weight_z) for _ in range(2))
    return dx, do, torch.empty_like(weight), *of_z


def _refuse_double_backward(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError("gdpa: the backward of norms on a GPU cannot be differentiated again")


for _name in ("norm_backward", "add_normed_backward"):
    torch.library.register_autograd(f"gdpa::{_name}", _refuse_double_backward)


# ---- launches --------------------------------------------------------------------------------------------------------
_BOUND: dict[Any, Any] = {}  # kernels, ready for launches


def _rows(t: Tensor) -> Tensor:
    """(rows, C), features side by side: a view where there can be one."""
    rows = t.reshape(-1, t.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _blocks(x: Tensor, of_warp: int) -> tuple[int, dict[str, Any]]:
    """How many programs, and what they are compiled for."""
    c = x.shape[-1]
    block_c = 1 << (c - 1).bit_length()
    warps = max(LEAST_WARPS, min(block_c // of_warp, 8))
    block_rows = max(1, warps * of_warp // block_c)
    most = WARPS // warps * _processors(x.device) if x.is_cuda else 2
    programs = min(most, -(-x.shape[0] // block_rows))
    shape = {"C": c, "BLOCK_ROWS": block_rows, "BLOCK_C": block_c}
    return programs, {**shape, "num_warps": warps, "enable_fp_fusion": True}


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch_norm(
    dz: Tensor, x: Tensor, weight: Tensor | None, beside: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from gdpa.backends.triton.launching import bind
    from gdpa.device.norms import norm_backward_kernel

    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, g, into = _rows(x), _rows(dz), _rows(dx)
    of_beside = None if beside is None else _rows(beside)
    programs, options = _blocks(rows, OF_WARP)
    sums = None if weight is None else rows.new_empty(programs, 2, x.shape[-1], dtype=torch.float32)
    if programs:
        launch = bind(_BOUND, norm_backward_kernel, CENTRED=centred, **options)
        with on_device_of(x):
            launch(
                (programs,), g, rows, weight, of_beside, into, sums, rows.shape[0], g.stride(0), rows.stride(0),
                0 if of_beside is None else of_beside.stride(0), into.stride(0), eps,
            )  # fmt: skip
    if sums is None or weight is None:
        return dx, x.new_empty(0), x.new_empty(0)
    dw, db = (sums[:, i].sum(0).to(weight.dtype) for i in range(2))
    return dx, dw, db


def _launch_add_normed(
    dy: Tensor, x: Tensor, o: Tensor, weight: Tensor, dz: Tensor | None, weight_z: Tensor | None, eps_x: float,
    eps: float, eps_z: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from gdpa.backends.triton.launching import bind
    from gdpa.device.norms import add_normed_backward_kernel

    dx, do = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, o))
    g, rows, of_o, into, into_o = map(_rows, (dy, x, o, dx, do))
    gz = None if dz is None else _rows(dz)
    programs, options = _blocks(rows, OF_WARP if dz is None else OF_WARP // 2)
    sums = rows.new_empty(programs, 3, x.shape[-1], dtype=torch.float32)
    if programs:
        launch = bind(_BOUND, add_normed_backward_kernel, **options)
        with on_device_of(x):
            launch(
                (programs,), g, rows, of_o, weight, gz, weight_z, into, into_o, sums, rows.shape[0], g.stride(0),
                rows.stride(0), of_o.stride(0), 0 if gz is None else gz.stride(0), into.stride(0), into_o.stride(0),
                eps_x, eps, eps_z,
            )  # fmt: skip
    dw = sums[:, 0].sum(0).to(weight.dtype)
    if weight_z is None:
        return dx, do, dw, x.new_empty(0), x.new_empty(0)
    return dx, do, dw, *(sums[:, i].sum(0).to(weight_z.dtype) for i in (1, 2))
