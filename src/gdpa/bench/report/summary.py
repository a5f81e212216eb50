"""Speeds and errors side by side, for the README and docs/results.md: a line per case, a column per contender or
layout."""

from __future__ import annotations

from typing import Any

from gdpa.bench import conclusion, noise
from gdpa.bench.report.tables import markdown_row, number, percent, rates_line, title, unit
from gdpa.bench.results import ByPass, by_layout, groups

RIVAL, PACKED_RIVAL = "sdpa-cudnn", "torch-varlen"
# What errors are given in, so that they have few digits.
ERROR_UNITS = {"bfloat16": "10⁻³", "float16": "10⁻⁴", "float32": "10⁻⁷"}
ERROR_FACTORS = {"bfloat16": 1e3, "float16": 1e4, "float32": 1e7}


def markdown(document: dict[str, Any], contenders: list[str]) -> str:
    """TFLOP/s forward / backward of ``contenders`` (all if none are named) and their errors, and the first one's share
    of the roofline. A backend of gdpa has a column for each precision it was measured in."""
    found = groups(document)
    measured = list(dict.fromkeys(name for entries in found.values() for name in entries))
    names = [name for wanted in contenders or measured for name in _columns(wanted, measured, bool(contenders))]
    if not names:
        raise ValueError(f"the result has none of {', '.join(contenders)}; it has {', '.join(measured)}")
    lines = [
        markdown_row(["case", "function", *names, f"{names[0]}, of roofline"]),
        markdown_row(["---", "---", *["---:"] * (len(names) + 1)]),
    ]
    for (case, function), entries in found.items():
        cells = [_cell(document, entries.get(name)) for name in names]
        lines.append(markdown_row([case, function, *cells, _floors(entries.get(names[0]))]))
    softmax = "; sdpa-* compute softmax, on dense cases only"
    if PACKED_RIVAL in names:
        softmax += f"; {PACKED_RIVAL}, too, on packed ones only"
    return "\n".join([*lines, "", _caption(document, softmax)])


def _columns(wanted: str, measured: list[str], with_fast: bool) -> list[str]:
    return [name for name in ((wanted, f"{wanted} fast") if with_fast else (wanted,)) if name in measured]


def headline_markdown(document: dict[str, Any], cases: list[str]) -> str:
    """A line for each of ``cases``: speed and error of gdpa and of cuDNN's softmax, and how the times compare. A case
    may be measured with several functions: CASE is with the first one, CASE:FUNCTION with another."""
    own = conclusion.ours(document)
    found: dict[str, tuple[str, dict[str, ByPass]]] = {}
    for (case, function), entries in groups(document).items():
        if own in entries and RIVAL in entries:
            found |= {f"{case}:{function}": (function, entries), case: found.get(case, (function, entries))}
    unknown = [case for case in cases if case not in found]
    if unknown or own is None:
        known = [case for case in found if ":" not in case]
        raise ValueError(f"the result has no {', '.join(unknown)} of both gdpa and {RIVAL}; it has {', '.join(known)}")
    speed = f"{unit(document)[0]}FLOP/s"
    head = ["case", "function", f"gdpa, {speed}", "its error", f"cuDNN's softmax, {speed}", "its error", "gdpa is"]
    lines = [markdown_row(head), markdown_row(["---", "---", *["---:"] * 5])]
    for case in cases:
        function, entries = found[case]
        mine, theirs = entries[own], entries[RIVAL]
        than = " / ".join(noise.speed(mine[which], theirs[which]) for which in ("fwd", "bwd"))
        cells = [_cell(document, entry).rstrip(")").split(" (") for entry in (mine, theirs)]
        lines.append(markdown_row([case.split(":")[0], function, *(part for cell in cells for part in cell), than]))
    what = f"Forward / backward, {title(document)}, commit {document['commit']}; {_sizes(document, cases)}. "
    errors = f"Errors: RMS against float64, relative, in {ERROR_UNITS[document['dtype']]} (out / worst gradient). "
    return "\n".join([*lines, "", f'{what}{errors}"Within the noise": p20–p80 overlap.'])


def _sizes(document: dict[str, Any], cases: list[str]) -> str:
    """Batch 1152 (self-8192: 16), 4 heads of 128: what most cases have, and which of them differ."""
    shapes = {name: document["cases"][name] for name in (case.split(":")[0] for case in cases)}

    def usual(key: str) -> str:
        sizes = [shape[key] for shape in shapes.values()]
        common = max(dict.fromkeys(sizes), key=sizes.count)
        others = ", ".join(f"{name}: {shape[key]}" for name, shape in shapes.items() if shape[key] != common)
        return f"{common} ({others})" if others else str(common)

    return f"batch {usual('batch')}, {usual('heads')} heads of {usual('d')}"


def layouts_markdown(document: dict[str, Any], contenders: list[str]) -> str:
    """A column for each layout, on the cases that were measured in several."""
    found = {key: entries for key, entries in by_layout(document).items() if not contenders or key[2] in contenders}
    names = list(dict.fromkeys(name for entries in found.values() for name in entries))
    head = ["case", "function", "backend", *names]
    lines = [markdown_row(head), markdown_row(["---"] * 3 + ["---:"] * len(names))]
    for key, entries in found.items():
        lines.append(markdown_row([*key, *(_cell(document, entries.get(name)) for name in names)]))
    return "\n".join([*lines, "", _caption(document, "")])


def _caption(document: dict[str, Any], softmax: str) -> str:
    prefix, _ = unit(document)
    errors = (
        f", in brackets the RMS error against float64 relative to its result, in {ERROR_UNITS[document['dtype']]}: of "
        "out / of the worst of dq, dk and dv"
        if any(record["rms_error"] is not None for record in document["records"])
        else ""
    )
    return (
        f"{prefix}FLOP/s forward / backward{errors}{softmax}. {title(document)}, commit {document['commit']}. "
        f"{rates_line(document)}. Medians."
    )


def _cell(document: dict[str, Any], entry: ByPass | None) -> str:
    """513 / 495 (1.7 / 2.4), without the brackets where nobody measured the error."""
    if entry is None:
        return ""
    passes = [entry[which] for which in ("fwd", "bwd")]
    speeds = " / ".join(number(unit(document)[1] * record["tflops"]) for record in passes)
    if any(record["rms_error"] is None for record in passes):
        return speeds
    errors = (ERROR_FACTORS[document["dtype"]] * record["rms_error"] for record in passes)
    return f"{speeds} ({' / '.join(f'{error:.2g}' for error in errors)})"


def _floors(entry: ByPass | None) -> str:
    return "" if entry is None else " / ".join(percent(entry[which]) for which in ("fwd", "bwd"))
