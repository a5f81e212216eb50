"""CSV files in the layout of the reczoo and BARS data sets: a header, one impression per row, histories as a^b^c."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from gdpa.data.batch import Sample
from gdpa.data.draws import Draws
from gdpa.data.errors import DataError
from gdpa.data.parse import RowParser, Tally
from gdpa.data.presets import PRESETS
from gdpa.data.rows import Line, read_header, read_lines
from gdpa.data.schema import Schema
from gdpa.data.stream import Stream
from gdpa.data.vocabulary import Vocabularies


class ReczooCSV(Stream):
    """The samples of one file, read as they are asked for.

        train = ReczooCSV("train.csv", "AmazonElectronics_x1", shuffle=100_000)
        test = ReczooCSV("test.csv", "AmazonElectronics_x1", train.vocabularies)

    ``schema`` is one of your own or the name of a preset. Without ``vocabularies`` they are built on this file, which
    should be the training file then. Memory: the vocabularies, and ``shuffle`` lines.

    ``shuffle`` n > 1 puts every n successive rows into a random order that depends on the seed, the epoch and the
    place in the file alone. That mixes less than a buffer in which rows wait at random, but a position in it is a few
    numbers, and to continue there rereads n lines instead of everything before. n of the file's size mixes fully.
    """

    def __init__(
        self,
        path: str | Path,
        schema: Schema | str,
        vocabularies: Vocabularies | None = None,
        *,
        shuffle: int = 0,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if shuffle < 0:
            raise ValueError(f"shuffle is a number of rows, not {shuffle}")
        self.path, self.schema = Path(path), _schema(schema)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.header = read_header(self.path, self.schema.columns)
        if next(read_lines(self.path, self.header.offset, self.header.lines), None) is None:
            raise DataError("the file has a header, but no rows", self.path)
        self.vocabularies = Vocabularies.build(self.path, self.schema) if vocabularies is None else vocabularies
        if missing := sorted(set(self.schema.vocabularies) - set(self.vocabularies.ids)):
            raise ValueError(f"vocabularies lacks {', '.join(missing)}; it has {', '.join(self.vocabularies.ids)}")
        self._parse = RowParser(self.path, self.header, self.schema, self.vocabularies)
        super().__init__(rank, world)

    @property
    def tally(self) -> Tally:
        """What this process had to replace, cut or fill so far."""
        return self._parse.tally

    @property
    def dense_names(self) -> tuple[str, ...]:
        return tuple(feature.name for feature in self.schema.numeric)

    @property
    def sparse_names(self) -> tuple[str, ...]:
        return tuple(feature.vocabulary_name for feature in self.schema.categorical)

    @property
    def sequence_names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple((h.name, tuple(c.vocabulary_name for c in h.columns)) for h in self.schema.histories)

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        return self.vocabularies.sizes()

    def set_epoch(self, epoch: int) -> None:
        """Shuffle anew; the next iter() begins at the first row."""
        self.epoch = epoch
        self._position, self._loaded = self._beginning(), False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epoch = self._position["epoch"]

    def __iter__(self) -> Iterator[Sample]:
        position = self._begin()
        start = position["next"]
        shard, shards = self._shard()
        for number, block, line in self._ordered(position):
            if number < start or (number - start) % shards != shard:
                continue
            sample = self._parse(line)
            self._position = {**block, "next": number - shard + shards}
            yield sample

    def _ordered(self, position: dict[str, int]) -> Iterator[tuple[int, dict[str, int], Line]]:
        """(number of the sample, position of its block, its line) from the position's block on."""
        block = dict(position)
        lines = read_lines(self.path, block["offset"], block["lines"])
        while held := list(islice(lines, max(self.shuffle, 1))):
            for i, line in enumerate(self._permuted(held, block)):
                yield block["row"] + i, block, line
            last = held[-1]
            block = {**block, "row": block["row"] + len(held), "offset": last.end, "lines": last.number}

    def _permuted(self, lines: list[Line], block: dict[str, int]) -> list[Line]:
        if len(lines) == 1:
            return lines
        mixed = self.seed * 0x9E3779B97F4A7C15 + block["epoch"]  # far apart for neighbouring seeds
        order = Draws(mixed, 0, block["row"]).permutation(len(lines))
        return [lines[i] for i in order.tolist()]

    def _beginning(self) -> dict[str, int]:
        """row, offset and lines are where the block of ``next`` begins."""
        return {"epoch": self.epoch, "next": 0, "row": 0, "offset": self.header.offset, "lines": self.header.lines}

    def _identity(self) -> dict[str, Any]:
        """A file's name and size: its folder may differ where a run is continued."""
        size = self.path.stat().st_size
        return {"kind": "ReczooCSV", "file": self.path.name, "bytes": size, "shuffle": self.shuffle, "seed": self.seed}


def _schema(schema: Schema | str) -> Schema:
    if isinstance(schema, Schema):
        return schema
    if schema not in PRESETS:
        raise ValueError(f"schema must be a Schema or one of {', '.join(PRESETS)}, not {schema!r}")
    return PRESETS[schema]
