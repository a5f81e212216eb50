"""What `gdpa tune` measured, and the configuration that follows from it for a problem. Nothing is measured here.

The file holds, for each machine (its GPU, Triton's and gdpa's version), one entry per class of shapes. It is read once
per process, at the first launch on a GPU. One that cannot be used is ignored with one warning that names it: a training
run must neither stop nor silently change because of a file in a cache.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gdpa.problem import Problem

FORMAT = 1
VARIABLE = "GDPA_TUNING"  # another file, or "off"
PASSES = ("fwd", "bwd")
# Mean numbers of keys up to which a class reaches: the more keys, the less a program's start and end weigh.
KEY_CLASSES = {"short": 256, "medium": 1024, "long": None}
# What an entry must hold; "config" is None where the built-in configuration won.
ENTRY = {"config": dict | None, "default": dict, "measurements": list, "refused": list}

Document = dict[str, Any]


@dataclass(frozen=True)
class ShapeClass:
    """Problems that share a configuration. ``columns`` is the head dimension as the kernel pads it."""

    backend: str
    which: str
    dtype: str
    columns: int
    keys: str

    def __str__(self) -> str:
        return f"{self.backend}/{self.which}/{self.dtype}/{self.columns}/{self.keys}"


def parse(text: str) -> ShapeClass:
    """The class that ``str`` wrote; ValueError for anything else."""
    parts = text.split("/")
    if len(parts) != 5 or parts[1] not in PASSES or not parts[3].isdigit() or parts[4] not in KEY_CLASSES:
        raise ValueError(f"{text!r} is not a class such as hopper/fwd/bfloat16/128/short")
    return ShapeClass(parts[0], parts[1], parts[2], int(parts[3]), parts[4])


def shape_class(backend: str, which: str, problem: Problem, columns: int) -> ShapeClass:
    return ShapeClass(backend, which, dtype_name(problem.dtype), columns, key_class(problem.mean_keys))


def key_class(mean_keys: int) -> str:
    for name, most in KEY_CLASSES.items():
        if most is not None and mean_keys <= most:
            return name
    return "long"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def choice(shape: ShapeClass, device: torch.device, legal: Callable[[ShapeClass], tuple[Any, ...]]) -> Any:
    """The stored configuration of a class on this machine; None if the built-in one is to be used.

    Only one of ``legal(shape)`` counts: what the kernels cannot run must not reach them.
    """
    fields = _choices(device).get(str(shape))
    if fields is None:
        return None
    found = matching(fields, legal(shape))
    if isinstance(found, str):
        _warn(f"{_in_use()} is not used for {shape}: {found}")
        return None
    return found


def matching(fields: dict[str, Any], legal: tuple[Any, ...]) -> Any:
    """The one of ``legal`` with exactly these fields, or in words why there is none."""
    for config in legal:
        if asdict(config) == fields:
            return config
    known = set(asdict(legal[0])) if legal else set()
    for what, names in (("unknown", set(fields) - known), ("missing", known - set(fields))):
        if names:
            return f"{what} fields {', '.join(sorted(names))}"
    return f"{fields} is not a configuration that these kernels can run"


# ---- the file --------------------------------------------------------------------------------------------------------
def path() -> Path | None:
    """Where the measurements are kept; None if GDPA_TUNING=off."""
    named = os.environ.get(VARIABLE)
    if named:
        return None if named.lower() == "off" else Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "gdpa" / "tuning.json"


def machine_key(gpu: str) -> str:
    """What measurements are valid for: another Triton compiles other code, another gdpa has other kernels."""
    from gdpa import __version__

    return f"{gpu}, Triton {triton_version()}, gdpa {__version__}"


@cache
def triton_version() -> str | None:
    for package in ("triton", "pytorch-triton-rocm"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def read(file: Path) -> Document:
    """The file's contents; FileNotFoundError, or ValueError in words if it is not what `gdpa tune` wrote."""
    try:
        document = json.loads(file.read_text())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as e:
        raise ValueError(f"it cannot be read: {e}") from e
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"it is not a result of `gdpa tune` (format {FORMAT})")
    machines = document.get("machines")
    if not isinstance(machines, dict):
        raise ValueError("it has no machines")
    for key, machine in machines.items():
        if not isinstance(machine, dict) or not isinstance(machine.get("classes"), dict):
            raise ValueError(f"{key!r} has no classes")
        for name, entry in machine["classes"].items():
            parse(name)
            for field, kind in ENTRY.items():
                if not isinstance(entry, dict) or not isinstance(entry.get(field, ...), kind):
                    raise ValueError(f"{name} has no {field}")
    return document


def new() -> Document:
    return {"format": FORMAT, "machines": {}}


def put(document: Document, machine: str, shape: ShapeClass, entry: dict[str, Any]) -> None:
    """Enter the result of one class, in place of an older one."""
    document["machines"].setdefault(machine, {"classes": {}})["classes"][str(shape)] = entry


def write(document: Document, file: Path) -> None:
    """All of it or nothing: another process may be reading."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.{os.getpid()}.new")
    beside.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(beside, file)


# ---- what this process uses ------------------------------------------------------------------------------------------
@cache
def _in_use() -> Path | None:
    return path()


@cache
def _document() -> Document | str | None:
    """The file's contents, why it is ignored, or None if there is none."""
    file = _in_use()
    if file is None:
        return None
    try:
        return read(file)
    except FileNotFoundError:
        return "there is no such file" if os.environ.get(VARIABLE) else None
    except ValueError as e:
        return str(e)


@cache
def _choices(device: torch.device) -> dict[str, dict[str, Any]]:
    """The stored configurations for this GPU, by class."""
    if device.type != "cuda":
        return {}
    document = _document()
    if isinstance(document, str):
        _warn(f"{_in_use()} is ignored: {document}")
        return {}
    return {name: entry["config"] for name, entry in _classes(device, document).items() if entry["config"] is not None}


def _classes(device: torch.device, document: Document | None) -> dict[str, Any]:
    machine = machine_key(torch.cuda.get_device_name(device))
    return document["machines"].get(machine, {}).get("classes", {}) if document else {}


_warned: list[str] = []


def _warn(what: str) -> None:
    """The first time only: a file with one bad entry has many, and every launch would say so."""
    if not _warned:
        _warned.append(what)
        warnings.warn(f"gdpa: {what}; `gdpa tune` measures again, {VARIABLE}=off ignores the file", stacklevel=2)


_times: list[int] = [0]


def times_read() -> int:
    """How often ``forget`` was called: what was chosen before may not be chosen again."""
    return _times[0]


def forget() -> None:
    """Read the environment and the file again when they are next needed."""
    _times[0] += 1
    for cached in (choice, _in_use, _document, _choices):
        cached.cache_clear()
    _warned.clear()


def file_status() -> str:
    """Which file is in use, or why none is."""
    file, document = _in_use(), _document()
    if file is None:
        return f"built-in configurations, {VARIABLE}=off"
    if document is None:
        return f"built-in configurations, there is no {file}"
    return f"{file} is ignored: {document}" if isinstance(document, str) else str(file)


def status(device: torch.device) -> str:
    """What `gdpa info` says about a GPU: which configurations its kernels run with, and from which file."""
    document = _document()
    if not isinstance(document, dict):
        return file_status()
    key = machine_key(torch.cuda.get_device_name(device))
    classes = _classes(device, document)
    if not classes:
        return f"built-in configurations, {_in_use()} has nothing for {key}"
    changed = sum(entry["config"] is not None for entry in classes.values())
    return f"{_in_use()}, {changed} of {len(classes)} measured classes differ from the built-in configurations"
