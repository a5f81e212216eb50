"""Who is measured: gdpa's backends, and what a person would use instead.

A new contender is an object with ``name``, ``function`` (what it computes in place of the function asked for, or
None) and ``prepare``; put it into ``contenders()``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import gdpa
from gdpa import backends
from gdpa.bench.contenders import layouts
from gdpa.bench.contenders.contender import Contender, Prepared
from gdpa.bench.contenders.flex import FlexLog
from gdpa.bench.contenders.plain import Eager, EagerCompiled
from gdpa.bench.contenders.softmax import FlashAttention, OurSoftmax, Sdpa
from gdpa.bench.contenders.varlen import TorchVarlen
from gdpa.errors import UnsupportedProblemError
from gdpa.functions.activation import from_name
from gdpa.masks.band import Band
from gdpa.problem import Operands, make_problem
from gdpa.spec import Loaded
from gdpa.testing.cases import Case, Inputs

EXACT, FAST = "exact", "fast"
# These run where they are asked for by name: the reference is a plain loop, the rest take seconds to compile per case.
ONLY_BY_NAME = {"cuda": {"reference"}, "cpu": {"reference", "eager-compiled", "flex-log"}}


@dataclass(frozen=True)
class Ours:
    """A backend of gdpa in one precision and layout (None: the case's own). Its errors end the run."""

    name: str
    function: str | None = None
    precision: str = EXACT
    layout: str | None = None

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        layout = self.layout or layouts.native(case)
        reason = layouts.why_not(case, layout)
        if reason is not None:
            return reason
        arranged = layouts.arrange(case, x, layout)
        act, params = function.compile(), function.leaves(x.q)

        def forward() -> Tensor:
            with gdpa.precision(self.precision):
                return arranged.call(act, params=params, backend=self.name)

        try:
            forward()
        except UnsupportedProblemError as e:
            return str(e)
        return Prepared(forward, (*arranged.leaves, *params), arranged.pieces)


def precisions() -> tuple[str, ...]:
    """What gdpa offers."""
    return (EXACT, FAST)


def contenders(device: torch.device, dtype: torch.dtype, only: tuple[str, ...] = ()) -> list[Contender]:
    """Everybody who can run on ``device``, or those named in ``only``."""
    everybody: list[Contender] = [Ours(name) for name in backends.BACKENDS]
    everybody += [Eager(), EagerCompiled(), FlexLog()]
    if device.type == "cuda":
        everybody += [
            OurSoftmax(),
            Sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
            Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION),
            TorchVarlen(),
            FlashAttention(),
        ]
    if not only:
        idle = {name for name in backends.BACKENDS if why_not(name, device, dtype) is not None}
        return [c for c in everybody if c.name not in idle | ONLY_BY_NAME[device.type]]
    known = {c.name: c for c in everybody}
    for name in only:
        if name not in known:
            raise ValueError(f"backend {name!r} is unknown here; known: {', '.join(known)}")
    return [known[name] for name in only]


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot run an ordinary problem on ``device``; None if it can."""
    q = torch.empty(1, 1, 16, 64, device=device, dtype=dtype)
    return backends.get(name).supports(make_problem(Operands(q, q, q), (from_name("identity"),), 1.0, 1.0, Band()))
