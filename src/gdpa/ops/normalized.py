"""The torch.library operators with row sums: they also return what each row was divided by.

They are operators of their own, so that calls without row sums keep nothing but q, k and v. These keep the output and
its sums, one float32 per row and head, as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gdpa import ops, reference
from gdpa.arguments import checks
from gdpa.compat import transformed
from gdpa.ops import flops, heads, schema
from gdpa.ops.transforms import (
    Transformable,
    inside_transforms,
    no_tables_in_transforms,
    none_for_lists,
    one_by_one,
    one_call,
)
from gdpa.ops.unfilled import unfilled
from gdpa.problem import PLAIN, Divided, Operands, Problem, Settings, parts, sums_dtype

SUMS = "Tensor? sink, str[] normalize"
SAVED = "Tensor grad, Tensor? grad_sums, Tensor out, Tensor sums"
schema.define(
    f"normalized({SUMS}, {schema.SEPARATE}) -> (Tensor, Tensor)",
    f"normalized_backward({SAVED}, {SUMS}, {schema.SEPARATE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"normalized_packed({SUMS}, {schema.TOGETHER}) -> (Tensor, Tensor)",
    f"normalized_packed_backward({SAVED}, {SUMS}, {schema.TOGETHER}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
Results = tuple[Tensor, ...]


def records(sink: Tensor | None, normalize: list[str], *args: Any) -> tuple[Operands, Settings]:
    """The arguments of gdpa::normalized by name."""
    x, settings = ops.records(args)
    return replace(x, sink=sink), replace(settings, normalize=normalize)


@torch.library.impl("gdpa::normalized", "CompositeExplicitAutograd")
def _forward(*args: Any) -> Results:
    return _output(*args)


@torch.library.impl("gdpa::normalized_packed", "CompositeExplicitAutograd")
def _packed_forward(sink: Tensor | None, normalize: list[str], *args: Any) -> Results:
    return _output(sink, normalize, *ops.together(*args))


@unfilled
def _output(*args: Any) -> Results:
    x, settings = records(*args)
    problem, backend = ops.prepare(x, settings)
    out, sums = ops.empty_output(x.q, x.v, problem.out_batch), empty_sums(problem, problem.rows_q)
    if problem.packed_q:
        sums.zero_()  # rows of no sequence
    ops.write_output(problem, backend, x, out, sums)
    fill_plain_sums(problem, x, sums)
    return out, sums


@torch.library.impl("gdpa::normalized_backward", "CompositeExplicitAutograd")
@unfilled
def _backward(grad: Tensor, grad_sums: Tensor | None, out: Tensor, sums: Tensor, *args: Any) -> Results:
    x, settings = records(*args)
    dq, dk, dv = (torch.empty_like(t) for t in (x.q, x.k, x.v))
    dsink = empty_dsink(x).zero_()
    saved = Divided(out, sums, grad_sums, dsink if x.sink is not None else None)
    return dq, dk, dv, *ops.write_gradients(grad, x, settings, dq, dk, dv, saved), dsink


@torch.library.impl("gdpa::normalized_packed_backward", "CompositeExplicitAutograd")
@unfilled
def _packed_backward(
    grad: Tensor, grad_sums: Tensor | None, out: Tensor, sums: Tensor, sink: Tensor | None, normalize: list[str],
    q: Tensor | None, rows: Tensor, *args: Any,
) -> Results:  # fmt: skip
    x, settings = records(sink, normalize, *ops.together(q, rows, *args))
    dq, drows = ops.empty_dq(q, rows), ops.empty_drows(q, rows)
    dsink = empty_dsink(x).zero_()
    saved = Divided(out, sums, grad_sums, dsink if sink is not None else None)
    into = parts(None if q is None else dq, drows)
    return dq, drows, *ops.write_gradients(grad, x, settings, *into, saved), dsink


def empty_sums(problem: Problem, rows_q: int) -> Tensor:
    # Numbers one by one: a tuple of them takes torch a microsecond longer.
    batch, heads = problem.out_batch, problem.heads_q
    return torch.empty(batch, heads, rows_q, dtype=sums_dtype(problem.dtype), device=problem.device)


def fill_plain_sums(problem: Problem, x: Operands, sums: Tensor) -> None:
    """1 for heads that are not normalised, in the rows of sequences; the others are 0, as in every head."""
    if PLAIN not in problem.norms:
        return
    rows = 1.0 if x.cu_q is None else _in_sequences(x.cu_q, x.used_q, problem.rows_q).to(sums.dtype)
    for part in heads.head_slices(problem):
        if part.norm == PLAIN:
            sums[:, part.q] = rows


def _in_sequences(cu: Tensor, used: Tensor | None, rows: int) -> Tensor:
    """(rows,) of bool. Waits for no device."""
    row = torch.arange(rows, device=cu.device, dtype=cu.dtype)
    ends = cu[1:] if used is None else cu[:-1] + used
    return row < F.pad(ends, (0, 1))[torch.searchsorted(cu, row, right=True) - 1]  # none is before the 0 at the end


def empty_dsink(x: Operands) -> Tensor:
    """Shaped like the sink; an op must return a tensor, so without one it is empty."""
    return torch.empty_like(x.sink) if x.sink is not None else x.q.new_empty(0)


@torch.library.register_fake("gdpa::normalized")
def _forward_fake(sink: Tensor | None, normalize: list[str], *args: Any) -> Results:
    out = ops._forward_fake(*args)
    q = args[0]
    return out, q.new_empty((out.shape[0], *q.shape[1:3]), dtype=sums_dtype(q.dtype))


@torch.library.register_fake("gdpa::normalized_packed")
def _packed_forward_fake(sink: Tensor | None, normalize: list[str], *args: Any) -> Results:
    return _forward_fake(sink, normalize, *ops.together(*args))


@torch.library.register_fake("gdpa::normalized_backward")
def _backward_fake(grad: Tensor, grad_sums: Tensor | None, out: Tensor, sums: Tensor, *args: Any) -> Results:
    x, _ = records(*args)
    return *ops._backward_fake(grad, *args[2:]), empty_dsink(x)


@torch.library.register_fake("gdpa::normalized_packed_backward")
def _packed_backward_fake(
    grad: Tensor, grad_sums: Tensor | None, out: Tensor, sums: Tensor, sink: Tensor | None, normalize: list[str],
    *args: Any,
) -> Results:  # fmt: skip
    x, _ = records(sink, normalize, *ops.together(*args))
    return *ops._packed_backward_fake(grad, *args), empty_dsink(x)


def normalized(*args: Any) -> Results:
    """gdpa::normalized, as an autograd.Function under torch.func (see ops.attention)."""
    no_tables_in_transforms(args)
    found: Results = _normalized_transformed(*args) if inside_transforms() else torch.ops.gdpa.normalized(*args)
    return found


def normalized_packed(*args: Any) -> Results:
    """gdpa::normalized_packed, likewise."""
    no_tables_in_transforms(args)
    found: Results = _packed_transformed(*args) if inside_transforms() else torch.ops.gdpa.normalized_packed(*args)
    return found


@one_call
def by_reference(*args: Any) -> tuple[Tensor, Tensor | None]:
    """The same in plain torch, for backend="reference"; the sums are None where nothing is normalised."""
    x, settings = records(*args)
    problem = settings.problem(x)
    checks.offsets(problem, x)
    return reference.attention_and_sums(problem, x)


def _save(n_tensors: int) -> Any:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        sink, normalize, *args = inputs
        ctx.normalize = normalize
        ctx.set_materialize_grads(False)  # most calls do not use the sums
        ops.keep_for_backward(ctx, tuple(args[:n_tensors]), tuple(args[n_tensors:]), (sink, *output))

    return save


def _grad(ctx: Any, grad: Tensor | None, grad_sums: Tensor | None) -> tuple[Any, ...]:
    sink, out, sums, *operands = ops.saved_operands(ctx)
    backward = _NormalizedBackward.apply if transformed() else torch.ops.gdpa.normalized_backward
    grad = torch.zeros_like(out) if grad is None else grad
    dq, dk, dv, *others, dsink = backward(grad, grad_sums, out, sums, sink, ctx.normalize, *operands, *ctx.settings)
    others = ops.other_grads(ctx, operands[5], operands[-1], *others)
    return None if sink is None else dsink, None, dq, dk, dv, *others, *(None for _ in ctx.settings)


def _packed_grad(ctx: Any, grad: Tensor | None, grad_sums: Tensor | None) -> tuple[Any, ...]:
    sink, out, sums, *operands = ops.saved_operands(ctx)
    backward = _PackedBackward.apply if transformed() else torch.ops.gdpa.normalized_packed_backward
    grad = torch.zeros_like(out) if grad is None else grad
    dq, drows, *others, dsink = backward(grad, grad_sums, out, sums, sink, ctx.normalize, *operands, *ctx.settings)
    others = ops.other_grads(ctx, operands[4], operands[-1], *others)
    dq = None if operands[0] is None else dq
    return None if sink is None else dsink, None, dq, drows, *others, *(None for _ in ctx.settings)


_save_separate, _save_packed = _save(schema.N_OPERANDS), _save(schema.N_OPERANDS - 1)
torch.library.register_autograd("gdpa::normalized", _grad, setup_context=_save_separate)
torch.library.register_autograd("gdpa::normalized_backward", ops.refuse_double_backward)
torch.library.register_autograd("gdpa::normalized_packed", _packed_grad, setup_context=_save_packed)
torch.library.register_autograd("gdpa::normalized_packed_backward", ops.refuse_double_backward)
torch.library.impl("gdpa::normalized_backward", "Batched", ops.refuse_batched_gradients)
torch.library.impl("gdpa::normalized_packed_backward", "Batched", ops.refuse_batched_gradients)


class _NormalizedBackward(Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.normalized_backward(*args))
    setup_context = staticmethod(ops.save_nothing)
    backward = staticmethod(ops.refuse_double_backward)


class _Normalized(Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.normalized(*args))
    setup_context = staticmethod(_save_separate)
    backward = staticmethod(lambda ctx, *grads: none_for_lists(_grad(ctx, *grads)))


@one_call
def _normalized_transformed(*args: Any) -> Results:
    return _Normalized.apply(*args)


class _PackedBackward(Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.normalized_packed_backward(*args))
    setup_context = staticmethod(ops.save_nothing)
    backward = staticmethod(ops.refuse_double_backward)


class _Packed(Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.normalized_packed(*args))
    setup_context = staticmethod(_save_packed)
    backward = staticmethod(lambda ctx, *grads: none_for_lists(_packed_grad(ctx, *grads)))


@one_call
def _packed_transformed(*args: Any) -> Results:
    return _Packed.apply(*args)


for _op in (
    torch.ops.gdpa.normalized,
    torch.ops.gdpa.normalized_backward,
    torch.ops.gdpa.normalized_packed,
    torch.ops.gdpa.normalized_packed_backward,
):
    torch.library.register_vmap(_op.default, one_by_one(_op))


# By the convention of SDPA's formulas only products count.
@register_flop_formula(torch.ops.gdpa.normalized, get_raw=True)
def forward_flops(sink: Any, normalize: Any, *args: Any, **kwargs: Any) -> int:
    return flops.forward_flops(*args)


@register_flop_formula(torch.ops.gdpa.normalized_backward, get_raw=True)
def backward_flops(
    grad: Any, grad_sums: Any, out: Any, sums: Any, sink: Any, normalize: Any, *args: Any, **kwargs: Any
) -> int:
    return flops.backward_flops(grad, *args)


@register_flop_formula(torch.ops.gdpa.normalized_packed, get_raw=True)
def packed_forward_flops(sink: Any, normalize: Any, *args: Any, **kwargs: Any) -> int:
    return flops.packed_forward_flops(*args)


@register_flop_formula(torch.ops.gdpa.normalized_packed_backward, get_raw=True)
def packed_backward_flops(
    grad: Any, grad_sums: Any, out: Any, sums: Any, sink: Any, normalize: Any, *args: Any, **kwargs: Any
) -> int:
    return flops.packed_backward_flops(grad, *args)
