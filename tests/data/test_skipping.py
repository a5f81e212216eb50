"""Rows that cannot be read: how many are left out, and that no other one is lost, with ranks, shuffling and workers."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from comparing import plain
from tables import SCHEMA, columns, write_text

from gdpa.data import Categorical, DataError, Schema, TableLog, batches

SIMPLE = Schema("y", "u", categorical=(Categorical("i"),))
BAD = (3, 4, 11, 29)


def broken(folder: Path) -> Path:
    """Lines with too few fields, not in UTF-8, with a label and a quote that are wrong."""
    lines = [f"{n % 2},{n},{n % 5}\n".encode() for n in range(30)]
    lines[3], lines[4], lines[11], lines[29] = b"1,3\n", b"1,4,\xff\n", b"5,11,1\n", b'1,29,"x\n'
    path = folder / "log.csv"
    path.write_bytes(b"y,u,i\n" + b"".join(lines))
    return path


def log(folder: Path, skip_bad: int = 4, **options: int) -> TableLog:
    return TableLog(broken(folder), SIMPLE, skip_bad=skip_bad, **options)


@pytest.mark.parametrize("shuffle", [0, 7])
def test_all_others_are_read(shuffle: int, tmp_path: Path) -> None:
    stream = log(tmp_path, shuffle=shuffle)
    good = [n for n in range(30) if n not in BAD]
    assert sorted(s.group for s in stream) == good
    assert stream.skipped == 4
    shards = [log(tmp_path, shuffle=shuffle, rank=r, world=3) for r in range(3)]
    found = [[s.group for s in shard] for shard in shards]
    assert sorted(g for part in found for g in part) == good
    assert {len(part) for part in found} == {8, 9}  # as even as without bad rows
    assert [shard.skipped for shard in shards] == [4, 4, 4]


def test_one_more_is_an_error(tmp_path: Path) -> None:
    for read in (list, lambda stream: list(batches(stream, 5))):
        for few in (0, 3):
            with pytest.raises(DataError, match=r"log\.csv:(31|5)") as refused:
                read(log(tmp_path, skip_bad=few))
            assert refused.value.of_row
    stream = log(tmp_path)
    for _ in range(2):  # counted in each pass
        assert len(list(stream)) == 26
    with pytest.raises(ValueError, match="skip_bad must not be negative, not -1"):
        log(tmp_path, skip_bad=-1)


@pytest.mark.parametrize("steps", range(6))
def test_resume_is_exact(steps: int, tmp_path: Path) -> None:
    expected = [b.groups.tolist() for b in batches(log(tmp_path, shuffle=7), 5)]
    one, later = log(tmp_path, shuffle=7), log(tmp_path, shuffle=7)
    taken = [b.groups.tolist() for b in islice(batches(one, 5), steps)]
    later.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert taken + [b.groups.tolist() for b in batches(later, 5)] == expected
    assert later.skipped == 4


def test_a_run_that_stopped_at_a_bad_row_can_go_on(tmp_path: Path) -> None:
    """From the state of a stream that skipped nothing."""
    known = log(tmp_path).vocabularies
    strict, later = (TableLog(broken(tmp_path), SIMPLE, known, skip_bad=n) for n in (0, 4))
    taken = []
    with pytest.raises(DataError, match=r"log\.csv:5"):
        taken += [s.group for s in strict]
    rows = iter(strict)
    taken = [next(rows).group for _ in range(3)]
    later.load_state_dict(strict.state_dict())
    assert taken + [s.group for s in later] == [n for n in range(30) if n not in BAD]


@pytest.mark.usefixtures("spawned_by_forking")
def test_workers_change_nothing(tmp_path: Path) -> None:
    """Two processes: the same batches, the same tally, the same error; and they can be begun again."""
    table = columns(300)
    table["click"][250] = 7
    path = write_text(tmp_path / "log.csv", table)
    streams = [TableLog(path, SCHEMA, skip_bad=1, shuffle=64, seed=1, workers=n) for n in (0, 2)]
    here, there = ([[plain(s) for s in b] for b in batches(stream, 32)] for stream in streams)
    assert here == there
    assert streams[0].tally == streams[1].tally
    assert streams[1].skipped == 1
    streams[1].close()
    strict = TableLog(path, SCHEMA, streams[0].vocabularies, workers=1)
    with pytest.raises(DataError, match=r"log\.csv:252, column 'click', value '7'"):
        list(batches(strict, 32))
    strict.close()


def test_states_of_earlier_versions_are_understood(tmp_path: Path) -> None:
    """A position of ReczooCSV as it was before there were splits and several files."""
    from gdpa.data import ReczooCSV

    path = tmp_path / "old.csv"
    path.write_text("y,u,i\n" + "".join(f"{n % 2},{n},{n % 5}\n" for n in range(20)))
    whole = ReczooCSV(path, SIMPLE, shuffle=6, seed=1)
    expected = [s.group for s in whole]
    offset = len("y,u,i\n" + "".join(f"{n % 2},{n},{n % 5}\n" for n in range(6)))
    old = {"kind": "ReczooCSV", "file": "old.csv", "bytes": path.stat().st_size, "shuffle": 6, "seed": 1,
           "position": {"epoch": 0, "next": 8, "row": 6, "offset": offset, "lines": 7}}  # fmt: skip
    whole.load_state_dict(old)
    assert [s.group for s in whole] == expected[8:]
