"""Tables that TorchRec holds: the losses of plain ones, on one process, two and four, continued on another number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_files import settings as table_settings
from test_files import write as write_table
from tiny import without_dropout
from torchrec_worker import RUN, WAYS, main, outcome

from gdpa import data
from gdpa.data import Inputs
from gdpa.train import ConfigError, load_model, make_config, train
from gdpa.train.data.splits import open_splits
from gdpa.train.parallel import torchrec as optional
from processes import forked

needs_torchrec = pytest.mark.skipif(
    any(optional.find_spec(name) is None for name in optional.NEEDED), reason="needs torchrec and fbgemm-gpu-cpu"
)
PLAIN = {"tables": "plain"}


def start(world: int, folder: Path) -> list[dict[str, Any]]:
    workers = [forked().Process(target=main, args=(folder, rank, world), daemon=True) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    logs = [log.read_text()[-3000:] for log in sorted(folder.glob("log-*"))]
    assert not any(worker.exitcode for worker in workers), "\n".join(logs)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(world)]


@needs_torchrec
def test_two_ranks_and_from_one_to_two_to_one(tmp_path: Path) -> None:
    alone = outcome()
    plain = outcome(**PLAIN)
    assert alone["losses"] == pytest.approx(plain["losses"], rel=0, abs=1e-6)
    assert len(alone["losses"]) == 20

    forms = {way: {"out": str(tmp_path / way), "sharded_checkpoints": way == "fsdp"} for way in WAYS}
    for form in forms.values():
        outcome(**form, steps=6)
    for of_rank in start(2, tmp_path):
        for way in WAYS:
            assert of_rank[way]["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-5)
            assert of_rank[way]["valid"] == pytest.approx(alone["valid"], abs=1e-5)
            assert of_rank[f"{way}-resumed"]["losses"] == pytest.approx(alone["losses"][:13], rel=0, abs=1e-5)
    for way, form in forms.items():
        rest = outcome(**form, resume=True)
        assert rest["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-5)
        model = load_model(tmp_path / way / "checkpoints" / "step-00000020.pt")  # with plain tables, for serving
        assert model.tables.of_item.shape == (20, 8)  # type: ignore[union-attr]
        train({**RUN, **PLAIN, **form, "steps": 22}, resume=True)  # or to train on with plain ones


@needs_torchrec
def test_four_ranks_and_from_four_to_one(tmp_path: Path) -> None:
    expected = outcome()
    for of_rank in start(4, tmp_path):
        for way in WAYS:
            assert of_rank[way]["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-5)
    rest = outcome(out=str(tmp_path / "four"), resume=True)
    assert rest["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-5)


@needs_torchrec
def test_compiled_and_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_module = torch.nn.Module.compile
    eagerly = lambda self, **more: compile_module(self, backend="aot_eager", **more)
    monkeypatch.setattr(torch.nn.Module, "compile", eagerly)
    run = {**RUN, "steps": 3, "model": {"name": "din", "options": {"dim": 8}}}
    plain = train(run).history.losses
    assert train({**run, "compile": True}).history.losses == pytest.approx(plain, rel=1e-6)
    assert train({**run, "recompute": True}).history.losses == plain


@needs_torchrec
def test_keyed_jagged_tensors_are_views() -> None:
    from gdpa.data.keyed import Keyed, from_keyed, to_keyed

    batch = next(data.batches(data.SyntheticLog(seed=3, longest=9), 5))
    history = batch.sequences["history"]
    keyed = to_keyed(batch)
    of_events = keyed.sequences["history"]
    assert of_events.keys() == ["history:0", "history:1", "history:2"]
    assert torch.equal(of_events["history:1"].values(), history.ids[:, 1])
    assert torch.equal(of_events["history:1"].lengths(), history.lengths())
    assert torch.equal(keyed.sparse["sparse:2"].values(), batch.sparse[:, 2])

    again = from_keyed(keyed, batch.dense, {"history": history.values})
    assert torch.equal(again.sparse, batch.sparse)
    assert torch.equal(again.sequences["history"].ids, history.ids)
    assert torch.equal(again.sequences["history"].cu_seqlens, history.cu_seqlens)
    assert again.sequences["history"].values is history.values
    for one, other in ((again.sparse, keyed.sparse), (again.sequences["history"].ids, of_events)):
        assert one.data_ptr() == other.values().data_ptr()
    back = to_keyed(again)  # columns lie in one piece now
    assert back.sparse.values().data_ptr() == keyed.sparse.values().data_ptr()
    assert back.sequences["history"].values().data_ptr() == of_events.values().data_ptr()

    with pytest.raises(ValueError, match="sparse must have one id for each of the 4 samples"):
        from_keyed(keyed, batch.dense[:4])
    mixed = keyed.sparse.__class__(["a", "b"], torch.arange(4), lengths=torch.tensor([3, 0, 0, 1]))
    with pytest.raises(ValueError, match="must have the same lengths"):
        from_keyed(Keyed(keyed.sparse, {"history": mixed}), batch.dense)


@needs_torchrec
def test_evaluation_changes_no_table() -> None:
    """Not even where someone calls backward: ddp looks for unused parameters that way."""
    from gdpa import models
    from gdpa.models.torchrec_tables import TorchRecTables

    log = data.SyntheticLog(seed=1, longest=5)
    batch: Inputs = next(data.batches(log, 4))
    with optional.alone():
        model = models.build("din", models.Features.of(log), dim=8)
        before = {name: p.detach().clone() for name, p in model.tables.named_parameters()}  # type: ignore[union-attr]
        expected = model(batch)
        optional.divide_tables(model, 0.1, torch.device("cpu"))
        tables = model.tables
        assert isinstance(tables, TorchRecTables)
        assert torch.equal(model.eval()(batch), expected)
        model(batch).sum().backward()
        for name, table in tables.whole().items():
            assert torch.equal(table, before[name])
        model.train()(batch).sum().backward()
        assert not torch.equal(tables.whole()["of_item"], before["of_item"])


@needs_torchrec
def test_bags(tmp_path: Path) -> None:
    run = table_settings(write_table(tmp_path), table_updates="rowwise_adagrad", device="cpu", epochs=1)
    assert train({**run, "tables": "torchrec"}).history.losses == pytest.approx(train(run).history.losses, abs=1e-6)


@needs_torchrec
def test_bags_are_keyed_too(tmp_path: Path) -> None:
    from gdpa.data.keyed import from_keyed, to_keyed

    batch = next(data.batches(open_splits(make_config(table_settings(write_table(tmp_path)))).train, 7))
    keyed = to_keyed(batch)
    assert keyed.bags["genres"].keys() == ["bag:genres:0"]
    again = from_keyed(keyed, batch.dense, {name: e.values for name, e in batch.sequences.items()})
    assert torch.equal(again.bags["genres"].ids, batch.bags["genres"].ids)
    assert torch.equal(again.bags["genres"].cu_seqlens, batch.bags["genres"].cu_seqlens)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"table_updates": "dense", "table_lr": None}, "table_updates must be 'rowwise_adagrad', not 'dense'"),
    ({"table_updates": "rowwise_adam"}, "table_updates must be 'rowwise_adagrad', not 'rowwise_adam'"),
    ({"clip": 1.0}, "before clip=1.0 could act"),
    ({"accumulate": 2}, "before accumulate=2 could act"),
    ({"parallel": "tensor"}, "is for one process or parallel='ddp' or 'fsdp', not for 'tensor'"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    settings = {name: value for name, value in {**RUN, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        train(settings)


@needs_torchrec
def test_refusals_of_models_and_devices() -> None:
    with pytest.raises(ConfigError, match=r"is for the tables of gdpa\.models"):
        train(RUN, build=without_dropout)
    with pytest.raises(ConfigError, match="runs on the CPU here, but device is 'cuda'"):
        optional.divide_tables(torch.nn.Module(), 0.1, torch.device("cuda"))


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs torchrec, fbgemm-gpu-cpu, which is not installed"):
        train(RUN)
