"""The torch.library operators: schema, fake implementations, autograd, FLOP formulas. No maths here.

One pair of operators serves every backend, dense and jagged. Functions travel as the keys of their graphs, params as
one (n_params, Hq) tensor, optional numbers as None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gdpa import checks, heads
from gdpa.backends import Backend, select
from gdpa.functions.activation import from_keys
from gdpa.problem import Band, Operands, Problem, make_problem

COMMON = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_q, Tensor? cu_k, Tensor? params, str[] activations, "
    "float scale, float out_scale, SymInt? left, SymInt? right, SymInt? max_q, SymInt? max_k, str? backend"
)
torch.library.define("gdpa::attention", f"({COMMON}) -> Tensor")
torch.library.define("gdpa::attention_backward", f"(Tensor grad, {COMMON}) -> (Tensor, Tensor, Tensor, Tensor)")


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, params: Tensor | None,
    activations: Sequence[str], scale: float, out_scale: float, left: int | None, right: int | None,
    max_q: int | None, max_k: int | None, backend: str | None,
) -> tuple[Problem, Operands, Backend]:  # fmt: skip
    x = Operands(q, k, v, cu_q, cu_k, params)
    problem = make_problem(x, from_keys(activations), scale, out_scale, Band(left, right), max_q, max_k)
    checks.offsets(problem, x)
    return problem, x, select(problem, backend)


@torch.library.impl("gdpa::attention", "CompositeExplicitAutograd")
def _forward(*args: Any) -> Tensor:
    problem, x, backend = _prepare(*args)
    out = empty_output(x.q, x.v, problem.out_batch)
    for part in heads.head_slices(problem):
        backend.forward(part.problem(problem), part.operands(x), out[:, part.q])
    return out


@torch.library.impl("gdpa::attention_backward", "CompositeExplicitAutograd")
def _backward(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, x, backend = _prepare(*args)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # expanded by a sum(): there is no row to read
    slices = heads.head_slices(problem)
    summed = heads.shared_key_heads(slices, problem.heads_k)
    wide = torch.promote_types(problem.dtype, torch.float32)
    dq = torch.empty_like(x.q)
    dk = torch.zeros_like(x.k, dtype=wide) if summed else torch.empty_like(x.k)
    dv = torch.zeros_like(x.v, dtype=wide) if summed else torch.empty_like(x.v)
    dparams = empty_dparams(x.q, x.params)
    for part in slices:
        mine = part.operands(x)
        dk_part, dv_part = dk[:, part.k], dv[:, part.k]
        if summed:
            dk_part, dv_part = torch.empty_like(dk_part), torch.empty_like(dv_part)
        backend.backward(
            part.problem(problem), mine, grad[:, part.q], dq[:, part.q], dk_part, dv_part,
            dparams[:, part.q] if mine.params is not None else None,
        )  # fmt: skip
        if summed:
            dk[:, part.k] += dk_part
            dv[:, part.k] += dv_part
    return dq, dk.to(x.k.dtype), dv.to(x.v.dtype), dparams


def empty_output(q: Tensor, v: Tensor, out_batch: int) -> Tensor:
    """(out_batch, Hq, rows_q, Dv), its dimensions in memory in the order of q's, so that views stay views."""
    shape = (out_batch, q.shape[1], q.shape[2], v.shape[3])
    rows_outermost = q.stride(1) <= q.stride(2)  # (B, L, H, D) in memory, as projections and packed tensors have it
    return torch.empty_permuted(shape, (0, 2, 1, 3) if rows_outermost else (0, 1, 2, 3), dtype=q.dtype, device=q.device)


def empty_dparams(q: Tensor, params: Tensor | None) -> Tensor:
    """Shaped like params; an op must return a tensor, so without params it is an empty one."""
    return torch.empty_like(params) if params is not None else q.new_empty(0)


@torch.library.register_fake("gdpa::attention")
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, *rest: Any) -> Tensor:
    if cu_q is not None:
        out_batch = 1
    else:
        out_batch = cu_k.shape[0] - 1 if cu_k is not None else k.shape[0]
    return empty_output(q, v, out_batch)


@torch.library.register_fake("gdpa::attention_backward")
def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, params: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), empty_dparams(q, params)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.settings = inputs[6:]


def _attention_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dq, dk, dv, dparams = torch.ops.gdpa.attention_backward(grad, *ctx.saved_tensors, *ctx.settings)
    has_params = ctx.saved_tensors[5] is not None
    return (dq, dk, dv, None, None, dparams if has_params else None, *(None for _ in ctx.settings))


def _refuse_double_backward(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError(
        "gdpa: double backward is not available on fused backends, which keep no intermediate results; "
        "call with backend='reference' to differentiate twice"
    )


torch.library.register_autograd("gdpa::attention", _attention_grad, setup_context=_save_inputs)
torch.library.register_autograd("gdpa::attention_backward", _refuse_double_backward)


def _pairs(q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> int:
    """sum over sequences of Lq * Lk. A band does not lower it, by the convention of SDPA's own formulas."""
    if cu_q is not None and cu_k is not None:
        return int((cu_q.diff().long() * cu_k.diff().long()).sum())
    if cu_q is not None:
        return q.shape[2] * k.shape[2]
    if cu_k is not None:
        return q.shape[2] * k.shape[2]
    return k.shape[0] * q.shape[2] * k.shape[2]


def _products(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> tuple[int, int]:
    """FLOPs of one product over the head dimension of q and k, and of one over that of v."""
    pairs = 2 * q.shape[1] * _pairs(q, k, cu_q, cu_k)
    return pairs * q.shape[3], pairs * v.shape[3]


@register_flop_formula(torch.ops.gdpa.attention, get_raw=True)
def forward_flops(q, k, v, cu_q=None, cu_k=None, *args: Any, **kwargs: Any) -> int:  # type: ignore[no-untyped-def]
    """s = q k^T, o = p v."""
    qk, pv = _products(q, k, v, cu_q, cu_k)
    return qk + pv


@register_flop_formula(torch.ops.gdpa.attention_backward, get_raw=True)
def backward_flops(grad, q, k, v, cu_q=None, cu_k=None, *args: Any, **kwargs: Any) -> int:  # type: ignore[no-untyped-def]
    """s, dq and dk over D; dp and dv over Dv."""
    qk, pv = _products(q, k, v, cu_q, cu_k)
    return 3 * qk + 2 * pv
