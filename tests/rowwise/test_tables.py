"""Gradients of tables by row: sums against float64, in a fixed order however ids lie; updates against the formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa import data, models
from gdpa.bench.models import step as model_step
from gdpa.bench.models.contenders import EVERY_KERNEL
from gdpa.models.embedding import Tables
from gdpa.rowwise import tables as rows_of_tables
from gdpa.rowwise.tables import Column, Sums, sum_by_row
from gdpa.train.parallel.sharing import _make_sparse
from gdpa.train.run.rowwise import ROWWISE, RowwiseAdagrad, RowwiseAdam
from support import INTERPRET

kernels = pytest.mark.triton
SIZES = (5, 40, 3)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few rows make several launches."""
    monkeypatch.setattr(rows_of_tables, "CHUNK", 4)
    monkeypatch.setattr(rows_of_tables, "NEXT_CHUNK", 4)


def columns(kind: str, dim: int, dtype: torch.dtype = torch.float32) -> list[Column]:
    g = torch.Generator().manual_seed(dim)

    def ids(table: int, n: int) -> Tensor:
        if kind == "one id":
            return torch.full((n,), 2)
        if kind == "runs":  # whose ends are the ends of chunks
            return (torch.arange(n) // 4) % SIZES[table]
        return torch.randint(SIZES[table], (n,), generator=g)

    made = ((table, ids(table, n)) for table, n in ((1, 21), (0, 4), (2, 9), (1, 3), (0, 0)))
    return [Column(t, found, torch.randn(found.shape[0], dim, generator=g).to(dtype)) for t, found in made]


def dense(columns: list[Column], table: int) -> tuple[Tensor, Tensor]:
    """The gradient in float64, and which rows were read."""
    grad = torch.zeros(SIZES[table], columns[0].rows.shape[1], dtype=torch.float64)
    read = torch.zeros(SIZES[table], dtype=torch.bool)
    for column in columns:
        if column.table == table:
            grad.index_add_(0, column.ids, column.rows.double())
            read[column.ids] = True
    return grad, read


def found(sums: Sums, table: int) -> tuple[Tensor, Tensor]:
    first, last = sums.bounds[table : table + 2].tolist()
    return sums.keys[first:last].long() - sums.starts[table], sums.sums[first:last]


# ---- sums ------------------------------------------------------------------------------------------------------------
@kernels
@pytest.mark.parametrize(
    ("kind", "dim", "dtype"),
    [("random", 8, torch.float32), ("one id", 5, torch.float16), ("runs", 1, torch.float32)],
    ids=["random", "one id", "runs"],
)
def test_sums(kind: str, dim: int, dtype: torch.dtype) -> None:
    given = columns(kind, dim, dtype)
    sums = sum_by_row(given, SIZES)
    assert sums is not None
    squares = 0.0
    for table in range(len(SIZES)):
        want, read = dense(given, table)
        rows, values = found(sums, table)
        assert torch.equal(rows, read.nonzero()[:, 0])
        torch.testing.assert_close(values.double(), want[read], rtol=1e-6, atol=1e-6)
        squares += float(want.square().sum())
    assert float(sums.norm) == pytest.approx(squares**0.5, rel=1e-6)


@kernels
def test_wide_rows_and_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in several blocks, the last of them not full; gradients that are part of others, and not aligned."""
    monkeypatch.setattr(rows_of_tables, "OF_WARP", 4)
    whole = torch.randn(11, 40)
    given = [Column(0, torch.arange(11) % 3, whole[:, 7:26])]
    assert rows_of_tables._blocks(19) == 3
    sums = sum_by_row(given, SIZES)
    assert sums is not None
    assert sums.most == [5, None, None]
    want, read = dense(given, 0)
    torch.testing.assert_close(found(sums, 0)[1].double(), want[read], rtol=1e-6, atol=1e-6)
    assert float(sums.norm) == pytest.approx(float(want.norm()), rel=1e-6)


@kernels
def test_order_is_that_of_the_rows() -> None:
    """In how many columns they come makes no difference to the last bit, and NaN stays in its row."""
    ids, rows = torch.randint(6, (30,), generator=torch.Generator().manual_seed(1)), torch.randn(30, 4) * 1e3
    one, several = (
        sum_by_row([Column(0, i, r) for i, r in zip(ids.split(n), rows.split(n), strict=True)], [6]) for n in (30, 7)
    )
    assert one is not None
    assert several is not None
    assert torch.equal(one.sums, several.sums)
    assert torch.equal(one.norm, several.norm)
    rows[3] = torch.nan
    spoilt = sum_by_row([Column(0, ids, rows)], [6])
    assert spoilt is not None
    bad = found(spoilt, 0)[0] == ids[3]
    assert spoilt.norm.isnan()
    assert found(spoilt, 0)[1][bad].isnan().all()
    assert torch.equal(found(spoilt, 0)[1][~bad], found(one, 0)[1][~bad])


@kernels
def test_nothing_read() -> None:
    assert sum_by_row([], SIZES) is None
    assert sum_by_row([Column(1, torch.empty(0, dtype=torch.int64), torch.empty(0, 4))], SIZES) is None


# ---- gdpa::embedding_backward ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [23, 0])
def test_dense_gradient(rows: int) -> None:
    ids = torch.randint(5, (rows,), generator=torch.Generator().manual_seed(0))
    table = torch.randn(7, 12, requires_grad=True)
    exact = table.detach().double().requires_grad_()
    weights = torch.randn(12, rows).mT  # a gradient whose rows are not side by side
    (rows_of_tables.look_up(table, ids, torch.float32) * weights).sum().backward()
    (F.embedding(ids, exact) * weights.double()).sum().backward()
    assert table.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(table.grad.double(), exact.grad, rtol=1e-6, atol=1e-6)


@kernels
def test_dense_gradient_of_16_bits() -> None:
    """Is added up in float32 and rounded once."""
    ids, grad = torch.zeros(60, dtype=torch.int64), torch.randn(60, 4).half()
    found = torch.ops.gdpa.embedding_backward(grad, ids, 3, torch.float16)
    assert torch.equal(found[0], grad.double().sum(0).half())
    assert torch.equal(found[1:], torch.zeros(2, 4, dtype=torch.float16))


def test_operator() -> None:
    arguments = torch.randn(9, 4), torch.randint(5, (9,)), 5, torch.float32
    torch.library.opcheck(torch.ops.gdpa.embedding_backward, arguments)
    arguments[0].requires_grad_()
    with pytest.raises(RuntimeError, match="backward of look-ups on a GPU cannot be differentiated again"):
        torch.ops.gdpa.embedding_backward(*arguments).sum().backward()


def test_compiled_look_up() -> None:
    """In one graph, with another number of rows each time, and gradients of rows in the dtype that is asked for."""
    table, calls = torch.randn(6, 4, requires_grad=True), 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal calls
        calls += 1
        return graph

    look_up = torch.compile(
        lambda ids: rows_of_tables.look_up(table, ids, torch.bfloat16) * 2,
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )
    for n in (5, 8):
        table.grad = None
        look_up(torch.arange(n) % 6).sum().backward()
        assert table.grad is not None
        assert torch.equal(table.grad[:, 0], 2.0 * torch.bincount(torch.arange(n) % 6, minlength=6))
    assert calls == 1


# ---- updates ---------------------------------------------------------------------------------------------------------
class Tabled(torch.nn.Module):
    """Tables with an end to them."""

    def __init__(self) -> None:
        super().__init__()
        vocabularies = {"item": 9, "place": 4}
        history = models.SequenceFeatures("history", ("item",), ())
        features = models.Features((), ("item", "place"), (history,), vocabularies)
        self.tables = Tables(features, 6, {})
        self.weight = torch.nn.Parameter(torch.empty(6))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.tables.reset_parameters()
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1, 2, 6))

    def forward(self, batch: data.Batch) -> Tensor:
        looked = self.tables(batch)
        item, place = looked.sparse
        (events,) = looked.columns("history")
        return (item * place * self.weight).sum(1) + events.sin().sum() * self.weight.sum()


def make_batch(seed: int, events: int) -> data.Batch:
    g = torch.Generator().manual_seed(seed)
    cu = torch.tensor([0, events, events], dtype=torch.int32)
    history = data.PackedEvents(torch.randint(9, (events, 1), generator=g), torch.empty(events, 0), cu, events)
    sparse = torch.stack([torch.randint(n, (2,), generator=g) for n in (9, 4)], dim=1)
    return data.Batch(torch.empty(2, 0), sparse, {"history": history}, torch.tensor([1.0, 0.0]), torch.arange(2))


def trained(updates: str, by_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Tables after a few steps, of two batches each, and the state of the optimizer; clipped once."""
    monkeypatch.setattr(Tables, "by_kernels", lambda self: by_kernels)
    torch.manual_seed(0)
    model = Tabled()
    model.tables.row_gradients = True
    optimizer = ROWWISE[updates](model.tables.parameters(), lr=0.1, modules=[model.tables])
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            model(make_batch(2 * step + part, 5 * part + step)).sum().backward()
        assert (model.tables.of_item.grad is None) == by_kernels
        if step == 1 and by_kernels:
            model.tables.gradients.clip = torch.tensor(0.25)
        elif step == 1:
            for p in model.tables.parameters():
                assert p.grad is not None
                p.grad = p.grad * 0.25
        optimizer.step()
    states = [value for p in model.tables.parameters() for value in optimizer.state[p].values()]
    return dict(model.tables.named_parameters()), states


@kernels
@pytest.mark.parametrize("updates", ROWWISE)
def test_updates_are_the_formulas(updates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want, want_states = trained(updates, False, monkeypatch)
    got, states = trained(updates, True, monkeypatch)
    for name, table in got.items():
        torch.testing.assert_close(table, want[name], rtol=2e-6, atol=2e-7)
    for state, expected in zip(states, want_states, strict=True):
        torch.testing.assert_close(state, expected, rtol=2e-6, atol=1e-9)


@kernels
def test_adam_of_the_thousandth_step_and_a_rate_on_the_device() -> None:
    """1 - 0.999^t has all its digits; a row whose gradient is zero was not read; a checkpoint's state is taken on."""
    table = torch.nn.Parameter(torch.ones(4, 3))
    module = Tabled().tables
    adam, plain = RowwiseAdam([table], lr=torch.tensor(0.5)), RowwiseAdam([table.detach().double()], lr=0.5)  # type: ignore[arg-type]
    (other,) = plain.param_groups[0]["params"]
    start = {"step": torch.tensor(1000.0), "exp_avg": torch.ones(4, 3), "exp_avg_sq": torch.ones(4, 3)}
    adam.state[table] = {k: v.clone() for k, v in start.items()}
    plain.state[other] = {k: v.double() for k, v in start.items()}
    rows = torch.tensor([[1.0, -2, 3], [0, 0, 0], [4, 0, 0]])
    sums = sum_by_row([Column(0, torch.tensor([2, 1, 0]), rows)], [4])
    assert sums is not None
    adam._launch([(0, table)], sums, None, {table: adam.param_groups[0]})
    other.grad = torch.sparse_coo_tensor(torch.tensor([[2, 1, 0]]), rows.double(), (4, 3), check_invariants=True)
    plain.step()
    assert torch.equal(table[1::2], torch.ones(2, 3))
    torch.testing.assert_close(table.double(), other, rtol=1e-6, atol=1e-7)
    assert adam.state[table]["step"] == 1001
    assert module.gradients.sums() is None  # nothing was read


@kernels
def test_adagrad_of_a_narrow_table() -> None:
    table = torch.nn.Parameter(torch.ones(3, 4).half())
    optimizer = RowwiseAdagrad([table], lr=0.5)
    sums = sum_by_row([Column(0, torch.tensor([2, 2]), torch.ones(2, 4).half())], [3])
    assert sums is not None
    optimizer._launch([(0, table)], sums, None, {table: optimizer.param_groups[0]})
    assert torch.equal(optimizer.state[table]["sum"], torch.tensor([0, 0, 4]).half())
    assert torch.equal(table, torch.tensor([[1.0], [1], [0.5]]).expand(3, 4).half())


def test_rows_to_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take them as sparse gradients, of both columns that read a table."""
    monkeypatch.setattr(Tables, "by_kernels", lambda self: True)
    torch.manual_seed(0)
    model, batch = Tabled(), make_batch(0, 7)
    grads = []
    for by_row in (False, True):
        model.tables.row_gradients = by_row
        model.zero_grad()
        model(batch).sum().backward()
        if by_row:
            assert model.tables.of_item.grad is None
            _make_sparse(model.tables)
            assert not model.tables.gradients.read
        grads.append([p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.tables.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(*grads)


def test_frozen_tables_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that does not learn has no gradient by row either; without any table there is nothing to look up."""
    monkeypatch.setattr(rows_of_tables, "has_kernel", lambda table: True)
    model = Tabled()
    model.tables.row_gradients = True
    model.tables.of_item.requires_grad_(False)
    model(make_batch(0, 7)).sum().backward()
    assert [column.table for column in model.tables.gradients.columns()] == [1]
    empty = Tables(models.Features(("age",), (), (), {}), 4, {})
    empty.row_gradients = True
    batch = data.Batch(torch.zeros(2, 1), torch.empty(2, 0, dtype=torch.int64), {}, torch.zeros(2), torch.arange(2))
    assert empty(batch).sparse == []


# ---- compiled models -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "autocast"])
def test_compiled_leaves_get_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph, of any number of events; in the dtype that autocast computes in."""
    monkeypatch.setattr(Tables, "by_kernels", lambda self: True)
    close = 1e-6 if dtype == torch.float32 else 2e-2
    model = Tabled()
    model.tables.row_gradients = True
    trainer = model_step.Trainer(model, torch.device("cpu"), dtype, False, EVERY_KERNEL)
    trainer.start([])
    step = torch.compile(trainer._plain_loss, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"needs tables\.expect\(batch\) before every batch"):
        step(make_batch(0, 7))
    trainer.tables = [model.tables]
    with model_step.counted_graphs(True) as graphs:
        for seed, events in enumerate((7, 12, 9)):
            batch = make_batch(seed, events)
            model_step.mark_lengths(batch)
            model.tables.gradients.clear()
            trainer._expect(batch)
            step(batch).backward()
            given = model.tables.gradients.columns()
            assert [c.rows.shape for c in given] == [(2, 6), (2, 6), (events, 6)]
            assert {c.rows.dtype for c in given} == {dtype}
            got = model.tables.gradients.sparse(0, model.tables.of_item).to_dense()  # type: ignore
            monkeypatch.setattr(Tables, "by_kernels", lambda self: False)
            model.zero_grad()
            trainer._plain_loss(batch).backward()
            want = model.tables.of_item.grad.to_dense()  # type: ignore[union-attr,operator]
            monkeypatch.setattr(Tables, "by_kernels", lambda self: True)
            torch.testing.assert_close(got, want, rtol=close, atol=close)
    assert len(graphs) == 1
    model.tables.gradients.clear()
    assert all(leaf.grad is None for leaf in model.tables.expected or ())


@kernels
@pytest.mark.skipif(not INTERPRET, reason="on a GPU it is tested with kernels that are compiled")
def test_a_model_trains_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's step, with kernels and with sparse gradients."""
    ends = []
    for where in ("on", "off"):
        monkeypatch.setattr("gdpa.rowwise.where", where)
        model = Tabled()
        trainer = model_step.Trainer(model, torch.device("cpu"), torch.float32, False, EVERY_KERNEL, "rowwise_adam")
        trainer.start([make_batch(seed, 6) for seed in range(2)])
        losses = [float(trainer()) for _ in range(3)]
        assert (model.tables.gradients.sums() is not None) == (where == "on")
        ends.append((losses, {name: p.detach().clone() for name, p in model.named_parameters()}))
        trainer.rest()
        assert model.tables.gradients.sums() is None
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-7)
