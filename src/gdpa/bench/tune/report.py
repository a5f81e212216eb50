"""Stored tunings as a table, and in words what was not considered."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.table import Table

from gdpa.backends import tuning
from gdpa.bench.report.tables import LOOK
from gdpa.bench.tune.select import LEAST_GAIN, mean

CAPTION = (
    "medians in ms, a number per case and function; gain: default / best other, rounds compared with each other; "
    f"chosen: the best other if it gains at least {100 * (LEAST_GAIN - 1):.0f} % and is right on edge cases, too"
)


def table(machine: str, classes: dict[str, Any]) -> Table:
    """A line per class: the default, the best other configuration, and which of them is used."""
    shown = Table(title=machine, caption=CAPTION, **LOOK)
    for name in ("backend", "pass", "dtype", "D", "keys", "measured on"):
        shown.add_column(name)
    shown.add_column("others", justify="right")
    shown.add_column("default ms", justify="right")
    shown.add_column("best other")
    for name in ("ms", "gain"):
        shown.add_column(name, justify="right")
    shown.add_column("chosen")
    for name, entry in classes.items():
        shape, others = tuning.parse(name), by_config(entry)
        default = others.pop(frozenset(entry["default"].items()), [])
        cases = " ".join(dict.fromkeys(m["case"] for m in default))
        shown.add_row(
            shape.backend, shape.which, shape.dtype, str(shape.columns), shape.keys, cases, str(len(others)),
            ms(default), *best_other(entry, others), chosen(entry),
        )  # fmt: skip
    return shown


def by_config(entry: dict[str, Any]) -> dict[frozenset[Any], list[dict[str, Any]]]:
    found: dict[frozenset[Any], list[dict[str, Any]]] = {}
    for m in entry["measurements"]:
        found.setdefault(frozenset(m["config"].items()), []).append(m)
    return found


def best_other(entry: dict[str, Any], others: dict[frozenset[Any], list[dict[str, Any]]]) -> tuple[str, str, str]:
    """What it changes, its times and its gain: the chosen one, or else the fastest that was not."""
    if entry["config"] is not None:
        best = others.get(frozenset(entry["config"].items()), [])
    else:
        best = max(others.values(), key=lambda ms: mean([m["gain"] for m in ms]), default=[])
    if not best:
        return "-", "-", "-"
    return changed(best[0]["config"], entry["default"]), ms(best), " ".join(f"{m['gain']:.3f}x" for m in best)


def ms(measurements: list[dict[str, Any]]) -> str:
    return " ".join(f"{m['median_ms']:.3f}" for m in measurements) or "-"


def chosen(entry: dict[str, Any]) -> str:
    return "default" if entry["config"] is None else f"[green]{changed(entry['config'], entry['default'])}[/]"


def changed(config: dict[str, Any], default: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in config.items() if default.get(k) != v) or "default"


def refused(classes: dict[str, Any]) -> list[str]:
    """A line for each class and reason, with how many configurations it kept out and one of them."""
    lines = []
    for name, entry in classes.items():
        reasons = Counter(r["why"] for r in entry["refused"])
        for why, count in reasons.items():
            first = next(r["config"] for r in entry["refused"] if r["why"] == why)
            more = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"{name}, refused: {changed(first, entry['default'])}{more}: {why}")
    return lines
