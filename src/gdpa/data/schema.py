"""Which columns of a CSV file are what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Numeric:
    """A number, one entry of Batch.dense.

    A missing, NaN or infinite one (also: too large for float32) is an ``nonfinite`` "error", or becomes "zero" and is
    counted. ``log1p``: sign(x) log(1 + |x|) instead of x, for prices and counts.
    """

    name: str
    nonfinite: Literal["error", "zero"] = "error"
    log1p: bool = False

    def __post_init__(self) -> None:
        if self.nonfinite not in ("error", "zero"):
            raise ValueError(f'nonfinite must be "error" or "zero", not {self.nonfinite!r}')


@dataclass(frozen=True)
class Categorical:
    """A value out of many, one id of Batch.sparse. Columns that name the same ``vocabulary`` share their ids."""

    name: str
    vocabulary: str = ""

    @property
    def vocabulary_name(self) -> str:
        return self.vocabulary or self.name


@dataclass(frozen=True)
class History:
    """A behaviour sequence, one entry of Batch.sequences: columns that describe the same events, oldest first.

    Each column is a list of values with ``separator`` between them, empty for no events. Of more than ``max_len``
    events the newest are kept. Where the columns of a row differ in length, ``unequal`` is an "error", or "fill"
    aligns them at the newest event and gives the missing older entries the id MISSING.
    """

    name: str
    columns: tuple[Categorical, ...]
    max_len: int
    separator: str = "^"
    unequal: Literal["error", "fill"] = "error"

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError(f"the history {self.name!r} needs at least one column")
        if self.max_len < 1:
            raise ValueError(f"max_len of the history {self.name!r} must be positive, not {self.max_len}")
        if not self.separator or self.separator in ',"\n':
            raise ValueError(f"separator of the history {self.name!r} cannot be {self.separator!r}")
        if self.unequal not in ("error", "fill"):
            raise ValueError(f'unequal must be "error" or "fill", not {self.unequal!r}')


@dataclass(frozen=True)
class Schema:
    """A file's columns. Those that are not named here are not read.

    ``label`` holds 0 or 1. ``group`` is what gAUC groups by. A value needs to occur ``min_count`` times in the
    training file to have an id of its own.
    """

    label: str
    group: str
    numeric: tuple[Numeric, ...] = ()
    categorical: tuple[Categorical, ...] = ()
    histories: tuple[History, ...] = ()
    min_count: int = 1

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise ValueError(f"min_count must be positive, not {self.min_count}")
        for kind, names in (
            ("numeric", [f.name for f in self.numeric]),
            ("categorical", [f.name for f in self.categorical]),
            ("histories", [h.name for h in self.histories]),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"{kind} has a name twice: {names}")

    @property
    def id_columns(self) -> tuple[Categorical, ...]:
        """Every column that has ids, also those of histories."""
        return (*self.categorical, *(column for history in self.histories for column in history.columns))

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, once, in the order in which they are named."""
        return tuple(dict.fromkeys([self.label, self.group, *self.feature_columns]))

    @property
    def feature_columns(self) -> tuple[str, ...]:
        """Those that a prediction needs."""
        return tuple(dict.fromkeys([*(f.name for f in self.numeric), *(f.name for f in self.id_columns)]))

    @property
    def vocabularies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(column.vocabulary_name for column in self.id_columns))
