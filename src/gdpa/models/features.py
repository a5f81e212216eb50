"""Features: what a model needs to know about the data, in plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gdpa.data import Inputs, Stream
from gdpa.nn.linear import positive


@dataclass(frozen=True)
class SequenceFeatures:
    """One behaviour sequence: the vocabulary of each column of its ids, and what each column of its values is.

    A value called "age" is the time since the event, in any unit.
    """

    name: str
    vocabularies: tuple[str, ...]
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.vocabularies and not self.values:
            raise ValueError(f"sequence {self.name!r} has neither ids nor values")


@dataclass(frozen=True)
class Features:
    """What a model needs to know about the data: names, and the rows of each embedding table.

    Args:
        dense: the columns of Batch.dense.
        sparse: the vocabulary of each column of Batch.sparse.
        sequences: Batch.sequences, in the order in which models read them.
        vocabularies: how many ids each vocabulary has. Columns of one vocabulary share one table.

    >>> features = Features.of(gdpa.data.SyntheticLog(items=50))
    >>> features.sparse, features.vocabularies["item"]
    (('item', 'category', 'situation'), 50)
    >>> Features.from_dict(features.to_dict()) == features
    True
    """

    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    sequences: tuple[SequenceFeatures, ...]
    vocabularies: Mapping[str, int]

    def __post_init__(self) -> None:
        names = [s.name for s in self.sequences]
        if len(set(names)) != len(names):
            raise ValueError(f"sequences must have different names, got {names}")
        for name, size in self.vocabularies.items():
            positive(f"vocabularies[{name!r}]", size)
        used = {*self.sparse, *(name for s in self.sequences for name in s.vocabularies)}
        if missing := sorted(used - set(self.vocabularies)):
            raise ValueError(f"vocabularies lacks the sizes of {missing}; it has {sorted(self.vocabularies)}")

    @staticmethod
    def of(stream: Stream) -> Features:
        """Those of a stream of gdpa.data. No sample is read."""
        values = dict(stream.value_names)
        return Features(
            tuple(stream.dense_names),
            tuple(stream.sparse_names),
            tuple(SequenceFeatures(name, tuple(ids), tuple(values[name])) for name, ids in stream.sequence_names),
            dict(stream.vocabulary_sizes),
        )

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and ints: fit for JSON."""
        found = asdict(self)
        for sequence in found["sequences"]:
            sequence.update({name: list(sequence[name]) for name in ("vocabularies", "values")})
        return {**found, "dense": list(self.dense), "sparse": list(self.sparse), "sequences": list(found["sequences"])}

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> Features:
        """The inverse of ``to_dict``."""
        if set(found) != (want := {"dense", "sparse", "sequences", "vocabularies"}):
            raise ValueError(f"features must have {sorted(want)}, got {sorted(found)}")
        sequences = [
            SequenceFeatures(s["name"], tuple(s["vocabularies"]), tuple(s["values"])) for s in found["sequences"]
        ]
        return Features(tuple(found["dense"]), tuple(found["sparse"]), tuple(sequences), {**found["vocabularies"]})

    def check(self, batch: Inputs) -> None:
        """Refuses a batch of other columns. Looks at shapes only."""
        _columns("dense", batch.dense.shape, len(self.dense))
        _columns("sparse", batch.sparse.shape, len(self.sparse))
        for s in self.sequences:
            if s.name not in batch.sequences:
                raise ValueError(f"the batch has no sequence {s.name!r}; it has {sorted(batch.sequences)}")
            events = batch.sequences[s.name]
            _columns(f"sequences[{s.name!r}].ids", events.ids.shape, len(s.vocabularies))
            _columns(f"sequences[{s.name!r}].values", events.values.shape, len(s.values))


def _columns(name: str, shape: Any, want: int) -> None:
    if len(shape) != 2 or shape[1] != want:
        raise ValueError(f"{name} must have {want} columns, as the model's features do, got shape {tuple(shape)}")
