"""torch.compile(fullgraph=True) of whole models: no graph break, and one graph however long the histories are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

from gdpa.data import Batch
from gdpa.models import Model
from gdpa.models.cores import PaddedEager, PaddedSoftmax, replace
from models.cases import batch, made

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
# As many samples, but other totals and other longest histories; no two sizes of the first are equal by chance.
LENGTHS = [(5, 0, 3, 13, 2, 4, 1), (2, 9, 4, 4, 1, 0, 0), (7, 7, 0, 0, 3, 2, 30), (2, 0, 0, 0, 0, 0, 1)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
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


@pytest.mark.parametrize("model", ["interformer", "dlrm", "din", "transformer"])
def test_training_step_is_one_graph(model: str) -> None:
    one_graph_for_all(made(model))


def test_kunlun_with_sequences_of_different_sizes() -> None:
    one_graph_for_all(made("kunlun", "two"), "two")


@pytest.mark.parametrize("core", [PaddedEager, PaddedSoftmax])
def test_other_cores(core: Any) -> None:
    one_graph_for_all(replace(made("interformer-one-way"), core))
