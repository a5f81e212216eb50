"""The function on one tile of scores: its values, and its gradients by autograd over this tile alone.

A tile is s (n, Hq, rows, keys) in the compute dtype; params are (Hq, 1, 1); keep (n or 1, 1, rows, keys) is 0 for pairs
that are masked or padding and -1 (all bits set) for others, or None if all are kept. The mask acts after f and after
f', and selects: f or f' may be infinite where it is masked (log at a padded score of 0), and 0 * inf would leak.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gdpa.backends.cpu.normalized import BlockTerms, select
from gdpa.compat import recording
from gdpa.functions.activation import Activation
from gdpa.functions.places.program import Places
from gdpa.functions.places.tables import Recorded


def value(
    f: Activation, s: Tensor, params: Sequence[Tensor], keep: Tensor | None, places: Places | None = None
) -> Tensor:
    """p = f(s; params), zero where not kept."""
    return select(keep, f.eager(s, *params, places=places))


def gradients(
    f: Activation, s: Tensor, dp: Tensor, params: Sequence[Tensor], keep: Tensor | None, needs_dparams: bool,
    places: Places | None = None, dtables: Sequence[Tensor | None] = (), terms: BlockTerms | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """(p, ds = dp * df/ds, [dp * df/dparam summed per head, (Hq,)]), each zero where not kept. Gradients of tables are
    added to ``dtables`` (``places`` then has tables that record lookups). With the ``terms`` of row sums, p is divided
    by its row's sum, and dp is taken through that division first."""
    with recording():
        # Expanded leaves keep the gradients of params element-wise, so that the mask reaches them before the sum.
        leaves = [s.detach().requires_grad_()]
        leaves += [param.expand_as(s).detach().requires_grad_(needs_dparams) for param in params]
        wanted = leaves if needs_dparams else leaves[:1]
        p = f.eager(*leaves, places=places)
        weights = p.detach()
        if terms is not None:
            weights, dp = terms.weigh(weights, dp, keep)
        lookups = _lookups(places, dtables)
        wanted = [*wanted, *(leaf for _, _, leaf in lookups)]
        if p.requires_grad:
            grads = torch.autograd.grad(p, wanted, dp, allow_unused=True, materialize_grads=True)
        else:  # piecewise constant, such as (s > 0).to(s.dtype)
            grads = tuple(torch.zeros_like(leaf) for leaf in wanted)
    for (into, at, _), grad in zip(lookups, grads[len(grads) - len(lookups) :], strict=True):
        into.view(-1).index_add_(0, at.expand_as(grad).reshape(-1), grad.reshape(-1).to(into.dtype))
    ds, *dparams = (select(keep, grad) for grad in grads[: len(grads) - len(lookups)])
    return select(keep, weights), ds, [grad.sum((0, 2, 3)) for grad in dparams]


def _lookups(places: Places | None, dtables: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(gradient of the table, places in it, values) of all that was looked up in differentiable tables."""
    if places is None:
        return []
    pairs = zip(places.tables, dtables, strict=False)
    return [
        (into, at, leaf)
        for table, into in pairs
        if into is not None and isinstance(table, Recorded)
        for at, leaf in table.found
    ]
