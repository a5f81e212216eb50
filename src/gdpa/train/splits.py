"""The streams of a run, as its config describes them: to train on, to validate on, to test on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gdpa.data import PRESETS, Categorical, History, Numeric, ReczooCSV, Schema, Stream, SyntheticLog, Vocabularies
from gdpa.train.config import Config, CsvData, SyntheticData
from gdpa.train.errors import ConfigError


@dataclass(frozen=True)
class Splits:
    """Each a shard of its data. ``first`` reads all of the training data, whatever the shard."""

    train: Stream
    first: Stream
    valid: Stream | None = None
    test: Stream | None = None
    vocabularies: Vocabularies | None = None


def open_splits(config: Config, rank: int = 0, world: int = 1, vocabularies: Vocabularies | None = None) -> Splits:
    """Shard ``rank`` of ``world``. Vocabularies of an earlier part of the run spare counting the training file."""
    if isinstance(config.data, SyntheticData):
        return _synthetic(config.data, rank, world)
    return _csv(config.data, config.seed, rank, world, vocabularies)


def _synthetic(data: SyntheticData, rank: int, world: int) -> Splits:
    def part(first: int, size: int, rank: int = rank, world: int = world) -> SyntheticLog:
        return SyntheticLog(
            data.seed,
            size,
            first=first,
            lengths=data.lengths,
            longest=data.longest,
            items=data.items,
            categories=data.categories,
            users=data.users,
            rank=rank,
            world=world,
        )

    return Splits(
        train=part(0, data.size),
        first=part(0, data.size, 0, 1),
        valid=part(data.size, data.valid_size) if data.valid_size else None,
        test=part(data.size + data.valid_size, data.test_size) if data.test_size else None,
    )


def _csv(data: CsvData, seed: int, rank: int, world: int, vocabularies: Vocabularies | None) -> Splits:
    schema = schema_of(data)
    train = ReczooCSV(data.train, schema, vocabularies, shuffle=data.shuffle, seed=seed, rank=rank, world=world)
    found = train.vocabularies

    def held_out(path: str | None) -> ReczooCSV | None:
        return None if path is None else ReczooCSV(path, schema, found, rank=rank, world=world)

    first = ReczooCSV(data.train, schema, found)
    return Splits(train, first, held_out(data.valid), held_out(data.test), found)


def schema_of(data: CsvData) -> Schema:
    """The preset, or the table as a Schema: columns by name, or by a table of their own."""
    if data.preset is not None:
        if data.preset not in PRESETS:
            raise ConfigError(f"data.preset must be one of {', '.join(PRESETS)}, not {data.preset!r}")
        return PRESETS[data.preset]
    values = dict(data.schema)
    where = "data.schema"
    for name, make in (("numeric", Numeric), ("categorical", Categorical)):
        values[name] = tuple(_column(make, entry, f"{where}.{name}") for entry in _entries(values, name, where))
    histories = []
    for entry in _entries(values, "histories", where):
        history = dict(_table(entry, f"{where}.histories"))
        columns = _entries(history, "columns", f"{where}.histories")
        history["columns"] = tuple(_column(Categorical, column, f"{where}.histories.columns") for column in columns)
        histories.append(_build(History, history, f"{where}.histories"))
    return _build(Schema, {**values, "histories": tuple(histories)}, where)


def _entries(values: Mapping[str, Any], name: str, where: str) -> list[Any]:
    found = values.get(name, [])
    if not isinstance(found, (list, tuple)):
        raise ConfigError(f"{where}.{name} must be a list, not {found!r}")
    return list(found)


def _column(cls: Any, entry: Any, where: str) -> Any:
    return cls(entry) if isinstance(entry, str) else _build(cls, _table(entry, where), where)


def _table(entry: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must hold tables, not {entry!r}")
    return entry


def _build(cls: Any, values: Mapping[str, Any], where: str) -> Any:
    known = [f.name for f in fields(cls)]
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key '{where}.{key}'; known are {', '.join(known)}")
    try:
        return cls(**values)
    except TypeError as error:  # a key that is missing
        raise ConfigError(f"{where}: {error}") from error
