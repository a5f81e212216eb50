"""Files that are not what they should be: the error names the file, the line, the column and the value."""

from __future__ import annotations

import gzip
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from gdpa.data import Bag, Categorical, DataError, History, Numeric, ReczooCSV, Schema, TableLog, Vocabularies

SCHEMA = Schema(
    label="y",
    group="u",
    numeric=(Numeric("x"),),
    categorical=(Categorical("i"),),
    histories=(History("h", (Categorical("hi", "i"), Categorical("hc")), max_len=4),),
)
HEADER = "y,u,x,i,hi,hc\n"
GOOD = "1,1,0.5,a,a^b,1^2\n"


KNOWN = Vocabularies({"i": {"a": 2, "b": 3}, "hc": {"1": 2, "2": 3}})


def read(
    folder: Path, content: str | bytes, schema: Schema = SCHEMA, vocabularies: Vocabularies | None = None
) -> ReczooCSV:
    path = folder / "log.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ReczooCSV(path, schema, vocabularies)


def test_a_row_of_empty_fields_is_a_row(tmp_path: Path) -> None:
    """Tabs are space, but not blank; lines of nothing, or of spaces alone, are."""
    path = tmp_path / "log.tsv"
    path.write_text("y\tu\ti\n1\t1\ta\n\t\t\n\n  \r\n0\t2\tb\n")
    stream = TableLog(path, Schema("y", "u", categorical=(Categorical("i"),)), skip_bad=1)
    assert [sample.group for sample in stream] == [1, 2]
    assert stream.skipped == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1,1,0.5,a,a", "value '1,1,0.5,a,a': 5 columns, but the header has 6"),
        ("1,1,0.5,a,a,1,", "value '1,1,0.5,a,a,1,': 7 columns, but the header has 6"),
        ("yes,1,0.5,a,a,1", "column 'y', value 'yes': the label is not a number"),
        (",1,0.5,a,a,1", "column 'y', value '': the label is not a number"),
        ("nan,1,0.5,a,a,1", "column 'y', value 'nan': the label must be 0 or 1"),
        ("2,1,0.5,a,a,1", "column 'y', value '2': the label must be 0 or 1"),
        ("1,,0.5,a,a,1", "column 'u', value '': the group is empty"),
        ("1,1,high,a,a,1", "column 'x', value 'high': not a number"),
        ("1,1,1_5,a,a,1", "column 'x', value '1_5': not a number"),
        ("1,1,Tru,a,a,1", "column 'x', value 'Tru': not a number; True and False count as 1 and 0"),
        ("Tru,1,0,a,a,1", "column 'y', value 'Tru': the label is not a number; True and False count as 1 and 0"),
        ("1,1,nan,a,a,1", "column 'x', value 'nan': missing, or not a finite float32"),
        ("1,1,-inf,a,a,1", "column 'x', value '-inf': missing, or not a finite float32"),
        ("1,1,1e39,a,a,1", "column 'x', value '1e39': missing, or not a finite float32"),
        ("1,1,,a,a,1", "column 'x', value '': missing, or not a finite float32"),
        ("1,1,0.5,a,a^^b,1^2^3", "column 'hi', value 'a^^b': entry 2 of 3 between '^' is empty"),
        ("1,1,0.5,a,a^,1^2", "column 'hi', value 'a^': entry 2 of 2 between '^' is empty"),
        ("1,1,0.5,a,a^b,1", "the history 'h' has columns of different lengths (hi 2, hc 1)"),
        (
            '1,1,0.5,"a,a,1',
            "value '1,1,0.5,\"a,a,1': not a valid line of CSV (unexpected end of data; a field in quotes",
        ),
    ],
)
def test_a_bad_row_is_named(row: str, message: str, tmp_path: Path) -> None:
    """Line 4: behind the header, a good row, which is still read, and a blank line."""
    rows = iter(read(tmp_path, f"{HEADER}{GOOD}\n{row}\n{GOOD}", vocabularies=KNOWN))
    assert next(rows).group == 1
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        next(rows)
    assert f"{tmp_path / 'log.csv'}:4" in str(caught.value)
    assert caught.value.line == 4
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_building_vocabularies_finds_bad_rows_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"log\.csv:3, value '1,2': 2 columns, but the header has 6"):
        read(tmp_path, f"{HEADER}{GOOD}1,2\n")


def test_bad_encoding(tmp_path: Path) -> None:
    content = HEADER.encode() + GOOD.encode() + "1,1,0.5,é,a,1\n".encode("latin-1")
    with pytest.raises(DataError, match=r"log.csv:3, value b'\\xe9': byte 9 of the line is not UTF-8"):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "log.csv: the file is empty"),
        ("\n \n", "log.csv: the file is empty"),
        (HEADER, "log.csv: the file has a header, but no rows"),
        (HEADER + "\n\n", "log.csv: the file has a header, but no rows"),
        ("y,u,i,hi,hc\n1,1,a,a,1\n", "log.csv:1, column 'x': this column is missing; the file has y, u, i, hi, hc"),
        ("y,u,x,i,hi,hc,u\n", "log.csv:1, column 'u': this column occurs more than once"),
        (GOOD * 2, "column 'y': this column is missing"),
    ],
    ids=["empty", "blank", "no-rows", "blank-rows", "missing", "twice", "no-header"],
)
def test_a_bad_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read(tmp_path, content)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ReczooCSV(tmp_path / "none.csv", SCHEMA)


def test_a_compressed_file_that_was_cut_is_named(tmp_path: Path) -> None:
    """Not as the end of input, which a command line takes for Ctrl-D."""
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress((HEADER + GOOD * 5).encode())[:-12])
    with pytest.raises(DataError, match=r"log\.csv\.gz:\d+: the compressed file is damaged or cut short"):
        list(ReczooCSV(path, SCHEMA))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is a folder: name files in it, such as '.*\*\.csv'"):
        TableLog(tmp_path, SCHEMA)


def test_long_values_are_shortened(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        list(read(tmp_path, f"{HEADER}{'9' * 5000},1,0.5,a,a,1\n"))
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("bad", ["nan", "", "inf", "-1e300"])
def test_numbers_can_be_replaced_by_zero(bad: str, tmp_path: Path) -> None:
    schema = Schema(**{**vars(SCHEMA), "numeric": (Numeric("x", nonfinite="zero", log1p=True),)})
    stream = read(tmp_path, f"{HEADER}1,1,{bad},a,a,1\n1,1,-2,a,a,1\n", schema)
    first, second = list(stream)
    assert first.dense.tolist() == [0.0]
    assert second.dense.tolist() == [pytest.approx(-math.log(3))]
    assert stream.tally.replaced == {"x": 1}


def test_text_is_never_replaced(tmp_path: Path) -> None:
    schema = Schema(**{**vars(SCHEMA), "numeric": (Numeric("x", nonfinite="zero"),)})
    with pytest.raises(DataError, match="not a number"):
        list(read(tmp_path, f"{HEADER}1,1,abc,a,a,1\n", schema))


def test_a_state_of_another_file_is_refused(tmp_path: Path) -> None:
    state = read(tmp_path, HEADER + GOOD).state_dict()
    with pytest.raises(ValueError, match="saved with bytes="):
        read(tmp_path, HEADER + GOOD * 2).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Numeric("x", nonfinite="drop"), "nonfinite must be"),  # type: ignore[arg-type]
        (lambda: History("h", (), 5), "at least one column"),
        (lambda: History("h", (Categorical("a"),), 0), "max_len of the history 'h' must be positive"),
        (lambda: History("h", (Categorical("a"),), 5, '"'), "separator of the history 'h' cannot be '\"'"),
        (lambda: History("h", (Categorical("a"),), 5, unequal="cut"), "unequal must be"),  # type: ignore[arg-type]
        (lambda: Schema("y", "u", min_count=0), "min_count must be positive, not 0"),
        (lambda: Schema("y", "u", (Numeric("x"), Numeric("x"))), "numeric has a name twice"),
    ],
)
def test_a_wrong_schema_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_lists_with_commas(tmp_path: Path) -> None:
    """In CSV they divide columns; elsewhere they are common."""
    schema = Schema("y", "u", bags=(Bag("g", separator=","),))
    for name, delimiter in (("log.tsv", "\t"), ("log.csv", ",")):
        (tmp_path / name).write_text(delimiter.join("yug") + "\n" + delimiter.join(["1", "7", '"a,b"']) + "\n")
    assert len(next(iter(TableLog(tmp_path / "log.tsv", schema))).bags["g"]) == 2
    with pytest.raises(
        ValueError, match="separator of the bag 'g' cannot be ',' in a file whose columns are separated"
    ):
        TableLog(tmp_path / "log.csv", schema)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    path = read(tmp_path, HEADER + GOOD).path
    with pytest.raises(ValueError, match=r"schema must be a Schema or one of AmazonElectronics_x1, .*, not 'Amazon'"):
        ReczooCSV(path, "Amazon")
    with pytest.raises(ValueError, match="shuffle is a number of rows, not -1"):
        ReczooCSV(path, SCHEMA, shuffle=-1)
    with pytest.raises(ValueError, match="vocabularies lacks hc, i"):
        ReczooCSV(path, SCHEMA, Vocabularies({}))
    with pytest.raises(TypeError, match=r"vocabularies must be gdpa\.data\.Vocabularies, not \{\}"):
        ReczooCSV(path, SCHEMA, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"schema must be a gdpa\.data\.Schema or the name of a preset, not \{'label'"):
        TableLog(path, {"label": "click"})  # type: ignore[arg-type]
    for name in ("shuffle", "skip_bad", "workers", "seed"):
        for value in (2.5, "2", None, True):
            with pytest.raises(TypeError, match=f"{name} must be a whole number, not {value!r}"):
                TableLog(path, SCHEMA, **{name: value})


@pytest.mark.parametrize("text", ["[1, 2]", "[1,2]", "[]", "['a']", '["a", "b"]', "['a' 'b']", "[1 2]", "[a, b]"])
def test_lists_in_brackets_are_refused(text: str, tmp_path: Path) -> None:
    """As pandas writes a column of lists to CSV: each would be one event, of an id that nothing else has."""
    pa = pytest.importorskip("pyarrow")
    schema = Schema("y", "u", histories=(History("h", (Categorical("hi"),), 4),), bags=(Bag("b"),))
    for column, other in (("hi", "b"), ("b", "hi")):
        rows = {"y": ["1", "0"], "u": ["1", "2"], column: ["a", text], other: ["", "[x] y"]}
        (tmp_path / "log.tsv").write_text(
            "\n".join(["\t".join(rows), *map("\t".join, zip(*rows.values(), strict=True))])
        )
        for source, place in ((tmp_path / "log.tsv", r"log\.tsv:3"), (pa.table(rows), "row 2")):
            with pytest.raises(
                DataError, match=rf"{place}, column '{column}', value .*a list in brackets would be one"
            ):
                list(TableLog(source, schema))


@pytest.mark.parametrize("text", ["[18+]", "[a]", "[a", "a]", "x[1, 2]", "[1, 2] x", "[a]^[b, c]", "[new release]"])
def test_other_brackets_are_text(text: str, tmp_path: Path) -> None:
    schema = Schema("y", "u", histories=(History("h", (Categorical("hi"),), 4),))
    (tmp_path / "log.tsv").write_text(f"y\tu\thi\n1\t1\t{text}\n")
    log = TableLog(tmp_path / "log.tsv", schema)
    assert len(next(iter(log)).sequences["h"]) == text.count("^") + 1
