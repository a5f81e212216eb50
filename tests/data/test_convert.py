"""Published files become tables: small ones in each format, made here, line by line as their documentation has them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gdpa.cli import main
from gdpa.data import PRESETS, DataError, TableLog, collate
from gdpa.data.convert import CONVERTERS, Converter
from gdpa.data.convert.histories import Coded, Column, with_histories
from gdpa.data.convert.records import finite, flag, whole, with_header

RATINGS = [
    (1, 10, 5, 300),
    (2, 10, 3, 100),
    (1, 20, 4, 100),
    (1, 30, 1, 200),
    (2, 30, 4, 100),
]  # user, item, stars, time


def movielens_100k(raw: Path) -> None:
    flags = {10: "0|1|1", 20: "0|0|0", 30: "1|0|0"}
    (raw / "u.data").write_text("".join(f"{u}\t{i}\t{s}\t{t}\n" for u, i, s, t in RATINGS))
    (raw / "u.genre").write_text("unknown|0\nAction|1\nComedy|2\n\n")
    rows = [f"{i}|Café {i} (1995)|01-Jan-1995||http://x|{flag}\n" for i, flag in flags.items()]
    (raw / "u.item").write_bytes("".join(rows).encode("latin-1"))
    (raw / "u.user").write_text("1|24|M|technician|85711\n2|53|F|other|94043\n")


def movielens_1m(raw: Path) -> None:
    (raw / "ratings.dat").write_text("".join(f"{u}::{i}::{s}::{t}\n" for u, i, s, t in RATINGS))
    movies = "10::Café: Two (1995)::Action|Comedy\n20::B (1995)::Drama\n30::C (1995)::Action\n"
    (raw / "movies.dat").write_bytes(movies.encode("latin-1"))
    (raw / "users.dat").write_text("1::M::25::15::85711\n2::F::50::0::94043\n")


def movielens_20m(raw: Path) -> None:
    (raw / "ratings.csv").write_text(
        "userId,movieId,rating,timestamp\n" + "".join(f"{u},{i},{s - 0.5},{t}\n" for u, i, s, t in RATINGS)
    )
    (raw / "movies.csv").write_text(
        'movieId,title,genres\n10,"Two, The (1995)",Action|Comedy\n20,B,Drama\n30,C,(no genres listed)\n', "utf-8"
    )


LOG = "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,\
play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"


def kuairand(raw: Path, suffix: str = "pure") -> None:
    raw = raw / "data"
    raw.mkdir()

    def row(user: int, video: int, time: int, click: int, like: int) -> str:
        return f"{user},{video},20220408,700,{time},{click},{like},0,0,0,0,{click},900,1000,0,0,0,0,1\n"

    (raw / f"log_standard_4_08_to_4_21_{suffix}.csv").write_text(
        LOG + row(1, 5, 3_600_000, 1, 1) + row(1, 6, 7_200_000, 0, 0) + row(2, 5, 3_600_000, 0, 0)
    )
    (raw / f"log_standard_4_22_to_5_08_{suffix}.csv").write_text(LOG + row(1, 7, 90_000_000, 1, 0))
    (raw / f"user_features_{suffix}.csv").write_text(
        "user_id,user_active_degree,is_lowactive_period,is_live_streamer,is_video_author,follow_user_num,"
        "follow_user_num_range,register_days_range\n"
        '1,full_active,0,0,1,7,"(0,10]",31-60\n2,high_active,0,0,0,0,0,8-14\n'
    )
    (raw / f"video_features_basic_{suffix}.csv").write_text(
        "video_id,author_id,video_type,upload_dt,upload_type,visible_status,music_id,tag\n"
        '5,50,NORMAL,2022-03-01,ShortImport,1,8,"12,65"\n6,60,NORMAL,2022-03-01,LongImport,1,9,\n'
    )


def convert(name: str, raw: Path, out: Path) -> list[dict[str, str]]:
    result = CliRunner().invoke(main, ["convert", name, str(raw), "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert f"--data-preset {CONVERTERS[name].preset}" in result.output
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "make"),
    [("movielens-100k", movielens_100k), ("movielens-1m", movielens_1m), ("movielens-20m", movielens_20m)],
)
def test_movielens(name: str, make: object, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    make(raw)  # type: ignore[operator]
    rows = convert(name, raw, tmp_path / "out.csv")
    stars = 0.5 if name.endswith("20m") else 0
    assert [(int(r["user_id"]), int(r["item_id"]), int(r["time"])) for r in rows] == [
        (u, i, t) for u, i, _, t in sorted(RATINGS, key=lambda r: r[3])
    ]
    assert [int(r["liked"]) for r in rows] == [
        int(s - stars >= 4) for _, _, s, _ in sorted(RATINGS, key=lambda r: r[3])
    ]
    last = rows[-1]  # user 1 at 300, after items 20 and 30
    assert (last["hist_items"], last["hist_times"], last["genres"]) == ("20^30", "100^200", "Action|Comedy")
    assert [float(s) for s in last["hist_ratings"].split("^")] == [4 - stars, 1 - stars]
    assert rows[2]["hist_items"] == ""  # the user's other rating of the same moment is not before it
    batch = collate(list(TableLog(tmp_path / "out.csv", CONVERTERS[name].preset)))
    assert batch.sequences["history"].lengths().tolist() == [0, 0, 0, 1, 2]
    assert batch.bags["genres"].lengths().tolist()[-1] == 2
    days = batch.sequences["history"].values[:, 1] * 86400
    assert [round(d) for d in days.tolist()] == [100, 200, 100]


def test_kuairand(tmp_path: Path) -> None:
    kuairand(tmp_path)
    rows = convert("kuairand-pure", tmp_path, tmp_path / "out.csv")
    assert [r["video_id"] for r in rows] == ["5", "5", "6", "7"]
    assert [r["hist_videos"] for r in rows] == ["", "", "5", "5"]  # only clicked ones
    assert rows[0]["tags"] == "12|65"
    log = TableLog(tmp_path / "out.csv", "KuaiRand")
    batch = collate(list(log))
    assert log.label_names == ("is_click", "long_view", "is_like")
    assert batch.labels.tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert batch.sequences["clicked"].values.tolist() == [[pytest.approx(1 / 24)], [1.0]]
    assert batch.bags["tags"].lengths().tolist() == [2, 2, 0, 0]
    assert batch.sparse.min() >= 0


def test_max_len_and_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    movielens_20m(tmp_path)
    for name, length in (("a.csv", "1"), ("a.parquet", "1")):
        arguments = ["convert", "movielens-20m", str(tmp_path), "--out", str(tmp_path / name), "--max-len", length]
        assert CliRunner().invoke(main, arguments, catch_exceptions=False).exit_code == 0
    text, table = (TableLog(tmp_path / name, "MovieLens_20M") for name in ("a.csv", "a.parquet"))
    assert text.vocabularies == table.vocabularies
    for a, b in zip(text, table, strict=True):
        assert a.sequences["history"].ids.tolist() == b.sequences["history"].ids.tolist()
        assert len(a.sequences["history"]) <= 1


@pytest.mark.parametrize(
    ("name", "make", "removed", "origin"),
    [
        ("movielens-100k", movielens_100k, "u.item", "https://files.grouplens.org/datasets/movielens/ml-100k.zip"),
        ("movielens-1m", movielens_1m, "users.dat", "https://files.grouplens.org/datasets/movielens/ml-1m.zip"),
        ("movielens-20m", movielens_20m, "ratings.csv", "https://files.grouplens.org/datasets/movielens/ml-20m.zip"),
        ("kuairand-pure", kuairand, "data/user_features_pure.csv", "KuaiRand-Pure.tar.gz from https://kuairand.com"),
    ],
)
def test_a_missing_file_is_named_with_its_origin(
    name: str, make: object, removed: str, origin: str, tmp_path: Path
) -> None:
    make(tmp_path)  # type: ignore[operator]
    (tmp_path / removed).unlink()
    out = tmp_path / "out.csv"
    result = CliRunner().invoke(main, ["convert", name, str(tmp_path), "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 1
    assert f"needs {Path(removed).name}" in result.output
    assert origin in result.output
    assert not list(tmp_path.glob("*out.csv"))


def test_refusals(tmp_path: Path) -> None:
    movielens_1m(tmp_path)
    out = tmp_path / "out.csv"
    out.write_text("mine")
    for arguments, message in (
        (["netflix", str(tmp_path)], "NAME must be one of movielens-100k"),
        (["movielens-1m", str(tmp_path), "--out", str(out)], "already exists: --overwrite replaces it"),
        (["movielens-1m", str(tmp_path), "--out", str(tmp_path / "out.json")], ", not 'out.json'"),
    ):
        result = CliRunner().invoke(main, ["convert", *arguments], catch_exceptions=False)
        assert result.exit_code in (1, 2)
        assert message in result.output
    assert out.read_text() == "mine"


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_no_rows_are_no_table(name: str, tmp_path: Path) -> None:
    movielens_100k(tmp_path)
    (tmp_path / "u.data").write_text("")
    arguments = ["convert", "movielens-100k", str(tmp_path), "--out", str(tmp_path / name)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 1
    assert "there are no rows in" in result.output
    assert not list(tmp_path.glob(f"*{name}"))


@pytest.mark.parametrize(
    ("name", "make", "file"),
    [("movielens-20m", movielens_20m, "ratings.csv"), ("movielens-20m", movielens_20m, "movies.csv"),
     ("kuairand-pure", kuairand, "data/log_standard_4_08_to_4_21_pure.csv"),
     ("kuairand-pure", kuairand, "data/user_features_pure.csv")],
)  # fmt: skip
def test_a_file_of_the_data_set_is_not_replaced(name: str, make: object, file: str, tmp_path: Path) -> None:
    make(tmp_path)  # type: ignore[operator]
    before = (tmp_path / file).read_bytes()
    arguments = ["convert", name, str(tmp_path), "--out", str(tmp_path / file), "--overwrite"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 1
    assert "a file of the data set itself, which would be overwritten" in result.output.replace("\n", " ")
    assert (tmp_path / file).read_bytes() == before


@pytest.mark.parametrize(
    ("name", "make", "file", "old", "said"),
    [("movielens-100k", movielens_100k, "u.user", "2|53|F|other|94043\n",
      "2 of 5 rows refer to 1 user that u.user does not have (the first is 2)"),
     ("movielens-1m", movielens_1m, "movies.dat", "30::C (1995)::Action\n",
      "2 of 5 rows refer to 1 movie that movies.dat does not have (the first is 30)"),
     ("movielens-20m", movielens_20m, "movies.csv", '10,"Two, The (1995)",Action|Comedy\n',
      "2 of 5 rows refer to 1 movie that movies.csv does not have (the first is 10)")],
)  # fmt: skip
def test_rows_of_nobody_known_are_counted(
    name: str, make: object, file: str, old: str, said: str, tmp_path: Path
) -> None:
    make(tmp_path)  # type: ignore[operator]
    out = tmp_path / "out.csv"
    whole = CliRunner().invoke(main, ["convert", name, str(tmp_path), "--out", str(out)], catch_exceptions=False)
    assert "does not have" not in whole.output
    changed(tmp_path / file, old, "")
    arguments = ["convert", name, str(tmp_path), "--out", str(out), "--overwrite"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert (result.exit_code, result.output.count(said)) == (0, 1)
    with pytest.warns(UserWarning, match="does not have"):
        CONVERTERS[name].convert(tmp_path, out, 5)


def test_videos_of_nobody_known_are_counted(tmp_path: Path) -> None:
    kuairand(tmp_path)
    told: list[str] = []
    CONVERTERS["kuairand-pure"].convert(tmp_path, tmp_path / "out.csv", 5, tell=told.append)
    (said,) = told
    assert said.startswith(
        "1 of 4 rows refer to 1 video that video_features_basic_pure.csv does not have (the first is 7)"
    )


@pytest.mark.parametrize(
    ("name", "make", "file", "message"),
    [("movielens-100k", movielens_100k, "u.user", "u.user: the file has no users"),
     ("movielens-100k", movielens_100k, "u.item", "u.item: the file has no movies"),
     ("movielens-1m", movielens_1m, "movies.dat", "movies.dat: the file has no movies")],
)  # fmt: skip
def test_files_that_say_nothing_are_refused(name: str, make: object, file: str, message: str, tmp_path: Path) -> None:
    make(tmp_path)  # type: ignore[operator]
    (tmp_path / file).write_text("")
    with pytest.raises(DataError, match=message):
        CONVERTERS[name].convert(tmp_path, tmp_path / "out.csv", 5)
    assert not list(tmp_path.glob("*out.csv"))


def test_every_converter_has_a_preset() -> None:
    assert {converter.preset for converter in CONVERTERS.values()} <= set(PRESETS)


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text("latin-1")
    assert old in text
    path.write_text(text.replace(old, new, 1), "latin-1")


@pytest.mark.parametrize(
    ("name", "make", "file", "old", "new", "message"),
    [
        ("movielens-100k", movielens_100k, "u.data", "2\t10\t3\t100", "2\t10\t3",
         "u.data:2, value ['2', '10', '3']: 3 fields, not the 4 of user id, movie id, rating, timestamp"),
        ("movielens-100k", movielens_100k, "u.data", "\t5\t", "\tnan\t",
         "u.data:1, column 'rating', value 'nan': not a finite number"),
        ("movielens-100k", movielens_100k, "u.item", "|0|0|0", "|0|0", "u.item:2, value ['20', "),
        ("movielens-100k", movielens_100k, "u.item", "|0|0|0", "|0|0|x",
         "u.item:2, column 'Comedy', value 'x': neither 0 nor 1"),
        ("movielens-100k", movielens_100k, "u.user", "|85711", "", "u.user:1, value ['1', '24', 'M', 'technician']: 4"),
        ("movielens-1m", movielens_1m, "movies.dat", "::Drama", "", "movies.dat:2, value ['20', 'B (1995)']: 2 fields"),
        ("movielens-1m", movielens_1m, "users.dat", "2::", "two::",
         "users.dat:2, column 'user id', value 'two': not a whole number"),
        ("movielens-20m", movielens_20m, "ratings.csv", ",300\n", ",1e3\n",
         "ratings.csv:2, column 'timestamp', value '1e3': not a whole number"),
        ("movielens-20m", movielens_20m, "ratings.csv", "timestamp", "time",
         "ratings.csv:1, column 'timestamp': this column is missing; the file has userId, movieId, rating, time"),
        ("movielens-20m", movielens_20m, "movies.csv", ",Drama", ",Drama,", "movies.csv:3, value ['20', 'B', 'Drama'"),
        ("movielens-20m", movielens_20m, "movies.csv", "The", "\xff", "movies.csv:2, value b'\\xff': byte 10 of the"),
        ("kuairand-pure", kuairand, "data/log_standard_4_22_to_5_08_pure.csv", "90000000", "",
         "pure.csv:2, column 'time_ms', value '': not a whole number"),
        ("kuairand-pure", kuairand, "data/log_standard_4_22_to_5_08_pure.csv", "is_click", "clicked",
         "pure.csv:1, column 'is_click': this column is missing"),
        ("kuairand-pure", kuairand, "data/user_features_pure.csv", ",31-60", "", "features_pure.csv:2, value ['1', "),
        ("kuairand-pure", kuairand, "data/video_features_basic_pure.csv", "music_id", "music",
         "'music_id': this column"),
    ],
)  # fmt: skip
def test_damage_is_named(name: str, make: object, file: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    make(tmp_path)  # type: ignore[operator]
    changed(tmp_path / file, old, new)
    arguments = ["convert", name, str(tmp_path), "--out", str(tmp_path / "out.csv")]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 1
    assert message in result.output.replace("\n", "")
    assert not list(tmp_path.glob("*out.csv"))


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    movielens_20m(tmp_path)
    changed(tmp_path / "ratings.csv", "2,10,", "\n  \n2,10,")
    assert len(convert("movielens-20m", tmp_path, tmp_path / "out.csv")) == len(RATINGS)


def test_overwrite_replaces_the_file(tmp_path: Path) -> None:
    movielens_1m(tmp_path)
    out = tmp_path / "out.csv"
    out.write_text("old")
    arguments = ["convert", "movielens-1m", str(tmp_path), "--out", str(out)]
    refused = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert (refused.exit_code, out.read_text()) == (2, "old")
    assert "--overwrite replaces it" in refused.output
    result = CliRunner().invoke(main, [*arguments, "--overwrite"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for words in ("[1/1] reading", "[1/1] writing rows up to 5 of 5", f"{out}: 5 rows"):
        assert words in result.output.replace("\n", " ")
    assert out.read_text().startswith("liked,")


def test_texts_of_kuairand_are_the_same_in_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    kuairand(tmp_path)
    for name in ("out.csv", "out.parquet"):
        arguments = ["convert", "kuairand-pure", str(tmp_path), "--out", str(tmp_path / name)]
        assert CliRunner().invoke(main, arguments, catch_exceptions=False).exit_code == 0
    text, table = (collate(list(TableLog(tmp_path / name, "KuaiRand"))) for name in ("out.csv", "out.parquet"))
    assert text.sparse.tolist() == table.sparse.tolist()
    assert text.sequences["clicked"].ids.tolist() == table.sequences["clicked"].ids.tolist()
    assert text.bags["tags"].ids.tolist() == table.bags["tags"].ids.tolist()


@pytest.mark.parametrize("max_len", [1, 3, 100])
@pytest.mark.parametrize("some", [False, True])
def test_histories_are_those_of_a_walk_through_the_log(max_len: int, some: bool) -> None:
    rng = np.random.default_rng(0)
    users, items = rng.integers(-3, 4, size=(2, 300))
    time, counts = np.sort(rng.integers(0, 90, size=300)), rng.random(300) < 0.5
    columns: dict[str, Column] = {"user": users, "time": time, "item": items}
    log = with_histories(columns, "user", {"past": "item"}, max_len, counts if some else None)
    past = log.past["past"]
    assert isinstance(past, np.ndarray)
    for i in range(300):
        before = [items[j] for j in range(i) if users[j] == users[i] and time[j] < time[i] and (counts[j] or not some)]
        assert past[log.first[i] : log.end[i]].tolist() == before[-max_len:]


KINDS = {"a": whole, "b": finite, "c": flag}


@pytest.mark.parametrize(
    ("text", "quick"),
    [
        ("a,x,b,c\n1,?,0.5,1\n-2,,1e3,0\n", True),
        ("a,x,b,c\r\n1,?,0.5,1\r\n\r\n-2,,1e3,0", True),
        ('a,x,b,c\n"1","y,z",0.5,1\n-2,,1e3,0\n', False),  # quoted
        ("a,x,b,c\n1,,0.5,1\n   \n-2,,1e3,0\n", False),  # blank
    ],
)
def test_numbers_are_those_that_are_read_line_by_line(text: str, quick: bool, tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_bytes(text.encode())
    records = with_header(path)
    assert (records._parsed(KINDS) is not None) == quick
    found = records.columns(KINDS)
    assert list(zip(*(found[name].tolist() for name in KINDS), strict=True)) == list(records.read(KINDS))
    assert list(records.read(KINDS)) == [(1, 0.5, 1), (-2, 1000.0, 0)]


LARGE = f"{2**63},,0.5,1"


@pytest.mark.parametrize("line", ["1.0,,0.5,1", "1,,nan,1", "1,,inf,1", "1,,0.5,2", "1,,0.5", "1,,0.5,1,", LARGE])
def test_numbers_that_are_none_are_refused_by_their_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text(f"a,x,b,c\n1,,0.5,1\n{line}\n")
    with pytest.raises(DataError, match=r"some\.csv:3"):
        with_header(path).columns(KINDS)


def test_texts_are_quoted_where_they_must_be(tmp_path: Path) -> None:
    texts = ["plain", 'a "word"', "one,two", "two\nlines", ""]
    codes = np.arange(5)
    columns: dict[str, Column] = {"user": np.zeros(5, np.int64), "time": codes, "text": Coded(codes, texts)}
    columns["bag"] = Coded(codes, [["x", "y"]] * 5)
    log = with_histories(columns, "user", {"hist_texts": "text"}, 2)
    Converter("", "", lambda raw, max_len: log).convert(tmp_path, tmp_path / "out.csv", 2)
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == texts
    assert [row["hist_texts"] for row in rows] == ["", *("^".join(texts[max(0, i - 2) : i]) for i in range(1, 5))]
    assert {row["bag"] for row in rows} == {"x|y"}
