"""What is compared: the definition in float64, with its own roundings only, as plain PyTorch has it, and gdpa's.

    s = scale q k^T    p = f(s)    out = out_scale p v
    dp = out_scale do v^T    ds = scale dp f'(s)    dq = ds k    dk = ds^T q    dv = out_scale p^T do

f' comes from autograd on the Python function, so nothing here has seen gdpa's compiler. All results have the shape
(rows, heads, D), whatever the layout of the call; dparams is one vector of all gradients of params.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdpa.exactness.draw import Tensors
from gdpa.exactness.layout import Batch, as_rows, batches, make_batch
from gdpa.testing import cases
from gdpa.testing.cases import Case

Results = dict[str, Tensor]
EPS32 = 2.0**-24  # half a unit in the last place
NOISE64 = 2.0**-48  # of a number near 1 from which f takes another one: 16 units in the last place of float64
# In float16 a ds below 6e-5 loses digits. The factor scale * out_scale is ours to apply before or after its rounding:
# before, so that ds overflows later than in plain PyTorch, but not more than this of it.
LEAST_FACTOR = 2.0**-6


@dataclass(frozen=True)
class Formula:
    """A call without its tensors. ``f(s, *params)`` takes s (n, H, Lq, Lk) and params that broadcast with it."""

    case: Case
    f: Callable[..., Tensor]
    scale: float
    out_scale: float = 1.0
    normalize: str | None = None  # "sum", "abs", or "softmax": f is exp, whose row's maximum is subtracted

    @classmethod
    def of(
        cls, case: Case, f: Callable[..., Tensor], scale: float | None = None, out_scale: float = 1.0,
        normalize: str | None = None,
    ) -> Formula:  # fmt: skip
        return cls(case, f, 1 / math.sqrt(case.d) if scale is None else scale, out_scale, normalize)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.case.heads // (self.case.heads_k or self.case.heads)

    def value(self, s: Tensor, *params: Tensor) -> Tensor:
        """f(s) in the shape and dtype of s, which f may write into; tensors that f makes are where s is, as they are in
        compiled code."""
        with nullcontext() if s.device.type == "cpu" else s.device:
            return self.f(s.clone(), *params).to(s.dtype).expand_as(s)

    def derivatives(self, s: Tensor, params: list[Tensor]) -> list[Tensor]:
        """f, df/ds and df/dparam for every score (n, H, Lq, Lk); params are (H,)."""
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (s, *(p[:, None, None].expand_as(s) for p in params))]
            p = self.value(*leaves)
            if not p.requires_grad:  # piecewise constant
                return [p, *(torch.zeros_like(s) for _ in leaves)]
            return [p.detach(), *torch.autograd.grad(p.sum(), leaves, allow_unused=True, materialize_grads=True)]

    def boost(self, dtype: torch.dtype) -> float:
        """What the factor of ds is multiplied by before it is rounded to ``dtype``, and divided by afterwards."""
        factor = abs(self.scale * self.out_scale)
        if dtype != torch.float16 or factor == 0 or factor >= LEAST_FACTOR:
            return 1.0
        return 2.0 ** math.ceil(math.log2(LEAST_FACTOR / factor))


class Truth(NamedTuple):
    """Results in float64; which of their elements are decided (of the same shapes up to D = 1); and what float64 itself
    may be off by in an element: 1 + tanh(s) of s = -25 is 0 there, and should be 4e-22."""

    values: Results
    decided: Results
    noise: dict[str, float]


# ---- by the formulas -------------------------------------------------------------------------------------------------
class Tile:
    """One padded batch: q, do (n, Hq, Lq, D), k, v (n, Hq, Lk, D), and s, p, dp, slope (n, Hq, Lq, Lk)."""

    def __init__(
        self, formula: Formula, batch: Batch, q: Tensor, k: Tensor, v: Tensor, do: Tensor, params: list[Tensor]
    ) -> None:
        self.formula, self.batch, self.params = formula, batch, params
        self.q, self.do = q[batch.q].transpose(1, 2), do[batch.out].transpose(1, 2)
        self.k, self.v = (t[batch.k].transpose(1, 2).repeat_interleave(formula.group, dim=1) for t in (k, v))
        self.s = (self.q @ self.k.mT) * formula.scale
        self.p, self.slope, *self.by_params = formula.derivatives(self.s, params)
        self.dp = (self.do @ self.v.mT) * formula.out_scale

    def masked(self, t: Tensor) -> Tensor:
        return torch.where(self.batch.keep, t, 0.0)

    def add_to(self, found: Results, dparams: Tensor, rounded: torch.dtype | None = None) -> None:
        """Add the results of these sequences. ``rounded``: what p and ds are rounded to, if they are."""
        formula, boost = self.formula, 1.0 if rounded is None else self.formula.boost(rounded)
        p, ds = self.masked(self.p), self.masked(self.dp * self.slope * (formula.scale * boost))
        if rounded is not None:
            p, ds = (t.to(rounded).to(t.dtype) for t in (p, ds))
        self.scatter(found, "out", (p @ self.v) * formula.out_scale)
        self.scatter(found, "dq", (ds @ self.k) / boost)
        self.scatter(found, "dk", (ds.mT @ self.q) / boost)
        self.scatter(found, "dv", (p.mT @ self.do) * formula.out_scale)
        for total, by_param in zip(dparams, self.by_params, strict=True):
            total += self.masked(self.dp * by_param).sum((0, 2, 3)).double()

    def scatter(self, found: Results, name: str, t: Tensor) -> None:
        """Add (n, Hq, L, D) to the rows it belongs to; key heads sum over their group."""
        rows, real = self.batch.rows(name)
        target = found[name]
        if name in ("dk", "dv"):
            t = t.unflatten(1, (target.shape[1], -1)).sum(2)
        target.index_add_(0, rows[real], t.transpose(1, 2)[real].to(target.dtype))

    def score_error(self) -> Tensor:
        """How far a float32 score may be off: some roundings of the size of its terms."""
        terms = (self.q.float().square() @ self.k.float().square().mT).sqrt().to(self.s.dtype)
        return 8 * EPS32 * (abs(self.formula.scale) * terms + self.s.abs())

    def noise(self) -> dict[str, float]:
        """What float64 may lose in an element of each result where f or f' is a difference of numbers near s or 1."""
        formula = self.formula
        s, q, k, v, do, dp = (float(t.abs().max()) for t in (self.s, self.q, self.k, self.v, self.do, self.dp))
        len_q, len_k = self.s.shape[-2:]
        unit = NOISE64 * max(s, 1.0)
        per_p, per_ds = unit * abs(formula.out_scale), unit * abs(formula.scale) * dp
        found = {"out": per_p * len_k * v, "dv": per_p * len_q * do, "dq": per_ds * len_k * k, "dk": per_ds * len_q * q}
        return {**found, "dparams": unit * dp * self.s.numel()}


class SummedTile(Tile):
    """With row sums: out = out_scale p v / d and dp' = (dp - n'(p) delta) / d, delta = <do, out>. Rounded are p before
    its product with v, p / d before that with do, ds, and what is kept of out."""

    def add_to(self, found: Results, dparams: Tensor, rounded: torch.dtype | None = None) -> None:
        formula, boost = self.formula, 1.0 if rounded is None else self.formula.boost(rounded)
        p, slope = self.masked(self.p), self.slope
        if formula.normalize == "softmax":
            largest = torch.where(self.batch.keep, self.s, -torch.inf).amax(-1, keepdim=True)
            p = slope = self.masked((self.s - largest.nan_to_num(neginf=0.0)).exp())
        d = (p.abs() if formula.normalize == "abs" else p).sum(-1, keepdim=True)
        inverse = torch.where(d == 0, 0.0, 1 / d)

        def narrow(t: Tensor) -> Tensor:
            return t if rounded is None else t.to(rounded).to(t.dtype)

        out = (narrow(p) @ self.v) * inverse * formula.out_scale
        delta = (self.do * narrow(out)).sum(-1, keepdim=True)
        dp = (self.dp - (p.sign() * delta if formula.normalize == "abs" else delta)) * inverse
        ds = narrow(self.masked(dp * slope * (formula.scale * boost)))
        self.scatter(found, "out", out)
        self.scatter(found, "dq", (ds @ self.k) / boost)
        self.scatter(found, "dk", (ds.mT @ self.q) / boost)
        self.scatter(found, "dv", (narrow(p * inverse).mT @ self.do) * formula.out_scale)
        for total, by_param in zip(dparams, self.by_params, strict=True):
            total += self.masked(dp * by_param).sum((0, 2, 3)).double()


def tiles(formula: Formula, x: Tensors, dtype: torch.dtype) -> Iterator[Tile]:
    """Everything, computed in ``dtype``."""
    case = formula.case
    q, k, v, do = (as_rows(case, t.detach()).to(dtype) for t in (*x.x.leaves, x.do))
    params = [p.detach().to(dtype).expand(case.heads) for p in x.params]
    for part in batches(case):
        kind = Tile if formula.normalize is None else SummedTile
        yield kind(formula, make_batch(case, part, do.device), q, k, v, do, params)


def empty(formula: Formula, x: Tensors, dtype: torch.dtype) -> tuple[Results, Tensor]:
    """Zeros: rows of out, dq, dk, dv in ``dtype``, and dparams (n_params, H) in float64."""
    case = formula.case
    shapes = {"out": x.do, "dq": x.x.q, "dk": x.x.k, "dv": x.x.v}
    found = {name: torch.zeros_like(as_rows(case, t.detach()), dtype=dtype) for name, t in shapes.items()}
    return found, torch.zeros(len(x.params), case.heads, dtype=torch.float64, device=x.do.device)


def as_given(x: Tensors, dparams: Tensor) -> Tensor:
    """(n_params, H) as the gradients of the params come: one number for a param of shape ()."""
    parts = [row if p.dim() else row.sum(0, keepdim=True) for p, row in zip(x.params, dparams, strict=True)]
    return torch.cat(parts) if parts else dparams.new_zeros(0)


@torch.no_grad()
def exact(formula: Formula, x: Tensors, visit: Callable[[Tile], None] = lambda tile: None) -> Truth:
    """The truth in float64. ``visit`` is shown every tile.

    Where a score is within float32's error of a step of f or f' (0, for relu), either side is right, and one pair that
    falls on the other one would outweigh all roundings of its row: such rows are not decided.
    """
    found, dparams = empty(formula, x, torch.float64)
    decided = {name: torch.ones_like(t[..., :1], dtype=torch.bool) for name, t in found.items()}
    sure = torch.ones_like(dparams, dtype=torch.bool)
    unit = torch.finfo(x.do.dtype).eps / 2
    noise = dict.fromkeys((*found, "dparams"), 0.0)
    for tile in tiles(formula, x, torch.float64):
        tile.add_to(found, dparams)
        _mark_steps(tile, unit, decided, sure)
        noise = {name: noise[name] + more for name, more in tile.noise().items()}
        visit(tile)
    found["dparams"] = as_given(x, dparams)
    decided["dparams"] = as_given(x, (~sure).double()) == 0
    return Truth(found, decided, noise)


def _mark_steps(tile: Tile, unit: float, decided: Results, sure: Tensor) -> None:
    """Unmark what a step of f or of a derivative near a score makes undecided."""
    h = tile.score_error()
    above, below = (tile.formula.derivatives(tile.s + sign * h, tile.params) for sign in (1, -1))

    def steps(i: int, value: Tensor) -> Tensor:
        """Pairs of which the rounding of the score costs as much as a fourth of a rounding to 16 bits."""
        usual = tile.masked(value).square().mean((-2, -1), keepdim=True).sqrt()
        near = (above[i] - below[i]).abs() <= unit / 4 * (value.abs() + usual)
        return ~near & tile.batch.keep

    at_step = steps(0, tile.p) | steps(1, tile.slope)  # (n, H, Lq, Lk)
    for i, by_param in enumerate(tile.by_params):
        sure[i] &= ~steps(2 + i, by_param).any(-1).any(-1).any(0)
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
    dtype = x.do.dtype
    found, dparams = empty(formula, x, torch.float32)
    with true_float32():
        for tile in tiles(formula, x, torch.float32):
            tile.add_to(found, dparams, rounded=dtype)
    return {**{name: t.to(dtype) for name, t in found.items()}, "dparams": as_given(x, dparams).float()}


@contextmanager
def true_float32() -> Iterator[None]:
    """Products of float32 are IEEE, not TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---- plain PyTorch ---------------------------------------------------------------------------------------------------
class _RoundedProduct(torch.autograd.Function):
    """a @ b in float32, rounded once: what torch's own 16-bit product gives on the CPU, 200 times faster."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a.float() @ b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (a, b), do = ctx.saved_tensors, grads[0].float()
        return (do @ b.float().mT).to(a.dtype), (a.float().mT @ do).to(a.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    narrow_on_cpu = a.device.type == "cpu" and a.dtype in (torch.bfloat16, torch.float16)
    return _RoundedProduct.apply(a, b) if narrow_on_cpu else a @ b


def plain(formula: Formula, x: Tensors) -> Results:
    """Eager PyTorch as one writes it, everything in the dtype of the inputs, with gradients by autograd."""
    case, dtype = formula.case, x.do.dtype
    found, dparams = empty(formula, x, torch.float64)  # sums over sequences cost nothing: shared queries, params
    q, k, v, do = (as_rows(case, t.detach()) for t in (*x.x.leaves, x.do))
    params = [p.detach().to(dtype).expand(case.heads)[:, None, None] for p in x.params]
    for part in batches(case):
        batch = make_batch(case, part, do.device)
        inputs = {"dq": q[batch.q], "dk": k[batch.k], "dv": v[batch.k]}  # (n, L, H, D)
        leaves = [t.detach().requires_grad_() for t in (*inputs.values(), *params)]
        heads = [t.transpose(1, 2) for t in leaves[:3]]
        heads[1:] = [t.repeat_interleave(formula.group, dim=1) for t in heads[1:]]
        p = _weights(formula, _product(heads[0], heads[1].mT) * formula.scale, batch.keep, leaves[3:])
        out = (_product(p, heads[2]) * formula.out_scale).transpose(1, 2)
        do_rows = torch.where(batch.real_q[:, :, None, None], do[batch.out], 0.0).to(dtype)
        grads = torch.autograd.grad(out, leaves, do_rows, allow_unused=True, materialize_grads=True)
        for name, t in zip(("out", *inputs), (out.detach(), *grads[:3]), strict=True):
            rows, real = batch.rows(name)
            found[name].index_add_(0, rows[real], t[real].double())
        for total, grad in zip(dparams, grads[3:], strict=True):
            total += grad.flatten().double()
    found["dparams"] = as_given(x, dparams)
    return {name: t.to(dtype) for name, t in found.items()}


def _weights(formula: Formula, s: Tensor, keep: Tensor, params: list[Tensor]) -> Tensor:
    zero = torch.zeros((), dtype=s.dtype, device=s.device)
    if formula.normalize == "softmax":
        lowest = torch.finfo(s.dtype).min
        return torch.where(keep, s.masked_fill(~keep, lowest).softmax(-1), zero)
    p = torch.where(keep, formula.value(s, *params), zero)
    if formula.normalize is None:
        return p
    d = (p.abs() if formula.normalize == "abs" else p).sum(-1, keepdim=True)
    return torch.where(d == 0, zero, p / d)


# ---- gdpa ------------------------------------------------------------------------------------------------------------
def ours(formula: Formula, x: Tensors, activation: Any, **kwargs: Any) -> Results:
    """gdpa's; keyword arguments go to the API."""
    settings = {"params": x.params, "scale": formula.scale, "out_scale": formula.out_scale, **kwargs}
    out = cases.call(formula.case, x.x, activation, **settings)
    inputs = (*x.x.leaves, *x.params)
    grads: Any = [torch.zeros_like(t) for t in inputs]
    if out.requires_grad:
        grads = torch.autograd.grad(out, inputs, x.do, allow_unused=True, materialize_grads=True)
    rows = [as_rows(formula.case, t.detach()) for t in (out, *grads[:3])]
    dparams = torch.cat([g.reshape(-1) for g in grads[3:]]) if x.params else out.new_zeros(0)
    return {**dict(zip(("out", "dq", "dk", "dv"), rows, strict=True)), "dparams": dparams}
