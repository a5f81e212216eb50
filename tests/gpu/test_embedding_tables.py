"""Gradients of tables by row on a GPU: against float64, however ids lie; without waiting for the host; in a graph; in a
compiled model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gdpa import data, models
from gdpa.bench.models.contenders import EVERY_KERNEL
from gdpa.bench.models.step import Trainer
from gdpa.rowwise.tables import Column, sum_by_row
from gdpa.train.run.rowwise import RowwiseAdam

pytestmark = pytest.mark.gpu
SIZES, DIM = (3000, 50), 384


def columns(ids: int | None, dtype: torch.dtype) -> list[Column]:
    made = ((t, torch.randint(ids or SIZES[t], (n,), device="cuda")) for t, n in ((0, 20_000), (1, 9_999), (0, 77)))
    return [Column(t, found, torch.randn(found.shape[0], DIM, device="cuda").to(dtype)) for t, found in made]


@pytest.mark.parametrize("ids", [None, 20, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums(ids: int | None, dtype: torch.dtype) -> None:
    given = columns(ids, dtype)
    sums, again = sum_by_row(given, SIZES), sum_by_row(given, SIZES)
    assert sums is not None
    assert again is not None
    for table, size in enumerate(SIZES):
        want = torch.zeros(size, DIM, dtype=torch.float64, device="cuda")
        for column in given:
            if column.table == table:
                want.index_add_(0, column.ids, column.rows.double())
        first, last = sums.bounds[table : table + 2].tolist()
        read = sums.keys[first:last].long() - sums.starts[table]
        assert torch.equal(read, (want != 0).any(1).nonzero()[:, 0])
        assert float((sums.sums[first:last].double() - want[read]).norm() / want.norm()) < 2e-6
        assert torch.equal(sums.sums[first:last], again.sums[first:last])


def test_dense_gradient() -> None:
    ids, rows = torch.randint(50, (9_999,), device="cuda"), torch.randn(9_999, DIM, device="cuda").bfloat16()
    want = torch.zeros(60, DIM, dtype=torch.float64, device="cuda").index_add_(0, ids, rows.double())
    found = torch.ops.gdpa.embedding_backward(rows, ids, 60, torch.float32)
    assert float((found.double() - want).norm() / want.norm()) < 2e-6
    assert torch.equal(found, torch.ops.gdpa.embedding_backward(rows, ids, 60, torch.float32))


def test_no_syncs_and_a_graph() -> None:
    """Replayed on other ids and gradients it is the step itself, to the last bit."""
    tables = [torch.nn.Parameter(torch.randn(size, DIM, device="cuda")) for size in SIZES]
    given, optimizer = columns(None, torch.bfloat16), RowwiseAdam(tables, lr=0.01)

    def step() -> None:
        sums = sum_by_row(given, SIZES)
        assert sums is not None
        optimizer._launch(list(enumerate(tables)), sums, sums.norm, dict.fromkeys(tables, optimizer.param_groups[0]))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for column in given:
        column.rows.normal_()
        column.ids.random_(SIZES[column.table])
    held = [t for table in tables for t in (table.data, *optimizer.state[table].values())]
    before = [t.clone() for t in held]
    graph.replay()
    after = [t.clone() for t in held]
    for t, old in zip(held, before, strict=True):
        t.copy_(old)
    step()
    assert all(map(torch.equal, held, after))
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_learns_by_row(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log = data.SyntheticLog(seed=1, items=500, longest=10)
    batches = [batch.to("cuda") for _, batch in zip(range(2), data.batches(log, 64), strict=False)]
    losses: list[Tensor] = []
    for where in ("on", "off"):
        monkeypatch.setattr("gdpa.rowwise.where", where)
        torch.manual_seed(0)
        model = models.build("transformer", models.Features.of(log), dim=32, device="cuda")
        as_it_is = not compiled or where == "off"  # sparse gradients do not go with one graph
        trainer = Trainer(model, torch.device("cuda"), torch.float32, not as_it_is, EVERY_KERNEL, "rowwise_adam")
        trainer.start(batches)
        losses.append(torch.stack([trainer() for _ in range(6)]))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
