"""Features: what a model needs to know about the data, in plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gdpa.arguments import checks
from gdpa.data import Inputs, PackedEvents, Stream
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
        if self.values.count("age") > 1:  # models that read the time would take the first of them for it
            raise ValueError(f"sequence {self.name!r} has more than one value called 'age', got {self.values}")


@dataclass(frozen=True)
class BagFeatures:
    """Ids without order, such as the genres of a film: the vocabulary that they are of."""

    name: str
    vocabulary: str


@dataclass(frozen=True)
class Features:
    """What a model needs to know about the data: names, and the rows of each embedding table.

    Args:
        dense: the columns of Batch.dense.
        sparse: the vocabulary of each column of Batch.sparse.
        sequences: Batch.sequences, in the order in which models read them.
        vocabularies: how many ids each vocabulary has. Columns of one vocabulary share one table.
        bags: Batch.bags, in the order in which models read them.
        labels: the columns of Batch.labels; a model has one head for each.

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
    bags: tuple[BagFeatures, ...] = ()
    labels: tuple[str, ...] = ("label",)

    def __post_init__(self) -> None:
        for what, names in (("sequences", [s.name for s in self.sequences]), ("bags", [b.name for b in self.bags])):
            if len(set(names)) != len(names):
                raise ValueError(f"{what} must have different names, got {names}")
        if not self.labels:
            raise ValueError("labels must contain at least one name")
        for name, size in self.vocabularies.items():
            positive(f"vocabularies[{name!r}]", size)
        used = {*self.sparse, *(name for s in self.sequences for name in s.vocabularies)}
        used |= {bag.vocabulary for bag in self.bags}
        if missing := sorted(used - set(self.vocabularies)):
            raise ValueError(f"vocabularies lacks the sizes of {missing}; it has {sorted(self.vocabularies)}")

    @staticmethod
    def of(stream: Stream) -> Features:
        """The features of a stream of gdpa.data. No sample is read."""
        values = dict(stream.value_names)
        return Features(
            tuple(stream.dense_names),
            tuple(stream.sparse_names),
            tuple(SequenceFeatures(name, tuple(ids), tuple(values[name])) for name, ids in stream.sequence_names),
            dict(stream.vocabulary_sizes),
            tuple(BagFeatures(name, vocabulary) for name, vocabulary in stream.bag_names),
            tuple(stream.label_names),
        )

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and ints, suitable for JSON."""
        found = asdict(self)
        for sequence in found["sequences"]:
            sequence.update({name: list(sequence[name]) for name in ("vocabularies", "values")})
        lists = {name: list(found[name]) for name in ("dense", "sparse", "sequences", "bags", "labels")}
        return {**found, **lists}

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> Features:
        """The inverse of ``to_dict``. Without bags and labels, as in files from before they existed, there is one
        label."""
        want = {"dense", "sparse", "sequences", "vocabularies"}
        if not want <= set(found) <= want | {"bags", "labels"}:
            raise ValueError(f"features must have {sorted(want)}, got {sorted(found)}")
        found = {"bags": (), "labels": ("label",), **found}
        sequences = [
            SequenceFeatures(s["name"], tuple(s["vocabularies"]), tuple(s["values"])) for s in found["sequences"]
        ]
        bags = tuple(BagFeatures(b["name"], b["vocabulary"]) for b in found["bags"])
        return Features(
            tuple(found["dense"]), tuple(found["sparse"]), tuple(sequences), {**found["vocabularies"]}, bags,
            tuple(found["labels"]),
        )  # fmt: skip

    def check(self, batch: Inputs, *, candidates: bool = False) -> None:
        """Refuses a batch with other columns, or whose parts have different numbers of samples; with ``candidates``
        there may be fewer histories than rows. Looks at shapes, and on the CPU, or under GDPA_CHECK=1, at offsets."""
        _columns("dense", batch.dense.shape, len(self.dense))
        _columns("sparse", batch.sparse.shape, len(self.sparse))
        rows = batch.dense.shape[0]
        _samples("sparse", batch.sparse.shape[0], rows)
        for s in self.sequences:
            if s.name not in batch.sequences:
                raise ValueError(f"the batch has no sequence {s.name!r}; it has {sorted(batch.sequences)}")
            events = batch.sequences[s.name]
            _columns(f"sequences[{s.name!r}].ids", events.ids.shape, len(s.vocabularies))
            _columns(f"sequences[{s.name!r}].values", events.values.shape, len(s.values))
            _offsets(f"sequences[{s.name!r}]", events, None if candidates else rows)
        for bag in self.bags:
            if bag.name not in batch.bags:
                raise ValueError(f"the batch has no bag {bag.name!r}; it has {sorted(batch.bags)}")
            _offsets(f"bags[{bag.name!r}]", batch.bags[bag.name], None if candidates else rows)


def _columns(name: str, shape: Any, want: int) -> None:
    if len(shape) != 2 or shape[1] != want:
        raise ValueError(f"{name} must have {want} columns, as the model's features do, got shape {tuple(shape)}")


def _offsets(name: str, events: PackedEvents, rows: int | None) -> None:
    """Not all of these reach an attention, which would refuse bad ones."""
    checks.own_offsets(f"{name}.cu_seqlens", events.cu_seqlens, events.ids, f"{name}.ids")
    if rows is not None:
        _samples(name, events.cu_seqlens.shape[0] - 1, rows)


def _samples(name: str, found: int, rows: int) -> None:
    if found != rows:
        raise ValueError(
            f"all parts of a batch must have the same number of samples: {name} has {found}, dense has {rows}; for "
            "many candidates per history use score_candidates"
        )
