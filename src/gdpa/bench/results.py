"""Result files: written, read, and walked through."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMAT = 1
SOFTMAX = "softmax"

Key = tuple[str, str, str]  # case, function, backend
ByPass = dict[str, dict[str, Any]]  # records by pass


def save(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """A result file; ValueError if it is not one."""
    try:
        document = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} is not a result of `gdpa bench` (format {FORMAT})")
    return document


def product_rate(document: dict[str, Any]) -> str:
    """The name of the rate of matrix products among a document's rates: cuBLAS's on a GPU."""
    return "cublas_tflops" if document["gpu"] else "matmul_tflops"


def rows(document: dict[str, Any]) -> Iterator[tuple[Key, ByPass]]:
    """((case, function, backend), {pass: record}) in the order of measurement."""
    grouped: dict[Key, ByPass] = {}
    for r in document["records"]:
        grouped.setdefault((r["case"], r["function"], r["backend"]), {})[r["pass"]] = r
    yield from grouped.items()


def groups(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, ByPass]]:
    """{(case, function): {backend: {pass: record}}}. The softmax of a case stands beside each of its functions."""
    found: dict[tuple[str, str], dict[str, ByPass]] = {}
    for (case, function, backend), by_pass in rows(document):
        found.setdefault((case, function), {})[backend] = by_pass
    others = {case for case, function in found if function != SOFTMAX}
    return {
        (case, function): entries if function == SOFTMAX else {**entries, **found.get((case, SOFTMAX), {})}
        for (case, function), entries in found.items()
        if function != SOFTMAX or case not in others
    }
