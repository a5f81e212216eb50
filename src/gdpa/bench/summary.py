"""One line per case, one column per contender: the README's table of speeds."""

from __future__ import annotations

from typing import Any

from gdpa.bench.report import markdown_row, number, percent, rates_line, title, unit
from gdpa.bench.results import ByPass, groups


def markdown(document: dict[str, Any], contenders: list[str]) -> str:
    """TFLOP/s forward / backward of ``contenders`` (all if none are named), and the first one's share of the floor."""
    found = groups(document)
    names = contenders or list(dict.fromkeys(name for entries in found.values() for name in entries))
    prefix, factor = unit(document)
    lines = [
        markdown_row(["case", "function", *names, f"{names[0]}, of floor"]),
        markdown_row(["---", "---", *["---:"] * (len(names) + 1)]),
    ]
    for (case, function), entries in found.items():
        speeds = [_speeds(entries.get(name), factor) for name in names]
        lines.append(markdown_row([case, function, *speeds, _floors(entries.get(names[0]))]))
    lines += [
        "",
        f"{prefix}FLOP/s forward / backward; sdpa-* compute softmax, on dense cases only. {title(document)}, commit "
        f"{document['commit']}. {rates_line(document)}. Medians.",
    ]
    return "\n".join(lines)


def _speeds(entry: ByPass | None, factor: float) -> str:
    if entry is None:
        return ""
    return " / ".join(number(factor * entry[which]["tflops"]) for which in ("fwd", "bwd"))


def _floors(entry: ByPass | None) -> str:
    return "" if entry is None else " / ".join(percent(entry[which]) for which in ("fwd", "bwd"))
