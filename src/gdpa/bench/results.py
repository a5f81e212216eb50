"""Result files: written, read, and walked through."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gdpa.bench import earlier

FORMAT = 1
SOFTMAX = "softmax"

ByPass = dict[str, dict[str, Any]]  # records by pass


class Key(NamedTuple):
    """What a record is of. ``precision`` is None for others than gdpa, ``layout`` where it is the case's own."""

    case: str
    function: str
    backend: str
    precision: str | None
    layout: str | None

    @property
    def contender(self) -> str:
        """A name for tables and plots: ``hopper`` is exact, ``hopper fast`` is not."""
        return f"{self.backend} {self.precision}" if self.precision == "fast" else self.backend

    @property
    def label(self) -> str:
        """The contender, and its layout unless that is the case's own."""
        return f"{self.contender} {self.layout}" if self.layout else self.contender


def save(document: dict[str, Any], path: Path) -> None:
    """All or nothing: a run that is killed while it writes keeps what it wrote before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)


def read(path: Path) -> dict[str, Any]:
    """A result file; ValueError if it is not one."""
    try:
        document = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} is not a result of `gdpa bench` (format {FORMAT})")
    return document if "kind" in document else earlier.completed(document)


def product_rate(document: dict[str, Any]) -> str:
    """The name of the rate of matrix products among a document's rates: cuBLAS's on a GPU."""
    return "cublas_tflops" if document["gpu"] else "matmul_tflops"


def rows(document: dict[str, Any]) -> Iterator[tuple[Key, ByPass]]:
    """What was measured, and its records, in the order of measurement."""
    grouped: dict[Key, ByPass] = {}
    for r in document["records"]:
        grouped.setdefault(key_of(document, r), {})[r["pass"]] = r
    yield from grouped.items()


def key_of(document: dict[str, Any], entry: dict[str, Any]) -> Key:
    """What a record is of, or a refusal."""
    own, layout = document["cases"][entry["case"]].get("layout"), entry.get("layout")  # models have none
    layout = None if layout == own else layout
    return Key(entry["case"], entry["function"], entry["backend"], entry.get("precision"), layout)


def groups(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, ByPass]]:
    """{(case, function): {contender: {pass: record}}} in each case's own layout. The softmax of a case stands beside
    each of its functions."""
    found: dict[tuple[str, str], dict[str, ByPass]] = {}
    for key, by_pass in rows(document):
        if key.layout is None:
            found.setdefault((key.case, key.function), {})[key.contender] = by_pass
    others = {case for case, function in found if function != SOFTMAX}
    return {
        (case, function): entries if function == SOFTMAX else {**entries, **found.get((case, SOFTMAX), {})}
        for (case, function), entries in found.items()
        if function != SOFTMAX or case not in others
    }


def by_layout(document: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, ByPass]]:
    """{(case, function, contender): {layout: {pass: record}}} where there are several layouts."""
    found: dict[tuple[str, str, str], dict[str, ByPass]] = {}
    for key, by_pass in rows(document):
        layout = by_pass["fwd"]["layout"]
        found.setdefault((key.case, key.function, key.contender), {})[layout] = by_pass
    return {key: entries for key, entries in found.items() if len(entries) > 1}
