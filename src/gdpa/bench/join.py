"""Several runs on one machine as one result: a long benchmark in pieces that each fit a time limit."""

from __future__ import annotations

from typing import Any

from gdpa.bench.results import product_rate

ALIKE = ("format", "device", "gpu", "cpu", "threads", "versions", "dtype", "commit")


def joined(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Records of all ``documents``; what was measured twice is taken from the last. Fractions of the floor stay those
    of each record's own run; the rates shown are the best, with every reading."""
    first, last = documents[0], documents[-1]
    for other in documents[1:]:
        for name in ALIKE:
            if other.get(name) != first.get(name):
                raise ValueError(f"results of different runs cannot be joined: {name} {first.get(name)!r} and "
                                 f"{other.get(name)!r}")  # fmt: skip
    if any("kind" in document for document in documents):
        raise ValueError("only kernel results can be joined, not those of --model")
    records = {_identity(record, record["pass"]): record for d in documents for record in d["records"]}
    measured = {_identity(record) for record in records.values()}
    skipped = {_identity(entry): entry for d in documents for entry in d["skipped"]}
    rates = {rate: max(d["rates"][rate] for d in documents) for rate in (product_rate(first), "copy_tb_s")}
    return {
        **last,
        "cases": {name: case for d in documents for name, case in d["cases"].items()},
        "took_s": round(sum(d["took_s"] for d in documents), 1),
        "clocks": [clocks for d in documents for clocks in d["clocks"]],
        "rates": {**rates, "readings": [reading for d in documents for reading in d["rates"]["readings"]]},
        "records": list(records.values()),
        "skipped": [entry for identity, entry in skipped.items() if identity not in measured],
    }


def _identity(entry: dict[str, Any], *more: str) -> tuple[str, ...]:
    return (*(entry[name] for name in ("case", "function", "backend", "precision", "layout")), *more)
