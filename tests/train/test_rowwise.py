"""Row-wise updates of tables: what a dense update would do, without a dense gradient; saved and continued exactly."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import assert_same_end
from tiny import settings, without_dropout

from gdpa import data, models
from gdpa.data import Inputs
from gdpa.train import ConfigError, train
from gdpa.train.run.rowwise import ROWWISE, Joined, RowwiseAdagrad, RowwiseAdam
from support import INTERPRET, default_dtype, in_turn

OPTIONS = {"dim": 8, "num_heads": 2, "hidden_units": 4, "longest": 6, "hidden": [8]}
UPDATES = ("rowwise_adagrad", "rowwise_adam")
RUN = settings(steps=12, clip=0.5, model={"name": "interformer", "options": OPTIONS}, device="cpu")


def sparse_gradient(generator: torch.Generator, rows: int, table: torch.Tensor) -> torch.Tensor:
    ids = torch.randint(0, table.shape[0], (rows,), generator=generator)  # some of them twice
    values = torch.randn(rows, table.shape[1], generator=generator, dtype=table.dtype)
    return torch.sparse_coo_tensor(ids[None], values, table.shape, check_invariants=True)


def test_adagrad_is_the_dense_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.Parameter(torch.randn(20, 4, dtype=torch.float64, generator=generator))
    expected, total = table.detach().clone(), torch.zeros(20, dtype=torch.float64)
    optimizer = RowwiseAdagrad([table], lr=0.3, eps=1e-4)
    for _ in range(5):
        table.grad = sparse_gradient(generator, 9, table)
        dense = table.grad.to_dense()
        total += dense.pow(2).mean(1)
        expected -= 0.3 * dense / (total.sqrt() + 1e-4)[:, None]
        optimizer.step()
    torch.testing.assert_close(table.detach(), expected, rtol=1e-12, atol=1e-12)


def test_adam_is_adam_where_every_row_is_read() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64, generator=generator))
    dense = torch.nn.Parameter(table.detach().clone())
    ours, adam = RowwiseAdam([table], lr=0.1), torch.optim.Adam([dense], lr=0.1)
    everything = torch.arange(6).repeat(2)
    for _ in range(5):
        values = torch.randn(12, 4, generator=generator, dtype=torch.float64)
        table.grad = torch.sparse_coo_tensor(everything[None], values, table.shape)
        dense.grad = table.grad.to_dense()
        ours.step()
        adam.step()
    torch.testing.assert_close(table, dense, rtol=1e-12, atol=1e-12)


def test_adam_leaves_other_rows_alone() -> None:
    table = torch.nn.Parameter(torch.zeros(4, 2))
    optimizer = RowwiseAdam([table], lr=0.1)
    for rows in ([0, 1], [1], [1]):
        values = torch.ones(len(rows), 2)
        table.grad = torch.sparse_coo_tensor(torch.tensor([rows]), values, table.shape)
        optimizer.step()
        if len(rows) == 2:
            after = table.detach().clone()
    assert torch.equal(table[0], after[0])
    assert torch.equal(table[2:], torch.zeros(2, 2))
    assert (table[1] < after[1]).all()
    before = table.detach().clone()  # a row whose gradient is zero, as of a rank without samples, was not read
    table.grad = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.zeros(2, 2), table.shape)
    optimizer.step()
    assert torch.equal(table, before)


def test_steps_are_counted_whatever_the_default_dtype() -> None:
    """bfloat16 has no 257."""
    table = torch.nn.Parameter(torch.zeros(2, 2))
    with default_dtype(torch.bfloat16):
        optimizer = RowwiseAdam([table], lr=0.1)
        for _ in range(257):
            table.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2, dtype=torch.float32), (2, 2))
            optimizer.step()
    assert optimizer.state[table]["step"].item() == 257


def test_no_dense_gradient_and_the_same_one() -> None:
    log = data.SyntheticLog(seed=1, items=500, longest=10)
    torch.manual_seed(0)
    model = models.build("transformer", models.Features.of(log), dim=8)  # tables that several columns share
    batch: Inputs = next(data.batches(log, 4))
    model(batch).square().sum().backward()
    dense = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.tables.row_gradients = True  # type: ignore[union-attr]
    model(batch).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert p.grad.is_sparse == name.startswith("tables.")
        torch.testing.assert_close(p.grad.to_dense() if p.grad.is_sparse else p.grad, dense[name])
    assert model.tables.of_item.grad.coalesce().values().shape[0] < 100  # type: ignore[union-attr]


@pytest.mark.parametrize("updates", in_turn(UPDATES, 0))
def test_training_is_that_of_dense_gradients(updates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run, with the same optimizer, but dense gradients made sparse behind the clipping: accumulated,
    clipped and scheduled alike."""
    more = {"table_updates": updates, "table_lr": 0.05, "accumulate": 2, "warmup": 3}
    ours = train({**RUN, **more})

    def of_dense(joined: Joined) -> None:
        dense, rows = joined.parts
        for group in rows.param_groups:
            for table in group["params"]:
                read = (table.grad != 0).any(1).nonzero()[:, 0]
                table.grad = torch.sparse_coo_tensor(read[None], table.grad[read], table.shape)
        dense.step()
        rows.step()

    monkeypatch.setattr("gdpa.train.run.building._set_tables", lambda *args: None)
    monkeypatch.setattr(Joined, "step", of_dense)
    expected = train({**RUN, **more})
    assert ours.history.losses == pytest.approx(expected.history.losses, abs=1e-6)
    assert ours.history.losses[-1] != pytest.approx(train(RUN).history.losses[-1], abs=1e-4)


@pytest.mark.parametrize("updates", in_turn(UPDATES, 1))
def test_continued_exactly(updates: str, tmp_path: Path) -> None:
    run = {**RUN, "table_updates": updates, "checkpoint_every": 4, "eval_every": 6, "warmup": 5}
    train({**run, "out": str(tmp_path / "whole")})

    def stop(progress: Any) -> None:
        if progress.step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train({**run, "out": str(tmp_path / "parts")}, on_step=stop)
    train({**run, "out": str(tmp_path / "parts")}, resume=True)
    assert_same_end(tmp_path / "parts", tmp_path / "whole")


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_module = torch.nn.Module.compile
    eagerly = lambda self, **more: compile_module(self, backend="aot_eager", **more)
    monkeypatch.setattr(torch.nn.Module, "compile", eagerly)
    run = {**RUN, "steps": 3, "model": {"name": "din", "options": {"dim": 8}}, "table_updates": "rowwise_adagrad"}
    assert train({**run, "compile": True}).history.losses == pytest.approx(train(run).history.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_decay": 0.1}, "rows that are not read would not decay"),
        ({"parallel": "fsdp"}, "is for one process or parallel='ddp', not for 'fsdp'"),
        ({"table_lr": 0.0}, "table_lr must be positive"),
        ({"table_updates": "dense", "table_lr": 0.1}, "table_lr=0.1 is for row-wise updates"),
        ({"table_updates": "rowwise"}, "must be one of dense, rowwise_adagrad, rowwise_adam"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train({**RUN, "table_updates": "rowwise_adam", **changes})


def test_models_without_such_tables() -> None:
    with pytest.raises(ConfigError, match=r"is for the tables of gdpa\.models, of which Tiny has none"):
        train({**RUN, "table_updates": "rowwise_adam"}, build=without_dropout)


@pytest.mark.triton
@pytest.mark.skipif(not INTERPRET, reason="a GPU has its own test")
@pytest.mark.parametrize("updates", in_turn(UPDATES, 2))
def test_kernels_train_as_sparse_gradients_do(updates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulated, clipped and scheduled; compiled, where the tables must be told of every batch."""
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager"))
    run = {**RUN, "steps": 2, "batch_size": 4, "model": {"name": "din", "options": {"dim": 4}}, "table_lr": 0.05}
    run |= {"table_updates": updates, "accumulate": 2, "warmup": 2, "compile": True}
    launched: list[Any] = []
    launch = ROWWISE[updates]._launch
    monkeypatch.setattr(ROWWISE[updates], "_launch", lambda self, *args: launched.append(launch(self, *args)))
    ours = train(run)
    assert len(launched) == 2
    monkeypatch.setattr("gdpa.rowwise.where", "off")
    theirs = train({**run, "compile": False})
    assert len(launched) == 2
    assert ours.history.losses == pytest.approx(theirs.history.losses, rel=1e-5)
