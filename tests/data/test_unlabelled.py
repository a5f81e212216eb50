"""Rows for predictions: the features of labelled rows, without their labels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tables import SCHEMA, columns, write_text

from gdpa.data import DataError, Schema, TableLog, batches, unlabelled

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
