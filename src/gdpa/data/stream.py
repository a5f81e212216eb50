"""What every stream of samples has: shards, a position that can be saved, and a refusal of the wrong one.

Samples are numbered. Of the samples from ``start`` on, shard r of n reads start + r, start + r + n, ...: together the
shards read every sample exactly once. A shard that has read m of them is at the position start + m n, which is the
same number on every shard that has taken as many steps, so that one saved state serves all ranks, and a run may be
continued with a different number of them.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from gdpa.data.batch import Sample


class Stream(IterableDataset[Sample]):
    """Base of SyntheticLog, TableLog and SampleLog. ``rank`` of ``world`` is the shard that this process reads.

    iter() begins at the first sample, or where load_state_dict() said. DataLoader's workers divide the shard further.
    They run in their own processes, so state_dict() in this one does not know their progress: for an exact resume,
    read without workers.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        if world < 1:
            raise ValueError(f"world must be positive, not {world}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in [0, {world}), not {rank}")
        self.rank, self.world = rank, world
        self._position: dict[str, int] = self._beginning()
        self._loaded = False

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The columns of Batch.dense."""
        raise NotImplementedError

    @property
    def sparse_names(self) -> tuple[str, ...]:
        """The vocabulary of each column of Batch.sparse."""
        raise NotImplementedError

    @property
    def sequence_names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(its name, the vocabulary of each column of its ids) for each of Batch.sequences."""
        raise NotImplementedError

    @property
    def value_names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(its name, what each column of its values is) for each of Batch.sequences; "age" is the time since."""
        return tuple((name, ()) for name, _ in self.sequence_names)

    @property
    def bag_names(self) -> tuple[tuple[str, str], ...]:
        """(its name, its vocabulary) for each of Batch.bags."""
        return ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """What each column of Batch.labels is."""
        return ("label",)

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        """How many ids each vocabulary has: the rows of its embedding table. Ids begin at 0."""
        raise NotImplementedError

    def _beginning(self) -> dict[str, int]:
        """The position of the first sample; ``next`` is its number."""
        return {"next": 0}

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a saved position to mean the same samples."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The position after the last sample read, as a few plain values, suitable for JSON and torch.save."""
        return {**self._identity(), "position": dict(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iter() continues there. A state saved with other data is refused."""
        identity = self._identity()
        for name, own in identity.items():
            if state.get(name) != own:
                of = f" of {', '.join(identity['files'])}" if "files" in identity else ""
                raise ValueError(
                    f"the state was saved with {name}={state.get(name)!r}, but this stream{of} has {own!r}: it "
                    "reads other data, or the data have changed"
                )
        position = state.get("position")
        if not isinstance(position, dict) or position.keys() != self._position.keys():
            raise ValueError(f"the state's position must have {sorted(self._position)}, not {position!r}")
        self._position, self._loaded = dict(position), True

    def _begin(self) -> dict[str, int]:
        """Where this iter() starts: a loaded position counts once."""
        if not self._loaded:
            self._position = self._beginning()
        self._loaded = False
        return self._position

    def _shard(self) -> tuple[int, int]:
        """(which, of how many), DataLoader's workers counted."""
        worker = get_worker_info()
        if worker is None:
            return self.rank, self.world
        return self.rank * worker.num_workers + worker.id, self.world * worker.num_workers
