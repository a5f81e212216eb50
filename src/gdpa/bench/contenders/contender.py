"""What a contender is: it prepares a case to be timed, or says in words why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gdpa.spec import Loaded
from gdpa.testing.cases import Case, Inputs, sequence


@dataclass(frozen=True)
class Pieces:
    """Where one sequence is in a contender's results.

    ``out``: (H, Lq, Dv) of sequence b, a view of the output. ``grads``: its dq (H, Lq, D), dk and dv (Hk, Lk, .) from
    the gradients of all leaves.
    """

    out: Callable[[Tensor, int], Tensor]
    grads: Callable[[Sequence[Tensor], int], tuple[Tensor, Tensor, Tensor]]


def native_pieces(case: Case, x: Inputs) -> Pieces:
    """Results in the layout of the case's inputs."""

    def out(t: Tensor, b: int) -> Tensor:
        start = sum(case.len_q[:b])
        return t[start : start + case.len_q[b]].transpose(0, 1) if case.varlen else t[b]

    def grads(found: Sequence[Tensor], b: int) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = found[:3]  # params come after them
        return (
            sequence(case, dq, x.cu_q, b, shared=case.shared),
            sequence(case, dk, x.cu_k, b),
            sequence(case, dv, x.cu_k, b),
        )

    return Pieces(out, grads)


@dataclass(frozen=True)
class Prepared:
    """A forward pass ready to be timed, and the tensors its backward differentiates.

    Without ``pieces`` nobody can tell its error.
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    pieces: Pieces | None = None


class NoRoom(str):
    """A reason that is about memory which others hold now, and may not hold later."""


class Contender(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def function(self) -> str | None:
        """What it computes whatever function is asked for; None if it computes that."""

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        """The case ready to run, or the reason in words why it cannot be."""


def tried(prepared: Prepared, whose: str) -> Prepared | str:
    """``prepared`` after one forward and one backward, or what went wrong in them.

    For code that is not gdpa's: a compiler that fails on one case is a line in the report, not the end of the run.
    Running out of memory is left to the caller, who says so for every contender.
    """
    try:
        out = prepared.forward()
        torch.autograd.grad(out, prepared.leaves, torch.ones_like(out), retain_graph=True)  # as it is timed
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        return f"{whose} says: {in_one_line(e)}"
    return prepared


def in_one_line(error: Exception, longest: int = 200) -> str:
    """The kind of an error and the first line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= longest else f"{text[:longest]}..."
