"""Tables in Markdown files, made from result files. A document says itself what belongs where:

    <!-- table: bench benchmarks/results/cpu.json cpu-* -->
    ... replaced by `gdpa bench --readme README.md` ...
    <!-- end -->

Kinds: ``bench FILE [PATTERN...]``, ``speed FILE [CONTENDER...]`` (a backend's fast precision has a column beside its
exact one where it was measured; contenders that the file does not have get no column), ``headline FILE CASE...`` (gdpa
beside cuDNN's softmax), ``layouts FILE [CONTENDER...]``, ``model FILE [PATTERN...]``, ``model-profile FILE
[PATTERN...]`` and ``headline-model FILE [PATTERN...]`` (of `gdpa bench --model`), ``host FILE`` and ``host-parts FILE``
(of `gdpa bench --host`), ``biases FILE`` and ``masks FILE`` (of `gdpa bench --positions`), ``function-errors FILE``,
``builtins``. Paths are relative to the document's repository, that is to the nearest folder above it that has a
pyproject.toml.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gdpa.bench import results
from gdpa.bench.host import calls
from gdpa.bench.kernels import function_errors
from gdpa.bench.places import report as placed
from gdpa.bench.report import summary, tables
from gdpa.functions.builtin import BUILTINS

MARKED = re.compile(r"(<!-- table: (?P<what>[^\n]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def refresh(path: Path) -> int:
    """Rewrite the tables of one document; returns how many there are."""
    old = path.read_text()
    new, count = MARKED.subn(lambda match: match[1] + make(match["what"], root_of(path)) + "\n" + match[3], old)
    if count == 0:
        raise ValueError(f"{path} has no table to fill: mark a place with <!-- table: ... --> and <!-- end -->")
    if new != old:
        path.write_text(new)
    return count


def root_of(path: Path) -> Path:
    """The folder that result files are named relative to."""
    parents = path.resolve().parents
    return next((p for p in parents if (p / "pyproject.toml").exists()), parents[0])


def make(what: str, root: Path) -> str:
    """The Markdown of one table."""
    kind, *arguments = what.split()
    if kind == "bench":
        return tables.markdown(results.read(root / arguments[0]), arguments[1:])
    if kind == "speed":
        return summary.markdown(results.read(root / arguments[0]), arguments[1:])
    if kind == "headline":
        return summary.headline_markdown(results.read(root / arguments[0]), arguments[1:])
    if kind == "layouts":
        return summary.layouts_markdown(results.read(root / arguments[0]), arguments[1:])
    if kind in ("model", "model-profile", "headline-model"):
        return _model_table(kind, root / arguments[0], arguments[1:])
    if kind in ("host", "host-parts"):
        document = results.read(root / arguments[0])
        return f"{calls.markdown(document)}\n\n{_host(document)}" if kind == "host" else calls.parts_markdown(document)
    if kind in ("biases", "masks"):
        document = results.read(root / arguments[0])
        return placed.biases_markdown(document) if kind == "biases" else placed.masks_markdown(document)
    if kind == "function-errors":
        return function_errors.markdown(json.loads((root / arguments[0]).read_text()))
    if kind == "builtins":
        return builtins()
    raise ValueError(
        f"a table of kind {kind!r} is unknown; kinds: bench, speed, headline, layouts, model, model-profile, "
        "headline-model, host, host-parts, biases, masks, function-errors, builtins"
    )


def _host(document: dict[str, Any]) -> str:
    """The machine, and how to read the names and the times."""
    versions = document["versions"]
    where = f"{document['gpu'] or document['cpu']}, torch {versions['torch']}, Triton {versions['triton']}"
    return (
        f"{where}, {document['date'][:10]}, commit {document['commit']}. b2-h4-l128-d64: 2 sequences of 128 rows, 4 "
        "heads of 64. Medians (p20–p80); ~: the spread exceeds the difference."
    )


def _model_table(kind: str, path: Path, patterns: list[str]) -> str:
    from gdpa.bench.models import report as model_report

    makers = {"model": model_report.markdown, "model-profile": model_report.profile_markdown}
    return makers.get(kind, model_report.headline_markdown)(results.read(path), patterns)


def builtins() -> str:
    """Name and formula of every built-in, from its docstring."""
    lines = ["| name | f(s) |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{fn.__name__}` | {formula(fn)} |" for fn in BUILTINS)])


def formula(fn: object) -> str:
    return (fn.__doc__ or "").strip().splitlines()[0].rstrip(".").replace("|", "\\|")
