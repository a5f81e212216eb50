"""What a schema can ask of columns: numbers and times in histories, bags, weights, several labels."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparing import plain
from tables import SCHEMA, columns, write_text

from gdpa.data import Bag, Categorical, DataError, History, Numeric, Schema, TableLog, Time, batches, collate
from gdpa.data.decoding import lookup as lookup_module
from gdpa.data.decoding.lookup import Lookup, parse_whole
from gdpa.data.vocabulary import MISSING, UNSEEN, Vocabularies, is_whole

TIMED = Schema("y", "u", histories=(History("h", (Categorical("i"), Time("t")), 5),), time="now")


def log(tmp_path: Path, text: str, schema: Schema, **options: Any) -> TableLog:
    path = tmp_path / "log.csv"
    path.write_text(text)
    return TableLog(path, schema, **options)


def test_everything_at_once(tmp_path: Path) -> None:
    stream = TableLog(write_text(tmp_path / "log.csv", columns()), SCHEMA)
    batch = collate(list(stream))
    assert stream.label_names == ("click", "like")
    assert batch.labels.tolist() == [[float(n % 2), float(n % 5 == 0)] for n in range(40)]
    assert batch.weights is not None
    assert batch.weights.tolist() == [0.5 + n % 3 for n in range(40)]
    assert stream.value_names == (("seen", ("stars", "age")), ("words", ()))
    sample = batch[6]  # six events, of which the newest four are kept: 4, 3, 2 and 1 days old
    seen = sample.sequences["seen"]
    assert seen.ids[:, 0].tolist() == [stream.vocabularies.id("item", str(8 + j)) for j in range(3)] + [
        stream.vocabularies.id("item", "0")
    ]
    assert seen.values[:, 0].tolist() == [1.0, 1.5, 2.0, 2.5]
    assert seen.values[:, 1].tolist() == [4.0, 3.0, 2.0, 1.0]
    assert batch[7].bags["genres"].ids[:, 0].tolist() == [stream.vocabularies.id("genres", v) for v in "xy"]
    assert (stream.tally.cut["genres"], stream.tally.cut["seen"]) == (10, sum(max(0, n % 7 - 4) for n in range(40)))
    assert batch.dense[8].tolist() == [pytest.approx(math.log1p(2.0))]


def test_batches_are_the_samples(tmp_path: Path) -> None:
    stream = TableLog(write_text(tmp_path / "log.csv", columns()), SCHEMA, shuffle=16, seed=2)
    one_by_one = [plain(s) for s in stream]
    for size in (1, 7, 40, 64):
        assert [plain(s) for b in batches(stream, size) for s in b] == one_by_one
    assert [len(b) for b in batches(stream, 15, drop_last=True)] == [15, 15]


@pytest.mark.parametrize(
    ("now", "event", "days"),
    [("172800", "86400", 1.0), ("1970-01-03", "1970-01-02T12:00:00+00:00", 0.5), ("1970-01-03T00:00:00", "0", 2.0)],
)
def test_times_may_be_numbers_or_dates(now: str, event: str, days: float, tmp_path: Path) -> None:
    (sample,) = log(tmp_path, f"y,u,i,t,now\n1,1,a,{event},{now}\n", TIMED)
    assert sample.sequences["h"].values.tolist() == [[days]]


def test_events_after_their_row_are_counted(tmp_path: Path) -> None:
    stream = log(tmp_path, "y,u,i,t,now\n1,1,a^b,86400^0,0\n", TIMED)
    assert next(iter(stream)).sequences["h"].values.tolist() == [[-1.0], [0.0]]
    assert stream.tally.future == {"t": 1}


@pytest.mark.parametrize("between", ["|", ",", ";", " "])
def test_a_separator_that_no_list_has_is_doubted(between: str, tmp_path: Path) -> None:
    """Every history would be one event, of an id of its own."""
    schema = Schema("y", "u", histories=(History("h", (Categorical("l"),), 5),), bags=(Bag("b", separator="^"),))
    lists = {"l": [between.join("123"), "", between.join("45")], "b": ["Science Fiction", "a-b", ""]}
    rows = {"y": ["1", "0", "1"], "u": ["1", "2", "3"], **lists}
    lines = map("\t".join, zip(*rows.values(), strict=True))
    (tmp_path / "log.tsv").write_text("\n".join(["\t".join(rows), *lines]))
    pa = pytest.importorskip("pyarrow")
    for source in (tmp_path / "log.tsv", pa.table(rows)):
        stream = TableLog(source, schema)
        assert list(next(iter(stream)).sequences["h"].ids.shape) == [1, 1]
        (said,) = stream.tally.doubts()
        assert said.startswith("no list of l has more than one entry, and 2 have")
        right = replace(schema, histories=(History("h", (Categorical("l"),), 5, separator=between),))
        stream = TableLog(source, right)
        assert [len(sample.sequences["h"]) for sample in stream] == [3, 0, 2]
        assert stream.tally.doubts() == []


def test_events_that_are_not_oldest_first_are_counted(tmp_path: Path) -> None:
    """Within a history, and of rows that are read: where the newest come first, max_len would keep the oldest."""
    rows = "y,u,i,t,now\n1,1,a^b^c,90^50^20,100\n1,1,a^b,30^30,100\n1,1,a,10,100\n1,2,b^a,10^x,100\n"
    stream = log(tmp_path, rows, TIMED, skip_bad=1)
    assert len(list(stream)) == 3
    assert stream.tally.unordered == {"t": 2}
    assert stream.tally.future == {}
    (said,) = stream.tally.doubts()
    assert said.startswith("2 of the events read, by t, are older than the one before")


@pytest.mark.parametrize(("own", "events"), [("s", "ms"), ("ms", "s"), ("s", "ns"), ("us", "s")])
def test_ages_that_only_a_wrong_unit_makes_are_refused(own: str, events: str, tmp_path: Path) -> None:
    """Times that are said to be in seconds, as they are by default."""
    now, scale = 1_700_000_000, {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    text = f"y,u,i,t,now\n1,1,,,{now * scale[own]}\n1,1,a,{(now - 86_400) * scale[events]},{now * scale[own]}\n"
    with pytest.raises(DataError, match=r"log\.csv:3, column 't', .*200 years.*Schema\.time_unit.*Time\.unit"):
        list(log(tmp_path, text, TIMED))
    timed = Schema(
        "y", "u", histories=(History("h", (Categorical("i"), Time("t", events)), 5),), time="now", time_unit=own
    )
    assert [s.sequences["h"].values.tolist() for s in log(tmp_path, text, timed)] == [[], [[1.0]]]


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_times_that_are_all_in_a_wrong_unit_are_refused(unit: str, tmp_path: Path) -> None:
    """Events of the last days: their ages would be a thousand times too large, which is no 200 years yet."""
    now, scale = 1_700_000_000, {"ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    text = f"y,u,i,t,now\n1,1,,,{now * scale}\n1,1,a,{(now - 6) * scale},{now * scale}\n"
    with pytest.raises(
        DataError, match=r"log\.csv:3, column 'now', .*after the year 9999.*Schema\.time_unit.*Time\.unit"
    ):
        list(log(tmp_path, text, TIMED))


def test_columns_that_are_aligned_at_the_newest_event(tmp_path: Path) -> None:
    history = History("h", (Categorical("i"), Numeric("x")), 3, unequal="fill")
    stream = log(tmp_path, "y,u,i,x\n1,1,a^b^c^d,7\n0,2,a,1^2\n", Schema("y", "u", histories=(history,)))
    first, second = (s.sequences["h"] for s in stream)
    assert first.values[:, 0].tolist() == [0.0, 0.0, 7.0]
    assert (second.ids[:, 0] > 0).tolist() == [False, True]
    assert stream.tally.filled == {"i": 1, "x": 2}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2,1,1,1,1,a,1,a,5", "column 'y', value '2': the label must be 0 or 1"),
        ("1,x,1,1,1,a,1,a,5", "column 'z', value 'x': the label is not a number"),
        ("1,1,1,-1,1,a,1,a,5", "column 'w', value '-1': a weight must be a finite number of at least 0"),
        ("1,1,1,nan,1,a,1,a,5", "column 'w', value 'nan': a weight must be"),
        ("1,1,1,1,,a,1,a,5", "column 'now', value '': the time is missing"),
        ("1,1,1,1,soon,a,1,a,5", "column 'now', value 'soon': neither a number nor an ISO date"),
        ("1,1,1,1,1,a^b,1^x,a,5^5", "column 'x', value '1^x': an entry is not a number"),
        ("1,1,1,1,1,a^b,1^inf,a,5^5", "column 'x', value '1^inf': missing, or not a finite float32"),
        ("1,1,1,1,1,a^b,1^2,a,5^never", "column 't', value '5^never': an entry is neither a number nor an ISO date"),
        ("1,1,1,1,1,a^b,1^2,a,5", "columns of different lengths (i 2, x 2, t 1)"),
        ("1,1,1,1,1,a,1,a||b,5", "column 'g', value 'a||b': entry 2 of 3 between '|' is empty"),
    ],
)
def test_bad_rows_are_named(row: str, message: str, tmp_path: Path) -> None:
    history = History("h", (Categorical("i"), Numeric("x"), Time("t")), 5)
    schema = Schema(("y", "z"), "u", histories=(history,), bags=(Bag("g"),), weight="w", time="now")
    good = "1,1,1,1,1,a,1,a,5"
    rows = log(tmp_path, f"y,z,u,w,now,i,x,g,t\n{good}\n{row}\n{good}\n", schema)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        list(rows)
    assert caught.value.line == 3
    kept = TableLog(tmp_path / "log.csv", schema, rows.vocabularies, skip_bad=1)
    assert len(list(kept)) == 2
    assert kept.skipped == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Time("t", "hours"), "unit must be one of s, ms, us, ns"),
        (lambda: Bag("g", separator=""), "separator of the bag 'g' cannot be ''"),
        (lambda: Bag("g", max_len=0), "max_len of the bag 'g' must be positive"),
        (lambda: History("h", (Time("a"), Time("b")), 3), "more than one Time"),
        (lambda: History("h", (Time("t"), Numeric("age")), 3), "both a Time, which becomes the value 'age', and a num"),
        (lambda: Schema("y", "u", histories=(History("h", (Time("a"),), 3),)), "the schema has no time for the row"),
        (lambda: Schema((), "u"), "label must name at least one"),
        (lambda: Schema(("a", "a"), "u"), "label has a name twice"),
        (lambda: Schema("y", "u", time_unit="d"), "time_unit must be one of"),
        (lambda: Schema("y", "u", bags=(Bag("g"), Bag("g"))), "bags has a name twice"),
        (lambda: Schema("y", "y"), "the label 'y' is also the group, which must be another column"),
        (lambda: Schema(("x", "y"), "u", weight="y"), "the label 'y' is also the weight"),
        (lambda: Schema("y", "u", time="y"), "the label 'y' is also the time"),
    ],
)
def test_wrong_schemas(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: History("h", (Categorical("i"),), 2.5), "max_len of the history 'h' must be a whole number, not 2.5"),
        (lambda: Bag("g", max_len="5"), "max_len of the bag 'g' must be a whole number, not '5'"),
        (lambda: Schema("y", "u", min_count="5"), "min_count must be a whole number, not '5'"),
        (lambda: Schema(5, "u"), "label must be the name of a column, or a tuple of names, not 5"),
        (lambda: Schema("y", "u", categorical=("item",)), r"must hold Categorical, not 'item': Categorical\('item'\)"),
        (lambda: Schema("y", "u", numeric="x"), "numeric must be a tuple of Numeric, not 'x'"),
        (lambda: Schema("y", None), "group must be the name of a column, not None"),
        (lambda: Schema("y", ["u"]), r"group must be the name of a column, not \['u'\]"),
        (lambda: Schema("y", "u", weight=1.0), "weight must be the name of a column, not 1.0"),
        (lambda: Schema("y", "u", time=["t"]), "time must be the name of a column"),
        (lambda: Bag("g", vocabulary=3), "vocabulary of Bag must be text, not 3"),
        (lambda: Categorical(3), "name of Categorical must be text, not 3"),
        (lambda: Categorical("i", None), "vocabulary of Categorical must be text, not None"),
        (lambda: Numeric(None), "name of Numeric must be text, not None"),
        (lambda: Time(0), "name of Time must be text, not 0"),
        (lambda: History("h", Categorical("a"), 3), r"columns of the history 'h' must be a tuple of .*, not Categor"),
    ],
)
def test_types_of_schemas(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()
    with pytest.raises(TypeError, match="must be Categorical, Numeric or Time, not 'x'"):
        History("h", ("x",), 3)  # type: ignore[arg-type]


# ---- whole numbers ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "texts",
    [("1^20^300", "", "7", "0^0"), ("999999999999999999",), ("", ""), ("5",)],
)
def test_whole_numbers_are_parsed_as_int_does(texts: tuple[str, ...]) -> None:
    found = parse_whole(texts, "^")
    assert found is not None
    lists = [[int(part) for part in text.split("^")] if text else [] for text in texts]
    assert found[0].tolist() == [len(entries) for entries in lists]
    assert found[1].tolist() == [entry for entries in lists for entry in entries]


@pytest.mark.parametrize("text", ["01", "1^^2", "^1", "1^", "-1", "+1", "1.5", "1 2", "x", "1" * 19, "١"])
def test_what_is_no_whole_number_is_left_to_the_slow_way(text: str) -> None:
    assert parse_whole(("7", text), "^") is None


@pytest.mark.parametrize("largest", [50, 10**15, 2**63 - 2])
def test_ids_of_whole_numbers_are_those_of_their_text(largest: int) -> None:
    """Both in a table and by searching; what is not written as a number usually is stands for itself."""
    import numpy as np

    ids = {str(largest): 2, "7": 3, "007": 4, "x": 5, "0": 6}
    lookup = Lookup(ids)
    values = np.array([7, 0, largest, largest + 1, 8, -7, 10**17, -(2**63)])
    assert lookup.numbers(values).tolist() == [ids.get(str(v), UNSEEN) for v in values.tolist()]
    assert Lookup({"x": 2}).numbers(values).tolist() == [UNSEEN] * len(values)
    assert all(is_whole(text) for text in ("0", "-7", str(2**63 - 1), str(-(2**63))))
    assert not any(is_whole(text) for text in ("07", "-0", "-", "", "٧", str(2**63), str(-(2**63) - 1)))


@pytest.mark.parametrize("known", [{"7": 2, "x": 3}, {"7.0": 2, "x": 3}], ids=("counted now", "counted before"))
def test_a_whole_number_may_be_written_as_a_float(known: dict[str, int], tmp_path: Path) -> None:
    """So pandas writes a column with gaps. Vocabularies that have 7.0 serve as they did."""
    schema = Schema("y", "u", categorical=(Categorical("i"),), histories=(History("h", (Categorical("l", "i"),), 3),))
    path = tmp_path / "log.csv"
    path.write_text("y,u,i,l\n1,1,7.0,7.0^8.0\n0,1,,\n1,2,x,x^7.0\n")
    log = TableLog(path, schema, Vocabularies({"i": known}))
    first = next(batches(log, 3))
    assert first.sparse[:, 0].tolist() == [2, 0, 3]
    assert first.sequences["h"].ids[:, 0].tolist() == [2, UNSEEN, 3, 2]
    assert dict(TableLog(path, schema).vocabularies.ids["i"]) == {"7": 2, "x": 3, "8": 4}
    assert log.vocabularies.id("i", "7.0") == 2


def test_floats_are_looked_up_without_a_call_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look at each value of the vocabulary, whatever the number of entries."""
    ids = {"0": 2, "7": 3, "-7": 4, "07": 5, "x": 6, "y.0": 7, str(2**63): 8}
    calls: list[str] = []
    monkeypatch.setattr(lookup_module, "is_whole", lambda text: (calls.append(text), is_whole(text))[1])
    texts = ["7.0", "0.0", "-7.0", "-0.0", "07.0", "x.0", "y.0", "7", "", "8.0", f"{2**63}.0"] * 100
    expected = [Vocabularies({"i": ids}).id("i", text) for text in texts]
    lookup = Lookup(ids)
    assert lookup.texts(texts).tolist() == lookup.texts(texts).tolist() == expected
    assert expected[:11] == [3, 2, 4, 2, UNSEEN, UNSEEN, 7, 3, MISSING, UNSEEN, UNSEEN]
    assert len(calls) == len(ids)
