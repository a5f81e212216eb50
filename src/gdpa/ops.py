"""The torch.library operators: schema, fake implementations, autograd, FLOP formulas. No maths here.

One pair of operators serves every backend, dense and jagged. Functions and masks travel as the keys of their graphs,
params as one (n_params, Hq) tensor, optional numbers as None; gradients of tables as one flat tensor. A second pair
takes q, k and v, or k and v, as one tensor, and returns one gradient of it: three views of it are what a backend
writes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from gdpa import heads, reference
from gdpa.arguments import checks
from gdpa.backends import Backend
from gdpa.calling import plans
from gdpa.functions.activation import from_keys, keep_for_programs
from gdpa.functions.mask import keep_mask_for_programs, mask_from_key
from gdpa.problem import PLAIN, Divided, Operands, Problem, Settings, parts

# The arguments are the fields of Operands and Settings. The scales are Scalar, not float: only a Scalar may stay
# symbolic, so that out_scale = 1 / k.shape[2] does not make torch.compile compile again for every length.
OTHERS = "Tensor? cu_q, Tensor? cu_k, Tensor? params, Tensor? used_q, Tensor? used_k, Tensor[] tables"
SETTINGS = (
    "str[] activations, Scalar scale, Scalar out_scale, SymInt? left, SymInt? right, SymInt? max_q, SymInt? max_k, "
    "str precision, str? backend, str? mask, bool learn"
)
SEPARATE = f"Tensor q, Tensor k, Tensor v, {OTHERS}, {SETTINGS}"
TOGETHER = f"Tensor? q, Tensor rows, {OTHERS}, {SETTINGS}"
GRADS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
N_OPERANDS = 3 + OTHERS.count(",") + 1


def define(*schemas: str) -> None:
    for schema in schemas:
        name, _, rest = schema.partition("(")
        torch.library.define(f"gdpa::{name}", f"({rest}", tags=torch.Tag.pt2_compliant_tag)


define(
    f"attention({SEPARATE}) -> Tensor",
    f"attention_backward(Tensor grad, {SEPARATE}) -> {GRADS}",
    f"attention_packed({TOGETHER}) -> Tensor",
    f"attention_packed_backward(Tensor grad, {TOGETHER}) -> (Tensor, Tensor, Tensor, Tensor)",
)


def together(q: Tensor | None, rows: Tensor, *args: Any) -> tuple[Any, ...]:
    """The arguments of gdpa::attention for those of gdpa::attention_packed."""
    return (*parts(q, rows), *args)


def records(args: Sequence[Any]) -> tuple[Operands, Settings]:
    """The arguments of gdpa::attention by name."""
    return Operands(*args[:N_OPERANDS]), Settings(*args[N_OPERANDS:])


def prepare(x: Operands, settings: Settings) -> tuple[Problem, Backend]:
    """What is to be computed, checked, and who does it."""
    plan = plans.of(x, settings)
    checks.offsets(plan.problem, x)
    if x.tables and plan.backend.name not in ("cpu", "reference") and os.environ.get("GDPA_CHECK", "0") == "1":
        reference.check_indices(plan.problem, x)  # which those two do by themselves
    return plan.problem, plan.backend


@torch.library.impl("gdpa::attention", "CompositeExplicitAutograd")
def _forward(*args: Any) -> Tensor:
    return _output(args)


@torch.library.impl("gdpa::attention_packed", "CompositeExplicitAutograd")
def _packed_forward(*args: Any) -> Tensor:
    return _output(together(*args))


def _output(args: tuple[Any, ...]) -> Tensor:
    x, settings = records(args)
    problem, backend = prepare(x, settings)
    out = empty_output(x.q, x.v, problem.out_batch)
    write_output(problem, backend, x, out)
    return out


def write_output(problem: Problem, backend: Backend, x: Operands, out: Tensor) -> None:
    if len(problem.activations) == 1:
        backend.forward(problem, x, out)
        return
    for part in heads.head_slices(problem):
        backend.forward(part.problem(problem), part.operands(x), out[:, part.q])


@torch.library.impl("gdpa::attention_backward", "CompositeExplicitAutograd")
def _backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    dq, dk, dv = (torch.empty_like(t) for t in args[:3])
    return dq, dk, dv, *write_gradients(grad, *records(args), dq, dk, dv)


@torch.library.impl("gdpa::attention_packed_backward", "CompositeExplicitAutograd")
def _packed_backward(grad: Tensor, q: Tensor | None, rows: Tensor, *args: Any) -> tuple[Tensor, ...]:
    dq, drows = empty_dq(q, rows), empty_drows(q, rows)
    others = write_gradients(grad, *records(together(q, rows, *args)), *parts(None if q is None else dq, drows))
    return dq, drows, *others


def write_gradients(
    grad: Tensor, x: Operands, settings: Settings, dq: Tensor, dk: Tensor, dv: Tensor, sums: Divided | None = None
) -> tuple[Tensor, Tensor]:
    """Fill dq, dk and dv, which may be views; returns dparams and the gradients of the tables. ``sums`` is there if
    the settings normalise any head."""
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


def empty_output(q: Tensor, v: Tensor, out_batch: int) -> Tensor:
    """(out_batch, Hq, rows_q, Dv), its dimensions in memory in the order of q's, so that views stay views."""
    shape = (out_batch, q.shape[1], q.shape[2], v.shape[3])
    rows_outermost = q.stride(1) <= q.stride(2)  # (B, L, H, D) in memory, as projections and packed tensors have it
    return torch.empty_permuted(shape, (0, 2, 1, 3) if rows_outermost else (0, 1, 2, 3), dtype=q.dtype, device=q.device)


def empty_dparams(q: Tensor, params: Tensor | None) -> Tensor:
    """Shaped like params; an op must return a tensor, so without params it is an empty one."""
    return torch.empty_like(params) if params is not None else q.new_empty(0)


def empty_dtables(x: Operands, learn: bool) -> Tensor:
    """The gradients of all differentiable tables end to end, as wide as params; empty if nobody wants them."""
    size = sum(t.numel() for t in x.tables if t.is_floating_point()) if learn else 0
    return x.q.new_empty(size, dtype=torch.promote_types(x.q.dtype, torch.float32))


def table_gradients(flat: Tensor, tables: Sequence[Tensor]) -> list[Tensor | None]:
    """Views of ``flat``, one per table, None for those of integers."""
    sizes = [t.numel() if t.is_floating_point() else 0 for t in tables]
    whole = sum(sizes) == flat.numel() and sum(n > 0 for n in sizes) == 1
    # A table alone is not cut out: of a DTensor, which is sharded as the table is, that would gather it.
    pieces = [flat if n else flat[:0] for n in sizes] if whole else flat[: sum(sizes)].split(sizes)
    return [piece.view(t.shape) if t.is_floating_point() else None for t, piece in zip(tables, pieces, strict=True)]


def empty_dq(q: Tensor | None, rows: Tensor) -> Tensor:
    return torch.empty_like(q) if q is not None else rows.new_empty(0)


def empty_drows(q: Tensor | None, rows: Tensor) -> Tensor:
    """Grouped queries (Hq > Hk) must be a view of it; in a tensor of any strides they need not be one."""
    grouped = q is None and rows.shape[2] > 3
    return torch.empty_like(rows, memory_format=torch.contiguous_format if grouped else torch.preserve_format)


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


def n_seqs(k: Tensor, cu_k: Tensor | None) -> int:
    return k.shape[0] if cu_k is None else cu_k.shape[0] - 1


def attention(*args: Any) -> Tensor:
    """gdpa::attention, as an autograd.Function under torch.func: it refuses operators with a registered autograd."""
    no_tables_in_transforms(args)
    return _Attention.apply(*args) if transformed() else torch.ops.gdpa.attention(*args)


def attention_packed(*args: Any) -> Tensor:
    """gdpa::attention_packed, likewise."""
    no_tables_in_transforms(args)
    return _Packed.apply(*args) if transformed() else torch.ops.gdpa.attention_packed(*args)


def no_tables_in_transforms(args: Sequence[Any]) -> None:
    """An autograd.Function does not look into the list of tables."""
    if transformed() and any(isinstance(a, list) and a and isinstance(a[0], Tensor) for a in args):
        raise NotImplementedError(
            "gdpa: tables (and masks with tables) are not available inside transforms of torch.func on fused backends; "
            "call with backend='reference'"
        )


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) is running."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def save_inputs(n_tensors: int) -> Any:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep_for_backward(ctx, inputs[:n_tensors], inputs[n_tensors:])

    return save


def keep_for_backward(
    ctx: Any, operands: tuple[Any, ...], settings: tuple[Any, ...], more: tuple[Any, ...] = ()
) -> None:
    """What ``saved_operands`` gives back, after ``more`` tensors; and what the settings hold only the keys of."""
    *tensors, tables = operands
    ctx.save_for_backward(*more, *tensors, *tables)
    ctx.n_tables = len(tables)
    ctx.settings = settings
    ctx.functions = from_keys(settings[0])
    mask = Settings(*settings).mask
    ctx.mask = None if mask is None else mask_from_key(mask)


def saved_operands(ctx: Any) -> tuple[Any, ...]:
    """The operands again."""
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
    """Of the OTHERS: params have one, if there are any, and those tables of the function that are differentiable."""
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


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(checks.NO_FORWARD_MODE)


_save_separate, _save_packed = save_inputs(N_OPERANDS), save_inputs(N_OPERANDS - 1)
torch.library.register_autograd("gdpa::attention", _attention_grad, setup_context=_save_separate)
torch.library.register_autograd("gdpa::attention_backward", refuse_double_backward)
torch.library.register_autograd("gdpa::attention_packed", _packed_grad, setup_context=_save_packed)
torch.library.register_autograd("gdpa::attention_packed_backward", refuse_double_backward)


def of_no_list(grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """An operator wants a list for its tables, of which there are none here, an autograd.Function None."""
    return tuple(None if isinstance(grad, list) else grad for grad in grads)


class Transformable(torch.autograd.Function):
    generate_vmap_rule = True
    jvp = staticmethod(_refuse_forward_mode)


class _AttentionBackward(Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.attention_backward(*args))
    setup_context = staticmethod(save_nothing)
    backward = staticmethod(refuse_double_backward)


class _Attention(Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.attention(*args))
    setup_context = staticmethod(_save_separate)
    backward = staticmethod(lambda ctx, grad: of_no_list(_attention_grad(ctx, grad)))


class _PackedBackward(Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.attention_packed_backward(*args))
    setup_context = staticmethod(save_nothing)
    backward = staticmethod(refuse_double_backward)


class _Packed(Transformable):
    forward = staticmethod(lambda *args: torch.ops.gdpa.attention_packed(*args))
    setup_context = staticmethod(_save_packed)
    backward = staticmethod(lambda ctx, grad: of_no_list(_packed_grad(ctx, grad)))


def one_by_one(op: Any) -> Any:
    """A rule for vmap: one call per entry. (PyTorch's own takes no operator with a list of tensors.)"""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        def entry(i: int) -> tuple[Any, ...]:
            dims = zip(args, in_dims, strict=True)
            return tuple(a.select(d, i) if isinstance(d, int) else a for a, d in dims)

        found = [op(*entry(i)) for i in range(info.batch_size)]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        return tuple(torch.stack(some) for some in zip(*found, strict=True)), (0,) * len(found[0])

    return rule


for _op in (
    torch.ops.gdpa.attention,
    torch.ops.gdpa.attention_backward,
    torch.ops.gdpa.attention_packed,
    torch.ops.gdpa.attention_packed_backward,
):
    torch.library.register_vmap(_op.default, one_by_one(_op))


def _pairs(x: Operands) -> int:
    """sum over sequences of Lq * Lk. A band does not lower it, by the convention of SDPA's own formulas."""
    given = [t for t in (x.cu_q, x.cu_k, x.used_q, x.used_k) if t is not None]
    if given and not any(isinstance(t, FakeTensor) or t.is_meta for t in given):
        sides = ((x.cu_q, x.used_q, x.q), (x.cu_k, x.used_k, x.k))
        lengths_q, lengths_k = (_lengths(cu, used, t.shape[2]) for cu, used, t in sides)
        return int((lengths_q * lengths_k).sum())
    n = n_seqs(x.k, x.cu_k) if x.cu_q is None else x.cu_q.shape[0] - 1  # no data: as if all lengths were equal
    rows_q, rows_k = (t.shape[2] * (n if cu is None else 1) for t, cu in ((x.q, x.cu_q), (x.k, x.cu_k)))
    return rows_q * rows_k // max(n, 1)


def _lengths(cu: Tensor | None, used: Tensor | None, rows: int) -> Any:
    if used is not None:
        return used.long()
    return rows if cu is None else cu.long().diff()


def _products(*args: Any) -> tuple[int, int]:
    """FLOPs of one product over the head dimension of q and k, and of one over that of v."""
    x, _ = records(args)
    pairs = 2 * x.q.shape[1] * _pairs(x)
    return pairs * x.q.shape[3], pairs * x.v.shape[3]


@register_flop_formula(torch.ops.gdpa.attention, get_raw=True)
def forward_flops(*args: Any, **kwargs: Any) -> int:
    """s = q k^T, o = p v."""
    qk, pv = _products(*args)
    return qk + pv


@register_flop_formula(torch.ops.gdpa.attention_backward, get_raw=True)
def backward_flops(grad: Tensor, *args: Any, **kwargs: Any) -> int:
    """s, dq and dk over D; dp and dv over Dv."""
    qk, pv = _products(*args)
    return 3 * qk + 2 * pv


@register_flop_formula(torch.ops.gdpa.attention_packed, get_raw=True)
def packed_forward_flops(*args: Any, **kwargs: Any) -> int:
    return forward_flops(*together(*args))


@register_flop_formula(torch.ops.gdpa.attention_packed_backward, get_raw=True)
def packed_backward_flops(grad: Tensor, *args: Any, **kwargs: Any) -> int:
    return backward_flops(grad, *together(*args))
