"""Result documents as tables: in the terminal, against an older result, and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from rich import box
from rich.table import Table

from gdpa.bench.run import rows

MS = "{:.2f}"
LOOK: dict[str, Any] = {"box": box.SIMPLE_HEAD, "title_justify": "left", "caption_justify": "left"}


def title(document: dict[str, Any]) -> str:
    """The machine in a line."""
    versions = document["versions"]
    where = document["gpu"] or f"{document['cpu']}, {document['threads']} threads"
    stack = f"torch {versions['torch']}" + (f", Triton {versions['triton']}" if document["gpu"] else "")
    return f"{where}, {stack}, {document['dtype']}, {document['date'][:10]}"


def unit(document: dict[str, Any]) -> tuple[str, float]:
    """What speeds are shown in, and how many of it a tera is: G on a CPU, T on a GPU."""
    return ("T", 1.0) if document["gpu"] else ("G", 1000.0)


def rates_line(document: dict[str, Any]) -> str:
    rates, (prefix, factor) = document["rates"], unit(document)
    product, rate = ("cuBLAS", rates["cublas_tflops"]) if document["gpu"] else ("matmul", rates["matmul_tflops"])
    copy = _number(factor * rates["copy_tb_s"])
    return (
        f"{product} {_number(factor * rate)} {prefix}FLOP/s, copy {copy} {prefix}B/s (read plus written), measured in "
        "the same run; floor = max(flops / product rate, bytes / copy rate)"
    )


def table(document: dict[str, Any]) -> Table:
    """Everything measured: a line per case, function and contender."""
    caption = f"medians, half the spread from p20 to p80 as ±; {rates_line(document)}"
    shown = Table(title=title(document), caption=caption, **LOOK)
    for name in ("case", "function", "backend"):
        shown.add_column(name, no_wrap=True)
    for which in ("fwd", "bwd", "both"):
        shown.add_column(f"{which} ms", justify="right", no_wrap=True)
    prefix, factor = unit(document)
    speeds = (f"fwd {prefix}FLOP/s", f"bwd {prefix}FLOP/s")
    for name in (*speeds, "fwd of floor", "bwd of floor", "peak MiB", "extra MiB"):
        shown.add_column(name, justify="right")
    previous = None
    for (case, function, backend), by_pass in rows(document):
        if previous not in (None, case):
            shown.add_section()
        previous = case
        fwd, bwd, both = by_pass["fwd"], by_pass["bwd"], by_pass["both"]
        shown.add_row(
            case, function, backend,
            *(f"{r['median_ms']:.2f} ±{_spread(r):.0f}%" for r in (fwd, bwd, both)),
            _number(factor * fwd["tflops"]), _number(factor * bwd["tflops"]), _percent(fwd), _percent(bwd),
            _mib(both["peak_mib"]), _mib(both["extra_mib"]),
        )  # fmt: skip
    return shown


def skipped(document: dict[str, Any]) -> list[str]:
    return [f"{s['case']} {s['function']} {s['backend']}: not run, {s['why']}" for s in document["skipped"]]


def comparison(new: dict[str, Any], old: dict[str, Any]) -> Table:
    """Old and new medians of everything both have; drift of the machine cancels in the fraction of the floor."""
    shown = Table(title=f"against {title(old)}, commit {old['commit']}", **LOOK)
    for name in ("case", "function", "backend", "pass"):
        shown.add_column(name, no_wrap=True)
    for name in ("old ms", "new ms", "speed-up", "old of floor", "new of floor", "change"):
        shown.add_column(name, justify="right")
    before = {(*key, which): r for key, by_pass in rows(old) for which, r in by_pass.items()}
    for key, by_pass in rows(new):
        for which, r in by_pass.items():
            was = before.get((*key, which))
            if was is None:
                continue
            change = r["floor_fraction"] / was["floor_fraction"]
            style = "green" if change > 1.03 else "red" if change < 0.97 else ""
            shown.add_row(
                *key, which, MS.format(was["median_ms"]), MS.format(r["median_ms"]),
                f"{was['median_ms'] / r['median_ms']:.2f}x", _percent(was), _percent(r), f"{change:.2f}x", style=style,
            )  # fmt: skip
    return shown


def markdown(document: dict[str, Any], patterns: Iterable[str] = ()) -> str:
    """The table of the README: cases that match ``patterns``, everything if there are none."""
    wanted = list(patterns) or ["*"]
    prefix, factor = unit(document)
    head = ("case", "function", "backend", "forward ms", "backward ms", "both ms", f"{prefix}FLOP/s fwd / bwd",
            "of floor fwd / bwd", "peak MiB", "extra MiB")  # fmt: skip
    lines = [_row(head), _row("---" if i < 3 else "---:" for i in range(len(head)))]
    for (case, function, backend), p in rows(document):
        if any(fnmatchcase(case, pattern) for pattern in wanted):
            fwd, bwd, both = p["fwd"], p["bwd"], p["both"]
            times = (MS.format(r["median_ms"]) for r in (fwd, bwd, both))
            rates = f"{_number(factor * fwd['tflops'])} / {_number(factor * bwd['tflops'])}"
            floors = f"{_percent(fwd)} / {_percent(bwd)}"
            lines.append(
                _row((case, function, backend, *times, rates, floors, _mib(both["peak_mib"]), _mib(both["extra_mib"])))
            )
    lines += [
        "",
        f"{title(document)}, commit {document['commit']}. {rates_line(document)}. Medians. Memory is that of forward "
        "and backward together: the peak beyond inputs, and beyond inputs, outputs and gradients.",
    ]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(x: float | None) -> str:
    """Three digits."""
    return "-" if x is None else f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def _spread(record: dict[str, Any]) -> float:
    return 50 * (record["p80_ms"] - record["p20_ms"]) / record["median_ms"]


def _percent(record: dict[str, Any]) -> str:
    return f"{100 * record['floor_fraction']:.0f} %"


def _mib(x: float | None) -> str:
    return "-" if x is None else f"{x:,.0f}"
