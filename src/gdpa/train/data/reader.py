"""Batches in step: every rank makes the same number of steps, whatever its shard still holds.

Samples are dealt to the shards one by one, so that the B samples of a step are the same ones for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gdpa.data import Batch, Stream, batches, collate
from gdpa.train.errors import ConfigError
from gdpa.train.parallel.ranks import Ranks


@dataclass(frozen=True)
class Portion:
    """What this rank computes of a step: ``parts`` one after another, of ``total`` samples on all ranks together.

    A rank whose shard has ended takes part with a batch that does not count: ``counts`` says how many samples of each
    part do.
    """

    parts: tuple[Batch, ...]
    counts: tuple[int, ...]
    total: int


def per_rank(batch_size: int, ranks: Ranks, accumulate: int = 1, name: str = "batch_size") -> int:
    """Samples in one part of one rank."""
    pieces = ranks.shards * accumulate
    if batch_size % pieces:
        what = f"the {ranks.shards} ranks" + (f" times accumulate={accumulate}" if accumulate > 1 else "")
        raise ConfigError(f"{name}={batch_size} must be a multiple of {what}")
    return batch_size // pieces


def portions(stream: Stream, size: int, accumulate: int, ranks: Ranks, spare: Batch) -> Iterator[Portion]:
    """The steps of one pass, until all shards have ended; reads nothing ahead."""
    source = batches(stream, size)
    while True:
        held = tuple(islice(source, accumulate))
        total = int(ranks.sum_shards([sum(map(len, held))])[0])
        if not total:
            return
        most = -(-total // ranks.shards)  # what rank 0 has, and no other rank more
        missing = -(-most // size) - len(held)
        yield Portion((*held, *[spare] * missing), (*map(len, held), *[0] * missing), total)


def spare_batch(first: Stream) -> Batch:
    """One sample, for ranks that have none left."""
    for sample in first:
        return collate([sample])
    raise ConfigError("there are no samples to train on")


def passes_begun(state: dict[str, Any]) -> int:
    """Of a Reader's saved state."""
    return state["epoch"] + (state["stream"] is not None)


class Reader:
    """The steps of the whole run, over ``epochs`` passes (None: without end), with a position that can be saved."""

    def __init__(
        self, stream: Stream, size: int, accumulate: int, ranks: Ranks, spare: Batch, epochs: int | None
    ) -> None:
        self.stream, self.epochs, self.epoch = stream, epochs, 0
        self._make = lambda: portions(stream, size, accumulate, ranks, spare)
        self._portions: Iterator[Portion] | None = None
        self._resumed = False

    @property
    def finished(self) -> bool:
        return self.epochs is not None and self.epoch >= self.epochs

    def next(self) -> Portion | None:
        """The next step, or None once at the end of each pass."""
        if self._portions is None:
            self._begin()
        assert self._portions is not None
        portion = next(self._portions, None)
        if portion is None:
            self.epoch, self._portions = self.epoch + 1, None
        return portion

    def _begin(self) -> None:
        if not self._resumed and hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(self.epoch)
        self._resumed = False
        self._portions = self._make()

    def state_dict(self) -> dict[str, Any]:
        """The pass and the place in it, None for its beginning. Rank 0's serves all: no other has read more."""
        begun = self._portions is not None or self._resumed
        return {"epoch": self.epoch, "stream": self.stream.state_dict() if begun else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._portions, self._resumed = state["epoch"], None, state["stream"] is not None
        if self._resumed:
            self.stream.load_state_dict(state["stream"])
