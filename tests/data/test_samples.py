"""Samples from anywhere: lists, DataLoaders, loaders that keep their own place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from comparing import plain

from gdpa.data import SampleLog, SyntheticLog, batches, collate
from gdpa.models import Features

LOG = SyntheticLog(seed=1, size=23, longest=6, items=50)
NAMES: dict[str, Any] = {
    "dense": LOG.dense_names, "sparse": LOG.sparse_names, "sequences": dict(LOG.sequence_names),
    "values": dict(LOG.value_names), "vocabularies": LOG.vocabulary_sizes,
}  # fmt: skip


def loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(LOG, batch_size=5, collate_fn=collate)


@pytest.mark.parametrize("make", [lambda: list(LOG), loader], ids=["list", "DataLoader"])
def test_the_samples_are_those_of_the_iterable(make: Any) -> None:
    stream = SampleLog(make(), **NAMES)
    assert Features.of(stream) == Features.of(LOG)
    assert [plain(s) for s in stream] == [plain(s) for s in LOG]
    shards = [SampleLog(make(), **NAMES, rank=r, world=2) for r in range(2)]
    assert [plain(s) for s in shards[1]] == [plain(s) for s in LOG][1::2]


@pytest.mark.parametrize("steps", [0, 2, 3])
def test_resume_is_exact(steps: int) -> None:
    one, later = SampleLog(loader(), **NAMES), SampleLog(loader(), **NAMES)
    taken = [b.groups.tolist() for b in islice(batches(one, 4), steps)]
    later.load_state_dict(json.loads(json.dumps(one.state_dict())))
    whole = [b.groups.tolist() for b in batches(SampleLog(loader(), **NAMES), 4)]
    assert taken + [b.groups.tolist() for b in batches(later, 4)] == whole


class Stateful:
    """As torchdata's StatefulDataLoader: it continues by itself, and counts what it reads."""

    def __init__(self) -> None:
        self.first, self.at, self.read = 0, 0, 0

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for i in range(first, len(LOG_LIST), 5):
            self.read += 1
            self.at = i + 5
            yield collate(LOG_LIST[i : i + 5])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"]


LOG_LIST = list(LOG)


@pytest.mark.parametrize(("size", "read"), [(5, 3), (4, 5)])
def test_a_loader_that_keeps_its_place_is_not_read_again(size: int, read: int) -> None:
    """At the end of one of its batches; in the middle of one, the samples before are read again."""
    one = SampleLog(Stateful(), **NAMES)
    taken = [b.groups.tolist() for b in islice(batches(one, size), 2)]
    later = SampleLog(Stateful(), **NAMES)
    later.load_state_dict(json.loads(json.dumps(one.state_dict())))
    rest = [b.groups.tolist() for b in batches(later, size)]
    assert taken + rest == [b.groups.tolist() for b in batches(SampleLog(LOG_LIST, **NAMES), size)]
    assert later.samples.read == read  # type: ignore[attr-defined]


def test_refusals() -> None:
    with pytest.raises(TypeError, match="not the generator, which ends after one pass"):
        SampleLog((s for s in LOG), **NAMES)
    with pytest.raises(ValueError, match="values has"):
        SampleLog([], values={"clicks": ("age",)})
