"""Functions on disk: later processes read the graphs that one process has traced, and the code that it made of them.

Tracing a function takes PyTorch's compiler, whose import alone takes a second or two; a stored graph takes
milliseconds. It is found by all that the function reads (its fingerprint, by names instead of objects), the versions of
Python and PyTorch, and the code of this package. Whoever reads one compares it with the function on some numbers,
values and derivatives, so that a wrong file costs time and nothing else.

Files are gdpa/functions/*.json under XDG_CACHE_HOME or ~/.cache; GDPA_FUNCTIONS names another folder, "off" is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, fx

from gdpa.functions.documents.graphs import UndocumentedError, graph_of, of_graph, of_recorded, recorded_of
from gdpa.functions.fingerprint import TRUSTED_PACKAGES
from gdpa.functions.graph import Graph

VARIABLE = "GDPA_FUNCTIONS"
VERSIONED = {*TRUSTED_PACKAGES, *sys.stdlib_module_names}
MOST = 4096  # files; a function with a new number in it at every step would fill the disk


class _UnnamedError(Exception):
    """Something that no name stands for in another process."""


# ---- files -----------------------------------------------------------------------------------------------------------
def folder() -> Path | None:
    named = os.environ.get(VARIABLE)
    if named:
        return None if named.lower() == "off" else Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "gdpa" / "functions"


def file_of(reads: Hashable) -> Path | None:
    """Where something is or would be kept; ``reads``: all that it depends on."""
    where = folder()
    if where is None:
        return None
    try:
        named = repr(_named(reads))
    except _UnnamedError:
        return None
    text = f"{sys.version} {torch.__version__} {_own_code()} {named}"
    return where / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@cache
def _own_code() -> str:
    """Of the modules that make graphs."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def _named(x: Any) -> Any:
    """A fingerprint (see fingerprint.py) by names that other processes know, too. A name alone stands for what belongs
    to a version of Python or PyTorch; what a user names, another process may have from a file that has changed."""
    if isinstance(x, tuple):
        return tuple(map(_named, x))
    if isinstance(x, str | bytes | int | float | complex | frozenset | None | types.EllipsisType | torch.dtype):
        return x
    if isinstance(x, types.CodeType):
        parts = (
            x.co_code, x.co_names, x.co_varnames, x.co_freevars, x.co_cellvars, x.co_flags, x.co_argcount,
            x.co_posonlyargcount, x.co_kwonlyargcount, getattr(x, "co_exceptiontable", b""),
        )  # fmt: skip
        return "code", *parts, _named(x.co_consts)
    if isinstance(x, types.ModuleType):
        return "module", x.__name__
    if isinstance(x, type):
        return "type", x.__module__, x.__qualname__
    where, name = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
    if isinstance(where, str) and isinstance(name, str) and _is_found(x, where, name):
        return "object", where, name
    name = getattr(x, "__name__", None)  # torch.relu says that it is that of a class which has no module
    if isinstance(name, str) and getattr(torch, name, None) is x:
        return "torch", name
    raise _UnnamedError


def _is_found(x: Any, where: str, name: str) -> bool:
    if where.split(".")[0] not in VERSIONED:
        return False
    try:
        return resolve_name(f"{where}:{name}") is x
    except (AttributeError, ImportError, ValueError):
        return False


def read(file: Path | None) -> Any:
    """What was written there; None if there is nothing, or it is damaged."""
    if file is None:
        return None
    try:
        digest, text = file.read_text().split("\n", 1)
    except (OSError, ValueError):
        return None
    return json.loads(text) if digest == _digest(text) else None


def write(file: Path | None, document: Any) -> None:
    """Keep it, if that is possible: a disk may be full, or not ours to write to."""
    if file is None:
        return
    text = json.dumps(document)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        if sum(1 for _ in file.parent.iterdir()) >= MOST:
            return
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as new:
            new.write(f"{_digest(text)}\n{text}")
        os.replace(new.name, file)  # other processes see all of it or nothing


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ---- graphs ----------------------------------------------------------------------------------------------------------
def write_graphs(file: Path | None, key: str, traced: fx.GraphModule, joint: Graph) -> None:
    """What torch has recorded of a function, and the graph with its derivatives."""
    if file is not None:
        with suppress(UndocumentedError):
            write(file, {"key": key, "recorded": of_recorded(traced), "joint": of_graph(joint)})


def read_graphs(file: Path | None, fn: Callable[..., Any], n_params: int) -> tuple[str, fx.GraphModule, Graph] | None:
    """The key of a function and its graphs; None if they are not there, or not those of ``fn``."""
    document = read(file)
    if document is None:
        return None
    joint = graph_of(document["joint"])
    return (document["key"], recorded_of(document["recorded"]), joint) if is_of(joint, fn, n_params) else None


def is_of(joint: Graph, fn: Callable[..., Any], n_params: int) -> bool:
    """Whether the graph computes what ``fn`` does, and its derivatives."""
    if joint.n_inputs != 1 + n_params or len(joint.outputs) != 2 + n_params:
        return False
    s = torch.linspace(-3.7, 4.1, 24, dtype=torch.float64)
    numbers = [s, *(0.3 * (s + i).cos() + 0.6 for i in range(n_params))]
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        inputs = [t.float().requires_grad_() for t in numbers]
        try:
            p = fn(*(t.clone() for t in inputs))
        except Exception:  # tracing says what is wrong
            return False
        found = [p]
        if p.requires_grad:
            found += torch.autograd.grad(p.sum(), inputs, allow_unused=True, materialize_grads=True)
        else:
            found += [torch.zeros_like(t) for t in inputs]
    with torch.no_grad():
        want = joint.evaluate(*(t.float() for t in numbers))
    return all(map(_close, found, want))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-6, equal_nan=True)
