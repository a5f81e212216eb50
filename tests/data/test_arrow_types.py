"""Columns of Arrow of every type that may hold ids: the ids that text would have, or a DataError with a place."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from gdpa.data import Bag, Categorical, DataError, History, Numeric, Schema, TableLog, batches
from gdpa.data.decoding.text import TextColumns
from gdpa.data.vocabulary import UNSEEN, Vocabularies

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet")
forms = pytest.importorskip("gdpa.data.decoding.forms")

SCHEMA = Schema("y", "u", categorical=(Categorical("i"),), histories=(History("h", (Categorical("l", "i"),), 3),))
BIG = 1234567890123456789
CODED = pa.dictionary(pa.int32(), pa.string())


def table(ids: Any, lists: Any) -> Any:
    return pa.table({"y": [1, 0, 1, 0], "u": [1, 2, 3, 4], "i": ids, "l": lists})


def read(found: Any) -> tuple[list[int], list[int], list[int]]:
    batch = next(batches(TableLog(found, SCHEMA), 4))
    history = batch.sequences["h"]
    return batch.sparse[:, 0].tolist(), history.ids[:, 0].tolist(), history.cu_seqlens.tolist()


@pytest.mark.parametrize(
    ("kind", "one", "two"),
    [("int64", 7, 8), ("int64", BIG, -BIG), ("int64", 2**63 - 1, -(2**63)), ("uint64", 2**63 + 5, 8),
     ("double", 7.0, 8.0), ("string", "a", "b"), ("string_view", "a", "b"), ("binary", b"a", b"\xc3\xa9"),
     ("large_binary", b"a", b"b"), ("binary_view", b"a", b"b"), ("dictionary of int64", 7, 8),
     ("dictionary of string", "a", "b"), ("dictionary of binary", b"a", b"b"),
     ("dictionary of large_binary", b"a", b"b")],
)  # fmt: skip
@pytest.mark.parametrize("of", ["list_", "large_list", "list_view", "large_list_view"])
def test_ids_of_any_type(kind: str, one: Any, two: Any, of: str, tmp_path: Path) -> None:
    """As from CSV, which has the text of each."""
    base = kind.removeprefix("dictionary of ").replace("double", "float64")
    if not hasattr(pa, base) or not hasattr(pa, of):
        pytest.skip("pyarrow is older than this type")
    own = getattr(pa, base)() if base == kind or kind == "double" else pa.dictionary(pa.int32(), getattr(pa, base)())
    lists = pa.array([[one], [], None, [two, one, one]], getattr(pa, of)(own))
    found = read(table(pa.array([one, two, None, one], own), lists))
    assert sorted(found[0][:2]) == [2, 3]
    a, b = found[0][:2]
    assert found == ([a, b, 0, a], [a, b, a, a], [0, 1, 1, 1, 4])
    text_one, text_two = (v.decode() if isinstance(v, bytes) else str(v) for v in (one, two))
    path = tmp_path / "log.csv"
    rows = f"1,1,{text_one},{text_one}\n0,2,{text_two},\n1,3,,\n0,4,{text_one},{text_two}^{text_one}^{text_one}\n"
    path.write_text(f"y,u,i,l\n{rows}")
    assert read(path) == found


def test_lists_of_one_size_that_are_dictionaries() -> None:
    """A null among them has entries all the same, and each chunk has a dictionary of its own."""
    own = pa.list_(pa.dictionary(pa.int32(), pa.binary()), 2)
    chunks = [pa.array([[b"a", b"b"], None], own), pa.array([[b"c", b"a"], [b"b", b"b"]], own)]
    ids, events, offsets = read(table(["a", "b", "c", "a"], pa.chunked_array(chunks)))
    a, b, c = ids[:3]
    assert (events, offsets) == ([a, b, c, a, b, b], [0, 2, 2, 4, 6])


@pytest.mark.parametrize("of", ["list_", "large_list"])
def test_lists_of_dictionaries_in_several_row_groups(of: str, tmp_path: Path) -> None:
    """As polars writes List(Categorical). pyarrow itself reads no batch of them that spans two row groups."""
    found = table(["a", "b", "a", "c"], pa.array([["a"], ["b", "c"], None, ["c"]], getattr(pa, of)(CODED)))
    path = tmp_path / "log.parquet"
    pq.write_table(found, path, row_group_size=1)
    assert read(path) == read(found)
    log = TableLog(path, SCHEMA)
    state = [log.state_dict() for _ in zip(range(3), batches(log, 1), strict=False)][-1]
    log.load_state_dict(state)
    assert [sample.group for sample in log] == [4]


def test_uuids_are_their_text(tmp_path: Path) -> None:
    """As DuckDB and others write them to Parquet, which pyarrow reads as an extension of 16 bytes."""
    if not hasattr(pa, "uuid"):
        pytest.skip("pyarrow is older than this type")
    one, two = UUID(int=5), UUID(int=2**127)

    def made(values: list[UUID | None]) -> Any:
        held = pa.array([None if value is None else value.bytes for value in values], pa.binary(16))
        return pa.ExtensionArray.from_storage(pa.uuid(), held)

    lists = pa.ListArray.from_arrays(pa.array([0, 1, 1, 1, 4], pa.int32()), made([one, two, one, one]))
    pq.write_table(table(made([one, two, None, one]), lists), tmp_path / "log.parquet")
    assert read(tmp_path / "log.parquet") == ([2, 3, 0, 2], [2, 3, 2, 2], [0, 1, 1, 1, 4])
    log = TableLog(tmp_path / "log.parquet", SCHEMA, shuffle=4)
    assert list(log.vocabularies.ids["i"]) == [str(one), str(two)]
    assert sorted(len(sample.sequences["h"]) for sample in log) == [0, 0, 1, 3]


@pytest.mark.parametrize("base", ["string_view", "binary_view"])
def test_dictionaries_of_views(base: str) -> None:
    if not hasattr(pa, base):
        pytest.skip("pyarrow is older than this type")
    codes = pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None, 0], pa.int32()), pa.array(["a", "b"], getattr(pa, base)())
    )
    entries = pa.ListArray.from_arrays(pa.array([0, 1, 2, 2, 2], pa.int32()), codes)
    a, b = read(table(codes, entries))[0][:2]
    assert read(table(codes, entries)) == ([a, b, 0, a], [a, b], [0, 1, 2, 2, 2])
    assert sorted((a, b)) == [2, 3]


@pytest.mark.parametrize("base", ["string_view", "binary_view"])
@pytest.mark.parametrize("of", ["list_", "list_view"])
def test_rows_of_views_in_any_order(base: str, of: str) -> None:
    """pyarrow takes no rows of them."""
    if not (hasattr(pa, base) and hasattr(pa, of)):
        pytest.skip("pyarrow is older than this type")
    own = getattr(pa, base)()
    found = table(pa.array(["a", "b", None, "c"], own), pa.array([["a"], [], None, ["b", "c"]], getattr(pa, of)(own)))
    log = TableLog(found, SCHEMA, shuffle=4, seed=1)
    names = {i: name for name, i in log.vocabularies.ids["i"].items()}
    rows = {s.group: ([names.get(i) for i in s.sparse], [names[i] for i in s.sequences["h"].ids[:, 0]]) for s in log}
    assert list(rows) != [1, 2, 3, 4]
    assert rows == {1: (["a"], ["a"]), 2: (["b"], []), 3: ([None], []), 4: (["c"], ["b", "c"])}


@pytest.mark.parametrize("kind", ["binary", "binary_view"])
@pytest.mark.parametrize("listed", [False, True])
def test_bytes_that_are_not_text_are_found_in_few_casts(kind: str, listed: bool, monkeypatch: Any) -> None:
    """Two of a thousand rows, and a slice beside them, which a cast of pyarrow would look beyond."""
    if not hasattr(pa, kind):
        pytest.skip("pyarrow is older than this type")
    values: list[Any] = [b"a"] * 1000
    values[17] = values[800] = b"\xff"
    own = getattr(pa, kind)()
    whole = pa.array([[v] for v in values], pa.list_(own)) if listed else pa.array(values, own)
    casts: list[int] = []
    halved = forms._halved
    monkeypatch.setattr(forms, "_halved", lambda found, text: (casts.append(len(found)), halved(found, text))[1])
    found, wrong = forms.plain(pa.chunked_array([whole]))
    good = ["a"] if listed else "a"
    assert wrong == [17, 800]
    assert found.to_pylist() == [None if i in (17, 800) else good for i in range(1000)]
    assert len(casts) < 50
    for start, stop, bad in ((0, 17, []), (16, 18, [1]), (18, 19, []), (800, 801, [0]), (17, 17, [])):
        found, wrong = forms.plain(pa.chunked_array([whole[start:stop]]))
        assert (wrong, len(found)) == (bad, stop - start)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (pa.array([[7.0], [], None, [8.0, None]]), r"row 4, column 'l', value \[8.0, None\]: entry 2 of 2 is empty"),
        (pa.array([[7.0], [], [float("nan")] + [8.0] * 5, []]), r"row 3, .*: entry 1 of 6 is empty"),
        (pa.array([["a"], [], None, ["b", ""]], pa.list_(CODED)), r"row 4, .*: entry 2 of 2 is empty"),
        (pa.array([[b"a"], [], None, [b"b", b"\xff"]]), r"row 4, column 'l', value \[b'b', b'\\xff'\]: not UTF-8"),
        (pa.array([[{"a": 1}], [], [], []]), r"column 'l': values of type struct<a: int64> cannot have ids"),
        (pa.array([[[1]], [], [], []]), r"column 'l': values of type list<.*> cannot have ids"),
    ],
    ids=("null", "nan that is cut", "dictionary", "bytes", "struct", "nested"),
)
def test_lists_that_cannot_have_ids(lists: Any, message: str, tmp_path: Path) -> None:
    pq.write_table(table([7, 8, 7, 8], lists), tmp_path / "log.parquet")
    with pytest.raises(DataError, match=rf"log\.parquet, {message}"):
        read(tmp_path / "log.parquet")


def test_an_empty_view_is_an_empty_entry() -> None:
    if not hasattr(pa, "string_view"):
        pytest.skip("pyarrow is older than this type")
    with pytest.raises(DataError, match=r"row 4, column 'l', value \['b', ''\]: entry 2 of 2 is empty"):
        read(table(["a"] * 4, pa.array([["a"], [], None, ["b", ""]], pa.list_(pa.string_view()))))


def test_gaps_among_numbers_are_left_to_the_column() -> None:
    column = Numeric("l", nonfinite="zero")
    log = TableLog(
        table(["a"] * 4, pa.array([[1.0, None], [], None, [float("nan")]])),
        Schema("y", "u", histories=(History("h", (column,), 3),)),
    )
    assert next(batches(log, 4)).sequences["h"].values[:, 0].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("lists", [Bag("l"), History("l", (Categorical("l"),), 3)], ids=("bag", "history"))
def test_structs_are_no_lists(lists: Any) -> None:
    """Their text would be that of Python's dict."""
    part = {"bags": (lists,)} if isinstance(lists, Bag) else {"histories": (lists,)}
    found = table([7] * 4, pa.array([{"a": 1}] * 4))
    for known in (None, Vocabularies({"l": {}})):
        with pytest.raises(DataError, match=r"column 'l': values of type struct<a: int64> cannot have ids"):
            list(TableLog(found, Schema("y", "u", **part), known))


@pytest.mark.parametrize("users", [[[1], [1], [2], [2]], [{"a": 1}] * 4], ids=("lists", "structs"))
def test_groups_that_have_parts(users: Any) -> None:
    found = table([7] * 4, [[1]] * 4).set_column(1, "u", pa.array(users))
    with pytest.raises(DataError, match=r"column 'u': values of type (list|struct)<.*> cannot be groups"):
        list(TableLog(found, SCHEMA))


def test_single_values_that_cannot_have_ids(tmp_path: Path) -> None:
    lists = [[], [], [], []]
    with pytest.raises(DataError, match=r"column 'i': values of type struct<a: int64> cannot have ids"):
        read(table(pa.array([{"a": 1}] * 4), lists))
    bad = table(pa.array([b"a", b"\xff", None, b"a"]), lists)
    pq.write_table(bad, tmp_path / "log.parquet")
    with pytest.raises(DataError, match=r"log\.parquet, row 2, column 'i', value b'\\xff': not UTF-8"):
        read(tmp_path / "log.parquet")
    assert [s.group for s in TableLog(bad, SCHEMA, skip_bad=1)] == [1, 3, 4]


@pytest.mark.parametrize("other", [["7", "x", "y", "z"], [7.0, 0.5, 1.0, 2.0]])
def test_files_of_unlike_types_are_named(other: list[Any], tmp_path: Path) -> None:
    """Text is no number, and a float cannot hold a long one."""
    pq.write_table(table([BIG] * 4, [[1]] * 4), tmp_path / "a.parquet")
    pq.write_table(table(other, [[1]] * 4), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet, column 'i': this column is of type .* here, but int64 in .*a\.p"):
        read([tmp_path / "a.parquet", tmp_path / "b.parquet"])


def test_files_of_unlike_types_are_named_behind_one_of_nulls(tmp_path: Path) -> None:
    """Which goes with either of the others."""
    paths = [tmp_path / f"{name}.parquet" for name in "abcd"]
    for path, ids in zip(paths, (pa.nulls(4), [7] * 4, [8] * 4, ["x"] * 4), strict=True):
        pq.write_table(table(ids, [["1"]] * 4), path)
    message = r"d\.parquet, column 'i': this column is of type string here, but int64 in \S*b\.parquet"
    with pytest.raises(DataError, match=message):
        read(paths)


# ---- the text of values, which is the same in every kind of source ---------------------------------------------------
FLAT = Schema("y", "u", categorical=(Categorical("i"),))
TEXTS: dict[str, Any] = {
    "booleans": [True, False, None, True],
    "float32": np.array([0.1, 7, 1e-4, 1.2345679e17], np.float32),
    "float64": [0.1, 7.0, -0.0, 1e15],
    "large": [1e16, 1.5e16, -1e16, 2.0**62],
    "beyond int64": [1e20, -1e20, 1e300, 2.0**63],
}


def samples(source: Any, known: Vocabularies | None = None) -> list[tuple[int, int]]:
    log = TableLog(source, FLAT, known, skip_bad=1)  # the null among the groups
    return [(int(sample.sparse[0]), sample.group) for sample in log]


@pytest.mark.parametrize("values", TEXTS.values(), ids=TEXTS.keys())
def test_ids_and_groups_are_those_of_the_same_frame_as_csv(values: Any, tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    found, path = pa.table({"y": [1, 0, 1, 0], "u": values, "i": values}), tmp_path / "log.csv"
    found.to_pandas().to_csv(path, index=False)
    assert TableLog(path, FLAT).vocabularies == TableLog(found, FLAT).vocabularies
    assert samples(path) == samples(found)
    assert len({group for _, group in samples(found)}) == len({str(value) for value in values if value is not None})


@pytest.mark.parametrize("name", ["booleans", "large", "beyond int64"])
def test_vocabularies_fit_what_arrow_writes(name: str, tmp_path: Path) -> None:
    """true where pandas writes True, and 1e+15 where it writes all digits."""
    values = [*TEXTS[name][:3], 1e15 if name == "large" else TEXTS[name][3]]
    found, path = pa.table({"y": [1, 0, 1, 0], "u": [1, 2, 3, 4], "i": values}), tmp_path / "log.csv"
    pytest.importorskip("pyarrow.csv").write_csv(found, path)
    for known in (TableLog(source, FLAT).vocabularies for source in (found, path)):
        assert samples(path, known) == samples(found, known)
        assert UNSEEN not in dict(samples(found, known))


def test_words_and_hashes_are_no_booleans_and_no_numbers(tmp_path: Path) -> None:
    """1e16 may be four digits of a hash; true may be a word among others."""
    path = tmp_path / "log.csv"
    texts = ["1e16", "1e+16", "10000000000000000", "true", "1", "x"]
    path.write_text("y,u,i\n" + "".join(f"1,{n},{text}\n" for n, text in enumerate(texts)))
    known = TableLog(path, FLAT).vocabularies
    assert list(known.ids["i"]) == ["10000000000000000", "1", "1e16", "true", "x"]
    assert known.id("i", "True") == UNSEEN
    assert known.id("i", "1e+16") == known.id("i", "10000000000000000") == 2


@pytest.mark.parametrize(
    "known", [{"1": 2, "0": 3}, {"True": 2, "False": 3}, {"true": 2, "false": 3}, {"TRUE": 2, "FALSE": 3}]
)
def test_booleans_by_any_vocabulary_of_them(known: dict[str, int], tmp_path: Path) -> None:
    """One that was counted on a Parquet file had 1 and 0 before."""
    path = tmp_path / "log.csv"
    texts = ["True", "False"], ["true", "false"], ["TRUE", "FALSE"], ["1", "0"], ["1.0", "0.0"]
    for values in ([True, False], [1, 0], [1.0, 0.0], *texts):
        path.write_text("y,u,i\n" + "".join(f"1,1,{value}\n" for value in values))
        for source in (pa.table({"y": [1, 1], "u": [1, 1], "i": values}), path):
            assert [i for i, _ in samples(source, Vocabularies({"i": known}))] == [2, 3]
    assert Vocabularies({"i": known}).id("i", "True") == 2


# ---- booleans as numbers ---------------------------------------------------------------------------------------------
COUNTED = Schema(
    ("y", "z"), "u", numeric=(Numeric("n", nonfinite="zero"),), weight="w", time="t",
    histories=(History("h", (Numeric("l"), Categorical("i")), 3),),
)  # fmt: skip


def counted(values: list[Any]) -> Any:
    """Labels, a number with a gap, weights and a history."""
    y, z = values[:2]
    listed = pa.array([[y, z, y], [], None, [z]])
    columns = {"y": [y, z, y, z], "z": [y] * 4, "u": [1, 2, 3, 4], "n": [z, y, None, y], "w": [y, z, z, y]}
    return pa.table({**columns, "t": [5, 6, 7, 8], "l": listed, "i": [[1, 2, 3], [], [], [4]]})


@pytest.mark.parametrize("values", [["True", "False"], ["true", "false"], ["TRUE", "FALSE"], ["1", "false"]])
def test_booleans_are_numbers_in_text_as_in_tables(values: list[str], tmp_path: Path) -> None:
    found, path = counted([True, False]), tmp_path / "log.csv"
    path.write_text(
        "y,z,u,n,w,t,l,i\n{0},{0},1,{1},{0},5,{0}^{1}^{0},1^2^3\n{1},{0},2,{0},{1},6,,\n{0},{0},3,,{1},7,,\n"
        "{1},{0},4, {0} ,{0},8,{1},4\n".format(*values)
    )
    batch = next(batches(TableLog(found, COUNTED), 4))
    assert batch.labels.tolist() == [[1, 1], [0, 1], [1, 1], [0, 1]]
    assert batch.dense[:, 0].tolist() == [0, 1, 0, 1]
    assert batch.weights is not None
    assert batch.weights.tolist() == [1, 0, 0, 1]
    assert batch.sequences["h"].values[:, 0].tolist() == [1, 0, 1, 0]
    for source in (path, counted(values)):
        stream = TableLog(source, COUNTED)
        other = next(batches(stream, 4))
        assert stream.tally.replaced == {"n": 1}
        for name in ("labels", "dense", "weights"):
            assert getattr(other, name).tolist() == getattr(batch, name).tolist()
        assert other.sequences["h"].values.tolist() == batch.sequences["h"].values.tolist()


def test_booleans_are_no_times(tmp_path: Path) -> None:
    path, schema = tmp_path / "log.csv", Schema("y", "u", time="t")
    path.write_text("y,u,t\n1,1,True\n")
    for source in (path, pa.table({"y": [1], "u": [1], "t": [True]})):
        with pytest.raises(DataError, match=r"column 't', value '?True'?: neither a number nor an ISO date"):
            list(TableLog(source, schema))


@pytest.mark.parametrize("texts", [("1", "2.5", "-3e4"), ("", "1", "2"), ("nan", "inf", "7")])
def test_numbers_are_not_looked_up_among_booleans(texts: tuple[str, ...], monkeypatch: Any) -> None:
    """Each would cost as much as parsing it."""
    calls: list[str] = []
    monkeypatch.setattr("gdpa.data.decoding.text._boolean", calls.append)
    columns = TextColumns(3, {"x": texts}, lambda row: ("", row), {})
    found = columns.numbers("x", lambda row, problem: None)
    np.testing.assert_array_equal(found, [float(text or "nan") for text in texts])
    assert not calls


def test_a_dictionary_whose_chunks_have_more_values_than_it_counts() -> None:
    """As files have it that are written a batch at a time."""
    own = [
        pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), [f"{k}.{i}" for i in range(100)])
        for k in (0, 1)
    ]
    rows = {"y": [1] * 200, "u": range(200), "i": pa.chunked_array(own)}
    assert sorted(i for i, _ in samples(pa.table(rows))) == list(range(2, 202))
    lists = pa.chunked_array([pa.ListArray.from_arrays(pa.array(range(101), pa.int32()), values) for values in own])
    found = pa.table({**rows, "l": lists})
    for log in (TableLog(found, SCHEMA), TableLog(found, SCHEMA, shuffle=50)):
        both = [(sample.sparse.tolist(), sample.sequences["h"].ids[:, 0].tolist()) for sample in log]
        assert len(both) == 200
        assert all(item == past for item, past in both)
