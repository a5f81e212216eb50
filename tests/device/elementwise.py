"""Apply device functions to a vector: emitted activations with their derivatives, or single maths helpers."""

from __future__ import annotations

import linecache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdpa.backends.triton import launch
from gdpa.device import maths
from gdpa.functions.activation import Activation
from gdpa.functions.emit import JitFunctions, jit_functions
from support import INTERPRET

DEVICE = "cpu" if INTERPRET else "cuda"
BLOCK = 1 << 14 if INTERPRET else 1 << 10
PACKED_BLOCK = 1 << 13  # 64 scores for each of 128 threads, as many as the largest block of PTX takes


@triton.jit
def joint_kernel(
    p_s, p_params, p_out, n, LOAD_PARAMS: tl.constexpr, FORWARD: tl.constexpr, BACKWARD: tl.constexpr,
    N_PARAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of out: forward's p, then backward's p, dp/ds, dp/dparam..."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(p_s + i, mask=i < n, other=0.0)
    params = LOAD_PARAMS(p_params, 1, 0)
    tl.store(p_out + i, FORWARD(s, params), mask=i < n)
    results = BACKWARD(s, params)
    for row in tl.static_range(2 + N_PARAMS):
        tl.store(p_out + (1 + row) * n + i, results[row], mask=i < n)


@triton.jit
def packed_kernel(
    p_s, p_params, p_out, n, LOAD_PARAMS: tl.constexpr, FORWARD: tl.constexpr, BACKWARD: tl.constexpr,
    N_PARAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same of Hopper's functions, whose p is rounded to 16 bits; here it is stored in float32."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(p_s + i, mask=i < n, other=0.0)
    params = LOAD_PARAMS(p_params, 1, 0)
    tl.store(p_out + i, FORWARD(s, params).to(tl.float32), mask=i < n)
    results = BACKWARD(s, params)
    for row in tl.static_range(2 + N_PARAMS):
        tl.store(p_out + (1 + row) * n + i, results[row].to(tl.float32), mask=i < n)


@triton.jit
def products_kernel(
    p_s, p_dp, p_params, p_out, n, skips, LOAD_PARAMS: tl.constexpr, PRODUCTS: tl.constexpr, GAINS: tl.constexpr,
    N_PARAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of out: p, ds and what would be added to each param's gradient."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(p_s + i, mask=i < n, other=0.0)
    dp = tl.load(p_dp + i, mask=i < n, other=0.0)
    params = LOAD_PARAMS(p_params, 1, 0)
    results = PRODUCTS(s, dp, 1.0, params, skips)
    gains = GAINS(params)
    tl.store(p_out + i, results[0].to(tl.float32), mask=i < n)
    tl.store(p_out + n + i, results[1].to(tl.float32), mask=i < n)
    for row in tl.static_range(N_PARAMS):
        tl.store(p_out + (2 + row) * n + i, results[2 + row] * gains[row], mask=i < n)


@triton.jit
def unary_kernel(p_x, p_y, n, FN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_y + i, FN(tl.load(p_x + i, mask=i < n, other=1.0)), mask=i < n)


@triton.jit
def binary_kernel(p_x, p_z, p_y, n, FN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + i, mask=i < n, other=1.0)
    tl.store(p_y + i, FN(x, tl.load(p_z + i, mask=i < n, other=1.0)), mask=i < n)


def joint(
    act: Activation, s: Tensor, params: tuple[float, ...] = (), dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """(3 + n_params, n): f(scale s) from the forward function, then it, its derivatives by s and by params from the
    backward one.

    ``dtype`` is that of the attention inputs, which decides about approximations; s is float32 in any case.
    """
    s = s.float().to(DEVICE)
    f = jit_functions(act, dtype, launch.target(s.device), scale)
    out = torch.full((3 + act.n_params, s.numel()), torch.nan, device=DEVICE)
    values = torch.tensor(params, device=DEVICE) if params else None
    joint_kernel[(triton.cdiv(s.numel(), BLOCK),)](
        s, values, out, s.numel(), LOAD_PARAMS=f.load_params, FORWARD=f.forward, BACKWARD=f.backward,
        N_PARAMS=act.n_params, BLOCK=BLOCK,
    )  # fmt: skip
    return out.cpu() * factors(f, act)


def factors(f: JitFunctions, act: Activation) -> Tensor:
    """What the rows of ``joint`` and ``packed`` are multiplied by."""
    return torch.tensor([f.factor] + [f.backward_factor] * (2 + act.n_params))[:, None]


def packed(act: Activation, s: Tensor, params: tuple[float, ...], dtype: torch.dtype, scale: float) -> Tensor:
    """``joint`` in float64 by the functions of Hopper's kernels; p as rounded, before the factor."""
    s = s.float().to(DEVICE)
    f = jit_functions(act, dtype, "sm90", scale)
    out = torch.full((3 + act.n_params, s.numel()), torch.nan, device=DEVICE)
    values = torch.tensor(params, device=DEVICE) if params else None
    packed_kernel[(triton.cdiv(s.numel(), PACKED_BLOCK),)](
        s, values, out, s.numel(), LOAD_PARAMS=f.load_params, FORWARD=f.packed_forward, BACKWARD=f.packed_backward,
        N_PARAMS=act.n_params, BLOCK=PACKED_BLOCK,
    )  # fmt: skip
    out[0] = out[0].to(dtype)  # by the kernel, where the function leaves it to that
    return out.cpu().double() * factors(f, act)


def products(
    act: Activation, s: Tensor, dp: Tensor, params: tuple[float, ...], dtype: torch.dtype, scale: float, skips: int = 0
) -> Tensor:  # fmt: skip
    """(2 + n_params, n) in float64: p, ds = dp df/ds and dp df/dparam, by the functions of Hopper's backward."""
    s, dp = s.float().to(DEVICE), dp.float().to(DEVICE)
    f = jit_functions(act, dtype, "sm90", scale)
    out = torch.full((2 + act.n_params, s.numel()), torch.nan, device=DEVICE)
    values = torch.tensor(params, device=DEVICE)
    products_kernel[(triton.cdiv(s.numel(), BLOCK),)](
        s, dp, values, out, s.numel(), skips, LOAD_PARAMS=f.load_params, PRODUCTS=f.products, GAINS=f.gains,
        N_PARAMS=act.n_params, BLOCK=BLOCK,
    )  # fmt: skip
    return out.cpu().double() * f.backward_factor


def expression(text: str, *names: str) -> Any:
    """A JIT function of ``names`` (x, or x and y) that returns the expression ``text``."""
    source = f"@triton.jit\ndef f({', '.join(names)}):\n    return {text}\n"
    filename = f"<test {text}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {"triton": triton, "tl": tl, "maths": maths, "__name__": "expression"}
    exec(compile(source, filename, "exec"), scope)
    return scope["f"]


def evaluate(text: str, x: Tensor, y: Tensor | None = None) -> Tensor:
    """The device expression ``text`` of x (and y), elementwise in float32."""
    inputs = [t.float().to(DEVICE) for t in (x, y) if t is not None]
    out = torch.full_like(inputs[0], torch.nan)
    kernel = unary_kernel if y is None else binary_kernel
    fn = expression(text, *("x", "y")[: len(inputs)])
    kernel[(triton.cdiv(x.numel(), BLOCK),)](*inputs, out, x.numel(), FN=fn, BLOCK=BLOCK)
    return out.cpu()
