"""Settings from plain values and back: TOML files, dictionaries, the differences between two."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Mapping, Set
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gdpa.train.config import MAY_CHANGE, MAY_GROW, SOURCES, Config, FilesData
from gdpa.train.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def read_toml(path: str | Path) -> dict[str, Any]:
    """The file's tables as they are."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the config {str(path)!r}: {error}") from error


def parse_value(text: str) -> Any:
    """A value as TOML would have it; what is none is a string, so that silu needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def make_config(values: Mapping[str, Any]) -> Config:
    """Config from nested tables. Errors about unknown keys list the known ones, those about types the expected one."""
    config = read_config(values)
    if isinstance(config.data, FilesData) and config.data.schema:
        from gdpa.train.data.splits import schema_of  # here, since it imports torch

        schema_of(config.data)
    return config


def read_config(values: Mapping[str, Any]) -> Config:
    """As make_config, with data.schema taken as it is: a look at it imports torch, and checkpoints of earlier versions
    may have one that is refused now."""
    return _make(Config, values, "")


def to_dict(config: Any) -> dict[str, Any]:
    """Nested tables that make_config reads; what is not set is left out, as TOML has no null."""
    found: dict[str, Any] = {}
    for name in (f.name for f in fields(config)):
        value = getattr(config, name)
        if is_dataclass(value):
            found[name] = to_dict(value)
        elif value is not None and value != {}:
            found[name] = value
    return found


def to_toml(config: Config) -> str:
    """The settings as the text of a config file, which ``read_toml`` and ``make_config`` turn back into them."""
    import tomli_w

    return tomli_w.dumps(to_dict(config))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``over``, which win; tables are merged key by key."""
    found = dict(base)
    for key, value in over.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found


def differences(old: Config, new: Config, also: Set[str] = frozenset()) -> list[str]:
    """'key: old -> new' for what a continued run must not change; it may change what is ``also`` allowed."""
    allowed = MAY_CHANGE | also | (MAY_GROW if old.schedule == new.schedule == "constant" else set())
    flat_old, flat_new = _flat(to_dict(old)), _flat(to_dict(new))
    keys = [key for key in {**flat_old, **flat_new} if key not in allowed]
    return [
        f"{key}: {flat_old.get(key)!r} -> {flat_new.get(key)!r}"
        for key in keys
        if flat_old.get(key) != flat_new.get(key)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
    return found


def _make(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    if not isinstance(values, Mapping):
        what = f"{where.rstrip('.')} must be a table" if where else "config must be a Config or a table of settings"
        raise ConfigError(f"{what}, not {values!r}")
    known: dict[str, Field[Any]] = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    for key in values:
        if key not in known:
            raise ConfigError(
                f"unknown key {where + key!r}{_of_another_source(cls, key)}; known keys: "
                f"{', '.join(where + name for name in known)}"
            )
    found = {key: _value(known[key], hints[key], value, where + key) for key, value in values.items()}
    return cls(**found)


def _of_another_source(cls: type, key: str) -> str:
    """If data of another source have the ``key``, how to choose that source."""
    name = next((name for name, other in SOURCES.items() if key in {f.name for f in fields(other)}), None)
    if cls not in SOURCES.values() or name is None:
        return ""
    return f' of this source of data: it goes with data.source = "{name}" (--data {name})'


def _value(spec: Field[Any], hint: Any, value: Any, where: str) -> Any:
    if where == "data":
        return _make(_source(value), value, "data.")
    if is_dataclass(hint) and isinstance(hint, type):
        return _make(hint, value, f"{where}.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # what TOML can say, and torch takes as a seed
        raise ConfigError(f"{where} must be a whole number of at most 64 bits, not {value!r}")
    value = _typed(hint, value, where)
    choices, least = spec.metadata["choices"], spec.metadata["least"]
    if choices and value is not None and value not in choices:
        raise ConfigError(f"{where} must be one of {', '.join(choices)}, not {value!r}")
    if least is not None and value is not None and not value >= least:  # also NaN
        raise ConfigError(f"{where} must be at least {least}, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value) and not spec.metadata["infinite"]:
        raise ConfigError(f"{where} must be a finite number, not {value!r}")
    return value


def _source(values: Any) -> Any:
    source = values.get("source", SOURCES["synthetic"]().source) if isinstance(values, Mapping) else values
    if source not in SOURCES:
        raise ConfigError(f"data.source must be one of {', '.join(SOURCES)}, not {source!r}")
    return SOURCES[source]


def _typed(hint: Any, value: Any, where: str) -> Any:
    """The value if it is of the type, a whole number also where a real one is asked for."""
    kinds = tuple(get_origin(kind) or kind for kind in kinds_of(hint))
    if float in kinds and type(value) is int:
        return float(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(kind.__name__ for kind in kinds if kind is not types.NoneType)
        raise ConfigError(f"{where} must be of type {names}, not {value!r}")
    return dict(value) if isinstance(value, Mapping) else value


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """int | None -> (int, NoneType)."""
    return get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def default_of(spec: Field[Any]) -> Any:
    return spec.default if spec.default is not MISSING else None
