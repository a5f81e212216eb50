"""Functions and masks that exported programs carry, in the keys by which they name them.

A program has nothing but strings for its functions, and may be run where only gdpa is imported. So there a key is
followed by what the function consists of, KEY={...}: its graphs in JSON, from which all else is derived as usual. No
code is in it (see checks.py), and it is what was exported: a key is the digest of the graphs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from gdpa.functions.documents import checks
from gdpa.functions.documents.graphs import UndocumentedError, graph_of, of_graph, of_recorded, recorded_of
from gdpa.functions.keys import MARK, mask_key, placed_key, recorded_key
from gdpa.functions.places.program import Program
from gdpa.functions.places.trace import try_out
from gdpa.functions.traced import TracedFunction

VERSION = 1  # of these documents, and of what keys are digests of
LONGEST_NAME = 100

T = TypeVar("T")


@dataclass(frozen=True)
class CarriedFunction:
    """What an Activation is made of. ``program``, if it is placed, and ``learned``: see traced.Placed."""

    name: str
    n_params: int
    traced: fx.GraphModule
    program: Program | None
    learned: tuple[int, ...]

    @property
    def key(self) -> str:
        if self.program is None:
            return recorded_key(self.traced)
        return placed_key(self.traced, self.program, self.learned, self.n_params)


@dataclass(frozen=True)
class CarriedMask:
    name: str
    program: Program

    @property
    def key(self) -> str:
        return mask_key(self.program)


# ---- written ---------------------------------------------------------------------------------------------------------
def with_function(act: TracedFunction) -> str:
    """The key of ``act`` with its document; the key alone, if there is none: for hand-written code, or an operation
    that would not be let through when it is read."""
    if act.triton is not None:
        return act.key
    try:
        document = {"name": act.name, "n_params": act.n_params, "recorded": of_recorded(act._traced)}
    except UndocumentedError:
        return act.key
    if act.placed is not None:
        document |= {"places": _of_program(act.placed.program), "learned": list(act.placed.learned)}
    return _written(act.key, document, read_function)


def with_mask(key: str, name: str, program: Program) -> str:
    """The key of a mask with its document."""
    return _written(key, {"name": name, "places": _of_program(program)}, read_mask)


def _written(key: str, document: dict[str, Any], read: Callable[[str, str], Any]) -> str:
    document["name"] = re.sub(r"^(?=\d)|\W", "_", document["name"], flags=re.ASCII)[:LONGEST_NAME]
    text = json.dumps({"version": VERSION, **document}, separators=(",", ":"))
    try:
        read(key, text)
    except ValueError:  # then it is of no use anywhere
        return key
    return f"{key}{MARK}{text}"


def _of_program(program: Program) -> dict[str, Any]:
    tables = [[t.ndim, str(t.dtype).removeprefix("torch.")] for t in program.tables]
    return {"graph": of_graph(program.graph), "tables": tables}


# ---- read ------------------------------------------------------------------------------------------------------------
def read_function(key: str, text: str) -> CarriedFunction:
    """The function ``key`` from its document."""
    return _read(key, text, "function", _function)


def read_mask(key: str, text: str) -> CarriedMask:
    """The mask ``key`` from its document."""
    return _read(key, text, "mask", _mask)


def _read(key: str, text: str, kind: str, make: Callable[[Any], T]) -> T:
    whose = f"the {kind} {key!r} that this program carries"
    try:
        document = json.loads(text)
        version = document["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"{whose} is damaged: {e}; export the model again") from e
    if version != VERSION:
        raise ValueError(
            f"{whose} is in format {version!r}, this version of gdpa reads {VERSION}: run the program with the version "
            "that exported it, or export the model again"
        )
    try:
        found = make(document)
    except Exception as e:  # whatever a document that is none leads to
        raise ValueError(f"{whose} is damaged: {type(e).__name__}: {e}; export the model again") from e
    if found.key != key:  # type: ignore[attr-defined]
        raise ValueError(f"{whose} is damaged: it is another {kind}; export the model again")
    return found


def _function(document: Any) -> CarriedFunction:
    n_params, program, learned = document["n_params"], None, ()
    checks.need(checks.whole(n_params, 1024), "n_params")
    if "places" in document:
        program = _program(document["places"])
        checks.check_learned(document["learned"], document["places"]["graph"])
        learned = tuple(document["learned"])
    leaves = 0 if program is None else len(program.graph.outputs)
    recorded = checks.checked_recorded(document["recorded"], 1 + n_params + leaves)
    return CarriedFunction(_name(document), n_params, recorded_of(recorded), program, learned)


def _mask(document: Any) -> CarriedMask:
    program = _program(document["places"])
    checks.need(len(program.graph.outputs) == 1, "outputs of a mask")
    return CarriedMask(_name(document), program)


def _program(document: Any) -> Program:
    tables = checks.table_kinds(document["tables"])
    checks.check_places(document["graph"], tables)
    program = Program(graph_of(document["graph"]), tables)
    try_out(program)  # an operation may have too few arguments
    return program


def _name(document: Any) -> str:
    """A name that can be part of a Python name."""
    name = document["name"]
    right = type(name) is str and len(name) <= LONGEST_NAME and name.isascii() and name.isidentifier()
    checks.need(right, "name")
    return name
