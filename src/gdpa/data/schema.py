"""Which columns of a table are what."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of the units in which time stamps may be written as numbers."""


@dataclass(frozen=True)
class Numeric:
    """A number: one entry of Batch.dense or, in a History, one of each event's values.

    ``nonfinite`` says what happens to one that is missing, NaN or infinite (also: too large for float32): an "error",
    or "zero", which takes 0 instead and counts it. ``log1p``: sign(x) log(1 + |x|) instead of x, for prices and counts.
    """

    name: str
    nonfinite: Literal["error", "zero"] = "error"
    log1p: bool = False

    def __post_init__(self) -> None:
        _check_names("Numeric", name=self.name)
        if self.nonfinite not in ("error", "zero"):
            raise ValueError(f'nonfinite must be "error" or "zero", not {self.nonfinite!r}')
        if not isinstance(self.log1p, bool):  # "false" would count as true
            raise TypeError(f"log1p of {self.name!r} must be true or false, not {self.log1p!r}")


@dataclass(frozen=True)
class Categorical:
    """One value out of many, one id of Batch.sparse. Columns that name the same ``vocabulary`` share their ids."""

    name: str
    vocabulary: str = ""

    def __post_init__(self) -> None:
        _check_names("Categorical", name=self.name, vocabulary=self.vocabulary)

    @property
    def vocabulary_name(self) -> str:
        return self.vocabulary or self.name


@dataclass(frozen=True)
class Time:
    """When each event of a History occurred. It becomes the value "age": the days from then to the time of the row.

    ``unit`` is that of numbers since an epoch: "s", "ms", "us" or "ns". ISO dates and the time stamps of Parquet and
    frames need none. The column of the row's own time is ``Schema.time``, of the same kind.
    """

    name: str
    unit: str = "s"

    def __post_init__(self) -> None:
        _check_names("Time", name=self.name)
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}, not {self.unit!r}")


@dataclass(frozen=True)
class Bag:
    """Several values without order, one entry of Batch.bags: the genres of a film, the words of a query.

    In text the values are separated by ``separator``, and empty text means none; of more than ``max_len`` values the
    first are kept.
    """

    name: str
    vocabulary: str = ""
    separator: str = "|"
    max_len: int = 100

    def __post_init__(self) -> None:
        _check_names("Bag", name=self.name, vocabulary=self.vocabulary)
        _check_list("bag", self.name, self.separator, self.max_len)

    @property
    def vocabulary_name(self) -> str:
        return self.vocabulary or self.name


EventColumn = Categorical | Numeric | Time


@dataclass(frozen=True)
class History:
    """A behaviour sequence, one entry of Batch.sequences: columns that describe the same events, oldest first.

    Each column is a list of values, in text with ``separator`` between them, empty for no events: Categorical for ids,
    Numeric for numbers, Time for time stamps. Of more than ``max_len`` events the newest are kept. Where the columns of
    a row differ in length, ``unequal`` is an "error", or "fill" aligns them at the newest event and gives the missing
    older entries the id MISSING (numbers: 0).
    """

    name: str
    columns: tuple[EventColumn, ...]
    max_len: int
    separator: str = "^"
    unequal: Literal["error", "fill"] = "error"

    def __post_init__(self) -> None:
        _check_names("History", name=self.name)
        known = "Categorical, Numeric or Time"
        if not isinstance(self.columns, list | tuple):
            raise TypeError(f"columns of the history {self.name!r} must be a tuple of {known}, not {self.columns!r}")
        if not self.columns:
            raise ValueError(f"the history {self.name!r} needs at least one column")
        for column in self.columns:
            if not isinstance(column, EventColumn):
                raise TypeError(f"columns of the history {self.name!r} must be {known}, not {column!r}")
        _check_list("history", self.name, self.separator, self.max_len)
        if self.unequal not in ("error", "fill"):
            raise ValueError(f'unequal must be "error" or "fill", not {self.unequal!r}')
        if len(self.times) > 1:
            raise ValueError(f"the history {self.name!r} has more than one Time")
        if self.times and any(isinstance(c, Numeric) and c.name == "age" for c in self.columns):
            raise ValueError(
                f"the history {self.name!r} has both a Time, which becomes the value 'age', and a number called 'age': "
                "rename that column, or leave the Time out"
            )

    @property
    def ids(self) -> tuple[Categorical, ...]:
        """The columns of Events.ids."""
        return tuple(c for c in self.columns if isinstance(c, Categorical))

    @property
    def numbers(self) -> tuple[Numeric | Time, ...]:
        """The columns of Events.values."""
        return tuple(c for c in self.columns if not isinstance(c, Categorical))

    @property
    def times(self) -> tuple[Time, ...]:
        return tuple(c for c in self.columns if isinstance(c, Time))


def _check_names(of: str, **values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} of {of} must be text, not {value!r}")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if int(value) < 1:
        raise ValueError(f"{name} must be positive, not {value}")


def _check_kinds(name: str, values: object, kind: type) -> None:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} must be a tuple of {kind.__name__}, not {values!r}")
    for value in values:
        if not isinstance(value, kind):
            instead = f": {kind.__name__}({value!r}) is meant?" if isinstance(value, str) else ""
            raise TypeError(f"{name} must hold {kind.__name__}, not {value!r}{instead}")


def _check_list(kind: str, name: str, separator: str, max_len: int) -> None:
    _check_count(f"max_len of the {kind} {name!r}", max_len)
    if not isinstance(separator, str) or not separator or separator in '"\n':
        raise ValueError(f"separator of the {kind} {name!r} cannot be {separator!r}")


@dataclass(frozen=True)
class Schema:
    """A table's columns. Columns that are not named here are not read.

    ``label`` holds 0 or 1; several, as a tuple, are learned together, one head each. ``group`` is what gAUC groups by.
    ``weight`` is how much a row counts in the loss. ``time`` is when the row occurred, for ages and for splits by time;
    ``time_unit`` as in :class:`Time`. A value needs to occur ``min_count`` times in the training data to have an id of
    its own.
    """

    label: str | tuple[str, ...]
    group: str
    numeric: tuple[Numeric, ...] = ()
    categorical: tuple[Categorical, ...] = ()
    histories: tuple[History, ...] = ()
    min_count: int = 1
    bags: tuple[Bag, ...] = field(default=(), kw_only=True)
    weight: str | None = field(default=None, kw_only=True)
    time: str | None = field(default=None, kw_only=True)
    time_unit: str = field(default="s", kw_only=True)

    def __post_init__(self) -> None:
        _check_count("min_count", self.min_count)
        if not isinstance(self.label, str | list | tuple) or not all(isinstance(name, str) for name in self.label):
            raise TypeError(f"label must be the name of a column, or a tuple of names, not {self.label!r}")
        for name, value in (("group", self.group), ("weight", self.weight), ("time", self.time)):
            if not isinstance(value, str) and (value is not None or name == "group"):
                raise TypeError(f"{name} must be the name of a column, not {value!r}")
        for part, of in (("numeric", Numeric), ("categorical", Categorical), ("bags", Bag), ("histories", History)):
            _check_kinds(part, getattr(self, part), of)
        if self.time_unit not in UNITS:
            raise ValueError(f"time_unit must be one of {', '.join(UNITS)}, not {self.time_unit!r}")
        if not self.labels:
            raise ValueError("label must name at least one column")
        for kind, names in (
            ("label", list(self.labels)),
            ("numeric", [f.name for f in self.numeric]),
            ("categorical", [f.name for f in self.categorical]),
            ("bags", [b.name for b in self.bags]),
            ("histories", [h.name for h in self.histories]),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"{kind} has a name twice: {names}")
        if leaked := [name for name in self.labels if name in self.feature_columns]:
            raise ValueError(f"the label {leaked[0]!r} is also a feature: the model would read what it is to predict")
        for name, column in (("group", self.group), ("weight", self.weight), ("time", self.time)):
            if column in self.labels:
                raise ValueError(f"the label {column!r} is also the {name}, which must be another column")
        timed = [h.name for h in self.histories if h.times]
        if timed and self.time is None:
            raise ValueError(f"the history {timed[0]!r} has a Time, but the schema has no time for the row itself")

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,) if isinstance(self.label, str) else tuple(self.label)

    @property
    def id_columns(self) -> tuple[Categorical | Bag, ...]:
        """Every column that has ids, also bags and those of histories."""
        return (*self.categorical, *self.bags, *(column for history in self.histories for column in history.ids))

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, once, in the order in which they are named."""
        own = [*self.labels, self.group, self.weight, self.time]
        return tuple(dict.fromkeys(name for name in (*own, *self.feature_columns) if name is not None))

    @property
    def feature_columns(self) -> tuple[str, ...]:
        """Those that a prediction needs, including the time if there are ages."""
        names = [f.name for f in self.numeric] + [f.name for f in self.categorical] + [b.name for b in self.bags]
        names += [c.name for history in self.histories for c in history.columns]
        return tuple(dict.fromkeys([*names, *([self.time] if self.time is not None and self.has_ages else [])]))

    @property
    def has_ages(self) -> bool:
        return any(history.times for history in self.histories)

    @property
    def vocabularies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(column.vocabulary_name for column in self.id_columns))
