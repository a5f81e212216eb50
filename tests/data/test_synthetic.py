"""The synthetic log: pure, seeded, sharded, resumable, and with the lengths it was asked for."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from typing import Any

import numpy as np
import pytest
from comparing import plain

from gdpa.data import LENGTHS, SyntheticLog, Weights, batches, lengths
from gdpa.data.draws import Draws
from gdpa.data.synthetic import BLOCK


def log(**kwargs: Any) -> SyntheticLog:
    return SyntheticLog(**{"seed": 5, "size": 40, "longest": 12, "lengths": "zipf", **kwargs})


def test_a_sample_depends_on_its_index_alone() -> None:
    in_order = [plain(s) for s in log()]
    other = log()
    for i in (39, 0, 17, 17, 3):
        assert plain(other.sample(i)) == in_order[i]
    assert plain(pickle.loads(pickle.dumps(other)).sample(8)) == in_order[8]
    assert plain(log(size=None, first=10).sample(7)) == in_order[17]


def test_the_stream_of_random_numbers_is_fixed() -> None:
    """Numbers published with one version of numpy must mean the same data with the next."""
    assert Draws(1, 2, 3).uniform(2).tolist() == DRAWS
    others = [Draws(*key).uniform(1)[0] for key in ((-1, 2, 3), (1, 1, 3), (1, 2, 4), (1, 2, 3 + 2**20 * 10**6))]
    assert len({DRAWS[0], *others}) == 5


DRAWS = [0.9227409448562424, 0.996703126586887]


def test_seeds_make_different_logs() -> None:
    assert [plain(s) for s in log(seed=6)] != [plain(s) for s in log()]
    assert len({repr(plain(s)) for s in log()}) == 40


def test_what_a_sample_holds() -> None:
    stream = log(size=500, items=97, categories=10, users=30)
    for s in stream:
        item, category, situation = s.sparse.tolist()
        events = s.sequences["history"]
        assert category == item % 10
        assert 0 <= item < 97
        assert 0 <= situation < stream.vocabulary_sizes["situation"]
        assert (events.ids[:, 1] == events.ids[:, 0] % 10).all()
        assert ((events.ids >= 0) & (events.ids < [97, 10, 4])).all()
        assert (np.diff(events.values[:, 0]) <= 0).all()  # oldest first
        assert s.label in (0.0, 1.0)
        assert 0 <= s.group < 30
        assert np.isfinite(s.dense).all()
    assert {s.sparse[0] for s in log(size=3000, items=23, categories=10, longest=1)} == set(range(23))


def test_without_history_only_the_context_speaks() -> None:
    stream = log(size=400)
    empty = [stream.draw(i) for i in range(400) if not len(stream.sample(i).sequences["history"])]
    assert len(empty) > 5
    for sample, terms in empty:
        assert (terms.target, terms.selected, terms.weighed) == (0.0, 0.0, 0.0)
        assert sample.sequences["history"].ids.shape == (0, 3)


@pytest.mark.parametrize("name", sorted(LENGTHS))
def test_lengths_are_those_of_the_benchmark(name: str) -> None:
    """The same function of data.lengths, so the same mean: 2,048 samples of each, compared in standard errors."""
    stream = SyntheticLog(seed=9, lengths=name, longest=64)
    got = np.array([stream._length(i) for i in range(2 * BLOCK)])
    want = np.array(LENGTHS[name](4096, 64, 77))
    assert abs(got.mean() - want.mean()) <= 4 * want.std() * np.sqrt(1 / 2048 + 1 / 4096)
    assert got.min() >= 0
    assert got.max() <= 64
    assert abs((got == 0).mean() - (lengths.ZIPF_EMPTY if name == "zipf" else 0)) < 0.02
    assert len(stream.sample(3).sequences["history"]) == got[3]
    if name != "full":
        assert (got[:BLOCK] != got[BLOCK:]).any()


@pytest.mark.parametrize(("world", "size"), [(1, 7), (3, 40), (4, 40), (5, 3)])
def test_shards_cover_every_sample_once(world: int, size: int) -> None:
    shards = [[plain(s) for s in log(size=size, rank=r, world=world)] for r in range(world)]
    assert sorted(map(repr, (s for shard in shards for s in shard))) == sorted(repr(plain(s)) for s in log(size=size))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_resume_equals_uninterrupted(steps: int) -> None:
    whole = [[plain(s) for s in b] for b in batches(log(), 8)]
    stream = log()
    assert len(list(islice(batches(stream, 8), steps))) == steps
    state = json.loads(json.dumps(stream.state_dict()))
    later = log()
    later.load_state_dict(state)
    assert [[plain(s) for s in b] for b in batches(later, 8)] == whole[steps:]
    assert [[plain(s) for s in b] for b in batches(later, 8)] == whole  # a loaded position counts once


def test_resume_with_another_number_of_ranks() -> None:
    """Two ranks take three steps of four samples; three ranks do the rest. Every rank has saved the same state."""
    ranks = [log(rank=r, world=2) for r in range(2)]
    seen = [plain(s) for stream in ranks for b in islice(batches(stream, 4), 3) for s in b]
    assert ranks[0].state_dict() == ranks[1].state_dict()
    for r in range(3):
        stream = log(rank=r, world=3)
        stream.load_state_dict(ranks[0].state_dict())
        seen += [plain(s) for s in stream]
    assert sorted(map(repr, seen)) == sorted(repr(plain(s)) for s in log())


def test_a_state_of_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match="saved with seed=6, but this stream has 5"):
        log().load_state_dict(log(seed=6).state_dict())
    with pytest.raises(ValueError, match="saved with weights="):
        log().load_state_dict(log(weights=Weights(noise=0.5)).state_dict())
    with pytest.raises(ValueError, match="kind=None"):
        log().load_state_dict({})
    with pytest.raises(ValueError, match="position must have"):
        log().load_state_dict({**log().state_dict(), "position": 3})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lengths": "normal"}, "lengths must be one of"),
        ({"categories": 3}, "categories must be in"),
        ({"categories": 50, "items": 40}, "categories must be in"),
        ({"longest": 0}, "longest must be positive, not 0"),
        ({"users": 0}, "users must be positive, not 0"),
        ({"size": -1}, "size must not be negative, not -1"),
        ({"first": -1}, "first must not be negative, not -1"),
        ({"world": 0}, "world must be positive, not 0"),
        ({"rank": 2, "world": 2}, r"rank must be in \[0, 2\), not 2"),
    ],
)
def test_wrong_arguments_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        log(**kwargs)


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(IndexError, match="sample 40 is out of range for a log of 40"):
        log().sample(40)
    assert len(list(islice(log(size=None), 50))) == 50
    assert list(log(size=0)) == []
