"""Batches hold exactly their samples, one after another, without padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from comparing import plain

import gdpa
from gdpa.data import Events, Sample, SyntheticLog, batches, collate


def sample(length: int, columns: int = 2, values: int = 1, dense: int = 3, probability: float | None = 0.5) -> Sample:
    rng = np.random.default_rng(length)
    return Sample(
        rng.normal(size=dense).astype(np.float32),
        np.array([length, 7]),
        {
            "clicks": Events(rng.integers(9, size=(length, columns)), np.ones((length, values), np.float32)),
            "views": Events(np.full((2 * length, 1), length), np.empty((2 * length, 0), np.float32)),
        },
        float(length % 2),
        length * 10**12,  # needs more than 32 bits
        probability,
    )


def test_a_batch_is_its_samples() -> None:
    samples = [sample(n) for n in (3, 0, 5, 1)]
    batch = collate(samples)
    assert len(batch) == 4
    assert [plain(s) for s in batch] == [plain(s) for s in samples]
    assert plain(batch[-1]) == plain(samples[3])
    with pytest.raises(IndexError, match="sample 4 is out of range for a batch of 4"):
        batch[4]


def test_layout() -> None:
    batch = collate([sample(n) for n in (3, 0, 5)])
    clicks, views = batch.sequences["clicks"], batch.sequences["views"]
    assert batch.dense.shape == (3, 3)
    assert batch.dense.dtype == batch.labels.dtype == clicks.values.dtype == torch.float32
    assert batch.sparse.dtype == batch.groups.dtype == clicks.ids.dtype == torch.int64
    assert clicks.ids.shape == (8, 2)
    assert clicks.values.shape == (8, 1)
    assert views.ids.shape == (16, 1)
    assert views.values.shape == (16, 0)
    assert clicks.cu_seqlens.dtype == torch.int32
    assert clicks.cu_seqlens.tolist() == [0, 3, 3, 8]
    assert clicks.lengths().tolist() == [3, 0, 5]
    assert (clicks.longest, views.longest) == (5, 10)


def test_a_batch_without_any_event() -> None:
    batch = collate([sample(0), sample(0)])
    clicks = batch.sequences["clicks"]
    assert clicks.ids.shape == (0, 2)
    assert clicks.cu_seqlens.tolist() == [0, 0, 0]
    assert clicks.longest == 0
    assert [plain(s) for s in batch] == [plain(sample(0))] * 2


@pytest.mark.parametrize("lengths", [(3, 0, 5), (0, 0)])
def test_attention_takes_it(lengths: tuple[int, ...]) -> None:
    """Also where a history is empty, or all are."""
    clicks = collate([sample(n) for n in lengths]).sequences["clicks"]
    q = torch.randn(sum(lengths), 2, 16, requires_grad=True)
    cu, longest = clicks.cu_seqlens, clicks.longest
    out = gdpa.attention_varlen(q, q, q, cu, cu, "gelu", max_seqlen_q=longest, max_seqlen_k=longest)
    out.sum().backward()
    assert out.shape == q.shape
    assert q.grad is not None


@pytest.mark.parametrize(
    "odd",
    [sample(2, columns=3), sample(2, values=0), sample(2, dense=1), sample(2, probability=None)],
    ids=["columns", "values", "dense", "probability"],
)
def test_unlike_samples_are_refused(odd: Sample) -> None:
    with pytest.raises(ValueError, match="sample 1 of the batch has the layout"):
        collate([sample(1), odd])


def test_no_samples_and_no_size_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        collate([])
    with pytest.raises(TypeError, match="batch_size must be an int, got float"):
        batches([], 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size must be positive, not 0"):
        batches([sample(1)], 0)


def test_batches_keep_every_sample() -> None:
    samples = [sample(n) for n in range(10)]
    found = list(batches(samples, 4))
    assert [len(b) for b in found] == [4, 4, 2]
    assert [plain(s) for b in found for s in b] == [plain(s) for s in samples]
    assert [len(b) for b in batches(samples, 4, drop_last=True)] == [4, 4]
    assert [len(b) for b in batches(samples, 5, drop_last=True)] == [5, 5]
    assert list(batches([], 4)) == []


def test_unknown_probabilities() -> None:
    batch = collate([sample(1, probability=None)])
    assert batch.probabilities is None
    assert batch.to("cpu")[0].probability is None


def test_to_moves_everything() -> None:
    batch = collate([sample(3), sample(4)]).to("meta")
    tensors = [batch.dense, batch.sparse, batch.labels, batch.groups, batch.probabilities]
    for jagged in batch.sequences.values():
        tensors += [jagged.ids, jagged.values, jagged.cu_seqlens]
    assert all(t is not None and t.device.type == "meta" for t in tensors)
    assert batch.sequences["clicks"].longest == 4
    for part in (batch, batch.sequences["clicks"]):  # in float16 ids above 2048 would be others'
        with pytest.raises(TypeError, match=r"takes only a device, got torch\.float16: ids and offsets stay integers"):
            part.to(torch.float16)


@pytest.mark.gpu
def test_pinned_memory_and_device() -> None:
    batch = collate([sample(3), sample(4)])
    pinned = batch.pin_memory()
    assert pinned.dense.is_pinned()
    assert pinned.sequences["clicks"].ids.is_pinned()
    moved = pinned.to("cuda", non_blocking=True)
    assert moved.sequences["views"].cu_seqlens.is_cuda
    assert [plain(s) for s in moved] == [plain(s) for s in batch]


def test_dataloader_with_workers_reads_every_sample_once() -> None:
    log = SyntheticLog(seed=1, size=21, longest=8)
    loader = torch.utils.data.DataLoader(log, batch_size=4, collate_fn=collate, num_workers=2)
    found = sorted(repr(plain(s)) for batch in loader for s in batch)
    assert found == sorted(repr(plain(log.sample(i))) for i in range(21))


def test_a_slice_of_a_batch_is_refused() -> None:
    batch = next(batches(SyntheticLog(), 4))
    with pytest.raises(TypeError, match=r"indexed by one sample's number, got slice\(0, 2, None\); use collate"):
        batch[0:2]  # type: ignore[index]
