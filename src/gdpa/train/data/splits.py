"""The streams of a run, as its config describes them: to train on, to validate on, to test on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from gdpa.data import (
    PRESETS,
    Bag,
    Categorical,
    History,
    Numeric,
    ReczooCSV,
    Schema,
    Stream,
    SyntheticLog,
    TableLog,
    Time,
    Vocabularies,
    split,
)
from gdpa.paths import expand
from gdpa.train.config import Config, CsvData, FilesData, SyntheticData
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
    return _files(config, config.data, rank, world, vocabularies)


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


def _files(config: Config, data: FilesData, rank: int, world: int, vocabularies: Vocabularies | None) -> Splits:
    schema, own = schema_of(data), {"rank": rank, "world": world, "skip_bad": config.skip_bad}
    if data.split is not None:
        shares = {"valid": data.valid_share, "test": data.test_share}
        made = split(
            expand(data.files("train")), schema, data.split, **shares, seed=config.seed, shuffle=data.shuffle,
            workers=data.workers, vocabularies=vocabularies, **own,
        )  # fmt: skip
        train, *held = made
        first = TableLog(train.source, schema, train.vocabularies, part=train.part, skip_bad=config.skip_bad)
        valid, test = (log if log.part is not None and len(log.part) else None for log in held)
        return Splits(train, first, valid, test, train.vocabularies)
    workers = {"shuffle": data.shuffle, "seed": config.seed, "workers": data.workers}
    train = _log(data, "train", schema, vocabularies, {**own, **workers})
    found = train.vocabularies

    def held_out(part: str) -> TableLog | None:
        return _log(data, part, schema, found, own) if data.files(part) else None

    first = _log(data, "train", schema, found, {"skip_bad": config.skip_bad})
    return Splits(train, first, held_out("valid"), held_out("test"), found)


def check_held_out(config: Config) -> None:
    """Refuses shares that nothing would read, and a metric that no validation could have. Not part of Config, since
    checkpoints of earlier runs have them."""
    if isinstance(config.data, FilesData) and config.data.split not in ("time", "user"):
        _check_shares(config.data)
    if config.best == "gauc" and isinstance(config.data, FilesData) and config.data.split == "last":
        raise ConfigError(
            "best='gauc' with data.split='last': a group (user) has one row to validate on, for which gAUC is not "
            "defined; best may be 'auc', 'logloss' or 'ne'"
        )


def _check_shares(data: FilesData) -> None:
    for spec in (spec for spec in fields(data) if spec.name in ("valid_share", "test_share")):
        if (value := getattr(data, spec.name)) not in (0, spec.default):
            now = "not given" if data.split is None else repr(data.split)
            raise ConfigError(f"data.{spec.name}={value} goes with data.split='time' or 'user'; data.split is {now}")


def held_out_in_vain(data: object, splits: Splits) -> list[str]:
    """What to say of parts that a split was to hold out, and that have no row."""
    if not isinstance(data, FilesData) or data.split is None:
        return []
    parts = (("validate", data.valid_share, splits.valid), ("test", data.test_share, splits.test))
    return [
        f"the split by {data.split} leaves no row to {what} on: there are too few rows for it"
        for what, share, found in parts
        if found is None and (share or data.split == "last")
    ]


def read_again(data: object) -> list[str]:
    """What to say of files that are read more than once: a pattern may mean more of them than were thought of."""
    if not isinstance(data, FilesData):
        return []
    train, valid, test = ([path.resolve() for path in expand(data.files(part))] for part in ("train", "valid", "test"))
    doubled = [path.name for path in dict.fromkeys(train) if train.count(path) > 1]
    said = [f"data.train reads {', '.join(doubled)} more than once"] if doubled else []
    for part, files in (("valid", valid), ("test", test)):
        if both := [path.name for path in dict.fromkeys(files) if path in train]:
            said.append(f"data.{part} reads {', '.join(both)}, as data.train does: its metrics are of rows trained on")
    return said


def _log(
    data: FilesData, part: str, schema: Schema, vocabularies: Vocabularies | None, options: dict[str, Any]
) -> TableLog:
    """One file of source "csv" is read as it was by earlier versions, whose checkpoints say so."""
    names = data.files(part)
    paths = expand(names)
    if isinstance(data, CsvData) and [str(path) for path in paths] == names and len(names) == 1:
        return ReczooCSV(paths[0], schema, vocabularies, **options)
    return TableLog(paths, schema, vocabularies, **options)


def schema_of(data: FilesData) -> Schema:
    """The preset, or the table as a Schema: columns by name, or by a table of their own."""
    if data.preset is not None:
        if data.preset not in PRESETS:
            raise ConfigError(f"data.preset must be one of {', '.join(PRESETS)}, not {data.preset!r}")
        return PRESETS[data.preset]
    values = dict(data.schema)
    where = "data.schema"
    for name, make in (("numeric", Numeric), ("categorical", Categorical), ("bags", Bag)):
        values[name] = tuple(_column(make, entry, f"{where}.{name}") for entry in _entries(values, name, where))
    histories = []
    for entry in _entries(values, "histories", where):
        history = dict(_table(entry, f"{where}.histories"))
        columns = _entries(history, "columns", f"{where}.histories")
        history["columns"] = tuple(_event_column(column, f"{where}.histories.columns") for column in columns)
        histories.append(_build(History, history, f"{where}.histories"))
    if isinstance(values.get("label"), list):
        values["label"] = tuple(values["label"])
    return _build(Schema, {**values, "histories": tuple(histories)}, where)


KINDS = {"categorical": Categorical, "numeric": Numeric, "time": Time}


def _event_column(entry: Any, where: str) -> Any:
    """``kind`` says what a column of a history is; ids if it does not."""
    if isinstance(entry, str):
        return Categorical(entry)
    found = dict(_table(entry, where))
    kind = found.pop("kind", "categorical")
    if kind not in KINDS:
        raise ConfigError(f"{where}.kind must be one of {', '.join(KINDS)}, not {kind!r}")
    return _build(KINDS[kind], found, where, ("kind",))


def _entries(values: Mapping[str, Any], name: str, where: str) -> list[Any]:
    found = values.get(name, [])
    if not isinstance(found, (list, tuple)):
        raise ConfigError(f"{where}.{name} must be a list, not {found!r}")
    return list(found)


def _column(cls: Any, entry: Any, where: str) -> Any:
    return cls(entry) if isinstance(entry, str) else _build(cls, _table(entry, where), where)


def _table(entry: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must contain tables, not {entry!r}")
    return entry


def _build(cls: Any, values: Mapping[str, Any], where: str, also: tuple[str, ...] = ()) -> Any:
    known = {f.name: f for f in fields(cls)}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key '{where}.{key}'; known keys: {', '.join((*known, *also))}")
    for key, spec in known.items():
        if key not in values and spec.default is MISSING and spec.default_factory is MISSING:
            of = f" of {values['name']!r}" if "name" in values else ""
            raise ConfigError(f"the key '{where}.{key}'{of} is missing")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:  # a value that is refused
        raise ConfigError(f"{where}: {error}") from error
