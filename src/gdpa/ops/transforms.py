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
_calls: list[Callable[..., Any]] = []  # made by ``one_call``, and not yet made known to Dynamo


def one_call(fn: Call) -> Call:
    """Decorator for functions that apply a Transformable: torch.compile puts them into its graph as one call, which
    runs as in eager mode. (Dynamo cannot trace an autograd.Function inside of a transform.)"""
    _calls.append(fn)
    return fn


def inside_transforms() -> bool:
    """Whether a transform of torch.func is running. If so, Dynamo learns of the calls above, in case it asks."""
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


def none_for_lists(grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradient of the list of tables, of which there are none here: an operator's is a list, an autograd.Function's
    is None."""
    return tuple(None if isinstance(grad, list) else grad for grad in grads)


def refuse_tangents(x: Operands, *grads: Tensor | None) -> None:
    """Refuse forward-mode differentiation inside an operator, since compiled code has not checked its arguments. There
    the dispatch keys that make tangents visible may be off."""
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
