"""`gdpa predict` and `gdpa evaluate`: a checkpoint on a file, as people call them."""

from __future__ import annotations

import csv
import json
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from gdpa.cli import main
from gdpa.data import ReczooCSV, Vocabularies, batches
from gdpa.serving import scoring, writing
from gdpa.serving.checkpoints import open_checkpoint
from gdpa.train import load_model

HEADER = "label,user_id,item_id,cate_id,item_history,cate_history"


def rows(n: int, first: int = 0) -> Iterator[str]:
    for i in range(first, first + n):
        events = [j % 11 for j in range(i % 7)]
        items, cates = "^".join(map(str, events)), "^".join(str(e % 3) for e in events)
        yield f"{i * 7 % 3 == 0:d},u{i % 8},{i % 11},{i % 3},{items},{cates}"


def write_csv(path: Path, n: int, first: int = 0) -> Path:
    path.write_text("\n".join([HEADER, *rows(n, first)]) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run in run/, and a file to score whose last rows have ids that were never seen."""
    where = tmp_path_factory.mktemp("predict")
    train, test = write_csv(where / "train.csv", 64), write_csv(where / "test.csv", 45, 60)
    test.write_text(test.read_text() + '1,"a ""user"", indeed",unknown,1,,\n')
    arguments = ["train", "--data", "csv", "--data-train", str(train), "--data-valid", str(test), "--data-preset",
                 "AmazonElectronics_x1", "--out", str(where / "run"), "--steps", "6", "--eval-every", "6",
                 "--batch-size", "16", "--model", "interformer", "--set", "dim=8", "--device", "cpu"]  # fmt: skip
    assert CliRunner().invoke(main, arguments, catch_exceptions=False).exit_code == 0
    return where


def gdpa(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def predict(folder: Path, out: Path, *arguments: object, file: str = "test.csv") -> Result:
    return gdpa("predict", folder / "run", folder / file, "--out", out, "--batch-size", 16, *arguments)


def test_values_that_are_written_in_another_way_are_named(folder: Path, tmp_path: Path) -> None:
    """Otherwise every row has the id for unseen values, and a score like any other. One that is known will do."""
    assert "note:" not in predict(folder, tmp_path / "scores.csv").output
    other = [f"1,u{i},0{i},{i},," for i in range(3)]
    (tmp_path / "other.csv").write_text("\n".join([HEADER, *other]))
    result = predict(folder, tmp_path / "others.csv", file=str(tmp_path / "other.csv"))
    assert result.exit_code == 0
    assert "note: no value of item_id is known from the training" in result.output


def test_scores_in_the_order_of_the_file(folder: Path, tmp_path: Path) -> None:
    ids = ("--id", "user_id", "--id", "item_id", "--id", "user_id")  # a column that is named again is the same one
    assert predict(folder, tmp_path / "scores.csv", *ids).exit_code == 0
    with (tmp_path / "scores.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    with (folder / "test.csv").open(newline="") as file:
        source = list(csv.DictReader(file))
    assert [(row["user_id"], row["item_id"]) for row in found] == [(r["user_id"], r["item_id"]) for r in source]
    assert found[-1]["user_id"] == 'a "user", indeed'
    vocabularies = Vocabularies.load(folder / "run" / "vocabularies.json")
    stream = ReczooCSV(folder / "test.csv", "AmazonElectronics_x1", vocabularies)
    model = load_model(folder / "run" / "checkpoints" / "best.pt")
    with torch.no_grad():
        logits = torch.cat([model(batch) for batch in batches(stream, 16)])
    assert torch.equal(torch.tensor([float(row["logit"]) for row in found]), logits)  # nine digits are all of them
    for row in found:
        assert math.isclose(float(row["probability"]), 1 / (1 + math.exp(-float(row["logit"]))), rel_tol=1e-8)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_second_run_is_byte_identical(folder: Path, tmp_path: Path, ending: str) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    first, second = tmp_path / f"first.{ending}", tmp_path / f"second.{ending}"
    assert predict(folder, first).exit_code == predict(folder, second).exit_code == 0
    assert first.read_bytes() == second.read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_parquet_holds_what_csv_does(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    monkeypatch.setattr(writing, "ROW_GROUP", 20)
    assert predict(folder, tmp_path / "a.csv").exit_code == predict(folder, tmp_path / "a.parquet").exit_code == 0
    table = pq.read_table(tmp_path / "a.parquet")
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 2
    with (tmp_path / "a.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert table.column("user_id").to_pylist() == [row["user_id"] for row in found]
    assert [f"{x:.9g}" for x in table.column("logit").to_pylist()] == [row["logit"] for row in found]


def test_without_pyarrow(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    result = predict(folder, tmp_path / "a.parquet")
    assert result.exit_code == 1
    assert "Parquet needs pyarrow" in result.output


def test_a_file_without_labels(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "test.csv").read_text().splitlines()
    (folder / "unlabelled.csv").write_text("\n".join(line.partition(",")[2] for line in lines) + "\n")
    assert predict(folder, tmp_path / "a.csv").exit_code == 0
    assert predict(folder, tmp_path / "b.csv", file="unlabelled.csv").exit_code == 0
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_memory_does_not_grow_with_the_file(folder: Path, tmp_path: Path) -> None:
    def peak(n: int) -> int:
        saved = open_checkpoint(folder / "run", device="cpu")
        file = write_csv(tmp_path / f"{n}.csv", n)
        tracemalloc.start()
        writing.write(tmp_path / f"{n}-scores.csv", ["user_id"], scoring.score_file(saved, file, batch_size=32))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(64)  # what is made at the first call
    more = 1000
    assert peak(300 + more) - peak(300) < 150 * more  # a sample takes more than 1000 bytes; caches fill up at first


def test_what_is_there_stays(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.csv"
    out.write_text("mine")
    result = predict(folder, out)
    assert result.exit_code == 1
    assert "--overwrite replaces it" in result.output
    assert out.read_text() == "mine"
    bad = folder / "bad.csv"
    bad.write_text(f"{HEADER}\n0,u1,1,1,,\n0,u1,1,1,1^^2,1\n")
    result = predict(folder, out, "--overwrite", file="bad.csv")  # the old file stays where a new one fails
    assert result.exit_code == 1
    assert "bad.csv:3, column 'item_history'" in result.output
    assert out.read_text() == "mine"
    assert predict(folder, out, "--overwrite").exit_code == 0
    assert out.read_text() != "mine"
    elsewhere = tmp_path / "a" / "folder" / "scores.csv"  # that is not there yet
    assert predict(folder, elsewhere).exit_code == 0
    assert elsewhere.read_text() == out.read_text()
    before = (folder / "test.csv").read_bytes()
    result = predict(folder, folder / "test.csv", "--overwrite")
    assert result.exit_code == 1
    assert "the file being scored" in result.output
    assert (folder / "test.csv").read_bytes() == before


def test_evaluate(folder: Path) -> None:
    found = json.loads(gdpa("evaluate", folder / "run", folder / "test.csv").stdout)
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (trained,) = [r for r in records if r.get("split") == "valid"]
    assert found == pytest.approx({name: trained[name] for name in found}, rel=1e-6)
    assert json.loads(gdpa("evaluate", folder / "run", "--split", "valid").stdout) == found


REFUSED: list[tuple[list[str], str]] = [
    (["predict", "run", "test.csv", "--out", "a.txt"], "out must end in .csv or .parquet, got 'a.txt'"),
    (["predict", "run", "test.csv", "--out", "a.csv", "--id", "nobody"], "this column is missing"),
    (["predict", "test.csv", "test.csv", "--out", "a.csv"], "'test.csv' is not a checkpoint of gdpa train"),
    (["predict", "run/checkpoints", "test.csv", "--out", "a.csv"], "there is no checkpoint"),
    (["predict", "elsewhere.pt", "test.csv", "--out", "a.csv"], "name the file with --vocabularies"),
    (["predict", "synthetic", "test.csv", "--out", "a.csv"], "was trained on the synthetic log"),
    (
        ["evaluate", "run", "test.csv", "--vocabularies", "test.csv"],
        "'test.csv' does not contain vocabularies: it is not JSON",
    ),
    (["evaluate", "run", "test.csv", "--vocabularies", "list.json"], "'list.json' does not contain vocabularies"),
    (["evaluate", "run", "test.csv", "--vocabularies", "short.json"], "'short.json' does not belong to the run of"),
    (["evaluate", "run", "test.csv", "--vocabularies", "odd.json"], "'odd.json' does not contain vocabularies: a list"),
    (["predict", "run", "test.csv", "--out", "a.csv", "--vocabularies", "none.json"], "vocabularies lacks cate_id"),
    (["evaluate", "run"], "has no test samples; name a file"),
    (["evaluate", "run", "test.csv", "--split", "test"], "--split does not apply with FILE"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=lambda x: x if isinstance(x, str) else None)
def test_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.chdir(folder)
    (folder / "elsewhere.pt").write_bytes((folder / "run" / "checkpoints" / "best.pt").read_bytes())
    (folder / "list.json").write_text("[1]")
    (folder / "short.json").write_text('{"item_id": ["1"]}')
    (folder / "odd.json").write_text('{"item_id": ["1", ["2"]]}')
    (folder / "none.json").write_text("{}")
    if "synthetic" in arguments and not (folder / "synthetic").is_dir():
        small = [f"--data-{k}={v}" for k, v in (("size", 8), ("valid-size", 0), ("test-size", 4))] + ["--steps", "1"]
        assert gdpa("train", "--model", "dlrm", "--out", "synthetic", *small).exit_code == 0
        assert json.loads(gdpa("evaluate", "synthetic").stdout)["samples"] == 4
    result = gdpa(*arguments)
    assert result.exit_code != 0
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not Path("a.csv").exists()


SCHEMA = """
[data]
source = "files"
train = "log.tsv"
split = "user"
[data.schema]
label = ["click", "like"]
group = "user"
categorical = ["item"]
bags = ["genres"]
"""


def test_several_labels_and_bags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{i % 2}\t{int(i % 3 == 0)}\tu{i % 20}\t{i % 7}\t{'a|b' if i % 4 else ''}" for i in range(80)]
    Path("log.tsv").write_text("\n".join(["click\tlike\tuser\titem\tgenres", *lines]) + "\n")
    Path("run.toml").write_text(SCHEMA)
    trained = gdpa("train", "--config", "run.toml", "--model", "dlrm", "--steps", 2, "--out", "run", "--device", "cpu")
    assert trained.exit_code == 0, trained.output
    result = gdpa("predict", "run", "log.tsv", "--out", "a.csv", "--batch-size", 32)
    assert result.exit_code == 0, result.output
    with Path("a.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == ["user", "logit_click", "probability_click", "logit_like", "probability_like"]
    assert [row["user"] for row in found] == [f"u{i % 20}" for i in range(80)]
    for row in found[:5]:
        assert row["logit_click"] != row["logit_like"]
        assert math.isclose(float(row["probability_like"]), 1 / (1 + math.exp(-float(row["logit_like"]))), rel_tol=1e-8)
    whole, test = (json.loads(gdpa("evaluate", "run", *more).stdout) for more in (["log.tsv"], []))
    assert {"auc", "like.auc"} <= set(whole)
    assert whole["samples"] == 80 > test["samples"]


def test_code_that_a_checkpoint_names(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("functions.py").write_text("def cube(s):\n    return s * s * s\n")
    data = ["--data", "csv", "--data-train", folder / "train.csv", "--data-preset", "AmazonElectronics_x1"]
    model = ["--set", "activation=functions.py:cube", "--set", "dim=8", "--steps", 1, "--out", "run"]
    assert gdpa("train", *data, *model).exit_code == 0
    refused = gdpa("predict", "run", folder / "test.csv", "--out", "a.csv")
    assert refused.exit_code == 1
    assert "names code that would be imported and run" in refused.output
    assert gdpa("predict", "run", folder / "test.csv", "--out", "a.csv", "--trust").exit_code == 0


def test_predictions_that_are_no_numbers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, batch: Any) -> torch.Tensor:
            return torch.where(torch.arange(len(batch)) == 2, math.nan, 0.0)

    saved = open_checkpoint(folder / "run", device="cpu")
    object.__setattr__(saved, "model", Broken())
    with pytest.raises(ValueError, match=r"test.csv:4: the prediction is nan"):
        list(scoring.score_file(saved, folder / "test.csv"))
