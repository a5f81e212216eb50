"""The operators under transforms of torch.func, eager and compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gdpa.arguments import checks
from gdpa.compat import forward_mode, transformed, usual_keys
from gdpa.problem import Operands

Call = TypeVar("Call", bound=Callable[..., Any])
_calls: list[Callable[..., Any]] = []  # which Dynamo does not know yet


def one_call(fn: Call) -> Call:
    """For ``fn`` that applies a Transformable: in compiled code it is one call, which runs as it would without. Dynamo
    cannot look into an autograd.Function inside of a transform."""
    _calls.append(fn)
    return fn


def inside_transforms() -> bool:
    """Whether a transform is running. Where Dynamo asks, it is told of the calls above."""
    if not transformed():
        return False
    while "torch._dynamo" in sys.modules and _calls:
        torch.compiler.allow_in_graph(_calls.pop())
    return True


inside_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def no_tables_in_transforms(args: Sequence[Any]) -> None:
    """An autograd.Function does not look into the list of tables."""
    if transformed() and any(isinstance(a, list) and a and isinstance(a[0], Tensor) for a in args):
        raise NotImplementedError(
            "gdpa: tables (and masks with tables) are not available inside transforms of torch.func on fused backends; "
            "call with backend='reference'"
        )


def of_no_list(grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """An operator wants a list for its tables, of which there are none here, an autograd.Function None."""
    return tuple(None if isinstance(grad, list) else grad for grad in grads)


def refuse_tangents(x: Operands, *grads: Tensor | None) -> None:
    """Where an operator runs: compiled code has not looked at what it is called with. Dispatch keys by which tangents
    are seen may be off there."""
    if forward_mode():
        with usual_keys():
            checks.no_forward_mode(x, *grads)


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(checks.NO_FORWARD_MODE)


class Transformable(torch.autograd.Function):
    generate_vmap_rule = True
    jvp = staticmethod(_refuse_forward_mode)


def one_by_one(op: Any) -> Any:
    """A rule for vmap: one call per entry. (PyTorch's own takes no operator with a list of tensors.)"""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        n = info.batch_size
        pairs = list(zip(args, in_dims, strict=True))
        found = [op(*(_entry(a, dim, i) for a, dim in pairs)) for i in range(n or 1)]  # one for the shape, if n is 0
        if isinstance(found[0], Tensor):
            return torch.stack(found)[:n], 0
        return tuple(torch.stack(some)[:n] for some in zip(*found, strict=True)), (0,) * len(found[0])

    return rule


def _entry(a: Any, dim: Any, i: int) -> Any:
    if not isinstance(dim, int):
        return a
    return a.select(dim, i) if a.shape[dim] else a.new_zeros(a.movedim(dim, 0).shape[1:])
