"""CSV files of the reczoo layout: what is read, in which order, from which position."""

from __future__ import annotations

import csv
import json
import math
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import plain

from gdpa.data import MISSING, PRESETS, UNSEEN, Categorical, History, ReczooCSV, Schema, Vocabularies, batches, collate

# Made by hand after the files' public conversion scripts: the same columns in the same order.
FILES = {
    "AmazonElectronics_x1": """\
label,user_id,item_id,cate_id,item_history,cate_history
1,7,30,3,10^20^10,1^2^1
0,7,10,1,10^20^10,1^2^1
1,8,20,2,,
0,9,30,3,30,3
""",
    "TaobaoAd_x1": """\
clk,btag_his,cate_his,brand_his,userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,\
occupation,new_user_class_level,adgroup_id,cate_id,campaign_id,customer,brand,price,pid,btag
0,1^2^1,11^12^11,5^6^5,100,1,2,1,3,2,3,0,2,900,11,70,80,5,199.0,430548_1007,1
1,,,,101,1,2,2,3,,3,0,2,901,12,71,81,6,0.0,430539_1007,1
0,1^1,11^12,6,100,1,2,1,3,2,3,0,2,902,11,70,80,5,1e8,430548_1007,1
""",
    "KuaiVideo_x1": """\
timestamp,user_id,item_id,is_click,is_like,is_follow,pos_items,neg_items
100,1,50,1,0,0,50^51,52
101,2,51,0,0,0,,50^51^52^50
102,1,52,0,0,0,50^51,
""",
}
SIMPLE = Schema(
    label="y",
    group="u",
    categorical=(Categorical("i"),),
    histories=(History("h", (Categorical("hi", "i"),), max_len=3),),
)


def write(folder: Path, text: str, name: str = "train.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def simple(folder: Path, rows: int = 23) -> Path:
    """Row n has group n, by which the tests recognise it; there are blank lines and long and empty histories."""
    lines = [f"{n % 2},{n},{n % 5},{'^'.join(str(j) for j in range(n % 6))}\n" for n in range(rows)]
    lines[4:4] = ["\n", "  \r\n"]
    return write(folder, "y,u,i,hi\n" + "".join(lines))


def groups(stream: Any) -> list[int]:
    return [s.group for s in stream]


@pytest.mark.parametrize("name", sorted(FILES))
def test_presets_read_the_published_columns(name: str, tmp_path: Path) -> None:
    stream = ReczooCSV(write(tmp_path, FILES[name]), name)
    header, *rows = csv.reader(FILES[name].splitlines())
    schema = PRESETS[name]
    assert set(schema.columns) <= set(header)
    batch = collate(list(stream))
    assert batch.labels.tolist() == [float(row[header.index(schema.label)]) for row in rows]
    assert batch.groups.tolist() == [int(row[header.index(schema.group)]) for row in rows]
    assert batch.sparse.shape == (len(rows), len(stream.sparse_names))
    assert list(batch.sequences) == [history for history, _ in stream.sequence_names]
    for history in schema.histories:
        cells = [[row[header.index(c.name)] for c in history.columns] for row in rows]
        want = [max(len(cell.split("^")) if cell else 0 for cell in row) for row in cells]
        assert batch.sequences[history.name].lengths().tolist() == want


def test_amazon_ids(tmp_path: Path) -> None:
    """Counted over the columns that share a vocabulary: item 10 occurs 5 times, 20 and 30 three times."""
    stream = ReczooCSV(write(tmp_path, FILES["AmazonElectronics_x1"]), "AmazonElectronics_x1")
    assert stream.vocabularies.ids["item_id"] == {"10": 2, "20": 3, "30": 4}
    assert stream.vocabulary_sizes == {"item_id": 5, "cate_id": 5}
    first = next(iter(stream))
    assert first.sparse.tolist() == [4, 4]
    assert first.sequences["history"].ids.tolist() == [[2, 2], [3, 3], [2, 2]]
    assert first.sequences["history"].values.shape == (3, 0)
    assert first.probability is None


def test_taobao_rows_that_are_not_complete(tmp_path: Path) -> None:
    schema = PRESETS["TaobaoAd_x1"]
    assert schema.min_count == 10
    stream = ReczooCSV(write(tmp_path, FILES["TaobaoAd_x1"]), Schema(**{**vars(schema), "min_count": 1}))
    _, empty, short = list(stream)
    assert empty.sparse[stream.sparse_names.index("pvalue_level")] == MISSING
    assert short.dense.tolist() == [pytest.approx(math.log1p(1e8))]
    assert short.sequences["history"].ids[:, 1].tolist() == [MISSING, stream.vocabularies.id("brand", "6")]
    assert (short.sequences["history"].ids[:, 0] >= 2).all()
    assert stream.tally.filled == {"brand_his": 1, "cate_his": 0, "btag_his": 0}


def test_values_below_the_minimum_and_unseen_ones_share_an_id(tmp_path: Path) -> None:
    train = write(tmp_path, "y,u,i,hi\n1,1,a,a^a^b\n0,2,c,c\n")
    vocabularies = Vocabularies.build(train, Schema(**{**vars(SIMPLE), "min_count": 2}))
    assert vocabularies.ids == {"i": {"a": 2, "c": 3}}
    test = write(tmp_path, "y,u,i,hi\n1,1,b,a^never^c\n0,1,,\n", "test.csv")
    stream = ReczooCSV(test, SIMPLE, vocabularies)
    first, second = list(stream)
    assert first.sparse.tolist() == [UNSEEN]
    assert first.sequences["h"].ids[:, 0].tolist() == [2, UNSEEN, 3]
    assert second.sparse.tolist() == [MISSING]
    assert stream.tally.unseen == {"i": 1, "hi": 1}


def test_vocabularies_can_be_kept(tmp_path: Path) -> None:
    built = Vocabularies.build(write(tmp_path, 'y,u,i,hi\n1,1,"é,1",x^y\n'), SIMPLE)
    built.save(tmp_path / "ids.json")
    assert Vocabularies.load(tmp_path / "ids.json") == built
    assert "é,1" in built.ids["i"]


def test_the_newest_events_are_kept_and_the_cut_ones_counted(tmp_path: Path) -> None:
    stream = ReczooCSV(write(tmp_path, "y,u,i,hi\n1,1,a,a^b^c^d^e\n0,2,a,a^b\n"), SIMPLE)
    first, second = list(stream)
    assert first.sequences["h"].ids[:, 0].tolist() == [stream.vocabularies.id("i", v) for v in "cde"]
    assert len(second.sequences["h"]) == 2
    assert stream.tally.cut == {"h": 2}


def test_jagged_batches_are_the_rows_one_by_one(tmp_path: Path) -> None:
    stream = ReczooCSV(simple(tmp_path), SIMPLE)
    assert [plain(s) for b in batches(stream, 4) for s in b] == [plain(s) for s in stream]
    assert groups(stream) == list(range(23))
    empty = Schema(label="y", group="u")
    batch = collate(list(ReczooCSV(simple(tmp_path), empty)))
    assert batch.dense.shape == batch.sparse.shape == (23, 0)
    assert batch.sequences == {}


def test_a_batch_of_rows_without_history(tmp_path: Path) -> None:
    stream = ReczooCSV(write(tmp_path, "y,u,i,hi\n1,1,a,\n0,2,b,\n"), SIMPLE)
    (batch,) = batches(stream, 8)
    assert batch.sequences["h"].ids.shape == (0, 1)
    assert batch.sequences["h"].cu_seqlens.tolist() == [0, 0, 0]


def test_other_ways_to_write_the_same(tmp_path: Path) -> None:
    """A byte order mark, Windows line ends, quotes, another order of columns, others between, no last line end."""
    want = [plain(s) for s in ReczooCSV(write(tmp_path, "y,u,i,hi\n1,x,a,a^b\n0,7,b,\n"), SIMPLE)]
    other = write(tmp_path, '\ufeffhi,extra,"i",y,u\r\n"a^b","1,2",a,1.0,x\r\n,,b,0,7', "other.csv")
    assert [plain(s) for s in ReczooCSV(other, SIMPLE)] == want


def test_groups_are_numbers_or_hashes(tmp_path: Path) -> None:
    rows = ["12", "-3", "012", "u-12", "９", str(2**63), "9" * 5000]
    path = write(tmp_path, "y,u,i,hi\n" + "".join(f"1,{u},a,\n" for u in rows))
    found = groups(ReczooCSV(path, SIMPLE))
    assert found[:2] == [12, -3]
    assert len(set(found)) == 7
    assert found == groups(ReczooCSV(path, SIMPLE))
    assert found[3] == 3208038435137554892


@pytest.mark.parametrize("shuffle", [0, 1, 5, 100])
def test_shuffling_keeps_every_row(shuffle: int, tmp_path: Path) -> None:
    stream = ReczooCSV(simple(tmp_path), SIMPLE, shuffle=shuffle, seed=3)
    first, again = groups(stream), groups(stream)
    stream.set_epoch(1)
    second = groups(stream)
    assert sorted(first) == sorted(second) == list(range(23))
    assert first == again
    assert (first == second) == (first == list(range(23))) == (shuffle <= 1)
    if shuffle == 5:
        assert all(sorted(first[i : i + 5]) == list(range(i, min(i + 5, 23))) for i in range(0, 23, 5))
        assert groups(ReczooCSV(stream.path, SIMPLE, shuffle=5, seed=4)) != first


@pytest.mark.parametrize("shuffle", [0, 7])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_shards_cover_every_row_once(world: int, shuffle: int, tmp_path: Path) -> None:
    path = simple(tmp_path)
    shards = [groups(ReczooCSV(path, SIMPLE, shuffle=shuffle, rank=r, world=world)) for r in range(world)]
    assert sorted(g for shard in shards for g in shard) == list(range(23))


def test_dataloader_with_workers_reads_every_row_once(tmp_path: Path) -> None:
    stream = ReczooCSV(simple(tmp_path), SIMPLE, shuffle=7)
    loader = torch.utils.data.DataLoader(stream, batch_size=4, collate_fn=collate, num_workers=2)
    assert sorted(int(g) for b in loader for g in b.groups) == list(range(23))


@pytest.mark.parametrize("shuffle", [0, 7])
@pytest.mark.parametrize("steps", range(7))
def test_resume_equals_uninterrupted(steps: int, shuffle: int, tmp_path: Path) -> None:
    def stream() -> ReczooCSV:
        return ReczooCSV(simple(tmp_path), SIMPLE, shuffle=shuffle, seed=1)

    one, whole = stream(), stream()
    for s in (one, whole):
        s.set_epoch(2)
    taken = [groups(b) for b in islice(batches(one, 4), steps)]
    later = stream()
    later.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert later.epoch == 2
    assert taken + [groups(b) for b in batches(later, 4)] == [groups(b) for b in batches(whole, 4)]


@pytest.mark.parametrize("saved", [0, 1])
def test_resume_with_another_number_of_ranks(saved: int, tmp_path: Path) -> None:
    """Two ranks, then three, then one: each time any rank's state serves all. Rounds of ranks straddle blocks."""
    path, seen, state = simple(tmp_path), [], None
    for world, steps in ((2, 2), (3, 1), (1, 100)):
        ranks = [ReczooCSV(path, SIMPLE, shuffle=5, rank=r, world=world) for r in range(world)]
        for stream in ranks:
            if state is not None:
                stream.load_state_dict(state)
            seen += [g for b in islice(batches(stream, 2), steps) for g in groups(b)]
        state = ranks[min(saved, world - 1)].state_dict()
    assert sorted(seen) == list(range(23))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A file of 3 MB is read within a tenth of that."""
    path = write(tmp_path, "y,u,i,hi\n" + f"1,5,a,{'^'.join(['a'] * 500)}\n" * 3000)
    stream = ReczooCSV(path, SIMPLE, shuffle=50)
    tracemalloc.start()
    assert sum(1 for _ in stream) == 3000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 10
