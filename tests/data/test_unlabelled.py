"""Rows for predictions: the features of labelled rows, without their labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tables import SCHEMA, columns, write_text

from gdpa.data import DataError, Numeric, Schema, TableLog, Vocabularies, batches, unlabelled

HIDDEN = ("click", "like", "user", "weight")


def without(table: dict[str, list[object]]) -> dict[str, list[object]]:
    return {name: values for name, values in table.items() if name not in HIDDEN}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_features_are_those_of_labelled_rows(kind: str, tmp_path: Path) -> None:
    log = TableLog(write_text(tmp_path / "log.csv", columns()), SCHEMA)
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        write_text(path, without(columns()))
    else:
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table(without(columns())), path)
    found = list(unlabelled(path, SCHEMA, log.vocabularies, ("item", "page"), batch_size=7))
    assert [text for rows in found for text in rows.ids] == [(str(n % 9), f"p{n % 3}") for n in range(40)]
    for rows, want in zip(found, batches(log, 7), strict=True):
        assert torch.equal(rows.batch.dense, want.dense)
        assert torch.equal(rows.batch.sparse, want.sparse)
        assert rows.batch.labels.shape == want.labels.shape
        for name in want.sequences:
            assert torch.equal(rows.batch.sequences[name].ids, want.sequences[name].ids)
            assert torch.equal(rows.batch.sequences[name].values, want.sequences[name].values)
        assert torch.equal(rows.batch.bags["genres"].ids, want.bags["genres"].ids)
    where = f"{path}:9" if kind == "csv" else f"{path}, row 8"
    assert str(found[1].error(0, "odd")) == f"{where}: odd"


def test_refusals(tmp_path: Path) -> None:
    known = TableLog(write_text(tmp_path / "log.csv", columns()), SCHEMA).vocabularies
    table = without(columns())
    table["price"][3] = "dear"
    path = write_text(tmp_path / "bad.csv", table)
    with pytest.raises(DataError, match=r"bad\.csv:5, column 'price', value 'dear': not a number"):
        list(unlabelled(path, SCHEMA, known))
    with pytest.raises(DataError, match="column 'colour': this column is missing"):
        unlabelled(path, SCHEMA, known, ("colour",))
    with pytest.raises(ValueError, match="batch_size must be positive, not 0"):
        unlabelled(path, SCHEMA, known, batch_size=0)
    assert Schema("y", "u", time="t").feature_columns == ()


CODED = "dictionary of string"
JOINED: dict[str, tuple[list[str], str]] = {
    "numbers": (["null", "int32", "int64"], "int64"),
    "nulls": (["null", "null"], "null"),
    "text": (["string", "large_string", "null"], "large_string"),
    "categories": (["null", CODED, CODED], CODED),
    "lists": (["list of null", "list of int64"], "list of int64"),
}


@pytest.mark.parametrize(("kinds", "want"), JOINED.values(), ids=JOINED.keys())
def test_ids_have_one_type_in_all_files(kinds: list[str], want: str, tmp_path: Path) -> None:
    """Whatever the first rows are; the same as the files have together."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pq = pytest.importorskip("pyarrow.parquet")

    def typed(kind: str) -> Any:
        outer, _, inner = kind.rpartition(" of ")
        own = getattr(pa, inner)()
        return own if not outer else pa.list_(own) if outer == "list" else pa.dictionary(pa.int8(), own)

    ids, paths = [], []
    for n, kind in enumerate(kinds):
        value = [] if "list" in kind else None if kind == "null" else n if "int" in kind else f"v{n}"
        ids += [value, None]
        paths.append(tmp_path / f"{n}.parquet")
        pq.write_table(pa.table({"x": [1.0, 2.0], "id": pa.array(ids[-2:], typed(kind))}), paths[-1])
    schema = Schema("y", "u", numeric=(Numeric("x"),))
    for size in (1, 3, 8):
        found = [rows.table for rows in unlabelled(paths, schema, Vocabularies({}), ("id",), size)]
        assert all(table.schema.field("id").type == typed(want) for table in found)
        assert [value for table in found for value in table["id"].to_pylist()] == ids


def test_ids_of_frames_have_types_and_those_of_text_have_none(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pd.DataFrame({"x": [1.0, 2.0], "id": [2**60, 7], "c": pd.Categorical(["a", None])})
    frame.to_csv(tmp_path / "log.csv", index=False)
    schema, known = Schema("y", "u", numeric=(Numeric("x"),)), Vocabularies({})
    (typed,), (text,) = (
        list(unlabelled(source, schema, known, ("c", "id"))) for source in (frame, tmp_path / "log.csv")
    )
    assert text.table is None
    assert text.ids == typed.ids == [("a", str(2**60)), ("", "7")]
    assert typed.table.to_pydict() == {"c": ["a", None], "id": [2**60, 7]}
    assert [str(kind).partition("<")[0] for kind in typed.table.schema.types] == ["dictionary", "int64"]
