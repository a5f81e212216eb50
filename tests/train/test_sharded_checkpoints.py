"""Checkpoints whose tensors the ranks write: the same bits as in one file, nothing left over, nothing run."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from shutil import copy, copytree
from typing import Any

import pytest
import torch
from rich.console import Console
from test_resume import assert_equal, assert_same_end, last
from tiny import build, settings

from gdpa.serving.checkpoints import open_checkpoint
from gdpa.train import ConfigError, load_model, train
from gdpa.train.storage import checkpoint, parts
from gdpa.train.storage.checkpoint import Checkpoints
from gdpa.train.storage.state import part_of

WHOLE = settings(steps=8, eval_every=3, checkpoint_every=2, warmup=4, keep=2)
PARTS = {**WHOLE, "sharded_checkpoints": True}


def folders(out: Path) -> set[str]:
    return {path.name for path in (out / "checkpoints").glob("*.parts")}


def named(out: Path) -> set[str]:
    return {checkpoint.read(path)["parts"] for path in (out / "checkpoints").glob("*.pt")}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of eight steps, continued after the fifth."""
    path = tmp_path_factory.mktemp("parts") / "run"
    train({**PARTS, "steps": 5, "out": str(path)}, build=build)
    train({**PARTS, "out": str(path)}, build=build, resume=True)
    return path


def test_the_same_bits_as_in_one_file(out: Path, tmp_path: Path) -> None:
    expected = tmp_path / "whole"
    train({**WHOLE, "steps": 5, "out": str(expected)}, build=build)
    result = train({**WHOLE, "out": str(expected)}, build=build, resume=True)
    assert_same_end(out, expected)
    assert folders(out) == named(out)
    model = load_model(out / "checkpoints" / "best.pt", build)
    assert_equal(model.state_dict(), result.model.state_dict(), "model")


def test_a_run_goes_on_in_the_other_form(out: Path, tmp_path: Path) -> None:
    mine = copytree(out, tmp_path / "run")
    train({**WHOLE, "steps": 9, "keep": 1, "out": str(mine)}, build=build, resume=True)
    assert "parts" not in checkpoint.read(Checkpoints(mine, 1).paths()[-1])
    train({**WHOLE, "steps": 9, "out": str(tmp_path / "long")}, build=build)
    assert_equal(last(mine)["model"], last(tmp_path / "long")["model"], "model")


def test_names_of_parameters_may_have_slashes(tmp_path: Path) -> None:
    """Those of tables are made of columns' names. The optimizer's state must come back, too."""
    (tmp_path / "log.csv").write_text("y,u,ad/id\n" + "".join(f"{n % 2},{n},{n % 5}\n" for n in range(40)))
    schema = {"label": "y", "group": "u", "categorical": ["ad/id"]}
    run = {
        "data": {"source": "files", "train": str(tmp_path / "log.csv"), "schema": schema},
        "model": {"name": "dlrm", "options": {"dim": 4}},
        "batch_size": 8,
        "sharded_checkpoints": True,
    }
    for name in ("all", "parts"):
        train({**run, "steps": 6 if name == "all" else 3, "out": str(tmp_path / name)})
    result = train({**run, "steps": 6, "out": str(tmp_path / "parts")}, resume=True)
    assert_same_end(tmp_path / "parts", tmp_path / "all")
    assert_equal(load_model(tmp_path / "all").state_dict(), result.model.state_dict(), "model")


def test_what_was_not_finished_goes(out: Path, tmp_path: Path) -> None:
    mine = copytree(out, tmp_path / "run")
    store = Checkpoints(mine, 2)
    first = store.new_parts(8)  # a process was killed while it wrote
    (first / "__0_0.distcp").write_bytes(b"half")
    assert first.name not in named(mine)  # though there is a checkpoint of that step
    assert store.new_parts(8) == first
    assert not list(first.iterdir())
    store.clear_partial()
    assert folders(mine) == named(mine)


def test_a_damaged_part_is_named_and_the_one_before_taken(out: Path, tmp_path: Path) -> None:
    mine = copytree(out, tmp_path / "run")
    newest = Checkpoints(mine, 1).paths()[-1]
    damaged = mine / "checkpoints" / checkpoint.read(newest)["parts"] / "__0_0.distcp"
    os.truncate(damaged, damaged.stat().st_size // 2)
    text = io.StringIO()
    train({**PARTS, "out": str(mine)}, build=build, resume=True, console=Console(file=text, width=500))
    assert f"{newest.name} cannot be read (ValueError: {damaged.parent.name} lacks a part of __0_0.distcp)" in (
        text.getvalue()
    )
    assert_equal(last(mine)["model"], last(out)["model"], "model")


def test_serving_takes_it_with_its_folder(tmp_path: Path) -> None:
    train({**PARTS, "steps": 1, "model": {"name": "din", "options": {"dim": 4}}, "out": str(tmp_path / "run")})
    saved = open_checkpoint(tmp_path / "run", device="cpu")
    assert_equal(saved.model.state_dict(), last(tmp_path / "run")["model"], "model")
    alone = copy(tmp_path / "run" / "checkpoints" / "best.pt", tmp_path)
    with pytest.raises(ConfigError, match=r"best\.pt' is not a checkpoint on its own: there is no complete .*\.parts'"):
        open_checkpoint(Path(alone), device="cpu")


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("it-ran",)


def test_an_index_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / parts.INDEX).write_bytes(pickle.dumps(Runs()))
    for read in (parts.check, parts.whole):
        with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir does not belong in an index of tensors"):
            read(tmp_path)
    assert not (tmp_path / "it-ran").exists()


def test_objects_are_refused_that_torch_would_unpickle(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with parts._failures("writing"):
        dcp.save({"model/x": torch.zeros(2), "step": 3}, storage_writer=dcp.FileSystemWriter(tmp_path / "it"))
    with pytest.raises(pickle.UnpicklingError, match="BytesStorageMetadata does not belong"):
        parts.check(tmp_path / "it")


def test_another_folder_is_refused(tmp_path: Path) -> None:
    torch.save({"format": checkpoint.FORMAT, "parts": "../elsewhere.parts"}, tmp_path / "step-00000001.pt")
    with pytest.raises(ValueError, match=r"names '\.\./elsewhere\.parts', which is not in that folder"):
        checkpoint.load(tmp_path / "step-00000001.pt")


def test_another_model_is_refused(out: Path) -> None:
    folder = out / "checkpoints" / min(folders(out))
    with pytest.raises(ValueError, match=r"contains another model: .*model/attention\.qkv\.weight, .* only in one"):
        parts.load(folder, torch.nn.Linear(2, 3))


def test_failures_are_errors(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(RuntimeError, match="writing taken: rank 0: FileExistsError"):
        parts.save(tmp_path / "taken", torch.nn.Linear(2, 3), torch.optim.SGD([torch.zeros(1)]))


def test_states_of_optimizers_go_where_the_parameter_is() -> None:
    """Sums of rows too, which do not have its shape; Adam's step stays on the host."""
    table = torch.empty(4, 3, device="meta")
    assert part_of(torch.ones(4), table).device == table.device
    assert part_of(torch.ones(()), table).device == torch.device("cpu")
