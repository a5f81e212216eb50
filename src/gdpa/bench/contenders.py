"""Who is measured: gdpa's backends, and what a person would use instead. Each prepares a case or says why it cannot.

A new contender is an object with ``name``, ``function`` (what it computes in place of the function asked for, or
None) and ``prepare``; put it into ``contenders()``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gdpa import backends
from gdpa.bench import eager
from gdpa.bench.cases import Case, Inputs, call
from gdpa.bench.machine import free_memory
from gdpa.errors import UnsupportedProblemError
from gdpa.functions.activation import from_name
from gdpa.problem import Band, Operands, make_problem
from gdpa.spec import Loaded


@dataclass(frozen=True)
class Prepared:
    """A forward pass ready to be timed, and the tensors its backward differentiates."""

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]


class Contender(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def function(self) -> str | None:
        """What it computes whatever function is asked for; None if it computes that."""

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        """The case ready to run, or the reason in words why it cannot be."""


@dataclass(frozen=True)
class Ours:
    """A backend of gdpa, given the lengths' maxima as a data pipeline knows them."""

    name: str
    function: str | None = None

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        hints = {"max_seqlen_q": max(case.len_q), "max_seqlen_k": max(case.len_k)} if case.varlen else {}

        act, params = function.compile(), function.leaves(x.q)

        def forward() -> Tensor:
            return call(case, x, act, params=params, backend=self.name, **hints)

        try:
            forward()
        except UnsupportedProblemError as e:
            return str(e)
        return Prepared(forward, (*x.leaves, *params))


@dataclass(frozen=True)
class Eager:
    """Plain PyTorch; jagged cases are padded to the longest sequence beforehand, which is not timed."""

    name: str = "eager"
    function: str | None = None
    # s, p and the masked p are kept for a backward, which adds two gradients and a temporary of f; and the graph that
    # the backward is timed on is alive while forward and backward are timed together.
    matrices: int = 8

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        needed = self.matrices * eager.matrix_bytes(case, x.q.element_size())
        free = free_memory(x.q.device)
        if needed > 0.8 * free:
            return f"its Lq x Lk matrices need about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"
        q, k, v, mask = eager.padded(case, x)
        f, params = function.function, function.leaves(q)
        return Prepared(lambda: eager.attention(q, k, v, lambda s: f(s, *params), mask), (q, k, v, *params))


@dataclass(frozen=True)
class Sdpa:
    """PyTorch's fused softmax attention: another function, but the yardstick for dense kernels."""

    name: str
    backend: SDPBackend
    function: str | None = "softmax"

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        square_causal = case.causal and case.len_q[0] == case.len_k[0] and case.window is None
        if case.varlen or case.shared:
            return "F.scaled_dot_product_attention takes dense tensors"
        if case.band != (None, None) and not square_causal:
            return "F.scaled_dot_product_attention has no window without a mask matrix"

        def forward() -> Tensor:
            with sdpa_kernel([self.backend]):
                return F.scaled_dot_product_attention(*x.leaves, is_causal=case.causal)

        try:
            forward()
        except RuntimeError as e:
            return f"PyTorch says: {str(e).splitlines()[0]}"
        return Prepared(forward, x.leaves)


def contenders(device: torch.device, dtype: torch.dtype, only: tuple[str, ...] = ()) -> list[Contender]:
    """Everybody who can run on ``device``, or those named in ``only``. The reference, a plain loop, only when named."""
    everybody: list[Contender] = [Ours(name) for name in backends.BACKENDS]
    everybody.append(Eager())
    if device.type == "cuda":
        everybody += [Sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION), Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION)]
    if not only:
        idle = {name for name in backends.BACKENDS if why_not(name, device, dtype) is not None}
        return [c for c in everybody if c.name not in idle | {"reference"}]
    known = {c.name: c for c in everybody}
    for name in only:
        if name not in known:
            raise ValueError(f"backend {name!r} is unknown here; known: {', '.join(known)}")
    return [known[name] for name in only]


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot run an ordinary problem on ``device``; None if it can."""
    q = torch.empty(1, 1, 16, 64, device=device, dtype=dtype)
    return backends.get(name).supports(make_problem(Operands(q, q, q), (from_name("identity"),), 1.0, 1.0, Band()))
