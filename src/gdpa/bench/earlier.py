"""Results of earlier versions, given the fields that today's have.

Their kernels on GPUs did what `gdpa.precision("fast")` stands for. Nobody measured errors, and there was one layout.
"""

from __future__ import annotations

from typing import Any

PACKED = ("uniform-", "jagged-", "pma", "lognormal", "zipf", "bimodal", "cpu-jagged")
PRECISION = {"hopper": "fast", "triton": "fast", "cpu": "exact", "reference": "exact"}


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """A document of kernels whose cases and records all have their fields."""
    cases = {name: {"layout": _layout(name), **case} for name, case in document["cases"].items()}

    def complete(entry: dict[str, Any]) -> dict[str, Any]:
        known = {"precision": PRECISION.get(entry["backend"]), "layout": cases[entry["case"]]["layout"]}
        return {**known, **entry}

    records = [{"rms_error": None, "rms_errors": None, **complete(record)} for record in document["records"]]
    return {**document, "cases": cases, "records": records, "skipped": [complete(s) for s in document["skipped"]]}


def _layout(case: str) -> str:
    return "packed" if case.startswith(PACKED) else "heads"
