"""A traced function: its graphs, its name and its key. The compiler reads this; gdpa.Activation is a subclass."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from gdpa.functions.graph import Graph
from gdpa.functions.isolation import isolated
from gdpa.functions.passes.bounds import is_finite_at_zero
from gdpa.functions.passes.expand import expand
from gdpa.functions.places.names import TableKind
from gdpa.functions.places.program import Places, Program


class TracedFunction:
    """f(s, *params), recorded by torch, and the graph of its value and derivatives."""

    def __init__(
        self, name: str, key: str, traced: fx.GraphModule, joint: Graph, triton: Any = None,
        placed: Placed | None = None, part_of: TracedFunction | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.key = key
        self.joint = joint  # of a placed function: of the score, params and leaves
        self.triton = triton
        self.placed = placed
        self.part_of = part_of  # the function of scores and leaves whose outer part this is (see Shift)
        self._traced = traced
        self.n_params = joint.n_inputs - 1 - (placed.n_leaves if placed else 0)
        self.derived: dict[Hashable, Any] = {}  # what was made of it (see kept.kept_with_activation)
        self.plans: dict[Hashable, Any] = {}  # of calls with it (see gdpa.calling.plans)
        self.lock = threading.RLock()  # for whoever makes something of it

    @cached_property
    def finite_at_zero(self) -> bool:
        """Whether f and its derivatives are finite at 0, where zero padding puts the scores, with any sensible params
        (bounds.LARGEST_PARAM), and past the ends of its sequence, if it is placed."""
        if self.placed is not None and not self.placed.program.finite_past_the_end:
            return False
        with isolated():
            # The forms of erfc are finite everywhere, which intervals do not see of a polynomial.
            forms = (expand(self.joint, level, keep_erfc=True) for level in ("approx", "short", "close"))
            leaves = self.placed.n_leaves if self.placed else 0
            return all(is_finite_at_zero(graph, leaves) for graph in (self.joint, *forms))

    @property
    def tables(self) -> tuple[TableKind, ...]:
        return self.placed.program.tables if self.placed else ()

    def eager(self, s: Tensor, *params: Tensor, places: Places | None = None) -> Tensor:
        """f(s, *params) in eager torch, differentiable, in the dtype of ``s``; of a placed function at ``places``."""
        if not isinstance(s, Tensor) or len(params) != self.n_params:
            given = f"{len(params)} params" if isinstance(s, Tensor) else f"{type(s).__name__}"
            raise TypeError(f"{self.name!r} takes a tensor of scores and {self.n_params} params, got {given}")
        if self.placed is not None:
            if places is None:
                raise TypeError(f"{self.name!r} takes positions or tables, which it gets in a call of attention only")
            leaves = enumerate(self.placed.program.evaluate(places, s))
            learned = self.placed.learned
            params += tuple((leaf if i in learned else leaf.detach()).to(s.dtype) for i, leaf in leaves)
        p = self._traced.forward(s, *params)  # not __call__: the hooks of nn.Module are for the user's modules
        return p.to(s.dtype).expand_as(s)

    __call__ = eager


@dataclass(frozen=True)
class Placed:
    """What makes a function depend on where a score stands (see places/split.py)."""

    program: Program  # its results are the leaves, which ``inner`` takes after the params
    learned: tuple[int, ...]  # leaves that are entries of differentiable tables
    inner: TracedFunction
    shift: Shift | None = None

    @property
    def n_leaves(self) -> int:
        return len(self.program.graph.outputs)


@dataclass(frozen=True)
class Shift:
    """A placed function that is ``outer`` of u, a sum of the score and leaves (see places/shift.py)."""

    joint: Graph  # u, du/ds (which is 1) and du/dleaf...
    outer: TracedFunction
