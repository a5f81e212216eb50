"""torch.compile(fullgraph=True) of whole models: no graph break, and one graph however long the histories are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

import gdpa.nn as gnn
from gdpa.data import Batch
from gdpa.models import Model
from gdpa.models.cores import PaddedEager, PaddedSoftmax, replace
from models.cases import batch, made
from support import FULL

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
# As many samples, but other totals and other longest histories; no two sizes of the first are equal by chance.
LENGTHS = [(5, 0, 3, 13, 2, 4, 1), (2, 9, 4, 4, 1, 0, 0), (7, 7, 0, 0, 3, 2, 30)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    # With dynamic=True Dynamo traces everything once with its numbers left open, to find that scales must be known.
    with torch._dynamo.config.patch(specialize_float=True):
        yield
    torch._dynamo.reset()


def step(model: Model, b: Batch) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(b), b.labels.double())


def loss_and_gradients(run: Any, model: Model, b: Batch) -> list[torch.Tensor]:
    loss = run(model, b)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def one_graph_for_all(model: Model, layout: str = "usual") -> None:
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, lengths in enumerate(LENGTHS):
        b = batch(layout, lengths, seed=i)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = loss_and_gradients(compiled, model, b)
        torch.testing.assert_close(got, loss_and_gradients(step, model, b))


# The layers of interformer and transformer are among those of the others; bench/test_models.py has interformer too.
@pytest.mark.parametrize(
    "model", ["kunlun-small", "din", *(["hstu-small", "interformer-small", "transformer-small"] if FULL else [])]
)
def test_training_step_is_one_graph(model: str) -> None:
    one_graph_for_all(made(model))


class Attends(nn.Module):
    """All three ways in which layers call a core: generated keys, packed, shared queries."""

    def __init__(self) -> None:
        super().__init__()
        self.pffn = gnn.PFFN(8, 2, 3, context_tokens=1, context_dim=2, dtype=torch.float64)
        self.attention = gnn.SelfAttention(8, 2, window=(2, 2), dtype=torch.float64)
        self.pool = gnn.SeedPooling(8, 2, 2, dtype=torch.float64)

    def forward(self, rows: gnn.Jagged, context: torch.Tensor) -> torch.Tensor:
        return self.pool(self.attention(self.pffn(rows, context)))


@pytest.mark.skipif(not FULL, reason="only with the full grid: bench/test_models.py compiles padded contenders")
@pytest.mark.parametrize("core", [PaddedEager, PaddedSoftmax])
def test_other_cores(core: Any) -> None:
    model = replace(Attends(), core)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, lengths in enumerate(LENGTHS):
        rows = torch.randn(sum(lengths), 8, dtype=torch.float64)
        x = gnn.Jagged.from_lengths(rows, torch.tensor(lengths), max(lengths))
        context = torch.randn(len(lengths), 1, 2, dtype=torch.float64)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = compiled(x, context)
            gradients = torch.autograd.grad(got.square().sum(), list(model.parameters()))
        want = model(x, context)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(gradients, torch.autograd.grad(want.square().sum(), list(model.parameters())))
