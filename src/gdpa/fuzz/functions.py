"""The functions that calls are drawn with: every built-in, and some as people write them. Those of positions are in
placed.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.functions.builtin import BUILTINS
from gdpa.fuzz import placed
from gdpa.fuzz.placed import Draw, Tables


@dataclass(frozen=True)
class Function:
    """``parts`` has one function, or several that take turns over the query heads.

    ``params`` are typical values. ``spread`` is the standard deviation of scores that keeps all results within
    float16. ``at_zero``: defined where scores are exactly 0, as with scale = 0. ``positive``: its row sums are well
    conditioned. (Those of both signs may come close to 0, and functions that are 0 in places leave a sum to one key.)
    ``exponential``: exp is its last operation, so that row sums are returned as logarithms. ``tables`` makes tables for
    a call, and ``at`` are the positions that it takes by keyword. ``names``: what the API is given in place of parts.
    """

    name: str
    parts: tuple[Callable[..., Tensor], ...]
    params: tuple[float, ...] = ()
    spread: float = 2.5
    at_zero: bool = True
    builtin: bool = False
    positive: bool = False
    exponential: bool = False
    names: tuple[str, ...] = ()
    tables: Callable[[Draw], Tables] | None = None

    @property
    def at(self) -> tuple[str, ...]:
        """Built-ins have no keyword-only arguments, and some have no signature."""
        if self.builtin or len(self.parts) > 1:
            return ()
        found = inspect.signature(self.parts[0]).parameters.values()
        return tuple(p.name for p in found if p.kind == p.KEYWORD_ONLY)

    def activation(self, heads: int) -> Any:
        """What the API is given."""
        given: list[Any] = list(self.names or self.parts)
        return given[0] if len(given) == 1 else [given[h % len(given)] for h in range(heads)]

    def __call__(self, s: Tensor, *more: Any, **at: Tensor) -> Tensor:
        """f(s) for s (..., H, Lq, Lk) and params that have its shape; of positions, see gdpa.exactness' Formula."""
        if len(self.parts) == 1:
            return self.parts[0](s.clone(), *more, **at)  # cloned: a function may work in place
        heads = [self.parts[h % len(self.parts)](s[..., h, :, :].clone()) for h in range(s.shape[-3])]
        return torch.stack(heads, dim=-3)


def squared_softplus(s: Tensor) -> Tensor:
    return F.softplus(s) ** 2


def in_place(s: Tensor) -> Tensor:
    return s.mul_(0.5).clamp_(-1.5, 2.5).add_(0.25)


def gaussian(s: Tensor) -> Tensor:
    return torch.exp(-(s**2) / 8)


def prelu(s: Tensor, slope: Tensor) -> Tensor:
    return torch.where(s > 0, s, slope * s)


def gelu_with_temperature(s: Tensor, temperature: Tensor, shift: Tensor) -> Tensor:
    return F.gelu(s / temperature + shift)


def scaled_sigmoid(s: Tensor, height: Tensor, slope: Tensor, shift: Tensor) -> Tensor:
    return height * torch.sigmoid(slope * s + shift)


def log_of_size(s: Tensor) -> Tensor:
    return torch.log(s.abs())


def nan_at_zero(s: Tensor) -> Tensor:
    """A sigmoid, except where tiles are padded with zeros. (With (s - s) / s it would be a test of fused products, too:
    its derivative is 1/s - 1/s, of which a kernel that rounds once leaves a rounding of 1/s.)"""
    return torch.sigmoid(s) + torch.where(s == 0, torch.nan, 0.0)


_USER = (
    Function("squared_softplus", (squared_softplus,), positive=True),
    Function("in_place", (in_place,)),
    Function("gaussian", (gaussian,), positive=True, exponential=True),
    Function("prelu", (prelu,), params=(0.2,)),
    Function("gelu_with_temperature", (gelu_with_temperature,), params=(0.7, 0.3)),
    Function("scaled_sigmoid", (scaled_sigmoid,), params=(0.8, 1.2, -0.3), positive=True),
    Function("log_of_size", (log_of_size,), at_zero=False),
    Function("nan_at_zero", (nan_at_zero,), at_zero=False),
    Function("gelu|sigmoid", (F.gelu, torch.sigmoid)),
    Function("relu|softplus|silu", (F.relu, F.softplus, F.silu)),
)
_POSITIVE = ("sigmoid", "softplus", "exp")
_STEEP = _EXPONENTIAL = ("exp", "t5")


def _spread(name: str) -> float:
    return 1.0 if name in _STEEP else 2.5


_BUILTIN = tuple(
    Function(
        fn.__name__, (fn,), builtin=True, spread=_spread(fn.__name__), positive=fn.__name__ in _POSITIVE,
        exponential=fn.__name__ in _EXPONENTIAL, names=(fn.__name__,),
    )
    for fn in BUILTINS
)  # fmt: skip
_PLACED = tuple(
    Function(
        fn.__name__, (fn,), params=(0.8,) if fn is placed.decaying else (), spread=_spread(fn.__name__),
        positive=fn in (placed.clamped, placed.sequence_gate, placed.t5), exponential=fn.__name__ in _EXPONENTIAL,
        tables=tables,
    )
    for fn, tables in placed.TABLES.items()
)  # fmt: skip

MENU: dict[str, Function] = {f.name: f for f in (*_BUILTIN, *_USER)}
PLACED: dict[str, Function] = {f.name: f for f in _PLACED}
# With row sums only; the second one is divided in another way in each head.
SOFTMAX = Function("softmax", (torch.exp,), builtin=True, positive=True, exponential=True, names=("softmax",))
MIXED = Function(
    "softmax|silu|sigmoid", (torch.exp, F.silu, torch.sigmoid), builtin=True, names=("softmax", "silu", "sigmoid")
)
ALL = {**MENU, **PLACED, SOFTMAX.name: SOFTMAX, MIXED.name: MIXED}
