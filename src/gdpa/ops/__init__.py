"""The torch.library operators: implementations, fakes, autograd. No maths here.

One pair of operators serves every backend, dense and jagged. Functions and masks travel as the keys of their graphs,
params as one (n_params, Hq) tensor, optional numbers as None; gradients of tables as one flat tensor. A second pair
takes q, k and v, or k and v, as one tensor, and returns one gradient of it: three views of it are what a backend
writes. Schemas are in schema.py, FLOP formulas in flops.py, the operators with row sums in normalized.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gdpa import reference
from gdpa.arguments import checks
from gdpa.backends import Backend
from gdpa.calling import plans
from gdpa.compat import FakeTensor, transformed
from gdpa.functions.activation import from_keys, keep_for_programs
from gdpa.functions.mask import keep_mask_for_programs, mask_from_key
from gdpa.ops import flops, heads  # noqa: F401  flops registers formulas
from gdpa.ops.results import (
    empty_dparams,
    empty_dq,
    empty_drows,
    empty_dtables,
    empty_output,
    n_seqs,
    table_gradients,
)
from gdpa.ops.schema import N_OPERANDS, records, together
from gdpa.ops.transforms import (
    Transformable,
    inside_transforms,
    no_tables_in_transforms,
    none_for_lists,
    one_by_one,
    one_call,
    refuse_tangents,
)
from gdpa.ops.unfilled import unfilled
from gdpa.problem import PLAIN, Divided, Operands, Problem, Settings, parts


def prepare(x: Operands, settings: Settings) -> tuple[Problem, Backend]:
    """The problem of a call, its tensors checked, and the backend that computes it."""
    refuse_tangents(x)
    plan = plans.of(x, settings)
    checks.offsets(plan.problem, x)
    if x.tables:
        for i, t in enumerate(x.tables):
            checks.size_of_table(f"table {i}", t)
        check_tables(plan.problem, plan.backend, x)
    return plan.problem, plan.backend


def check_tables(problem: Problem, backend: Backend, x: Operands) -> None:
    """Check that indices lie inside their tables, if such checks are on (GDPA_CHECK=1); cpu and reference always do."""
    if backend.name not in ("cpu", "reference") and checks.asked():
        reference.check_indices(problem, x)


@torch.library.impl("gdpa::attention", "CompositeExplicitAutograd")
def _forward(*args: Any) -> Tensor:
    return _output(args)


@torch.library.impl("gdpa::attention_packed", "CompositeExplicitAutograd")
def _packed_forward(*args: Any) -> Tensor:
    return _output(together(*args))


@unfilled
def _output(args: tuple[Any, ...]) -> Tensor:
    x, settings = records(args)
    problem, backend = prepare(x, settings)
    out = empty_output(x.q, x.v, problem.out_batch)
    write_output(problem, backend, x, out)
    return out


def write_output(problem: Problem, backend: Backend, x: Operands, out: Tensor, sums: Tensor | None = None) -> None:
    """Fill ``out``, and ``sums`` of the heads that are normalised."""
    if len(problem.activations) == 1:
        backend.forward(problem, x, out) if sums is None else backend.forward(problem, x, out, sums)
        return
    for part in heads.head_slices(problem):
        more = () if part.norm == PLAIN or sums is None else (sums[:, part.q],)
        backend.forward(part.problem(problem), part.operands(x), out[:, part.q], *more)


@torch.library.impl("gdpa::attention_backward", "CompositeExplicitAutograd")
@unfilled
def _backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    dq, dk, dv = (torch.empty_like(t) for t in args[:3])
    return dq, dk, dv, *write_gradients(grad, *records(args), dq, dk, dv)


@torch.library.impl("gdpa::attention_packed_backward", "CompositeExplicitAutograd")
@unfilled
def _packed_backward(grad: Tensor, q: Tensor | None, rows: Tensor, *args: Any) -> tuple[Tensor, ...]:
    dq, drows = empty_dq(q, rows), empty_drows(q, rows)
    others = write_gradients(grad, *records(together(q, rows, *args)), *parts(None if q is None else dq, drows))
    return dq, drows, *others


def write_gradients(
    grad: Tensor, x: Operands, settings: Settings, dq: Tensor, dk: Tensor, dv: Tensor, sums: Divided | None = None
) -> tuple[Tensor, Tensor]:
    """Fill dq, dk and dv, which may be views; returns dparams and the gradients of the tables. ``sums`` is there if
    the settings normalise any head."""
    refuse_tangents(x, grad, None if sums is None else sums.dsums)
    problem, backend = prepare(x, settings)
    dparams, flat = empty_dparams(x.q, x.params), empty_dtables(x, problem.learn).zero_()
    more: dict[str, Any] = {} if sums is None else {"sums": sums}
    if problem.learn:
        more["dtables"] = table_gradients(flat, x.tables[: problem.n_tables])
    run_backward(problem, x, backend, grad, dq, dk, dv, dparams, **more)
    return dparams, flat


def run_backward(
    problem: Problem, x: Operands, backend: Backend, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dparams: Tensor | None, **more: Any,
) -> None:  # fmt: skip
    """Fill dq, dk and dv, which may be views, and dparams, if there are params. ``more``: sums and dtables of
    Backend.backward, where there are any."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # expanded by a sum(): there is no row to read
    dparams = dparams if x.params is not None else None
    if problem.out_scale == 0 and (sums := more.get("sums")) is not None and sums.dsums is not None:
        # Kernels multiply all of a score's gradient by out_scale, which would take that of the sums away.
        problem, grad = replace(problem, out_scale=1.0), torch.zeros_like(grad)
    if len(problem.activations) == 1:
        backend.backward(problem, x, grad, dq, dk, dv, dparams, **more)
    else:
        _backward_by_heads(backend, problem, x, grad, dq, dk, dv, dparams, **more)


def _backward_by_heads(
    backend: Backend, problem: Problem, x: Operands, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dparams: Tensor | None, sums: Divided | None = None, **dtables: list[Tensor | None],
) -> None:  # fmt: skip
    """One backward per group of heads that share a function; a key head in several groups sums their dk and dv."""
    slices = heads.head_slices(problem)
    summed = heads.shared_key_heads(slices, problem.heads_k)
    wide = torch.promote_types(problem.dtype, torch.float32)
    sum_dk, sum_dv = (torch.zeros_like(t, dtype=wide) if summed else t for t in (dk, dv))
    for part in slices:
        mine = part.operands(x)
        into_dk, into_dv = sum_dk[:, part.k], sum_dv[:, part.k]
        part_dk, part_dv = (torch.empty_like(t) if summed else t for t in (into_dk, into_dv))
        more: dict[str, Any] = dict(dtables)
        if sums is not None and part.norm != PLAIN:
            more["sums"] = sums.of_heads(part.q)
        backend.backward(
            part.problem(problem), mine, grad[:, part.q], dq[:, part.q], part_dk, part_dv,
            None if dparams is None else dparams[:, part.q], **more,
        )  # fmt: skip
        if summed:
            into_dk += part_dk
            into_dv += part_dv
    if summed:
        dk.copy_(sum_dk)
        dv.copy_(sum_dv)


@torch.library.register_fake("gdpa::attention")
def _forward_fake(*args: Any) -> Tensor:
    x, settings = records(args)
    if isinstance(x.q, FakeTensor):  # a program is being made that may outlive whatever holds its functions
        keep_for_programs(settings.activations)
        keep_mask_for_programs(settings.mask)
    return empty_output(x.q, x.v, 1 if x.cu_q is not None else n_seqs(x.k, x.cu_k))


@torch.library.register_fake("gdpa::attention_backward")
def _backward_fake(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    x, settings = records(args)
    others = empty_dparams(x.q, x.params), empty_dtables(x, settings.learn)
    return torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v), *others


@torch.library.register_fake("gdpa::attention_packed")
def _packed_forward_fake(*args: Any) -> Tensor:
    return _forward_fake(*together(*args))


@torch.library.register_fake("gdpa::attention_packed_backward")
def _packed_backward_fake(grad: Tensor, q: Tensor | None, rows: Tensor, *args: Any) -> tuple[Tensor, ...]:
    x, settings = records(together(q, rows, *args))
    return empty_dq(q, rows), empty_drows(q, rows), empty_dparams(rows, x.params), empty_dtables(x, settings.learn)


def attention(*args: Any) -> Tensor:
    """gdpa::attention, as an autograd.Function under torch.func: it refuses operators with a registered autograd."""
    no_tables_in_transforms(args)
    return _attention_transformed(*args) if inside_transforms() else torch.ops.gdpa.attention(*args)


def attention_packed(*args: Any) -> Tensor:
    """gdpa::attention_packed, likewise."""
    no_tables_in_transforms(args)
    return _packed_transformed(*args) if inside_transforms() else torch.ops.gdpa.attention_packed(*args)


def save_inputs(n_tensors: int) -> Any:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep_for_backward(ctx, inputs[:n_tensors], inputs[n_tensors:])

    return save


def keep_for_backward(
    ctx: Any, operands: tuple[Any, ...], settings: tuple[Any, ...], more: tuple[Any, ...] = ()
) -> None:
    """Save ``more`` and the operands for ``saved_operands``, and keep alive the functions and the mask, of which the
    settings only have the keys."""
    *tensors, tables = operands
    ctx.save_for_backward(*more, *tensors, *tables)
    ctx.n_tables = len(tables)
    ctx.settings = settings
    ctx.functions = from_keys(settings[0])
    mask = Settings(*settings).mask
    ctx.mask = None if mask is None else mask_from_key(mask)


def saved_operands(ctx: Any) -> tuple[Any, ...]:
    """What ``keep_for_backward`` has saved: ``more``, then the operands."""
    saved = ctx.saved_tensors  # once only: under activation checkpointing the second time is an error
    first = len(saved) - ctx.n_tables
    return (*saved[:first], list(saved[first:]))


def _attention_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = saved_operands(ctx)
    backward = _AttentionBackward.apply if transformed() else torch.ops.gdpa.attention_backward
    dq, dk, dv, *others = backward(grad, *saved, *ctx.settings)
    return (dq, dk, dv, *other_grads(ctx, saved[5], saved[-1], *others), *(None for _ in ctx.settings))


def _packed_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = saved_operands(ctx)
    backward = _PackedBackward.apply if transformed() else torch.ops.gdpa.attention_packed_backward
    dq, drows, *others = backward(grad, *saved, *ctx.settings)
    has_q = saved[0] is not None
    others = other_grads(ctx, saved[4], saved[-1], *others)
    return (dq if has_q else None, drows, *others, *(None for _ in ctx.settings))


def other_grads(
    ctx: Any, params: Tensor | None, tables: list[Tensor], dparams: Tensor, flat: Tensor
) -> tuple[Any, ...]:
    """The gradients of the arguments in schema.OTHERS: None but for params, if there are any, and for the
    differentiable ones among the function's tables."""
    learned = len(ctx.functions[0].tables) if flat.numel() else 0
    dtables = [*table_gradients(flat, tables[:learned]), *(None for _ in tables[learned:])]
    return None, None, dparams if params is not None else None, None, None, dtables


def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def refuse_double_backward(ctx: Any, *grads: Tensor) -> Any:
    raise RuntimeError(
        "gdpa: double backward is not available on fused backends, which keep no intermediate results; "
        "call with backend='reference' to differentiate twice"
    )


def refuse_batched_gradients(*args: Any) -> Any:
    """Gradients of several gradients at once come as tensors of an older kind than torch.func's, which has no rules."""
    raise NotImplementedError(
        "gdpa: batched gradients (jacobian(vectorize=True), is_grads_batched=True) are not available on fused "
        "backends; use torch.func.jacrev, or call with backend='reference'"
    )


_save_separate, _save_packed = save_inputs(N_OPERANDS), save_inputs(N_OPERANDS - 1)
torch.library.register_autograd("gdpa::attention", _attention_grad, setup_context=_save_separate)
torch.library.register_autograd("gdpa::attention_backward", refuse_double_backward)
torch.library.register_autograd("gdpa::attention_packed", _packed_grad, setup_context=_save_packed)
torch.library.register_autograd("gdpa::attention_packed_backward", refuse_double_backward)
torch.library.impl("gdpa::attention_backward", "Batched", refuse_batched_gradients)
torch.library.impl("gdpa::attention_packed_backward", "Batched", refuse_batched_gradients)


class _AttentionBackward(Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.attention_backward(*args))
    setup_context = staticmethod(save_nothing)
    backward = staticmethod(refuse_double_backward)


class _Attention(Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.attention(*args))
    setup_context = staticmethod(_save_separate)
    backward = staticmethod(lambda ctx, grad: none_for_lists(_attention_grad(ctx, grad)))


@one_call
def _attention_transformed(*args: Any) -> Tensor:
    return _Attention.apply(*args)


class _PackedBackward(Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.attention_packed_backward(*args))
    setup_context = staticmethod(save_nothing)
    backward = staticmethod(refuse_double_backward)


class _Packed(Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.attention_packed(*args))
    setup_context = staticmethod(_save_packed)
    backward = staticmethod(lambda ctx, grad: none_for_lists(_packed_grad(ctx, grad)))


@one_call
def _packed_transformed(*args: Any) -> Tensor:
    return _Packed.apply(*args)


for _op in (
    torch.ops.gdpa.attention,
    torch.ops.gdpa.attention_backward,
    torch.ops.gdpa.attention_packed,
    torch.ops.gdpa.attention_packed_backward,
):
    torch.library.register_vmap(_op.default, one_by_one(_op))
