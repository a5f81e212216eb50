"""Result documents as tables: in the terminal, against an older result, and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from rich import box
from rich.table import Table

from gdpa.bench.results import ByPass, key_of, product_rate, rows

MS = "{:.2f}"
MOST_NAMES = 6
VARIANTS = (
    "gdpa's backends are exact unless they say fast, and have the case's own layout, (B, H, L, D) or packed with "
    "max_seqlen, unless they name another"
)
ERRORS = "rms error: relative to float64's result, of out / of the worst of dq, dk and dv"
LOOK: dict[str, Any] = {"box": box.SIMPLE_HEAD, "title_justify": "left", "caption_justify": "left"}


def title(document: dict[str, Any]) -> str:
    """The machine in a line."""
    versions = document["versions"]
    where = document["gpu"] or cpu(document)
    stack = f"torch {versions['torch']}" + (f", Triton {versions['triton']}" if document["gpu"] else "")
    return f"{where}, {stack}, {document['dtype']}, {document['date'][:10]}"


def cpu(document: dict[str, Any]) -> str:
    """Its name and threads."""
    return f"{document['cpu']}, {document['threads']} thread{'' if document['threads'] == 1 else 's'}"


def unit(document: dict[str, Any]) -> tuple[str, float]:
    """What speeds are shown in, and how many of it a tera is: G on a CPU, T on a GPU."""
    return ("T", 1.0) if document["gpu"] else ("G", 1000.0)


def rates_line(document: dict[str, Any]) -> str:
    rates, (prefix, factor) = document["rates"], unit(document)
    product, rate = ("cuBLAS" if document["gpu"] else "matmul"), rates[product_rate(document)]
    copy = number(factor * rates["copy_tb_s"])
    return (
        f"{product} {number(factor * rate)} {prefix}FLOP/s, copy {copy} {prefix}B/s (read plus written), measured in "
        "the same run; roofline = max(flops / product rate, bytes / copy rate)"
    )


def table(document: dict[str, Any]) -> Table:
    """Everything measured: a line per case, function and contender."""
    caption = f"medians, half the spread from p20 to p80 as ±; {rates_line(document)}; {VARIANTS}; {ERRORS}"
    shown = Table(title=title(document), caption=caption, collapse_padding=True, pad_edge=False, **LOOK)
    for name in ("case", "function", "backend"):
        shown.add_column(name, no_wrap=True)
    for which in ("fwd", "bwd", "both"):
        shown.add_column(f"{which} ms", justify="right", no_wrap=True)
    prefix, factor = unit(document)
    for name in (f"{prefix}FLOP/s fwd/bwd", "% of roofline fwd/bwd", "rms error fwd/bwd", "peak MiB", "extra MiB"):
        shown.add_column(name, justify="right")
    previous = None
    for key, by_pass in rows(document):
        if previous not in (None, key.case):
            shown.add_section()
        previous = key.case
        fwd, bwd, both = by_pass["fwd"], by_pass["bwd"], by_pass["both"]
        shown.add_row(
            key.case, key.function, key.label,
            *(f"{r['median_ms']:.2f} ±{spread(r):.0f}%" for r in (fwd, bwd, both)),
            f"{number(factor * fwd['tflops'])}/{number(factor * bwd['tflops'])}",
            f"{100 * fwd['floor_fraction']:.0f}/{100 * bwd['floor_fraction']:.0f}", errors(by_pass, "/"),
            mib(both["peak_mib"]), mib(both["extra_mib"]),
        )  # fmt: skip
    return shown


def skipped(document: dict[str, Any]) -> list[str]:
    """What was not run and why: a line for each contender and reason, with its cases."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for s in document["skipped"]:
        cases.setdefault((key_of(document, s).label, s["function"], reason(s)), []).append(s["case"])
    return [f"{label} {function}, not run: {why} ({_some(c)})" for (label, function, why), c in cases.items()]


def reason(skipped: dict[str, Any]) -> str:
    """Why something was not run; results of earlier versions say "left out" once more."""
    return skipped["why"].removeprefix("left out: ")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return shown if len(names) <= MOST_NAMES else f"{shown} and {len(names) - MOST_NAMES} more"


def comparison(new: dict[str, Any], old: dict[str, Any]) -> Table:
    """Old and new medians of everything both have; drift of the machine cancels in the fraction of the roofline."""
    shown = Table(title=f"against {title(old)}, commit {old['commit']}", caption=_comparability(new, old), **LOOK)
    for name in ("case", "function", "backend", "pass"):
        shown.add_column(name, no_wrap=True)
    for name in ("old ms", "new ms", "speed-up", "old of roofline", "new of roofline", "change"):
        shown.add_column(name, justify="right")
    before = _by_key(old)
    for key, r in _by_key(new).items():
        was = before.get(key)
        if was is None:
            continue
        change = r["floor_fraction"] / was["floor_fraction"]
        style = "green" if change > 1.03 else "red" if change < 0.97 else ""
        shown.add_row(
            *key, MS.format(was["median_ms"]), MS.format(r["median_ms"]),
            f"{was['median_ms'] / r['median_ms']:.2f}x", percent(was), percent(r), f"{change:.2f}x", style=style,
        )  # fmt: skip
    return shown


def _by_key(document: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Records by case, function, backend and pass."""
    return {
        (key.case, key.function, key.label, which): r for key, by_pass in rows(document) for which, r in by_pass.items()
    }


def _comparability(new: dict[str, Any], old: dict[str, Any]) -> str:
    """What a reader must know before believing a comparison."""
    notes = ["speed-up: of the time; change: of the fraction of the roofline, green and red beyond 3 %"]
    notes += [f"{what} differs: {old[what]} before, {new[what]} now" for what in ("gpu", "cpu", "dtype")
              if old[what] != new[what]]  # fmt: skip
    after, before = set(_by_key(new)), set(_by_key(old))
    for count, which in ((len(after - before), "new"), (len(before - after), "old")):
        if count:
            notes.append(f"{count} records are only in the {which} result")
    return "; ".join(notes)


def markdown(document: dict[str, Any], patterns: Iterable[str] = ()) -> str:
    """The table of the README: cases that match ``patterns``, everything if there are none."""
    wanted = list(patterns) or ["*"]
    prefix, factor = unit(document)
    head = ("case", "function", "backend", "forward ms", "backward ms", "both ms", f"{prefix}FLOP/s fwd / bwd",
            "of roofline fwd / bwd", "rms error fwd / bwd", "peak MiB", "extra MiB")  # fmt: skip
    lines = [markdown_row(head), markdown_row("---" if i < 3 else "---:" for i in range(len(head)))]
    for key, p in rows(document):
        if any(fnmatchcase(key.case, pattern) for pattern in wanted):
            fwd, bwd, both = p["fwd"], p["bwd"], p["both"]
            times = (MS.format(r["median_ms"]) for r in (fwd, bwd, both))
            rates = f"{number(factor * fwd['tflops'])} / {number(factor * bwd['tflops'])}"
            floors = f"{percent(fwd)} / {percent(bwd)}"
            memory = (mib(both["peak_mib"]), mib(both["extra_mib"]))
            cells = (key.case, key.function, key.label, *times, rates, floors, errors(p), *memory)
            lines.append(markdown_row(cells))
    lines += [
        "",
        f"{title(document)}, commit {document['commit']}. {rates_line(document)}. Medians. {ERRORS}. Memory is that of "
        "forward and backward together: the peak beyond inputs, and beyond inputs, outputs and gradients.",
    ]
    return "\n".join(lines)


def markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(x: float | None) -> str:
    """Three digits."""
    return "-" if x is None else f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def errors(by_pass: ByPass, between: str = " / ") -> str:
    """Forward and backward; nothing where nobody measured them."""
    found = [by_pass[which]["rms_error"] for which in ("fwd", "bwd")]
    return "-" if None in found else between.join(f"{x:.1e}".replace("e-0", "e-") for x in found)


def spread(record: dict[str, Any]) -> float:
    """Half the distance from p20 to p80, in percent."""
    return 50 * (record["p80_ms"] - record["p20_ms"]) / record["median_ms"]


def percent(record: dict[str, Any]) -> str:
    return f"{100 * record['floor_fraction']:.0f} %"


def mib(x: float | None) -> str:
    return "-" if x is None else f"{x:,.0f}"
