"""Tables from anywhere give the same samples: text, Parquet, Arrow, frames and data sets, whole and from the middle."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from comparing import plain
from tables import SCHEMA, columns, write_text

from gdpa.data import DataError, Schema, TableLog, batches

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet")


def parts(table: dict[str, list[Any]], *cuts: int) -> list[dict[str, list[Any]]]:
    edges = [0, *cuts, len(table["user"])]
    return [{k: v[a:b] for k, v in table.items()} for a, b in pairwise(edges)]


def one_csv(folder: Path) -> Any:
    return write_text(folder / "log.csv", columns())


def tsv_gz(folder: Path) -> Any:
    return write_text(folder / "log.tsv.gz", columns(), "\t")


def in_capitals(folder: Path) -> Any:
    """As some systems write names: still tabs, and still compressed."""
    return tsv_gz(folder).rename(folder / "LOG.TSV.GZ")


def csv_pattern(folder: Path) -> Any:
    """Three files, one with its columns in another order."""
    first, second, third = parts(columns(), 13, 20)
    write_text(folder / "a1.csv", first)
    write_text(folder / "a2.csv", dict(reversed(second.items())))
    write_text(folder / "a3.csv", third)
    return str(folder / "a*.csv")


def parquet(folder: Path) -> Any:
    pq.write_table(pa.table(columns()), folder / "log.parquet", row_group_size=7)
    return folder / "log.parquet"


def parquet_list(folder: Path) -> Any:
    paths = [folder / f"part{i}.parquet" for i in range(3)]
    for path, part in zip(paths, parts(columns(), 13, 20), strict=True):
        pq.write_table(pa.table(part), path, row_group_size=5)
    return paths


def arrow_file(folder: Path) -> Any:
    with pa.OSFile(str(folder / "log.arrow"), "wb") as file, pa.ipc.new_file(file, pa.table(columns()).schema) as out:
        for batch in pa.table(columns()).to_batches(max_chunksize=6):
            out.write_batch(batch)
    return folder / "log.arrow"


def arrow_stream(folder: Path) -> Any:
    table = pa.table(columns())
    with pa.OSFile(str(folder / "log.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table, max_chunksize=6)
    return folder / "log.arrow"


def text_in_a_table(folder: Path) -> Any:
    """Lists as text with separators, ids as text, times as time stamps."""
    table = columns()
    joined = {name: [sep.join(map(str, v)) for v in table[name]] for name, sep in (("items", "^"), ("genres", "|"))}
    times = {"time": pa.array(table["time"], pa.timestamp("s")), "item": [str(v) for v in table["item"]]}
    events = {"times": pa.array(table["times"], pa.list_(pa.timestamp("ms")))}
    return pa.table({**table, **joined, **times, **events})


def pandas_frame(folder: Path) -> Any:
    return pytest.importorskip("pandas", reason="pandas is not installed").DataFrame(columns())


def polars_frame(folder: Path) -> Any:
    return pytest.importorskip("polars", reason="polars is not installed").DataFrame(columns())


def hugging_face(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    # With a fingerprint, since computing one fails where datasets, dill and pyarrow are of different years.
    return datasets.Dataset(datasets.table.InMemoryTable(pa.table(columns())), fingerprint="0")


def hugging_face_stream(folder: Path) -> Any:
    return hugging_face(folder).to_iterable_dataset(num_shards=3)


SOURCES: list[Callable[[Path], Any]] = [
    tsv_gz, in_capitals, csv_pattern, parquet, parquet_list, arrow_file, arrow_stream, text_in_a_table, pandas_frame,
    polars_frame, hugging_face, hugging_face_stream,
]  # fmt: skip
every_source = pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)


@every_source
def test_the_same_samples_as_from_one_csv_file(make: Callable[[Path], Any], tmp_path: Path) -> None:
    expected = TableLog(one_csv(tmp_path), SCHEMA)
    found = TableLog(make(tmp_path), SCHEMA)
    assert found.vocabularies == expected.vocabularies
    assert [plain(s) for s in found] == [plain(s) for s in expected]
    assert [plain(s) for b in batches(found, 7) for s in b] == [plain(s) for s in expected]
    assert found.tally.cut == {name: 2 * n for name, n in expected.tally.cut.items()} or found.tally == expected.tally


@every_source
def test_resume_is_exact_and_ranks_share(make: Callable[[Path], Any], tmp_path: Path) -> None:
    source = make(tmp_path)
    whole = TableLog(source, SCHEMA, shuffle=9, seed=3)
    whole.set_epoch(1)
    expected = [b.groups.tolist() for b in batches(whole, 6)]
    assert sorted(g for part in expected for g in part) == list(range(40))
    for steps in (0, 1, 4):
        one, later = (TableLog(source, SCHEMA, whole.vocabularies, shuffle=9, seed=3) for _ in range(2))
        one.set_epoch(1)
        taken = [b.groups.tolist() for b in islice(batches(one, 6), steps)]
        later.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert taken + [b.groups.tolist() for b in batches(later, 6)] == expected
    shards = [TableLog(source, SCHEMA, whole.vocabularies, shuffle=9, rank=r, world=3) for r in range(3)]
    assert sorted(s.group for shard in shards for s in shard) == list(range(40))


def test_memory_does_not_grow_with_a_parquet_file(tmp_path: Path) -> None:
    """Arrow holds some row groups at a time; of a file four times as long, no more."""

    def most(repeats: int) -> int:
        path = tmp_path / f"{repeats}.parquet"
        pq.write_table(pa.concat_tables([pa.table(columns())] * repeats), path, row_group_size=500)
        log, held = TableLog(path, SCHEMA, known, shuffle=100), 0
        before = pa.total_allocated_bytes()
        for _ in batches(log, 50):
            held = max(held, pa.total_allocated_bytes() - before)
        return held

    known = TableLog(pa.table(columns()), SCHEMA).vocabularies
    assert 0 < most(2000) < 1.2 * most(500)


def test_only_the_columns_of_the_schema_are_read(tmp_path: Path) -> None:
    """A column that no reader could take, of a type of its own, is not touched."""
    table = pa.table(columns())
    odd = table.append_column("odd", pa.array([{"a": 1}] * 40))
    pq.write_table(odd, tmp_path / "odd.parquet")
    assert len(list(TableLog(tmp_path / "odd.parquet", SCHEMA))) == 40


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("click", 3, "column 'click', value 3: the label must be 0 or 1"),
        ("click", None, "column 'click': the label is not a number"),
        ("price", float("nan"), "column 'price', value nan: missing, or not a finite float32"),
        ("user", None, "column 'user': the group is empty"),
        ("items", [1, None], r"column 'items', value \[1, None\]: entry 2 of 2 is empty"),
        ("query", ["a", ""], r"entry 2 of 2 is empty"),
        ("stars", [1.0], "columns of different lengths"),
        ("weight", -1.0, "a weight must be"),
    ],
)
def test_a_bad_row_is_named_and_loses_nothing_else(column: str, value: Any, message: str, tmp_path: Path) -> None:
    table = columns()
    table[column] = [value if n == 17 else v for n, v in enumerate(table[column])]
    first, second = parts(table, 10)
    for name, part in (("a", first), ("b", second)):
        pq.write_table(pa.table(part), tmp_path / f"{name}.parquet")
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    with pytest.raises(DataError, match=message) as caught:
        list(TableLog(paths, SCHEMA))
    assert (caught.value.path, caught.value.row) == (paths[1], 8)
    assert "b.parquet, row 8" in str(caught.value)
    kept = TableLog(paths, SCHEMA, skip_bad=1, shuffle=11)
    found = [s.group for s in kept]
    assert sorted(found) == [n for n in range(40) if n != 17]
    assert kept.skipped == 1


@pytest.mark.parametrize(
    ("name", "problem"),
    [("log.jsonl", r"read_json\(.*to_parquet"), ("log.JSON.gz", "read_json"), ("log.xlsx", "to_parquet"),
     ("log.csv.zst", "must be unpacked first"), ("log.parquet.gz", "must be unpacked first")],
)  # fmt: skip
def test_other_files_are_refused_by_what_they_are(name: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"y": 1, "u": 2}\n')
    with pytest.raises(ValueError, match=rf"{re.escape(name)}' .*{problem}"):
        TableLog(tmp_path / name, Schema("y", "u"))


def test_wrong_tables(tmp_path: Path) -> None:
    pq.write_table(pa.table(columns()), tmp_path / "log.parquet")
    with pytest.raises(DataError, match=r"log.parquet, column 'y': this column is missing; there are click"):
        TableLog(tmp_path / "log.parquet", Schema("y", "user"))
    pq.write_table(pa.table(columns(0) | {"click": pa.array([], pa.int64())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"none\.parquet: the table has no rows"):
        TableLog(tmp_path / "none.parquet", Schema("click", "user"))
    write_text(tmp_path / "log.csv", columns())
    with pytest.raises(ValueError, match="all text or all tables"):
        TableLog([tmp_path / "log.parquet", tmp_path / "log.csv"], SCHEMA)
    with pytest.raises(TypeError, match=r"source must be a path or a list of paths, .* got builtins\.int"):
        TableLog(3, SCHEMA)
    for missing in ("none.csv", "none*.csv", [tmp_path / "log.csv", "none.parquet"]):
        with pytest.raises(FileNotFoundError, match="none"):
            TableLog(missing, SCHEMA)


@pytest.mark.parametrize("name", ["log.parquet", "log.arrow"])
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match=rf"{name}: this file cannot be read \("):
        TableLog(tmp_path / name, SCHEMA)


def test_a_state_of_another_table_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table(columns()), tmp_path / "a.parquet")
    pq.write_table(pa.table(columns(30)), tmp_path / "b.parquet")
    one, other = (TableLog(tmp_path / f"{name}.parquet", SCHEMA) for name in "ab")
    with pytest.raises(ValueError, match="saved with tables="):
        other.load_state_dict(one.state_dict())
