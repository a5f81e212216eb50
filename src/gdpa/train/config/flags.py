"""The flags of `gdpa train`, made from the fields of the config, and what they say as nested tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields
from functools import lru_cache
from typing import Any, get_type_hints

import click

from gdpa.train.config import SOURCES, Config, FilesData, SyntheticData
from gdpa.train.config.reading import default_of, kinds_of, parse_value
from gdpa.train.errors import ConfigError

TOP, DATA = "top__", "data__"  # prefixes of the names under which click hands values on


@lru_cache(maxsize=1)
def options() -> tuple[click.Option, ...]:
    """Every field as a flag: --batch-size of the run, --data-size of its data."""
    made = [_option(spec, hint, "", TOP) for spec, hint in _settings(Config) if spec.name not in ("data", "model")]
    synthetic, files = dict(_by_name(SyntheticData)), dict(_by_name(FilesData))
    made.append(_data_source())
    for name, (spec, hint) in {**synthetic, **files}.items():
        if name not in ("source", "schema"):
            made.append(_option(spec, hint, "data-", DATA, "" if name in synthetic and name in files else _owner(name)))
    return tuple(made)


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given, as the tables of a config file. ``--model`` and ``--set`` are among them."""
    top = {k.removeprefix(TOP): v for k, v in values.items() if k.startswith(TOP) and v is not None}
    data = {k.removeprefix(DATA): _list(v) for k, v in values.items() if k.startswith(DATA) and v not in (None, ())}
    model: dict[str, Any] = {"name": values["model"]} if values.get("model") else {}
    if values.get("assignments"):
        model["options"] = assigned(values["assignments"])
    return {**top, **({"data": data} if data else {}), **({"model": model} if model else {})}


def _list(value: Any) -> Any:
    """Of an option that may be repeated: one value is itself."""
    if not isinstance(value, tuple):
        return value
    return value[0] if len(value) == 1 else list(value)


def assigned(texts: Sequence[str]) -> dict[str, Any]:
    """Options of a model, as --set gives them."""
    found: dict[str, Any] = {}
    for key, value in map(_assignment, texts):
        if key in found:
            raise ConfigError(f"--set gives {key} twice, {found[key]!r} and {value!r}; a list is one, in brackets")
        found[key] = value
    return found


def _assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r} must look like option=value")
    return key.strip(), parse_value(value.strip())


def _settings(cls: type) -> Iterator[tuple[Field[Any], Any]]:
    hints = get_type_hints(cls)
    return ((spec, hints[spec.name]) for spec in fields(cls))


def _by_name(cls: type) -> Iterator[tuple[str, tuple[Field[Any], Any]]]:
    return ((spec.name, (spec, hint)) for spec, hint in _settings(cls))


def _owner(name: str) -> str:
    return " [synthetic]" if any(spec.name == name for spec in fields(SyntheticData)) else " [files]"


def _data_source() -> click.Option:
    text = "Where samples come from; synthetic by default."
    return click.Option(["--data", f"{DATA}source"], type=click.Choice(list(SOURCES)), help=text)


def _option(spec: Field[Any], hint: Any, prefix: str, store: str, owner: str = "") -> click.Option:
    name, kind, default = spec.name.replace("_", "-"), kinds_of(hint)[0], default_of(spec)
    shown = "" if default in (None, "", False) else f" [default: {default}]"
    text = spec.metadata["help"] + owner + shown
    flag = f"--{prefix}{name}"
    if kind is bool:
        return click.Option([f"{flag}/--no-{prefix}{name}", store + spec.name], default=None, help=text)
    choices = spec.metadata["choices"]
    kinds: dict[type, click.ParamType] = {int: click.INT, float: click.FLOAT, str: click.STRING}
    type_ = click.Choice(choices) if choices else kinds[kind]
    if spec.name == "out":
        type_ = click.Path(file_okay=False, path_type=str)
    multiple = list[str] in kinds_of(hint)
    return click.Option([flag, store + spec.name], type=type_, default=None, help=text, multiple=multiple)
