"""Contenders written in plain PyTorch: eager, and the same through torch.compile.

Jagged cases are padded to the longest sequence beforehand, which is not timed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gdpa.bench.contenders import eager
from gdpa.bench.contenders.compiling import prepare_compiled
from gdpa.bench.contenders.contender import NoRoom, Prepared
from gdpa.bench.machine import free_memory
from gdpa.spec import Loaded
from gdpa.testing.cases import Case, Inputs


@dataclass(frozen=True)
class Eager:
    """Plain PyTorch."""

    name: str = "eager"
    function: str | None = None
    # s, p and the masked p are kept for a backward, which adds two gradients and a temporary of f; and the graph that
    # the backward is timed on is alive while forward and backward are timed together.
    matrices: int = 8

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        reason = too_large(case, x, self.matrices)
        if reason is not None:
            return reason
        q, k, v, mask = eager.padded(case, x)
        f, params = function.function, function.leaves(q)
        leaves, pieces = (q, k, v, *params), eager.padded_pieces(case)
        return Prepared(lambda: eager.attention(q, k, v, lambda s: f(s, *params), mask), leaves, pieces)


@dataclass(frozen=True)
class EagerCompiled:
    """The same through torch.compile, for exactly these shapes: it fuses f and its derivative, not the products."""

    name: str = "eager-compiled"
    function: str | None = None
    # s and p from the forward, p, dp and ds in the backward, and those of the graph that is kept (see Eager).
    matrices: int = 6

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        reason = too_large(case, x, self.matrices)
        if reason is not None:
            return reason
        q, k, v, mask = eager.padded(case, x)
        f, params = function.function, function.leaves(q)

        def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *params: Tensor) -> Tensor:
            return eager.attention(q, k, v, lambda s: f(s, *params), mask)

        leaves, pieces = (q, k, v, *params), eager.padded_pieces(case)
        return prepare_compiled(attention, lambda: (q, k, v, mask, *params), leaves, pieces, "torch.compile")


def too_large(case: Case, x: Inputs, matrices: int) -> str | None:
    """Why ``matrices`` padded Lq x Lk matrices do not fit; None if they do."""
    needed, free = matrices * eager.matrix_bytes(case, x.q.element_size()), free_memory(x.q.device)
    if needed <= 0.8 * free:
        return None
    return NoRoom(f"its Lq x Lk matrices need about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free")
