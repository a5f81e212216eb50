"""Samples that come from anywhere: an iterable of samples or batches, such as a torch DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gdpa.data.batch import Batch, Sample
from gdpa.data.stream import Stream


class SampleLog(Stream):
    """Samples of an iterable that yields the same ones, in the same order, every time it is iterated.

        loader = torch.utils.data.DataLoader(mine, batch_size=512, collate_fn=gdpa.data.collate, num_workers=4)
        log = SampleLog(loader, sparse=("item",), sequences={"clicks": ("item",)}, vocabularies={"item": 5_000})

    It may give Samples or Batches, which are taken apart. The names say what the columns are, as in
    gdpa.models.Features. Shards read everything and keep their share. A position is the number of samples before it:
    to continue there, those are read again; where the iterable has state_dict() and load_state_dict(), as torchdata's
    StatefulDataLoader does, they are used instead (with one shard, and at the end of one of its batches).
    """

    def __init__(
        self,
        samples: Iterable[Sample | Batch],
        *,
        dense: tuple[str, ...] = (),
        sparse: tuple[str, ...] = (),
        sequences: Mapping[str, tuple[str, ...]] | None = None,
        values: Mapping[str, tuple[str, ...]] | None = None,
        bags: Mapping[str, str] | None = None,
        labels: tuple[str, ...] = ("label",),
        vocabularies: Mapping[str, int] | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if iter(samples) is samples:
            raise TypeError(
                f"samples must be something that can be iterated again, such as a list or a DataLoader, not the "
                f"{type(samples).__name__}, which ends after one pass"
            )
        self.samples = samples
        self._dense, self._sparse, self._labels = tuple(dense), tuple(sparse), tuple(labels)
        self._sequences = {name: tuple(ids) for name, ids in (sequences or {}).items()}
        self._values, self._bags = dict(values or {}), dict(bags or {})
        if unknown := sorted(set(self._values) - set(self._sequences)):
            raise ValueError(f"values has {unknown}, but sequences has {sorted(self._sequences)}")
        self._sizes = dict(vocabularies or {})
        super().__init__(rank, world)

    @property
    def dense_names(self) -> tuple[str, ...]:
        return self._dense

    @property
    def sparse_names(self) -> tuple[str, ...]:
        return self._sparse

    @property
    def sequence_names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple(self._sequences.items())

    @property
    def value_names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple((name, tuple(self._values.get(name, ()))) for name in self._sequences)

    @property
    def bag_names(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._bags.items())

    @property
    def label_names(self) -> tuple[str, ...]:
        return self._labels

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        return dict(self._sizes)

    def _identity(self) -> dict[str, Any]:
        return {"kind": "SampleLog", "dense": list(self._dense), "sparse": list(self._sparse)}

    def state_dict(self) -> dict[str, Any]:
        own = getattr(self.samples, "state_dict", None)
        return super().state_dict() | ({} if own is None or self._inside else {"samples": own()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._given = state["position"]["next"] if "samples" in state and self.world == 1 else 0
        if self._given:
            self.samples.load_state_dict(state["samples"])  # type: ignore[attr-defined]

    _given = 0  # samples that the iterable itself leaves out of its next pass
    _inside = False  # a batch that the iterable gave

    def __iter__(self) -> Iterator[Sample]:
        start = self._begin()["next"]
        shard, shards = self._shard()
        number, self._given = self._given, 0
        for found in self.samples:
            batch = [found] if isinstance(found, Sample) else list(found)
            for i, sample in enumerate(batch, 1):
                self._inside = i < len(batch)
                if number >= start and (number - start) % shards == shard:
                    self._position = {"next": number - shard + shards}
                    yield sample
                number += 1
