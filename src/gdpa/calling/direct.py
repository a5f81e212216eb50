"""Repeated eager calls: straight to the backend, by a plan that was made at the first call of their kind.

The operator gdpa::attention serves every way in which it may be called: compiled, traced, transformed, counted, divided
among processes. In plain eager mode nothing of that kind watches the call, and going through the dispatcher and a
registered autograd would take longer than the whole of SDPA. So such calls look up their plan by the *marks* of the
arguments as the caller gave them (marks.py), and run what the operator would run, inside one autograd.Function where a
gradient is wanted. Any call that is unusual in some respect goes through the operator ("the operator's way"). A call is
checked in full when its plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gdpa import numerics, ops
from gdpa.arguments import checks
from gdpa.backends import tuning
from gdpa.calling import plans, warming
from gdpa.calling.layouts import Dense, Given, Layout, Together, Varlen
from gdpa.calling.marks import RowCounts, UnusualError, address_of, mark, of_offsets
from gdpa.calling.more import NO_MORE, More, is_nothing
from gdpa.compat import autocasting, hooks_save, nobody_watches
from gdpa.functions.activation import Activation, from_name, resolve_one
from gdpa.functions.modules import lift
from gdpa.functions.places.names import TableKind
from gdpa.ops import normalized as ops_normalized
from gdpa.ops.unfilled import unfilled
from gdpa.problem import UNDECIDED, Divided, Operands, Problem, Settings

MOST_STRIDES = 8  # of gradients of a result
MOST_LENGTHS = 64  # numbers of rows of packed batches, or classes of them, of one plan
DENSE = Dense()


@cache
def varlen(packed_q: bool, packed_k: bool) -> Varlen:
    return Varlen(packed_q, packed_k)


@cache
def together(alone: bool, varlen: bool, packed_q: bool, packed_k: bool) -> Together:
    return Together(alone, varlen, packed_q, packed_k)


Gradients = tuple[tuple[Any, ...], Sequence[Tensor | None]]


@dataclass(eq=False, slots=True)
class QuickPasses:
    """The quick passes of a plan (backends/hopper/quick) for numbers of rows of one class: launches that are decided
    already. None where a backend has none. The backward's differ by deterministic mode and the gradient's strides."""

    forward: Callable[..., bool] | None
    problem: Problem
    backward: dict[Hashable, Callable[..., bool] | None] = field(default_factory=dict)

    def backward_for(self, plan: DirectPlan, grad: Tensor) -> Callable[..., bool] | None:
        key = (torch.are_deterministic_algorithms_enabled(), grad.stride())
        found: Any = self.backward.get(key, UNDECIDED)
        if found is UNDECIDED:
            grad4 = plan.layout.grad(grad, self.problem.out_batch)
            found = plan.backend.quick_backward(self.problem, plan, key[0], grad4.stride()) if plan.given else None
            plans.remember(self.backward, key, found, MOST_STRIDES)
        return found


@dataclass(frozen=True, eq=False)
class DirectPlan:
    """How calls of one kind run. ``settings`` are the operator's; ``problem`` is that of the first such call, others
    differ in their numbers of rows at most, where sequences are packed."""

    layout: Any  # a Layout; each takes its own kinds of tensors
    backend: Any  # a Backend
    settings: Settings
    problem: Problem
    problems: dict[Hashable, Problem]  # for other numbers of rows
    has_offsets: bool
    fixed: RowCounts | None  # the numbers of rows of all calls, unless there are offsets
    held: Any  # functions and mask, which the settings name by their keys only: kept alive here
    strides: tuple[tuple[Any, int], ...]  # of each given tensor; with 15 if it did not begin at a multiple of 16 bytes
    direct: bool = True  # otherwise calls of this kind go through the operator
    given: bool = False  # the backend takes tensors in the caller's layout (see layouts.Given)
    like_q: bool = False  # the result has the shape and strides of the first tensor
    class_of: Callable[[int, int], Hashable] | None = None  # numbers of rows that share quick passes
    passes: dict[Hashable, QuickPasses] = field(default_factory=dict)  # by class_of
    compiling: list[Future[Any] | None] = field(default_factory=list)  # the backward, beside the first forward
    taken: list[RowCounts] = field(default_factory=list)  # the largest batch that ``takes`` has allowed

    def quick_passes(self, rows: RowCounts) -> QuickPasses:
        key = None if self.class_of is None else self.class_of(rows[0], rows[1])
        found = self.passes.get(key)
        if found is None:
            problem = self.problem_of(rows)
            found = QuickPasses(self.backend.quick_forward(problem, self) if self.given else None, problem)
            plans.remember(self.passes, key, found, MOST_LENGTHS)
        return found

    def takes(self, rows: RowCounts) -> bool:
        """Whether the backend still takes a packed call with a mask at so many rows: its lists of blocks have a
        limit."""
        most = self.taken[0] if self.taken else (self.problem.rows_q, self.problem.rows_k)
        if rows[0] <= most[0] and rows[1] <= most[1]:
            return True
        if self.backend.supports(self.problem_of(rows)) is not None:
            return False
        if rows[0] >= most[0] and rows[1] >= most[1]:
            self.taken[:] = [rows]
        return True

    def problem_of(self, rows: RowCounts) -> Problem:
        if not self.has_offsets or rows == (self.problem.rows_q, self.problem.rows_k):
            return self.problem
        found = self.problems.get(rows)
        if found is None:
            found = self.problem.with_rows(*rows)
            plans.remember(self.problems, rows, found, MOST_LENGTHS)
        return found

    def operands(self, problem: Problem, given: tuple[Any, ...], *others: Any) -> Operands:
        if self.given:
            return Given(self, self.layout, given, problem.out_batch, *others)
        return Operands(*self.layout.views(*given), *others)


def call(
    layout: Layout, a: Any, b: Any, c: Any, cu_q: Any, cu_k: Any, used_q: Any, used_k: Any, activation: Any,
    params: Any, others: tuple[Any, ...], numbers: tuple[Any, ...], prepare: Callable[..., Any], given: tuple[Any, ...],
) -> Any:  # fmt: skip
    """The result of a call with the tensors ``a``, ``b`` and ``c`` of ``layout``, or None if it has to go through the
    operator, which also raises if anything is wrong with it. ``others`` are tables, mask, normalize, sink and
    return_weights_sum, ``numbers`` the other arguments of the public function, in any order; ``prepare(*given)`` checks
    the call in full and returns it as api.Call."""
    heads, more = 0, NO_MORE
    try:
        if autocasting():
            a, b, c = _cast(a, b, c)
        marks, rows = layout.marks(a, b, c)
        if type(activation) is str and type(params) is tuple and not params and is_nothing(activation, *others):
            first = from_name(activation)
            names: Hashable = first.key
        elif not isinstance(params, list | tuple):
            return None
        else:
            heads = (b.shape[-2] * (b.shape[-3] - 2)) if a is None else a.shape[layout.heads]
            activation, params = lift(activation, params, heads)
            if not is_nothing(activation, *others):
                more = More.of(activation, b, heads, *others)
                activation = more.activation
            first, names = resolve(activation, len(params), heads, more.kinds)
        # The arguments as they are written down: True is 1 to a dictionary, but not to a check, nor is 0.0 -0.0.
        key = (
            layout, marks, None if rows is None else of_offsets(cu_q, cu_k, used_q, used_k),
            tuple([mark(p) for p in params]) if params else None, names, repr(numbers), numerics.current(),
            tuning.times_read(), more.key, None if rows is None or more is NO_MORE else more.size_class(rows),
        )  # fmt: skip
        plan = first.plans.get(key)
    except Exception:  # whatever it is, the operator's way meets it too, and raises it
        return None
    if plan is None:
        plan = make(layout, prepare(*given), a, b, c)
        plans.remember(first.plans, key, plan)
    if not plan.direct or (more.masked and rows is not None and not plan.takes(rows)):
        return None
    stacked = checks.stacked(params, a if a is not None else b, heads) if params else None
    return run(plan, marks, plan.fixed or rows, a, b, c, cu_q, cu_k, stacked, used_q, used_k, more)


def make(layout: Layout, call: Any, a: Any, b: Any, c: Any) -> DirectPlan:
    """The plan of a checked call."""
    x, settings = call.x, call.settings
    found = plans.of(x, settings)
    problem = found.problem
    has_offsets = any(t is not None for t in (x.cu_q, x.cu_k, x.used_q, x.used_k))
    direct = settings.backend != "reference" and x.q.device.type in ("cpu", "cuda") and layout.is_direct(a, b, c)
    given = getattr(found.backend, "takes_given", False) and len(problem.activations) == 1
    like_q = direct and a is not None and _is_like_output(layout, (a, b, c), problem.out_batch)
    held = (call.functions, call.mask)
    strides = tuple((None, 0) if t is None else (t.stride(), 15 if t.data_ptr() % 16 else 0) for t in (a, b, c))
    fixed = None if has_offsets else (problem.rows_q, problem.rows_k)
    class_of = found.backend.row_classes(problem) if given and has_offsets else None  # type: ignore[attr-defined]
    return DirectPlan(
        layout, found.backend, settings, problem, {}, has_offsets, fixed, held, strides, direct, given, like_q, class_of
    )


def _is_like_output(layout: Any, given: tuple[Any, ...], out_batch: int) -> bool:
    without_memory: list[Any] = [
        None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in given
    ]
    out: Tensor = layout.output(*without_memory, out_batch)
    return out.shape == given[0].shape and out.stride() == given[0].stride()


def resolve(activation: Any, n_params: int, heads: int, tables: tuple[TableKind, ...]) -> tuple[Activation, Hashable]:
    """The function, or the first of one for each head, and what names them all."""
    if not isinstance(activation, list | tuple):
        one = resolve_one(activation, n_params, tables)
        return one, one.key
    if len(activation) != heads:
        raise UnusualError
    functions = [resolve_one(one, n_params, tables) for one in activation]
    return functions[0], tuple([f.key for f in functions])


def _cast(*given: Any) -> list[Any]:
    tensors = iter(numerics.autocast(*(t for t in given if t is not None)))
    return [None if t is None else next(tensors) for t in given]


def run(
    plan: DirectPlan, marks: Hashable, rows: Any, a: Any, b: Any, c: Any, cu_q: Any, cu_k: Any, params: Any,
    used_q: Any, used_k: Any, more: More,
) -> Any:  # fmt: skip
    if torch.is_grad_enabled() and (
        b.requires_grad
        or (a is not None and a.requires_grad)
        or (c is not None and c.requires_grad)
        or (params is not None and params.requires_grad)
        or (more is not NO_MORE and more.learns)
    ):
        sink, rest = more.sink, (plan, marks, rows, cu_q, cu_k, used_q, used_k, more.with_sums)
        out = _apply(a, b, c, params, sink, rest, *more.tables)
    else:
        operands = (cu_q, cu_k, params, used_q, used_k, more.tables, more.sink)
        out, sums = forward(plan, rows, (a, b, c), operands, more.with_sums)
        out = (out, sums) if more.with_sums else out
    return (out[0], plan.layout.sums(out[1])) if more.with_sums else out


@unfilled
def forward(
    plan: DirectPlan, rows: RowCounts, given: tuple[Any, ...], operands: tuple[Any, ...], with_sums: bool,
    backward: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result, and its row sums if there are any. ``operands``: the fields of Operands after q, k and v;
    ``with_sums``: the caller gets the sums; ``backward``: one will follow."""
    layout, problem, quick = plan.layout, plan.problem, plan.quick_passes(rows).forward
    cu_q, cu_k, params, used_q, used_k, tables, sink = operands
    if plan.has_offsets and checks.looks_at_offsets(problem):
        checks.offsets(plan.problem_of(rows), plan.operands(problem, given, *operands))
    if tables and checks.asked():
        ops.check_tables(plan.problem_of(rows), plan.backend, plan.operands(problem, given, *operands))
    if backward and not plan.compiling:
        x = plan.operands(problem, given, *operands)
        plan.compiling.append(warming.start_backward(plan.problem_of(rows), plan.backend, x))
    out = torch.empty_like(given[0]) if plan.like_q else layout.output(*given, problem.out_batch)
    sums = None
    if problem.norms:
        sums = ops_normalized.empty_sums(problem, rows[0])
        if with_sums and problem.packed_q:
            sums.zero_()  # rows of no sequence
    if quick is None or not quick(
        *rows, *layout.addresses(*given), out, cu_q, cu_k, params, used_q, used_k, sink, sums, tables
    ):
        problem, x = plan.problem_of(rows), plan.operands(problem, given, *operands)
        ops.write_output(problem, plan.backend, x, out if plan.given else layout.grad(out, problem.out_batch), sums)
        if with_sums and sums is not None:
            ops_normalized.fill_plain_sums(problem, x, sums)
    return out, sums


class GdpaAttention(torch.autograd.Function):
    """The node of a direct call in the autograd graph. Its backward goes through the operator if by then it is
    compiled, traced or otherwise watched (see compat.nobody_watches), if it is to be differentiated itself, which the
    operator refuses, or if hooks have changed what was saved."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, c: Any, params: Any, sink: Any, rest: tuple[Any, ...], *tables: Any) -> Any:
        plan, marks, rows, cu_q, cu_k, used_q, used_k, with_sums = rest
        same = cu_k is cu_q  # saved once
        ctx.made = plan, rows, marks if hooks_save() else None, same
        operands = (cu_q, cu_k, params, used_q, used_k, tables, sink)
        out, sums = forward(plan, rows, (a, b, c), operands, with_sums, backward=True)
        if same:
            cu_k = None
        if sums is None:
            ctx.save_for_backward(a, b, c, cu_q, cu_k, params, used_q, used_k, *tables)
            return out
        ctx.save_for_backward(a, b, c, cu_q, cu_k, params, used_q, used_k, *tables, sink, out, sums)
        ctx.set_materialize_grads(False)  # most calls do not use the sums
        return (out, sums) if with_sums else out

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_sums: Tensor | None = None) -> tuple[Any, ...]:
        a, b, c, cu_q, cu_k, params, used_q, used_k, *tables = ctx.saved_tensors
        plan, rows, marks, same = ctx.made
        given, sink, divided = (a, b, c), None, None
        if same:
            cu_k = cu_q
        if plan.problem.norms:
            *tables, sink, out, sums = tables
            grad = torch.zeros_like(out) if grad is None else grad
            divided = Divided(plan.layout.grad(out, plan.problem.out_batch), sums, grad_sums, None)
        way = gradients if is_direct(plan, marks, grad, given) else gradients_by_operator
        grads, dtables = way(plan, rows, given, (cu_q, cu_k, params, used_q, used_k, tables, sink), grad, divided)
        return (*grads, None, *dtables, *[None] * (len(tables) - len(dtables)))


def gradients(
    plan: DirectPlan, rows: RowCounts, given: tuple[Any, ...], operands: tuple[Any, ...], grad: Tensor,
    divided: Divided | None,
) -> Gradients:  # fmt: skip
    """The gradients of the given tensors, the params and the sink; and those of tables. ``operands``: as in forward."""
    if plan.compiling and plan.compiling[0] is not None:
        wait([plan.compiling[0]])  # an error in it is met again below
        plan.compiling[0] = None
    return _gradients(plan, rows, given, operands, grad, divided)


@unfilled
def _gradients(
    plan: DirectPlan, rows: RowCounts, given: tuple[Any, ...], operands: tuple[Any, ...], grad: Tensor,
    divided: Divided | None,
) -> Gradients:  # fmt: skip
    layout = plan.layout
    _, _, params, _, _, tables, sink = operands
    if plan.given and 0 in grad.stride():  # of a sum, say: the kernels would copy it as well, but on the longer way
        grad = grad.contiguous()
    grads = layout.gradients(*given)
    dsink = None
    if divided is not None:
        dsink = None if sink is None else torch.zeros_like(sink)
        divided = replace(divided, dsink=dsink)
    dtables: Sequence[Tensor | None] = ()
    if plan.problem.learn:
        own = tables[: plan.problem.n_tables]
        dtables = [torch.zeros_like(t) if t.is_floating_point() else None for t in own]
    dparams = None if params is None else torch.empty_like(params)
    quick = None if _has_other_scale(plan.problem, divided) else plan.quick_passes(rows).backward_for(plan, grad)
    if quick is not None and quick(
        *rows, *layout.addresses(*given), operands, grad, *layout.addresses(*grads), divided, dtables, dparams
    ):
        return (*grads, dparams, dsink), dtables
    problem = plan.problem_of(rows)
    x = plan.operands(problem, given, *operands)
    more: dict[str, Any] = {} if divided is None else {"sums": divided}
    if dtables:
        more["dtables"] = dtables
    dq, dk, dv = layout.views(*grads)
    ops.run_backward(problem, x, plan.backend, layout.grad(grad, problem.out_batch), dq, dk, dv, dparams, **more)
    return (*grads, dparams, dsink), dtables


def _has_other_scale(problem: Problem, divided: Divided | None) -> bool:
    """Whether ops.run_backward computes this with another out_scale than the call had."""
    return problem.out_scale == 0 and divided is not None and divided.dsums is not None


def gradients_by_operator(
    plan: DirectPlan, rows: RowCounts, given: tuple[Any, ...], operands: tuple[Any, ...], grad: Tensor,
    divided: Divided | None,
) -> Gradients:  # fmt: skip
    """What ``gradients`` returns, through the operator."""
    *others, sink = operands
    params, tables = others[2], others[5]
    settings, out_batch = plan.settings, plan.problem.out_batch
    sums = None
    if divided is not None:
        sums = (divided.dsums, divided.out, divided.sums, sink, list(settings.normalize))
    found, dsink = plan.layout.by_operator(plan.layout.grad(grad, out_batch), *given, (*others, *settings.values), sums)
    *grads, dparams, flat = found
    dtables = ops.table_gradients(flat, tables[: plan.problem.n_tables]) if settings.learn else []
    return (*grads, None if params is None else dparams, None if sink is None else dsink), dtables


# Function.apply itself looks for tensors that have left a transform of torch.func, which are no plain ones (see _mark).
_apply = super(torch.autograd.Function, GdpaAttention).apply


def is_direct(plan: DirectPlan, marks: Hashable, grad: Tensor, given: tuple[Any, ...]) -> bool:
    """Whether a backward may go past the operator. ``marks``: those of the given tensors, if hooks that pack and
    unpack saved tensors may have changed them."""
    if torch.is_grad_enabled() or not nobody_watches():
        return False
    try:
        address_of(grad)
        return _are_as_before(plan, given) if marks is None else plan.layout.marks(*given)[0] == marks
    except Exception:
        return False


def _are_as_before(plan: DirectPlan, given: tuple[Any, ...]) -> bool:
    """Whether the saved tensors are laid out as before. (Hooks may be put on a single one after it was saved,
    unseen.)"""
    dtype = plan.problem.dtype
    for t, (strides, odd) in zip(given, plan.strides, strict=True):
        if t is not None and (t.stride() != strides or t.data_ptr() & 15 > odd or t.dtype is not dtype):
            return False
    return True
