"""A function and its derivatives on a vector of scores: by PyTorch's autograd, and by the compiled graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from functions.library import Function
from gdpa.functions.activation import Activation, from_function

EPS = torch.finfo(torch.float32).eps
UNIT = {torch.bfloat16: 2**-9, torch.float16: 2**-11}  # half an ulp of a number near 1


def compiled(f: Function) -> Activation:
    return from_function(f.fn, len(f.params), f.name)


def by_autograd(fn: Callable[..., Tensor], s: Tensor, params: tuple[float, ...] = ()) -> Tensor:
    """(2 + n_params, n): p, dp/ds, dp/dparam, as PyTorch computes them in the dtype of ``s``; returned in float64."""
    values = torch.tensor(params).to(s.dtype)  # rounded to float32 first, as the kernels get them
    leaves = [s.detach().clone().requires_grad_(), *(v.expand_as(s).clone().requires_grad_() for v in values)]
    p = fn(*(t.clone() for t in leaves)).expand_as(s)
    grads = tuple(torch.zeros_like(t) for t in leaves)
    if p.requires_grad:
        grads = torch.autograd.grad(p, leaves, torch.ones_like(p), allow_unused=True, materialize_grads=True)
    return torch.stack([p.detach(), *grads]).double()


def by_graph(act: Activation, s: Tensor, params: tuple[float, ...] = ()) -> Tensor:
    """The same by the compiled graph, run in eager torch."""
    values = torch.tensor(params).to(s.dtype)
    return torch.stack(act.joint.evaluate(s, *(v.expand_as(s) for v in values))).double()


def grid(f: Function, n: int = 4001) -> Tensor:
    """float32 scores: evenly over the function's grid, 0 and the whole numbers among them, and some at random."""
    random = torch.randn(300, generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.linspace(*f.grid, n), torch.arange(*f.grid), random])


def worst(got: Tensor, want: Tensor) -> Tensor:
    """Per row, the largest |got - want| / max(1, |want|); NaN and inf must stand at the same places."""
    same = (got == want) | (got.isnan() & want.isnan())
    error = (got - want).abs() / want.abs().clamp_min(1.0)
    return torch.where(same, 0.0, error).nan_to_num(nan=torch.inf).amax(dim=-1)
