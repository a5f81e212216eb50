"""Inputs whose scores have a chosen mean and spread: centred, tiny or narrow scores hide wrong functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gdpa.exactness.layout import operand_shapes, output_shape
from gdpa.testing.cases import Case, Inputs, offsets


@dataclass(frozen=True)
class Scores:
    """The distribution of scale * <q, k>."""

    mean: float = 0.0
    spread: float = 2.5

    @property
    def near(self) -> bool:
        """Whether rule (a) applies."""
        return abs(self.mean) <= 3 and 0.3 <= self.spread <= 4

    @property
    def far(self) -> bool:
        """Whether rule (b) applies."""
        return abs(self.mean) <= 8 and 0.1 <= self.spread <= 4

    def __str__(self) -> str:
        return f"mean {self.mean:g}, spread {self.spread:g}"


@dataclass(frozen=True)
class Tensors:
    """What the API is given, and the gradients of its output and, if they are returned, of its row sums. A sink that is
    a tensor requires a gradient, and so do all float tables, which have one dtype, or none of them."""

    x: Inputs
    do: Tensor
    params: tuple[Tensor, ...] = ()
    tables: tuple[Tensor, ...] = ()
    sink: float | Tensor = 0.0
    mask_tables: tuple[Tensor, ...] = ()
    dsums: Tensor | None = None

    @property
    def learned(self) -> dict[str, tuple[Tensor, ...]]:
        """What has a gradient besides q, k and v, by the name of the result that holds it: float32 numbers, sums over
        all pairs. Params always have a name there, be they none."""
        floats = tuple(t for t in self.tables if t.requires_grad)
        sink = (self.sink,) if isinstance(self.sink, Tensor) else ()
        return {"dparams": self.params, **{n: g for n, g in (("dtables", floats), ("dsink", sink)) if g}}

    def as_held(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """``found`` with the gradients of tables rounded to the tables' own dtype, which may have 16 bits."""
        tables = self.learned.get("dtables", ())
        return {**found, **{name: found[name].to(t.dtype) for name, t in zip(("dtables",), tables, strict=False)}}


def draw(
    case: Case, scores: Scores, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0,
    params: Sequence[Tensor] = (), scale: float | None = None, v_mean: float = 0.0, do_mean: float = 0.0,
) -> Tensors:  # fmt: skip
    """Random inputs of ``case``, rounded to ``dtype``: the scores are whatever the rounded ones give. Params are
    rounded too, though float32, so that code in 16 bits can be given the same ones."""
    rng = torch.Generator(device=device).manual_seed(seed)
    scale = 1 / math.sqrt(case.d) if scale is None else scale
    q, k, v, do = (
        torch.randn(shape, generator=rng, device=device) for shape in (*operand_shapes(case), output_shape(case))
    )
    shape_scores(q, k, scores, scale)
    leaves = [t.to(dtype).requires_grad_() for t in (q, k, v + v_mean)]
    cu_q = offsets(case.len_q, device) if case.packed_q else None
    cu_k = offsets(case.len_k, device) if case.packed_k else None
    given = tuple(p.detach().to(device, dtype).float().requires_grad_() for p in params)
    return Tensors(Inputs(leaves[0], leaves[1], leaves[2], cu_q, cu_k), (do + do_mean).to(dtype), given)


def shape_scores(q: Tensor, k: Tensor, scores: Scores, scale: float) -> None:
    """Give scale * <q, k> the mean and spread of ``scores``, where q and k (..., D) are standard normal numbers.

    An eighth of the columns holds constants, whose product is the mean; the others make the spread. So the mean costs
    no spread, and no entry stands out.
    """
    d = q.shape[-1]
    constant = max(1, d // 8) if scores.mean and scale else 0
    std = math.sqrt(scores.spread / (abs(scale or 1.0) * math.sqrt(max(1, d - constant))))
    q.mul_(std)
    k.mul_(std)
    if constant:
        product = scores.mean / (scale * constant)
        q[..., :constant] = math.sqrt(abs(product))
        k[..., :constant] = math.copysign(math.sqrt(abs(product)), product)
