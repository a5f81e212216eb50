"""Splits of one table: by time, by user, and each user's last rows."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from gdpa.data import Categorical, Schema, TableLog, batches, split
from gdpa.data.tables.dividing import Part

SCHEMA = Schema("y", "u", categorical=(Categorical("i"),), time="t")
# user, time; the item is the number of the row.
ROWS = [(u, t) for t in range(10) for u in range(8) if u < 6 or t < 2]  # two users have two rows only


def table(folder: Path) -> Path:
    path = folder / "log.csv"
    path.write_text("y,u,i,t\n" + "".join(f"{n % 2},{u},{n},{t}\n" for n, (u, t) in enumerate(ROWS)))
    return path


def rows(log: TableLog) -> list[int]:
    """The numbers of the rows, by their items."""
    texts = {i: text for text, i in log.vocabularies.ids["i"].items()}
    return [int(texts.get(int(s.sparse[0]), -1)) for s in log]


def parted(folder: Path, by: str, **options: Any) -> list[list[int]]:
    whole = TableLog(table(folder), SCHEMA).vocabularies  # so that all rows can be recognised
    return [sorted(rows(log)) for log in split(table(folder), SCHEMA, by, vocabularies=whole, **options)]


def test_by_time(tmp_path: Path) -> None:
    train, valid, test = parted(tmp_path, "time", valid=0.2, test=0.1)
    assert sorted(train + valid + test) == list(range(len(ROWS)))
    latest = [max(ROWS[n][1] for n in part) for part in (train, valid, test)]
    earliest = [min(ROWS[n][1] for n in part) for part in (train, valid, test)]
    assert latest[0] < earliest[1] <= latest[1] < earliest[2]
    assert abs(len(test) / len(ROWS) - 0.1) < 0.05
    assert abs(len(valid) / len(ROWS) - 0.2) < 0.1


def test_by_user(tmp_path: Path) -> None:
    train, valid, test = parted(tmp_path, "user", valid=0.3, test=0.3, seed=4)
    users = [{ROWS[n][0] for n in part} for part in (train, valid, test)]
    assert sorted(train + valid + test) == list(range(len(ROWS)))
    assert not users[0] & users[1]
    assert not users[0] & users[2]
    assert not users[1] & users[2]
    assert parted(tmp_path, "user", valid=0.3, test=0.3, seed=4) == [train, valid, test]
    assert parted(tmp_path, "user", valid=0.3, test=0.3, seed=5) != [train, valid, test]


def test_by_user_whichever_way_a_number_is_written(tmp_path: Path) -> None:
    """7 and 7.0, which pandas writes in a column with gaps, are one user, who must not be on both sides."""
    path = tmp_path / "log.csv"
    path.write_text("y,u,i,t\n" + "".join(f"{n % 2},{n // 2}{'.0' * (n % 2)},{n},0\n" for n in range(80)))
    whole = TableLog(path, SCHEMA).vocabularies
    parts = [rows(log) for log in split(path, SCHEMA, "user", vocabularies=whole, valid=0.3, test=0.3)]
    users = [{n // 2 for n in part} for part in parts]
    assert [len(part) for part in parts] == [2 * len(part) for part in users]
    assert sum(map(len, users)) == 40


@pytest.mark.parametrize("by", ["time", "last"])
def test_rows_without_a_time_change_no_split(by: str, tmp_path: Path) -> None:
    """They would be the newest ones, and leave validation and test data empty."""
    good = [f"{n % 2},{u},{n},{t}\n" for n, (u, t) in enumerate(ROWS)]
    bad = [f"1,{u},{u},\n" for u in range(8)]
    parts = []
    for name, lines in (("good", good), ("mixed", [*bad[:5], *good, *bad[5:]])):
        (tmp_path / f"{name}.csv").write_text("y,u,i,t\n" + "".join(lines))
        parts.append([[s.group for s in log] for log in split(tmp_path / f"{name}.csv", SCHEMA, by, skip_bad=8)])
    assert parts[0] == parts[1]
    assert all(parts[0])
    (tmp_path / "bad.csv").write_text("y,u,i,t\n" + "".join(bad))
    assert [len(list(log)) for log in split(tmp_path / "bad.csv", SCHEMA, by, skip_bad=8)] == [0, 0, 0]


def test_leave_last_out(tmp_path: Path) -> None:
    train, valid, test = parted(tmp_path, "last")
    assert [ROWS[n] for n in test] == [(u, 9) for u in range(6)]
    assert [ROWS[n] for n in valid] == [(u, 8) for u in range(6)]
    assert {u for u, _ in (ROWS[n] for n in train)} == set(range(8))
    assert sorted(train + valid + test) == list(range(len(ROWS)))


def test_vocabularies_are_of_the_training_rows(tmp_path: Path) -> None:
    train, valid, _ = split(table(tmp_path), SCHEMA, "last")
    assert len(train.vocabularies.ids["i"]) == len(ROWS) - 12
    assert rows(valid) == [-1] * 6


@pytest.mark.parametrize("steps", [0, 1, 5, 11])
def test_resume_is_exact(steps: int, tmp_path: Path) -> None:
    def train() -> TableLog:
        return split(table(tmp_path), SCHEMA, "last", shuffle=10)[0]

    expected = [rows_of(b) for b in batches(train(), 4)]
    one, later = train(), train()
    taken = [rows_of(b) for b in islice(batches(one, 4), steps)]
    later.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert taken + [rows_of(b) for b in batches(later, 4)] == expected
    shards = [split(table(tmp_path), SCHEMA, "last", shuffle=10, rank=r, world=3)[0] for r in range(3)]
    assert sorted(r for shard in shards for r in rows(shard)) == sorted(r for b in expected for r in unnumbered(one, b))


def rows_of(batch: Any) -> list[int]:
    return batch.sparse[:, 0].tolist()


def unnumbered(log: TableLog, ids: list[int]) -> list[int]:
    texts = {i: int(text) for text, i in log.vocabularies.ids["i"].items()}
    return [texts[i] for i in ids]


def test_another_split_is_another_stream(tmp_path: Path) -> None:
    one, other = (split(table(tmp_path), SCHEMA, "user", seed=seed)[0] for seed in (1, 2))
    with pytest.raises(ValueError, match="the state was saved with part="):
        other.load_state_dict(one.state_dict())
    assert isinstance(one.part, Part)
    assert len(one.part) == len(list(one))


def test_refusals(tmp_path: Path) -> None:
    path = table(tmp_path)
    with pytest.raises(ValueError, match="by must be one of time, user, last, not 'day'"):
        split(path, SCHEMA, "day")
    with pytest.raises(ValueError, match=r"leave some rows to train on, not 0\.5 and 0\.5"):
        split(path, SCHEMA, "user", valid=0.5, test=0.5)
    with pytest.raises(ValueError, match=r"a split by time needs Schema\.time"):
        split(path, Schema("y", "u"), "time")


def test_bad_rows_are_left_to_the_training_data(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(table(tmp_path).read_text() + "1,1\n")
    train, valid, test = split(path, SCHEMA, "last", skip_bad=1)
    assert (len(list(valid)), len(list(test))) == (6, 6)
    assert len(list(train)) == len(ROWS) - 12
    assert train.skipped == 1
