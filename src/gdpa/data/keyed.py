"""Ids of a Batch as TorchRec's KeyedJaggedTensors and back. Needs torchrec; nothing else here imports it.

A KeyedJaggedTensor holds its keys one after another, so that each column of ids lies in one piece. From one to a Batch
there are only views. The other way there are too, where the columns of the Batch lie in one piece (made from a
KeyedJaggedTensor, or with a single column); row after row, as ``collate`` has them, ids are transposed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from gdpa.data.batch import Inputs, PackedEvents


@dataclass(frozen=True, eq=False)
class Keyed:
    """The ids of a batch: one key for each column of Batch.sparse, of one id each; for each sequence one key for each
    column of its ids, of the same lengths; for each bag one key. Keys are the places of columns: "sparse:0",
    "history:1", "bag:genres:0"."""

    sparse: KeyedJaggedTensor
    sequences: Mapping[str, KeyedJaggedTensor]
    bags: Mapping[str, KeyedJaggedTensor] = field(default_factory=dict)


def key(name: str, column: int) -> str:
    return f"{name}:{column}"


def bag_name(name: str) -> str:
    """What a bag is called in keys, where a sequence may have the same name."""
    return f"bag:{name}"


def to_keyed(batch: Inputs) -> Keyed:
    """All ids of ``batch``."""
    lengths = batch.sparse.new_ones(batch.sparse.numel(), dtype=torch.int32)
    return Keyed(
        KeyedJaggedTensor(_keys("sparse", batch.sparse), _columns(batch.sparse), lengths=lengths),
        {name: events_to_keyed(name, events) for name, events in batch.sequences.items()},
        {name: events_to_keyed(bag_name(name), events) for name, events in batch.bags.items()},
    )


def from_keyed(keyed: Keyed, dense: Tensor, values: Mapping[str, Tensor] | None = None) -> Inputs:
    """What a model reads, in views of ``keyed``; ``values`` (T, V) of the sequences that have some."""
    sparse, n = keyed.sparse, dense.shape[0]
    if len(sparse.keys()) * n != sparse.values().numel() or not bool((sparse.lengths() == 1).all()):
        raise ValueError(f"sparse must have one id for each of the {n} samples of dense and each key {sparse.keys()}")
    sequences = {name: keyed_to_events(k, (values or {}).get(name)) for name, k in keyed.sequences.items()}
    bags = {name: keyed_to_events(k) for name, k in keyed.bags.items()}
    return Inputs(dense, sparse.values().view(-1, n).T, sequences, bags=bags)


def events_to_keyed(name: str, events: PackedEvents) -> KeyedJaggedTensor:
    """The ids of one sequence."""
    lengths = events.lengths().repeat(events.ids.shape[1])
    return KeyedJaggedTensor(_keys(name, events.ids), _columns(events.ids), lengths=lengths)


def keyed_to_events(keyed: KeyedJaggedTensor, values: Tensor | None = None) -> PackedEvents:
    """One sequence, whose columns are the keys: all of them must have the same lengths."""
    lengths = keyed.lengths().view(len(keyed.keys()), -1)
    if not bool((lengths == lengths[0]).all()):
        raise ValueError(f"the keys {keyed.keys()} of one sequence must have the same lengths")
    ids = keyed.values().view(len(keyed.keys()), -1).T
    cu_seqlens = torch.nn.functional.pad(lengths[0].cumsum(0, dtype=torch.int32), (1, 0))
    values = ids.new_empty(ids.shape[0], 0, dtype=torch.float32) if values is None else values
    return PackedEvents(ids, values, cu_seqlens)


def joined(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """The keys of all parts in one. Ids are copied, as they lie in different places."""
    return KeyedJaggedTensor.concat(list(parts))


def _keys(name: str, ids: Tensor) -> list[str]:
    return [key(name, column) for column in range(ids.shape[1])]


def _columns(ids: Tensor) -> Tensor:
    return ids.T.reshape(-1)
