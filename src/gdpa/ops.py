"""The torch.library operators: schema, fake implementations, autograd, FLOP formulas. No maths here.

One pair of operators serves every backend, dense and jagged. Functions travel as the keys of their graphs, params as
one (n_params, Hq) tensor, optional numbers as None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from gdpa import checks, heads
from gdpa.backends import Backend, select
from gdpa.functions.activation import from_keys, keep_for_programs
from gdpa.problem import Band, Operands, Problem, make_problem

# The scales are Scalar, not float: only a Scalar may stay symbolic, so that out_scale = 1 / k.shape[2] does not make
# torch.compile compile again for every length.
COMMON = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_q, Tensor? cu_k, Tensor? params, str[] activations, "
    "Scalar scale, Scalar out_scale, SymInt? left, SymInt? right, SymInt? max_q, SymInt? max_k, str? backend"
)
GRADS = "(Tensor, Tensor, Tensor, Tensor)"
torch.library.define("gdpa::attention", f"({COMMON}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
torch.library.define(
    "gdpa::attention_backward", f"(Tensor grad, {COMMON}) -> {GRADS}", tags=torch.Tag.pt2_compliant_tag
)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, params: Tensor | None,
    activations: Sequence[str], scale: float, out_scale: float, left: int | None, right: int | None,
    max_q: int | None, max_k: int | None, backend: str | None,
) -> tuple[Problem, Operands, Backend]:  # fmt: skip
    x = Operands(q, k, v, cu_q, cu_k, params)
    problem = make_problem(x, from_keys(activations), float(scale), float(out_scale), Band(left, right), max_q, max_k)
    checks.offsets(problem, x)
    return problem, x, select(problem, backend)


@torch.library.impl("gdpa::attention", "CompositeExplicitAutograd")
def _forward(*args: Any) -> Tensor:
    problem, x, backend = _prepare(*args)
    out = empty_output(x.q, x.v, problem.out_batch)
    if len(problem.activations) == 1:
        backend.forward(problem, x, out)
        return out
    for part in heads.head_slices(problem):
        backend.forward(part.problem(problem), part.operands(x), out[:, part.q])
    return out


@torch.library.impl("gdpa::attention_backward", "CompositeExplicitAutograd")
def _backward(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, x, backend = _prepare(*args)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # expanded by a sum(): there is no row to read
    dq, dk, dv = (torch.empty_like(t) for t in (x.q, x.k, x.v))
    dparams = empty_dparams(x.q, x.params)
    if len(problem.activations) == 1:
        backend.backward(problem, x, grad, dq, dk, dv, dparams if x.params is not None else None)
    else:
        _backward_by_heads(backend, problem, x, grad, dq, dk, dv, dparams)
    return dq, dk, dv, dparams


def _backward_by_heads(
    backend: Backend, problem: Problem, x: Operands, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dparams: Tensor
) -> None:
    """One backward per group of heads that share a function; a key head in several groups sums their dk and dv."""
    slices = heads.head_slices(problem)
    summed = heads.shared_key_heads(slices, problem.heads_k)
    wide = torch.promote_types(problem.dtype, torch.float32)
    sum_dk, sum_dv = (torch.zeros_like(t, dtype=wide) if summed else t for t in (dk, dv))
    for part in slices:
        mine = part.operands(x)
        into_dk, into_dv = sum_dk[:, part.k], sum_dv[:, part.k]
        part_dk, part_dv = (torch.empty_like(t) if summed else t for t in (into_dk, into_dv))
        backend.backward(
            part.problem(problem), mine, grad[:, part.q], dq[:, part.q], part_dk, part_dv,
            dparams[:, part.q] if mine.params is not None else None,
        )  # fmt: skip
        if summed:
            into_dk += part_dk
            into_dv += part_dv
    if summed:
        dk.copy_(sum_dk)
        dv.copy_(sum_dv)


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
    if isinstance(q, FakeTensor):  # a program is being made that may outlive whatever holds its functions
        keep_for_programs(rest[1])
    return empty_output(q, v, 1 if cu_q is not None else n_seqs(k, cu_k))


@torch.library.register_fake("gdpa::attention_backward")
def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, params: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), empty_dparams(q, params)


def n_seqs(k: Tensor, cu_k: Tensor | None) -> int:
    return k.shape[0] if cu_k is None else cu_k.shape[0] - 1


def attention(*args: Any) -> Tensor:
    """gdpa::attention, as an autograd.Function under torch.func: it refuses operators with a registered autograd."""
    return _Attention.apply(*args) if _transformed() else torch.ops.gdpa.attention(*args)


def _attention_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _AttentionBackward.apply(*args) if _transformed() else torch.ops.gdpa.attention_backward(*args)


def _transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) is running."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.settings = inputs[6:]
    ctx.functions = from_keys(inputs[6])  # the settings hold only their keys


def _attention_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once only: under activation checkpointing the second time is an error
    dq, dk, dv, dparams = _attention_backward(grad, *saved, *ctx.settings)
    has_params = saved[5] is not None
    return (dq, dk, dv, None, None, dparams if has_params else None, *(None for _ in ctx.settings))


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse_double_backward(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError(
        "gdpa: double backward is not available on fused backends, which keep no intermediate results; "
        "call with backend='reference' to differentiate twice"
    )


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(checks.NO_FORWARD_MODE)


torch.library.register_autograd("gdpa::attention", _attention_grad, setup_context=_save_inputs)
torch.library.register_autograd("gdpa::attention_backward", _refuse_double_backward)


class _Transformable(torch.autograd.Function):
    generate_vmap_rule = True
    jvp = staticmethod(_refuse_forward_mode)


class _AttentionBackward(_Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.attention_backward(*args))
    setup_context = staticmethod(_save_nothing)
    backward = staticmethod(_refuse_double_backward)


class _Attention(_Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.attention(*args))
    setup_context = staticmethod(_save_inputs)
    backward = staticmethod(_attention_grad)


def _pairs(q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> int:
    """sum over sequences of Lq * Lk. A band does not lower it, by the convention of SDPA's own formulas."""
    if cu_q is None or cu_k is None:  # one side has the same length in every sequence
        batch = k.shape[0] if cu_q is None and cu_k is None else 1
        return batch * q.shape[2] * k.shape[2]
    if isinstance(cu_q, FakeTensor) or cu_q.device.type == "meta":  # no data: as if all lengths were equal
        return q.shape[2] * k.shape[2] // max(cu_q.shape[0] - 1, 1)
    return int((cu_q.long().diff() * cu_k.long().diff()).sum())


def _products(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> tuple[int, int]:
    """FLOPs of one product over the head dimension of q and k, and of one over that of v."""
    pairs = 2 * q.shape[1] * _pairs(q, k, cu_q, cu_k)
    return pairs * q.shape[3], pairs * v.shape[3]


@register_flop_formula(torch.ops.gdpa.attention, get_raw=True)
def forward_flops(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None = None, cu_k: Tensor | None = None, *args: Any, **kwargs: Any
) -> int:
    """s = q k^T, o = p v."""
    qk, pv = _products(q, k, v, cu_q, cu_k)
    return qk + pv


@register_flop_formula(torch.ops.gdpa.attention_backward, get_raw=True)
def backward_flops(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None = None, cu_k: Tensor | None = None, *args: Any,
    **kwargs: Any,
) -> int:  # fmt: skip
    """s, dq and dk over D; dp and dv over Dv."""
    qk, pv = _products(q, k, v, cu_q, cu_k)
    return 3 * qk + 2 * pv
