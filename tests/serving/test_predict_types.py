"""`gdpa predict` on tables whose columns have types: ids that stay what they are, and the same scores from CSV."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gdpa.cli import main
from gdpa.serving import scoring, writing
from gdpa.serving.checkpoints import open_checkpoint

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet")

RUN = """
[data]
source = "files"
train = "log.parquet"
[data.schema]
label = "bought"
group = "user"
numeric = ["promo", {name = "price", nonfinite = "zero"}]
categorical = ["item", "new"]
weight = "counts"
[[data.schema.histories]]
name = "h"
columns = [{name = "items", vocabulary = "item"}, {name = "paid", kind = "numeric"}]
max_len = 3
"""
CODED = pa.dictionary(pa.int8(), pa.string())
FLAT = ["event_id", "age", "device", "hist_times", "at", "new"]
SCORES = {"logit": pa.float32(), "probability": pa.float64()}


def log(rows: int, first: int = 0) -> Any:
    """Booleans as a number, a label, a weight, an id and in histories."""
    n = range(first, first + rows)
    return pa.table(
        {
            "bought": [i % 3 == 0 for i in n],
            "user": [f"u{i % 5}" for i in n],
            "promo": [i % 2 == 0 for i in n],
            "price": [None if i % 7 == 0 else i / 4 for i in n],
            "item": [i % 11 for i in n],
            "new": [None if i % 6 == 0 else i % 4 == 0 for i in n],
            "items": [[j % 11 for j in range(i % 4)] for i in n],
            "paid": [[j % 2 == 0 for j in range(i % 4)] for i in n],
            "counts": [i % 5 != 0 for i in n],
            "event_id": [2**53 + i for i in n],
            "age": pa.array([None if i % 3 == 0 else i for i in n], pa.int16()),
            "device": pa.array([None if i % 4 == 0 else f"d{i % 3}" for i in n], CODED),
            "hist_times": [None if i % 5 == 0 else [i, None] for i in n],
            "at": pa.array([datetime.datetime(2024, 1, 1) + datetime.timedelta(i) for i in n], pa.timestamp("us")),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("types")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        pq.write_table(log(64), "log.parquet")
        Path("run.toml").write_text(RUN)
        more = ["--steps", 3, "--out", "run", "--device", "cpu", "--set", "dim=8", "--batch-size", 16]
        trained = gdpa("train", "--config", "run.toml", "--model", "din", *more)
    assert trained.exit_code == 0, trained.output
    return where


def gdpa(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def predict(folder: Path, file: Path, out: Path, *ids: str) -> Any:
    named = [argument for name in ids for argument in ("--id", name)]
    result = gdpa("predict", folder / "run", file, "--out", out, "--batch-size", 16, *named)
    assert result.exit_code == 0, result.output
    return pq.read_table(out) if out.suffix == ".parquet" else out.read_bytes()


def as_arrow(path: Path, batches: list[Any]) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as out:
        for batch in batches:
            out.write_table(batch)
    return path


# ---- ids -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_ids_have_the_types_of_the_table(kind: str, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writing, "ROW_GROUP", 20)
    file, rows = tmp_path / f"new.{kind}", log(50, 60)
    if kind == "parquet":
        pq.write_table(rows, file, row_group_size=9)
    else:
        as_arrow(file, [rows.slice(i, 7) for i in range(0, 50, 7)])
    found = predict(folder, file, tmp_path / "a.parquet", *FLAT)
    assert found.column_names == [*FLAT, *SCORES]
    assert found.select(FLAT).schema.types == rows.select(FLAT).schema.types
    assert found.select(list(SCORES)).schema.types == list(SCORES.values())
    assert found.select(FLAT).to_pylist() == rows.select(FLAT).to_pylist()
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 2
    predict(folder, file, tmp_path / "b.parquet", *FLAT)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_scores_can_be_joined_to_their_table(folder: Path, tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    predict(folder, folder / "log.parquet", tmp_path / "a.parquet", "event_id")
    rows, scores = pd.read_parquet(folder / "log.parquet"), pd.read_parquet(tmp_path / "a.parquet")
    joined = pd.merge(rows, scores.sample(frac=1, random_state=1), on="event_id")
    assert joined["event_id"].tolist() == rows["event_id"].tolist()
    assert joined["logit"].tolist() == scores["logit"].tolist()


def test_csv_has_the_text_of_ids(folder: Path, tmp_path: Path) -> None:
    text = predict(folder, folder / "log.parquet", tmp_path / "a.csv", *FLAT).decode().splitlines()
    assert text[1].startswith("9007199254740992,,,,2024-01-01 00:00:00,,")
    assert text[2].startswith('9007199254740993,1,d1,"[1, None]",2024-01-02 00:00:00,False,')
    (tmp_path / "new.csv").write_text("promo,price,item,new,items,paid,event_id,age\n1,2,3,True,4^5,1^0,7,\n")
    found = predict(folder, tmp_path / "new.csv", tmp_path / "b.parquet", "event_id", "age")  # a CSV file has no types
    assert found.select(["event_id", "age"]).to_pylist() == [{"event_id": "7", "age": ""}]


def test_a_dictionary_that_changes_from_batch_to_batch(folder: Path, tmp_path: Path) -> None:
    """All values together are more than its indices can count; pyarrow would write a row group that it cannot read."""
    batches = []
    for k in range(5):
        own = pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), [f"{k}.{i}" for i in range(100)])
        batches.append(log(100, 100 * k).drop_columns(["device"]).append_column("device", own))
    found = predict(folder, as_arrow(tmp_path / "new.arrow", batches), tmp_path / "a.parquet", "device", "event_id")
    assert found.schema.types[0] == CODED
    assert found["device"].to_pylist() == [f"{k}.{i}" for k in range(5) for i in range(100)]
    assert found["event_id"].to_pylist() == [2**53 + i for i in range(500)]


def test_types_that_parquet_has_not_are_text(folder: Path, tmp_path: Path) -> None:
    if not hasattr(pa, "string_view"):
        pytest.skip("pyarrow is older than views")
    views = pa.array(["a", "b"], pa.string_view())
    odd = {
        "coded": pa.DictionaryArray.from_arrays(pa.array([1, None, 0, 1], pa.int8()), views),
        "ends": pa.RunEndEncodedArray.from_arrays(pa.array([3, 4], pa.int32()), ["a", None]),
        "view": pa.array(["x", None, "", "y"], pa.string_view()),
        "nothing": pa.nulls(4),
    }
    rows = log(4)
    for name, column in odd.items():
        rows = rows.append_column(name, column)
    found = predict(folder, as_arrow(tmp_path / "new.arrow", [rows]), tmp_path / "a.parquet", *odd)
    assert found.schema.types[:4] == [pa.string(), pa.string(), pa.string_view(), pa.null()]
    assert found.select(list(odd)).to_pydict() == {name: column.to_pylist() for name, column in odd.items()}


def test_memory_does_not_grow_with_a_table(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writing, "ROW_GROUP", 256)
    monkeypatch.setattr("gdpa.data.sources.arrow.READ", 1024)
    saved = open_checkpoint(folder / "run", device="cpu")

    def most(repeats: int) -> int:
        """What Arrow holds; the reader has some of its row groups."""
        file, held = tmp_path / f"{repeats}.parquet", 0
        pq.write_table(pa.concat_tables([log(256)] * repeats), file, row_group_size=256)
        before = pa.total_allocated_bytes()

        def watched() -> Any:
            nonlocal held
            for some in scoring.score_file(saved, file, FLAT, batch_size=128):
                held = max(held, pa.total_allocated_bytes() - before)
                yield some

        assert writing.write(tmp_path / "scores.parquet", FLAT, watched(), overwrite=True) == 256 * repeats
        return held

    most(20)  # what is made at the first call
    assert 0 < most(80) < 1.2 * most(20)


# ---- booleans --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("written", [("True", "False"), ("true", "false"), ("TRUE", "FALSE"), ("1", "0")])
def test_a_csv_of_the_same_frame_has_the_same_scores(written: tuple[str, str], folder: Path, tmp_path: Path) -> None:
    """As pandas writes booleans, Arrow, and R."""
    pytest.importorskip("pandas", reason="pandas is not installed")
    rows, file, (yes, no) = log(50, 60), tmp_path / "new.parquet", written
    pq.write_table(rows, file)
    frame = rows.to_pandas().drop(columns=["age", "device", "hist_times", "at"])
    for name in ("items", "paid"):
        frame[name] = ["^".join(map(str, values)) for values in frame[name]]
    frame.to_csv(tmp_path / "pandas.csv", index=False)
    text = (tmp_path / "pandas.csv").read_text()
    assert ",True," in text
    (tmp_path / "new.csv").write_text(text.replace("True", yes).replace("False", no))
    scores = [predict(folder, tmp_path / f"new.{k}", tmp_path / f"{k}-scores.csv", "user") for k in ("parquet", "csv")]
    assert scores[0] == scores[1]
    metrics = [gdpa("evaluate", folder / "run", tmp_path / f"new.{kind}") for kind in ("parquet", "csv")]
    assert metrics[0].exit_code == 0, metrics[0].output
    assert json.loads(metrics[0].stdout)["samples"] == 50
    assert metrics[0].stdout == metrics[1].stdout
