"""Eager calls of the operator that repeat: straight to the backend, by a plan.

The operator gdpa::attention serves every way to call it: compiled, traced, transformed, counted, divided. In plain
eager mode none of these watches, and the way through the dispatcher and a registered autograd would take more time than
SDPA takes in all. So such calls look up their plan by what the caller wrote down, and run what the operator would run,
inside one autograd.Function where a gradient is wanted. What is unusual in any respect takes the operator's way, and a
call is checked in full when its plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gdpa import numerics, ops
from gdpa.arguments import checks
from gdpa.backends import Backend, tuning
from gdpa.calling import plans, warming
from gdpa.calling.layouts import Dense, Given, Layout, Together, Varlen
from gdpa.compat import autocasting, nobody_watches
from gdpa.functions.activation import Activation, resolve_one
from gdpa.functions.modules import lift
from gdpa.problem import Operands, Problem, Settings

PLAIN = frozenset((Tensor, Parameter))  # subclasses have a say of their own
MOST_ROWS = 2**29  # of packed sequences: from there on backends begin to refuse
MOST_LENGTHS = 64  # numbers of rows of packed batches, of one plan; they are cheap to make anew
DENSE = Dense()


@cache
def varlen(packed_q: bool, packed_k: bool) -> Varlen:
    return Varlen(packed_q, packed_k)


@cache
def together(alone: bool, varlen: bool, packed_q: bool, packed_k: bool) -> Together:
    return Together(alone, varlen, packed_q, packed_k)


class _UnusualError(Exception):
    """Something that only the operator's way deals with."""


@dataclass(frozen=True, eq=False)
class Plan:
    """How calls of one kind run. ``settings`` are the operator's; ``problem`` is that of the first such call, others
    differ in their numbers of rows at most, where sequences are packed."""

    layout: Layout
    backend: Backend
    settings: Settings
    problem: Problem
    problems: dict[Hashable, Problem]
    has_offsets: bool
    direct: bool = True  # otherwise calls of this kind take the operator's way
    given: bool = False  # the backend takes tensors as the caller gave them
    like_q: bool = False  # the result is laid out as the first tensor
    compiling: list[Future[Any] | None] = field(default_factory=list)  # the backward, beside the first forward

    def problem_of(self, a: Any, b: Any) -> Problem:
        if not self.has_offsets:
            return self.problem
        rows = self.layout.rows(a, b)
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
    params: Any, more: tuple[Any, ...], numbers: tuple[Any, ...], prepare: Callable[[], Any],
) -> Tensor | None:  # fmt: skip
    """The result of a call with the tensors ``a``, ``b`` and ``c`` of ``layout``, or None if it has to take the
    operator's way, which also says what is wrong with it. ``more`` are tables, mask, normalize, sink and
    return_weights_sum, ``numbers`` the other arguments of the public function, in any order; ``prepare()`` checks the
    call and returns it as api.Call."""
    try:
        if not _are_defaults(*more):
            return None
        if autocasting():
            a, b, c = _cast(a, b, c)
        where = _marks(layout, a, b, c)
        heads = (b.shape[-2] * (b.shape[-3] - 2)) if a is None else a.shape[layout.heads]
        activation, params = lift(activation, params, heads)
        first, names = resolve(activation, len(params), heads)
        offsets = _offsets_key(cu_q)
        # The arguments as they are written down: True is 1 to a dictionary, but not to a check, nor is 0.0 -0.0.
        key = (
            layout, where, offsets, offsets if cu_k is cu_q else _offsets_key(cu_k), _offsets_key(used_q),
            _offsets_key(used_k), tuple([_mark(p) for p in params]) if params else None, names, repr(numbers),
            numerics.current(), tuning.times_read(),
        )  # fmt: skip
        plan = first.plans.get(key)
    except Exception:  # whatever it is, the ordinary way meets it too
        return None
    if plan is None:
        plan = make(layout, prepare(), a, b, c)
        plans.remember(first.plans, key, plan)
    if not plan.direct:
        return None
    stacked = checks.stacked(params, a if a is not None else b, heads) if params else None
    return run(plan, where, a, b, c, cu_q, cu_k, stacked, used_q, used_k)


def _are_defaults(tables: Any, mask: Any, normalize: Any, sink: Any, return_weights_sum: Any) -> bool:
    return (
        mask is None and normalize is None and return_weights_sum is False and len(tables) == 0
        and type(sink) is float and sink == 0.0
    )  # fmt: skip


def make(layout: Layout, call: Any, a: Any, b: Any, c: Any) -> Plan:
    """The plan of a checked call."""
    x, settings = call.x, call.settings
    found = plans.of(x, settings)
    problem = found.problem
    has_offsets = any(t is not None for t in (x.cu_q, x.cu_k, x.used_q, x.used_k))
    direct = settings.backend != "reference" and x.q.device.type in ("cpu", "cuda") and layout.is_direct(a, b, c)
    given = getattr(found.backend, "takes_given", False) and len(problem.activations) == 1
    like_q = direct and a is not None and _is_like_output(layout, a, x, problem.out_batch)
    return Plan(layout, found.backend, settings, problem, {}, has_offsets, direct, given, like_q)


def _is_like_output(layout: Layout, a: Tensor, x: Operands, out_batch: int) -> bool:
    q, v = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (x.q, x.v))
    out, _ = layout.output(q, v, out_batch)
    return out.shape == a.shape and out.stride() == a.stride()


def resolve(activation: Any, n_params: int, heads: int) -> tuple[Activation, Hashable]:
    """The function, or the first of one for each head, and what names them all."""
    if not isinstance(activation, list | tuple):
        one = resolve_one(activation, n_params)
        return one, one.key
    if len(activation) != heads:
        raise _UnusualError
    functions = [resolve_one(one, n_params) for one in activation]
    return functions[0], tuple([f.key for f in functions])


def _cast(*given: Any) -> list[Any]:
    tensors = iter(numerics.autocast(*(t for t in given if t is not None)))
    return [None if t is None else next(tensors) for t in given]


def _marks(layout: Layout, a: Any, b: Any, c: Any) -> Hashable:
    """All that decisions depend on in the three tensors; of packed ones not the number of rows."""
    mark_a = None if a is None else _packed_mark(a)[1] if layout.packed_q else _mark(a)
    if not layout.packed_k:
        return mark_a, _mark(b), None if c is None else _mark(c)
    rows, mark_b = _packed_mark(b)
    if c is None:
        return mark_a, mark_b, None
    rows_c, mark_c = _packed_mark(c)
    if rows_c != rows:
        raise _UnusualError
    return mark_a, mark_b, mark_c


def _mark(t: Tensor) -> Hashable:
    return _check_plain(t) % 16 == 0, t.shape, t.stride(), t.dtype, t.device


def _packed_mark(t: Tensor) -> tuple[int, Hashable]:
    """The number of rows, and the mark."""
    aligned = _check_plain(t) % 16 == 0
    rows, *others = t.shape
    if not 1 < rows < MOST_ROWS:  # the stride of a single row means nothing, and empty_like would keep it
        raise _UnusualError
    return rows, (aligned, tuple(others), t.stride(), t.dtype, t.device)


def _check_plain(t: Tensor) -> int:
    """The address of ``t``. Not of one that is empty, a subclass, or whose numbers are not those in memory."""
    address = t.data_ptr()
    if address == 0 or type(t) not in PLAIN or t.is_neg():
        raise _UnusualError
    return address


def _offsets_key(t: Tensor | None) -> Hashable:
    if t is None:
        return None
    if type(t) not in PLAIN:
        raise _UnusualError
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16 == 0


def run(plan: Plan, where: Hashable, a: Any, b: Any, c: Any, cu_q: Any, cu_k: Any, params: Any, *used: Any) -> Tensor:
    if torch.is_grad_enabled() and (
        b.requires_grad
        or (a is not None and a.requires_grad)
        or (c is not None and c.requires_grad)
        or (params is not None and params.requires_grad)
    ):
        out: Tensor = _apply(a, b, c, params, (plan, where, cu_q, cu_k, *used))
        return out
    return forward(plan, a, b, c, cu_q, cu_k, params, *used)


def forward(plan: Plan, a: Any, b: Any, c: Any, *others: Any, backward: bool = False) -> Tensor:
    """``backward``: one will follow."""
    layout, problem = plan.layout, plan.problem_of(a, b)
    x = plan.operands(problem, (a, b, c), *others)
    if plan.has_offsets:
        checks.offsets(problem, x)
    if backward and not plan.compiling:
        plan.compiling.append(warming.start_backward(problem, plan.backend, x))
    out = torch.empty_like(a) if plan.like_q else layout.output(x.q, x.v, problem.out_batch)[0]
    ops.write_output(problem, plan.backend, x, out if plan.given else layout.grad(out, problem.out_batch))
    return out


class GdpaAttention(torch.autograd.Function):
    """The node of a direct call in the autograd graph. Its backward takes the operator's way where somebody watches by
    then, where it is to be differentiated itself (which the operator refuses), or where hooks have changed what was
    saved."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, c: Any, params: Any, rest: tuple[Any, ...]) -> Tensor:
        plan, ctx.where, cu_q, cu_k, used_q, used_k = rest
        ctx.plan = plan
        ctx.save_for_backward(a, b, c, cu_q, cu_k, params, used_q, used_k)
        return forward(plan, a, b, c, cu_q, cu_k, params, used_q, used_k, backward=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b, c, *others = ctx.saved_tensors
        plan: Plan = ctx.plan
        layout = plan.layout
        if is_direct(plan, ctx.where, grad, a, b, c):
            problem = plan.problem_of(a, b)
            x = plan.operands(problem, (a, b, c), *others)
            if plan.compiling and plan.compiling[0] is not None:
                wait([plan.compiling[0]])  # an error in it is met again below
                plan.compiling[0] = None
            grads, written = layout.gradients(a, b, c)
            grad = layout.grad(grad, problem.out_batch)
            dparams = None if x.params is None else torch.empty_like(x.params)
            ops.run_backward(problem, x, plan.backend, grad, *written, dparams)
        else:
            grad = layout.grad(grad, plan.problem.out_batch)
            da, db, dc, dparams = layout.by_operator(grad, a, b, c, (*others, [], *plan.settings.values))
            grads = da, db, dc
        return (*grads, None if others[2] is None else dparams, None)


# Function.apply itself looks for tensors that have left a transform of torch.func, which are no plain ones (see _mark).
_apply = super(torch.autograd.Function, GdpaAttention).apply


def is_direct(plan: Plan, where: Hashable, grad: Tensor, a: Any, b: Any, c: Any) -> bool:
    if torch.is_grad_enabled() or not nobody_watches():
        return False
    try:
        _check_plain(grad)
        return _marks(plan.layout, a, b, c) == where
    except Exception:
        return False
