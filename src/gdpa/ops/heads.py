"""Per-head functions: a problem whose heads differ, as problems whose heads agree, over views.

Backends only ever see one function. A list of functions is grouped by function into slices of heads; each slice is an
ordinary problem on strided views of the same tensors, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gdpa.functions.activation import Activation
from gdpa.problem import PLAIN, Operands, Problem, kept


@dataclass(frozen=True)
class HeadSlice:
    """Query heads ``q`` and key heads ``k`` that share ``activation``, and how they are normalised."""

    activation: Activation
    q: slice
    k: slice
    norm: str = PLAIN

    def problem(self, whole: Problem) -> Problem:
        heads = _count(self.q), _count(self.k)
        return _over_heads(whole, self.activation, *heads, self.q.start, self.q.step or 1, self.norm)

    def operands(self, x: Operands) -> Operands:
        params = x.params[:, self.q].contiguous() if x.params is not None else None  # kernels step by one head
        sink = x.sink[self.q].contiguous() if x.sink is not None and self.norm != PLAIN else None
        return replace(x, q=x.q[:, self.q], k=x.k[:, self.k], v=x.v[:, self.k], params=params, sink=sink)


@kept
def _over_heads(
    whole: Problem, activation: Activation, heads_q: int, heads_k: int, first_head: int, head_step: int, norm: str
) -> Problem:
    return whole.with_heads(activation, heads_q, heads_k, first_head, head_step, norm)


def _count(s: slice) -> int:
    return len(range(s.start, s.stop, s.step or 1))


@kept
def head_slices(problem: Problem) -> list[HeadSlice]:
    """Slices that cover every query head of a problem whose heads differ once. With GQA a key head may be in several
    (its gradients then add up)."""
    group = problem.group
    kinds = list(zip(problem.activations, problem.norms or [PLAIN] * len(problem.activations), strict=True))
    found = []
    for act, norm in dict.fromkeys(kinds):  # each function once, in order of appearance
        heads = [h for h, kind in enumerate(kinds) if kind == (act, norm)]
        if group == 1:
            found += [HeadSlice(act, s, s, norm) for s in progressions(heads)]
        else:
            for kv in range(problem.heads_k):
                mine = [h for h in heads if h // group == kv]
                found += [HeadSlice(act, s, slice(kv, kv + 1, 1), norm) for s in progressions(mine)]
    return found


def progressions(heads: list[int]) -> Iterator[slice]:
    """``heads`` (ascending) as few slices with a step, greedily: [0, 2, 4, 5] -> 0:5:2, 5:6:1."""
    i = 0
    while i < len(heads):
        step = heads[i + 1] - heads[i] if i + 1 < len(heads) else 1
        j = i + 1
        while j < len(heads) and heads[j] - heads[j - 1] == step:
            j += 1
        yield slice(heads[i], heads[j - 1] + 1, step)
        i = j


def shared_key_heads(slices: list[HeadSlice], heads_k: int) -> bool:
    """Whether some key head is in more than one slice, so that dk and dv must be summed over slices."""
    used = [h for s in slices for h in range(s.k.start, s.k.stop, s.k.step or 1)]
    return len(used) > heads_k
