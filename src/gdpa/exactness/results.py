"""What is compared: the definition in float64, with its own roundings only, as plain PyTorch has it (plain.py), and
gdpa's. All results have the shape (rows, heads, D), whatever the layout of the call (row sums, where they are returned:
D = 1); dparams, dtables and dsink are one vector each of all gradients of params, of float tables, and of a sink that
is a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdpa.exactness.draw import Tensors
from gdpa.exactness.formula import Formula
from gdpa.exactness.layout import as_rows
from gdpa.exactness.plain import plain
from gdpa.exactness.tiles import (
    Results,
    SummedTile,
    Tile,
    Totals,
    empty,
    first_sums,
    sink_gradient_of_keyless_rows,
    tiles,
)
from gdpa.testing import cases
from gdpa.testing.cases import Case

__all__ = ["Formula", "Results", "Truth", "definition", "exact", "gathered", "ours", "plain", "true_float32"]


class Truth(NamedTuple):
    """Results in float64; which of their elements are decided (of the same shapes up to D = 1); what float64 itself may
    be off by in an element (1 + tanh(s) of s = -25 is 0 there, and should be 4e-22); and of those that sum over all
    pairs the roots of their terms' summed squares: where the terms cancel, that is what their errors are relative to.
    """

    values: Results
    decided: Results
    noise: dict[str, float]
    terms: Results


@torch.no_grad()
def exact(formula: Formula, x: Tensors, visit: Callable[[Tile], None] = lambda tile: None) -> Truth:
    """The truth in float64. ``visit`` is shown every tile.

    Where a score is within float32's error of a step of f or f' (0, for relu), either side is right, and one pair that
    falls on the other one would outweigh all roundings of its row: such rows are not decided.
    """
    found, _ = empty(formula, x, torch.float64)
    totals = Totals.zeros(formula, x, squares=Totals.zeros(formula, x))
    decided = {name: torch.ones_like(t[..., :1], dtype=torch.bool) for name, t in found.items()}
    doubts = Totals.zeros(formula, x)
    unit = torch.finfo(x.do.dtype).eps / 2
    noise = dict.fromkeys((*found, *x.learned), 0.0)
    sums = {"sums": first_sums(formula, x)} if formula.with_sums else {}
    for tile in tiles(formula, x, torch.float64):
        tile.add_to(found, totals)
        if sums and isinstance(tile, SummedTile):
            tile.put_sums(sums["sums"])
        _mark_steps(tile, unit, decided, doubts)
        more = tile.noise()
        noise = {name: noise[name] + more[name] for name in noise}
        visit(tile)
    totals.add_sink(sink_gradient_of_keyless_rows(formula, x))
    decided |= {name: t == 0 for name, t in doubts.as_given(x).items()}
    assert totals.squares is not None
    terms = {name: t.sqrt() for name, t in totals.squares.as_given(x).items()}
    return Truth({**found, **totals.as_given(x), **sums}, decided, noise, terms)


def _mark_steps(tile: Tile, unit: float, decided: Results, doubts: Totals) -> None:
    """Unmark what a step of f or of a derivative near a score makes undecided, and count the terms of such pairs in
    what sums over all of them."""
    h = tile.score_error()
    above, below = (tile.derivatives(tile.s + sign * h).all for sign in (1, -1))

    def steps(i: int, value: Tensor) -> Tensor:
        """Pairs of which the rounding of the score costs as much as a fourth of a rounding to 16 bits."""
        usual = tile.masked(value).square().mean((-2, -1), keepdim=True).sqrt()
        near = (above[i] - below[i]).abs() <= unit / 4 * (value.abs() + usual)
        return ~near & tile.batch.keep

    own = steps(0, tile.p) | steps(1, tile.slope)  # (n, H, Lq, Lk)
    at_step = tile.reach(own, above[0], below[0])
    more = at_step if at_step is not own else torch.zeros_like(own)  # through the sum of a row
    doubts.add(tile.f, ((steps(2 + i, t) | more).double() for i, t in enumerate(tile.f.all[2:])))
    doubts.add_sink(more.double().sum(-1, keepdim=True))
    if not bool(at_step.any()):
        return
    for name, axis in (("out", -1), ("dq", -1), ("dk", -2), ("dv", -2)):
        rows, real = tile.batch.rows(name)
        hit = at_step.any(axis)  # (n, Hq, L)
        if axis == -2:
            hit = hit.unflatten(1, (decided[name].shape[1], -1)).any(2)
        count = torch.zeros_like(decided[name], dtype=torch.float32)
        count.index_add_(0, rows[real], hit.transpose(1, 2)[real][..., None].float())
        decided[name] &= count == 0


@torch.no_grad()
def definition(formula: Formula, x: Tensors) -> Results:
    """With the definition's roundings and no others: s, f, f' and all sums in float32; p, ds and each result rounded
    once to the dtype of the inputs."""
    found, totals = empty(formula, x, torch.float32)
    with true_float32():
        for tile in tiles(formula, x, torch.float32):
            tile.add_to(found, totals, rounded=x.do.dtype)
    totals.add_sink(sink_gradient_of_keyless_rows(formula, x))
    sums = {name: t.float() for name, t in totals.as_given(x).items()}
    return {**{name: t.to(x.do.dtype) for name, t in found.items()}, **x.as_held(sums)}


@contextmanager
def true_float32() -> Iterator[None]:
    """Products of float32 are IEEE, not TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---- gdpa ------------------------------------------------------------------------------------------------------------
def ours(formula: Formula, x: Tensors, activation: Any, **kwargs: Any) -> Results:
    """gdpa's; keyword arguments go to the API."""
    settings = {"params": x.params, "tables": x.tables, "sink": x.sink, **kwargs}
    out = cases.call(
        formula.case, x.x, activation, **{"scale": formula.scale, "out_scale": formula.out_scale, **settings}
    )
    return gathered(formula.case, x, out)


def gathered(case: Case, x: Tensors, result: Tensor | tuple[Tensor, Tensor]) -> Results:
    """What a call returned and its gradients, by name."""
    out, sums = result if isinstance(result, tuple) else (result, None)
    learned = x.learned
    inputs = (*x.x.leaves, *(t for some in learned.values() for t in some))
    grads: Any = [torch.zeros_like(t) for t in inputs]
    pairs = [(t, grad) for t, grad in ((out, x.do), (sums, x.dsums)) if t is not None and grad is not None]
    if pairs := [(t, grad) for t, grad in pairs if t.requires_grad]:
        of, given = zip(*pairs, strict=True)
        grads = torch.autograd.grad(of, inputs, given, allow_unused=True, materialize_grads=True)
    rows = [as_rows(case, t.detach()) for t in (out, *grads[:3])]
    vectors, rest = {}, iter(grads[3:])
    for name, some in learned.items():
        parts = [next(rest).reshape(-1) for _ in some]
        vectors[name] = torch.cat(parts) if parts else out.new_zeros(0)
    found = {**dict(zip(("out", "dq", "dk", "dv"), rows, strict=True)), **vectors}
    return found if sums is None else {**found, "sums": as_rows(case, sums.detach()[..., None])}
