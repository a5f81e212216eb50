"""torch.compile(fullgraph=True): no graph break, so no waiting for a device, and one graph for all lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import gdpa.nn as gnn
from nn.cases import C, context, made, rows, values
from support import FULL

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAMES = ["self-softmax", "self-biased", "pma-norm", "pffn", "gating", "masknet"]
OTHERS = ["self-heads", "self-hstu", "self-norm", "seeds", "hierarchical"]  # made of the same parts
# In the first no two sizes are equal, nor do they stay the same in the second: Dynamo would take that for a rule.
BATCHES = [(5, 0, 3, 12, 2, 4, 1), (2, 9, 4, 4, 1), (7, 7, 0, 0, 3, 2), (1, 30)]
FORMS = {
    "jagged": lambda v, n: gnn.Jagged.from_lengths(v, torch.tensor(n)),
    "bounded": lambda v, n: gnn.Jagged.from_lengths(v, torch.tensor(n), max(n)),
    "nested": lambda v, n: gnn.Jagged.from_lengths(v, torch.tensor(n)).to_nested(),
    "dense": lambda v, n: v[: len(v) // 2 * 2].view(2, -1, C),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same_as_eager(name: str, layer: nn.Module, step: Any, form: str, lengths: tuple[int, ...]) -> None:
    x = FORMS[form](values(lengths), lengths)
    extra = context(name, 2 if form == "dense" else len(lengths))
    grads = []
    for run in (step, layer):
        y = rows(run(x, *extra))
        grads.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", NAMES + OTHERS if FULL else NAMES)
def test_one_graph_for_all_lengths(name: str) -> None:
    layer = made(name)
    step = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    # With dynamic=True Dynamo traces everything once with its numbers left open, to find that scales must be known.
    with torch._dynamo.config.patch(specialize_float=True):
        same_as_eager(name, layer, step, "jagged", BATCHES[0])
    with torch._dynamo.config.patch(specialize_float=True, error_on_recompile=True):
        for lengths in BATCHES[1:]:
            same_as_eager(name, layer, step, "jagged", lengths)


FORMED = [("self-hstu", "nested"), ("pffn", "bounded")]
OTHERS_FORMED = [("self-hstu", "jagged"), ("self-hstu", "bounded"), ("self-hstu", "dense"), ("pma", "nested")]


@pytest.mark.parametrize(("name", "form"), FORMED + OTHERS_FORMED if FULL else FORMED)
def test_dynamo_learns_once_that_lengths_change(name: str, form: str) -> None:
    layer, counter = made(name), CompileCounterWithBackend("aot_eager")
    step = torch.compile(layer, fullgraph=True, backend=counter)
    for lengths in BATCHES:
        same_as_eager(name, layer, step, form, lengths)
    assert counter.frame_count <= 2
