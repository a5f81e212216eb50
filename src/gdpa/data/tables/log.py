"""Tables as streams of samples: files, frames and data sets, by a schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from gdpa.data.batch import Batch, Sample
from gdpa.data.decoding import Decoded, Decoder, Tally
from gdpa.data.decoding.decoded import Piece, to_batch
from gdpa.data.draws import Draws
from gdpa.data.errors import as_row
from gdpa.data.presets import PRESETS
from gdpa.data.schema import Schema, Time
from gdpa.data.sources import open_source
from gdpa.data.sources.base import Task
from gdpa.data.stream import Stream
from gdpa.data.tables.counting import count_values
from gdpa.data.tables.dividing import Part, divide
from gdpa.data.tables.workers import Workers
from gdpa.data.vocabulary import Vocabularies, check_names

BLOCK = 8192  # rows that are read at once where they are not shuffled
Position = dict[str, int]


@dataclass(frozen=True)
class _TaskOrigin:
    """Where the rows of a decoding task come from: the position of their block and that behind it, and whether the task
    is the block's last. ``numbers`` are those of the samples, where they are known before reading."""

    block: Position
    numbers: np.ndarray | None
    is_last: bool
    end: Position


class TableLog(Stream):
    """The samples of a table, read as they are asked for.

        train = TableLog("logs/train-*.parquet", schema, shuffle=100_000)
        test = TableLog("logs/test.csv.gz", schema, train.vocabularies)

    ``source`` is a path or pattern, a list of them (CSV, TSV, also compressed; Parquet, Arrow), a frame of pandas or
    polars, a table of pyarrow, a data set of Hugging Face's ``datasets``, or a :class:`Source` of your own. ``schema``
    is one of your own or the name of a preset. Without ``vocabularies`` they are built on this source, which should be
    the training data then. Memory: the vocabularies, and ``shuffle`` rows.

    ``shuffle`` n > 1 puts every n successive rows into a random order that depends on the seed, the epoch and the
    place in the table alone. That mixes less than a buffer in which rows wait at random, but a position in it is a few
    numbers, and to continue there rereads n rows instead of everything before. n of the table's size mixes fully.

    A row that cannot be read raises a DataError; up to ``skip_bad`` of them in a pass are left out and counted in
    ``skipped``. Every rank then reads all rows, to know which of them count. ``workers`` processes decode rows, which
    only changes the speed. ``part`` are the rows of a split, see :func:`split`.
    """

    def __init__(
        self,
        source: Any,
        schema: Schema | str,
        vocabularies: Vocabularies | None = None,
        *,
        shuffle: int = 0,
        seed: int = 0,
        skip_bad: int = 0,
        workers: int = 0,
        part: Part | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        for name, value in (("shuffle", shuffle), ("skip_bad", skip_bad), ("workers", workers), ("seed", seed)):
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name} must be a whole number, not {value!r}")
        if shuffle < 0:
            raise ValueError(f"shuffle is a number of rows, not {shuffle}")
        for name, value in (("skip_bad", skip_bad), ("workers", workers)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, not {value}")
        self.schema = schema_of(schema)
        self.source = open_source(source)
        self.source.check(self.schema.columns)
        _check_separators(self.schema, getattr(self.source, "delimiters", ()))
        self.shuffle, self.seed, self.skip_bad, self.part, self.epoch = shuffle, seed, skip_bad, part, 0
        if vocabularies is None:
            keep = None if part is None else part.keep
            vocabularies = Vocabularies.number(
                count_values(self.source, self.schema, keep, skip_bad), self.schema.min_count
            )
        check_names(vocabularies, self.schema)
        self.vocabularies = vocabularies
        self.tally = Tally()
        """What this process had to replace, cut or fill so far."""
        self.skipped = 0
        """Rows that were left out in this pass."""
        self._workers = Workers(workers, Decoder(self.schema, vocabularies))
        super().__init__(rank, world)

    # ---- what the samples are ----------------------------------------------------------------------------------------
    @property
    def dense_names(self) -> tuple[str, ...]:
        return tuple(feature.name for feature in self.schema.numeric)

    @property
    def sparse_names(self) -> tuple[str, ...]:
        return tuple(feature.vocabulary_name for feature in self.schema.categorical)

    @property
    def sequence_names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple((h.name, tuple(c.vocabulary_name for c in h.ids)) for h in self.schema.histories)

    @property
    def value_names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple(
            (h.name, tuple("age" if isinstance(c, Time) else c.name for c in h.numbers)) for h in self.schema.histories
        )

    @property
    def bag_names(self) -> tuple[tuple[str, str], ...]:
        return tuple((bag.name, bag.vocabulary_name) for bag in self.schema.bags)

    @property
    def label_names(self) -> tuple[str, ...]:
        return self.schema.labels

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        return self.vocabularies.sizes()

    # ---- where reading stands ----------------------------------------------------------------------------------------
    def set_epoch(self, epoch: int) -> None:
        """Shuffle anew; the next iter() begins at the first row."""
        self.epoch = epoch
        self._position, self._loaded = self._beginning(), False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position = state.get("position")
        if isinstance(position, dict) and "row" in position:  # of a version that had no splits and skipped nothing
            before = {"raw": position["row"], "skipped": 0} | ({"file": 0} if "file" in self._beginning() else {})
            state = {**state, "position": {**before, **position}}
        super().load_state_dict(state)
        self.epoch = self._position["epoch"]

    def _beginning(self) -> Position:
        """``row``, ``raw`` and ``skipped`` are counted up to the block of ``next``, where the rest says that it is:
        samples, rows of the table and rows left out."""
        return {"epoch": self.epoch, "next": 0, "row": 0, "raw": 0, "skipped": 0, **self.source.start()}

    def _identity(self) -> dict[str, Any]:
        part = {} if self.part is None else {"part": self.part.identity()}
        return {"kind": "TableLog", **self.source.identity(), **part, "shuffle": self.shuffle, "seed": self.seed}

    # ---- reading -----------------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Sample]:
        for decoded, numbers, block in self._decoded():
            for i in range(len(decoded)):
                if i in decoded.bad:
                    raise as_row(decoded.bad[i])
                self._reached(block, numbers, i)
                yield decoded.sample(i)

    def batches(self, size: int) -> Iterator[Batch]:
        """What gdpa.data.batches gives for this stream."""
        held: list[Piece] = []
        count = 0
        for decoded, numbers, block in self._decoded():
            i = 0
            while i < len(decoded):
                stop = min(i + size - count, len(decoded))
                if wrong := [row for row in decoded.bad if i <= row < stop]:
                    raise as_row(decoded.bad[min(wrong)])
                held.append((decoded, i, stop))
                count, i = count + stop - i, stop
                if count == size:
                    batch = to_batch(held)
                    self._reached(block, numbers, i - 1)
                    held, count = [], 0
                    yield batch
            last = (block, numbers, len(decoded) - 1)
        if held:
            self._reached(*last)
            yield to_batch(held)

    def close(self) -> None:
        """Ends the worker processes, if there are any; they begin again when they are needed."""
        self._workers.close()

    def _reached(self, block: Position, numbers: np.ndarray, i: int) -> None:
        shard, shards = self._shard()
        self._position = {**block, "next": int(numbers[i]) - shard + shards}

    def _decoded(self) -> Iterator[tuple[Decoded, np.ndarray, Position]]:
        """(rows of this shard, the numbers of the samples, the position of their block) from the position on."""
        position = self._begin()
        start, self.skipped = position["next"], position["skipped"]
        shard, shards = self._shard()
        row, block, behind = position["row"], position, position
        for about, decoded in self._workers.decode(self._tasks(position, start, shard, shards)):
            if about.numbers is None:
                block = {**about.block, "row": behind["row"], "skipped": behind["skipped"]}
                good = self._good_rows(decoded)
                numbers = row + np.arange(len(good))
                row += len(good)
                mine = (numbers >= start) & ((numbers - start) % shards == shard)
                decoded, numbers = decoded.take(good[mine]), numbers[mine]
                if about.is_last:
                    behind = {"row": row, "skipped": self.skipped}
            else:
                block, numbers = about.block, about.numbers
            self.tally.add(decoded.tally)
            if len(decoded):
                yield decoded, numbers, block

    def _good_rows(self, decoded: Decoded) -> np.ndarray:
        for _, error in sorted(decoded.bad.items()):
            if self.skipped == self.skip_bad:
                raise as_row(error)
            self.skipped += 1
        return np.delete(np.arange(len(decoded)), list(decoded.bad))

    def _tasks(self, position: Position, start: int, shard: int, shards: int) -> Iterator[tuple[_TaskOrigin, Task]]:
        block = dict(position)
        size = self.shuffle if self.shuffle > 1 else BLOCK
        for found in self.source.blocks(block, size, self.schema.columns):
            rows = np.arange(len(found)) if self.part is None else self.part.keep(block["raw"], len(found))
            rows = self._permuted(rows, block)
            end = {**block, **found.end, "raw": block["raw"] + len(found), "row": block["row"] + len(rows)}
            numbers = block["row"] + np.arange(len(rows))
            if not self.skip_bad:
                mine = (numbers >= start) & ((numbers - start) % shards == shard)
                rows, numbers = rows[mine], numbers[mine]
            tasks, given = found.tasks(rows), 0
            for task in tasks:
                own = None if self.skip_bad else numbers[given : given + len(task)]
                given += len(task)
                yield _TaskOrigin(block, own, given == len(rows), end), task
            block = end

    def _permuted(self, rows: np.ndarray, block: Position) -> np.ndarray:
        if self.shuffle <= 1 or len(rows) <= 1:
            return rows
        mixed = self.seed * 0x9E3779B97F4A7C15 + block["epoch"]  # far apart for neighbouring seeds
        return rows[Draws(mixed, 0, block["raw"]).permutation(len(rows))]


def split(
    source: Any,
    schema: Schema | str,
    by: str,
    *,
    valid: float = 0.1,
    test: float = 0.1,
    seed: int = 0,
    shuffle: int = 0,
    workers: int = 0,
    vocabularies: Vocabularies | None = None,
    **options: Any,
) -> tuple[TableLog, TableLog, TableLog]:
    """One table as training, validation and test data; vocabularies are counted on the first of them.

        train, valid, test = gdpa.data.split("ratings.parquet", schema, "last", shuffle=100_000)

    ``by`` is "time": the newest rows are held out; "user": the rows of some groups; or "last": the last row of each
    group for testing, the one before for validation (``valid`` and ``test`` are not used then). ``shuffle`` and
    ``workers`` are those of the training data; ``options`` are those of :class:`TableLog`. A byte is kept for every row
    of the table.
    """
    schema, opened = schema_of(schema), open_source(source)
    opened.check(schema.columns)
    division = divide(opened, schema, by, valid, test, seed)
    options["seed"] = seed
    own = {"shuffle": shuffle, "workers": workers}
    train = TableLog(opened, schema, vocabularies, part=division.part("train"), **own, **options)
    found = train.vocabularies
    held_out = [TableLog(opened, schema, found, part=division.part(name), **options) for name in ("valid", "test")]
    return train, held_out[0], held_out[1]


def _check_separators(schema: Schema, delimiters: tuple[str, ...]) -> None:
    """What divides the entries of a list must not divide the columns of a text file too."""
    for kind, lists in (("bag", schema.bags), ("history", schema.histories)):
        for entry in lists:
            if entry.separator in delimiters:
                raise ValueError(
                    f"separator of the {kind} {entry.name!r} cannot be {entry.separator!r} in a file whose columns are "
                    "separated by it"
                )


def schema_of(schema: Schema | str) -> Schema:
    if isinstance(schema, Schema):
        return schema
    if not isinstance(schema, str):  # a dict, which cannot be looked up, says what the columns are in a config alone
        raise TypeError(f"schema must be a gdpa.data.Schema or the name of a preset, not {schema!r}")
    if schema not in PRESETS:
        raise ValueError(f"schema must be a Schema or one of {', '.join(PRESETS)}, not {schema!r}")
    return PRESETS[schema]
