"""One sample, a batch of them, and the step from one to the other. Nothing is padded anywhere.

A behaviour sequence of a batch is packed as gdpa.attention_varlen takes it: the events of all samples one after
another, and cu_seqlens that say where each sample's begin and end.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import register_dataclass

from gdpa.foreign import only_a_device

INT32_MAX = 2**31 - 1
INTEGERS = "ids and offsets stay integers, and models compute in their own dtype"


@dataclass(frozen=True, eq=False)
class Events:
    """The history of one sample, oldest event first: ids (L, C) int64 and values (L, V) float32.

    C ids describe an event (its item, its category, ...), V numbers come with it (its age, ...); either may be 0.
    """

    ids: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Sample:
    """One impression: dense (F,) float32, sparse (S,) int64, a history per name, and what became of it.

    ``label`` is a tuple where there are several. ``group`` is what gAUC groups by, usually the user. ``probability`` is
    the true P(label = 1) where it is known, ``weight`` how much the sample counts in the loss. ``bags`` are ids without
    order, (L, 1) each.
    """

    dense: np.ndarray
    sparse: np.ndarray
    sequences: Mapping[str, Events]
    label: float | tuple[float, ...]
    group: int
    probability: float | None = None
    weight: float | None = None
    bags: Mapping[str, Events] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PackedEvents:
    """The histories of a batch: ids (T, C) int64, values (T, V) float32, cu_seqlens (B + 1,) int32.

    ``longest`` is kept as a number on the host, so that attention's max_seqlen needs no wait for the device; None where
    it is not known, as in an exported program.
    """

    ids: Tensor
    values: Tensor
    cu_seqlens: Tensor
    longest: int | None = None

    def __len__(self) -> int:
        return self.cu_seqlens.numel() - 1

    def lengths(self) -> Tensor:
        """(B,) int32."""
        return self.cu_seqlens.diff()

    def __getitem__(self, i: int) -> Events:
        start, stop = self.cu_seqlens[i : i + 2].tolist()
        return Events(self.ids[start:stop].cpu().numpy(), self.values[start:stop].cpu().numpy())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedEvents:
        only_a_device(device, INTEGERS)
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in _JAGGED}
        return replace(self, **moved)

    def pin_memory(self) -> PackedEvents:
        return replace(self, **{name: getattr(self, name).pin_memory() for name in _JAGGED})


_JAGGED = ("ids", "values", "cu_seqlens")


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a model reads of a batch: dense (B, F) float32, sparse (B, S) int64, sequences and bags by name. Where
    ``longest`` is None in all of these it consists of tensors alone, as programs made by gdpa.serving take it."""

    dense: Tensor
    sparse: Tensor
    sequences: Mapping[str, PackedEvents]
    bags: Mapping[str, PackedEvents] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True, eq=False)
class Batch(Inputs):
    """B samples: dense (B, F) float32, sparse (B, S) int64, sequences by name, labels (B,) float32, groups (B,) int64.

    Several labels are (B, K). ``bags`` are by name too, ids (T, 1). ``weights`` (B,) float32 are those of the loss, or
    None.

        for batch in gdpa.data.batches(log, 512):
            batch = batch.to("cuda", non_blocking=True)
            history = batch.sequences["history"]
            gdpa.attention_varlen(q, k, v, history.cu_seqlens, history.cu_seqlens, max_seqlen_q=history.longest, ...)

    ``batch[i]`` is the sample it was made of. ``probabilities`` (B,) float64 are the true ones, or None.
    """

    dense: Tensor
    sparse: Tensor
    sequences: Mapping[str, PackedEvents]
    labels: Tensor
    groups: Tensor
    probabilities: Tensor | None = field(default=None)
    weights: Tensor | None = field(default=None)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> Sample:
        try:
            i = operator.index(i)
        except TypeError:
            raise TypeError(
                f"a batch is indexed by one sample's number, got {i!r}; use collate to make a batch of several samples"
            ) from None
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} is out of range for a batch of {len(self)}")
        i %= len(self)
        return Sample(
            self.dense[i].cpu().numpy(),
            self.sparse[i].cpu().numpy(),
            {name: jagged[i] for name, jagged in self.sequences.items()},
            float(self.labels[i]) if self.labels.dim() == 1 else tuple(self.labels[i].tolist()),
            int(self.groups[i]),
            None if self.probabilities is None else float(self.probabilities[i]),
            None if self.weights is None else float(self.weights[i]),
            {name: jagged[i] for name, jagged in self.bags.items()},
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        only_a_device(device, INTEGERS)
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def inputs(self) -> Inputs:
        """What a model reads of the batch: only tensors, made contiguous, as compiled programs expect them. Those of
        ``collate`` are contiguous already, and are not copied."""

        def plain(jagged: Mapping[str, PackedEvents]) -> dict[str, PackedEvents]:
            return {
                name: PackedEvents(e.ids.contiguous(), e.values.contiguous(), e.cu_seqlens)
                for name, e in jagged.items()
            }

        sequences, bags = plain(self.sequences), plain(self.bags)
        return Inputs(self.dense.contiguous(), self.sparse.contiguous(), sequences, bags=bags)

    def pin_memory(self) -> Batch:
        """In page-locked memory, from which copies to a GPU can overlap with computation. DataLoader calls this."""
        return self._each(lambda part: part.pin_memory())

    def _each(self, move: Any) -> Batch:
        return Batch(
            move(self.dense),
            move(self.sparse),
            {name: move(jagged) for name, jagged in self.sequences.items()},
            move(self.labels),
            move(self.groups),
            None if self.probabilities is None else move(self.probabilities),
            None if self.weights is None else move(self.weights),
            bags={name: move(jagged) for name, jagged in self.bags.items()},
        )


# So that torch.export and whoever else maps over tensors finds them, each under its name. An exported program holds its
# example, which torch.load of plain data alone must take.
for _cls in (PackedEvents, Inputs, Batch):
    register_dataclass(_cls, serialized_type_name=f"gdpa.data.{_cls.__name__}")
torch.serialization.add_safe_globals([PackedEvents, Inputs, Batch])


def collate(samples: Sequence[Sample]) -> Batch:
    """Samples as one batch; also a ``collate_fn`` for torch's DataLoader.

    Samples without events are ordinary. A batch in which every history is empty has ids of shape (0, C).
    """
    if not samples:
        raise ValueError("a batch needs at least one sample")
    _check_alike(samples)
    known, weighted = samples[0].probability is not None, samples[0].weight is not None
    return Batch(
        torch.from_numpy(np.stack([s.dense for s in samples])),
        torch.from_numpy(np.stack([s.sparse for s in samples])),
        {name: _pack([s.sequences[name] for s in samples]) for name in samples[0].sequences},
        torch.tensor([s.label for s in samples], dtype=torch.float32),
        torch.tensor([s.group for s in samples], dtype=torch.int64),
        torch.tensor([s.probability for s in samples], dtype=torch.float64) if known else None,
        torch.tensor([s.weight for s in samples], dtype=torch.float32) if weighted else None,
        bags={name: _pack([s.bags[name] for s in samples]) for name in samples[0].bags},
    )


def _check_alike(samples: Sequence[Sample]) -> None:
    first = _layout(samples[0])
    for i, sample in enumerate(samples):
        if (layout := _layout(sample)) != first:
            raise ValueError(f"sample {i} of the batch has the layout {layout}, but sample 0 has {first}")


def _layout(sample: Sample) -> dict[str, Any]:
    sequences = {name: (e.ids.shape[1], e.values.shape[1]) for name, e in sample.sequences.items()}
    known, weighted = sample.probability is not None, sample.weight is not None
    labels = len(sample.label) if isinstance(sample.label, tuple) else 1
    return {
        "dense": len(sample.dense), "sparse": len(sample.sparse), "labels": labels, "probability": known,
        "weight": weighted, "bags": sorted(sample.bags), **sequences,
    }  # fmt: skip


def _pack(histories: Sequence[Events]) -> PackedEvents:
    lengths = np.array([len(events) for events in histories])
    ids = np.concatenate([events.ids for events in histories])
    return packed(ids, np.concatenate([events.values for events in histories]), lengths)


def packed(ids: np.ndarray, values: np.ndarray, lengths: np.ndarray) -> PackedEvents:
    """Of ids (T, C) and values (T, V) of all samples one after another, and how many each of them has."""
    if len(ids) > INT32_MAX:
        raise ValueError(f"{len(ids)} events in one batch, but cu_seqlens are int32: make smaller batches")
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    longest = int(lengths.max(initial=0))
    return PackedEvents(torch.from_numpy(ids), torch.from_numpy(values), torch.from_numpy(cu_seqlens), longest)


def batches(samples: Iterable[Sample], batch_size: int, drop_last: bool = False) -> Iterator[Batch]:
    """Batches of ``batch_size`` samples in order; the last may be smaller, unless ``drop_last`` drops it.

    After each batch the stream's state_dict() is the position right after that batch. Streams that make batches
    themselves, as tables do, are asked for those: the same samples, many times as fast.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise TypeError(f"batch_size must be an int, got {type(batch_size).__name__}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, not {batch_size}")
    own = getattr(samples, "batches", None)
    if own is None:
        return _batches(samples, batch_size, drop_last)
    return (batch for batch in own(batch_size) if not drop_last or len(batch) == batch_size)


def _batches(samples: Iterable[Sample], batch_size: int, drop_last: bool) -> Iterator[Batch]:
    """Apart from batches(), so that a wrong argument is refused there and not at the first next()."""
    held: list[Sample] = []
    for sample in samples:
        held.append(sample)
        if len(held) == batch_size:
            yield collate(held)
            held = []
    if held and not drop_last:
        yield collate(held)
