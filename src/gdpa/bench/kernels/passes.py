"""The three passes that are measured: forward, backward on a prepared graph, and both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gdpa.bench.contenders.contender import Prepared
from gdpa.bench.rates import Rates, floor_ms
from gdpa.testing.cases import Case

PASSES = ("fwd", "bwd", "both")


def pass_functions(prepared: Prepared) -> dict[str, Callable[[], object]]:
    """A function for each pass. The forward builds a graph, as in training; the backward keeps it, to run again."""
    out = prepared.forward()
    grad = torch.randn_like(out)

    def backward(of: Tensor, keep: bool) -> object:
        return torch.autograd.grad(of, prepared.leaves, grad, retain_graph=keep)

    return {
        "fwd": prepared.forward,
        "bwd": lambda: backward(out, True),
        "both": lambda: backward(prepared.forward(), False),
    }


def flops(case: Case, which: str) -> int:
    """Of pairs that the band keeps, by the same count for every contender: padding is nobody's achievement."""
    parts = {"fwd": (False,), "bwd": (True,), "both": (False, True)}[which]
    return sum(case.flops(backward) for backward in parts)


def floor(case: Case, which: str, itemsize: int, rates: Rates) -> float:
    """Milliseconds that these rates allow at best; forward and backward are separate passes over memory."""
    parts = {"fwd": (False,), "bwd": (True,), "both": (False, True)}[which]
    return sum(floor_ms(case.flops(b), case.bytes(itemsize, b), rates) for b in parts)


def results_bytes(case: Case, which: str, itemsize: int) -> int:
    """What a pass must leave behind: the output, the gradients of q, k, v, or both."""
    n = case.elements()
    gradients = n["q"] + n["k"] + n["v"]
    return itemsize * (n["out"] if which == "fwd" else n["out"] + gradients)
