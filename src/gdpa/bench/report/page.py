"""A result document as one HTML file that needs nothing else: conclusion, tables, plots, what was not run and why."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from gdpa import pages
from gdpa.backends import BACKENDS
from gdpa.bench import conclusion, noise
from gdpa.bench.kernels.passes import PASSES
from gdpa.bench.report.plot import CAPTIONS, drawings
from gdpa.bench.report.tables import MS, cpu, errors, mib, number, percent, reason, title, unit
from gdpa.bench.report.template import TEMPLATE
from gdpa.bench.results import SOFTMAX, ByPass, Key, groups, key_of, product_rate, rows
from gdpa.pages import Cell, Row, Table

# What every contender is compared with: name shown, backend, whether its function must be the same.
BASELINES = (("cuDNN", "sdpa-cudnn", False), ("triton", "triton", True), ("eager", "eager", True))
SENSORS = {
    "clocks.sm": "SM clock, MHz", "clocks.mem": "memory clock, MHz", "power.draw": "power, W",
    "power.limit": "power limit, W", "temperature.gpu": "GPU, °C",
}  # fmt: skip


def write_page(document: dict[str, Any], path: Path) -> str:
    """Write the report; returns what was done."""
    return pages.write(page(document), path)


def page(document: dict[str, Any]) -> str:
    """The report. Without matplotlib there are no plots."""
    from markupsafe import Markup

    has_plots = importlib.util.find_spec("matplotlib") is not None
    drawn = drawings(document) if has_plots else {}
    return pages.render(
        TEMPLATE,
        f"gdpa bench: {title(document)}",
        title=title(document),
        gpu=document["gpu"],
        prefix=unit(document)[0],
        product="cuBLAS" if document["gpu"] else "matrix product",
        conclusion=conclusion.lines(document),
        figures=conclusion.tiles(document),
        about=facts(document),
        rates=rates_table(document),
        overview=overview(document),
        drawings=[(name, Markup(svg), CAPTIONS[name.partition("-")[0]]) for name, svg in drawn.items()],
        cases=[_case(document, name) for name in document["cases"]],
    )


def facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    """What the result's head says of the machine and the run."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    found = [("GPU", document["gpu"]), ("CPU", cpu(document))]
    found += [("versions", versions), ("dtype", document["dtype"]), ("date", document["date"])]
    found += [("commit", document["commit"]), ("took", f"{document['took_s']:.0f} s" if "took_s" in document else None)]
    found += [("load", noise.load_words(document))]
    return [(name, value) for name, value in found if value]


def rates_table(document: dict[str, Any]) -> Table:
    """Every reading of the rates, with the clocks at that moment."""
    readings, clocks = document["rates"]["readings"], document["clocks"]
    prefix, factor = unit(document)
    product = product_rate(document)
    sizes = list(readings[0].get("products", {}))
    sensors = list(next((c for c in clocks if c), {}))
    lines = []
    for i, (reading, clock) in enumerate(zip(readings, clocks, strict=True)):
        products = [number(factor * reading["products"][size]) for size in sizes]
        sensed = [f"{clock[sensor]:g}" if clock and sensor in clock else "" for sensor in sensors]
        best = [number(factor * reading[product]), number(factor * reading["copy_tb_s"])]
        lines.append(Row([reading.get("when", str(i + 1)), *best, *products, *sensed]))
    head = ["reading", f"product {prefix}FLOP/s", f"copy {prefix}B/s", *(f"{size} {prefix}FLOP/s" for size in sizes)]
    head += [SENSORS.get(sensor, sensor) for sensor in sensors]
    return Table("rates-table", head, lines)


def overview(document: dict[str, Any]) -> Table:
    """A line per case and function, a column per contender."""
    every = groups(document)
    contenders = list(dict.fromkeys(name for entries in every.values() for name in entries))
    lines = [
        Row([case, function, *(_share(entries.get(contender)) for contender in contenders)])
        for (case, function), entries in every.items()
    ]
    return Table("overview-table", ["case", "function", *contenders], lines, 2)


def _share(by_pass: ByPass | None) -> str | Cell:
    if by_pass is None:
        return "–"
    mean = (by_pass["fwd"]["floor_fraction"] + by_pass["bwd"]["floor_fraction"]) / 2
    return Cell(_fractions(by_pass), heat=pages.heat_scale(mean, 0, 1))


def _fractions(by_pass: ByPass) -> str:
    return f"{percent(by_pass['fwd'])} / {percent(by_pass['bwd'])}"


def _case(document: dict[str, Any], name: str) -> dict[str, Any]:
    """One case: in words, its table, and who did not run."""
    skipped = [
        f"{key_of(document, s).label} ({s['function']}) not run: {reason(s)}"
        for s in document["skipped"]
        if s["case"] == name
    ]
    return {
        "name": name,
        "words": case_words(document["cases"][name]),
        "table": case_table(document, name),
        "skipped": skipped,
    }


def case_words(case: dict[str, Any]) -> str:
    """Shape and work of a case in a sentence."""

    def length(side: str) -> str:
        longest, mean = case[f"max_{side}"], case[f"mean_{side}"]
        return f"{longest}" if longest == mean else f"up to {longest}, {mean:.0f} on average"

    left, right = ("all" if side is None else side for side in case["band"])
    band = "" if left == right == "all" else f"; of them {left} before and {right} after the query's own place"
    work = f"{number(case['gflop']['fwd'])} GFLOP forward, {number(case['gflop']['bwd'])} backward"
    sequences = f"{case['batch']} sequence{'' if case['batch'] == 1 else 's'}"
    return (
        f"{sequences}, {case['heads']} heads of {case['d']}; queries {length('q')}; keys {length('k')}{band}; {work}."
    )


def case_table(document: dict[str, Any], name: str) -> Table:
    """Every contender's times, speeds, fractions of the roofline, errors and ratios on one case."""
    prefix, factor = unit(document)
    entries = {key: by_pass for key, by_pass in rows(document) if key.case == name}
    baselines = [b for b in BASELINES if b[1] in {key.backend for key in entries}]
    head = [
        "contender",
        "function",
        *(f"{which} ms" for which in PASSES),
        f"{prefix}FLOP/s fwd / bwd",
        "of roofline fwd / bwd",
        "rms error fwd / bwd",
    ]
    head += [*(f"speed vs {shown} fwd / bwd" for shown, _, _ in baselines), "MiB peak / extra"]
    lines = []
    for key, by_pass in entries.items():
        fwd, bwd, both = (by_pass[which] for which in PASSES)
        ratios = []
        for _, of, same in baselines:
            base = _baseline(entries, key, of, key.function if same else SOFTMAX)
            ratios.append(" / ".join(_ratio(base, by_pass, which) for which in ("fwd", "bwd")) if base else "")
        under = ", ".join(filter(None, (key.precision, fwd["layout"])))
        cells: list[str | Cell] = [Cell(key.backend, under), key.function]
        cells += [_time(record) for record in (fwd, bwd, both)]
        cells += [f"{number(factor * fwd['tflops'])} / {number(factor * bwd['tflops'])}", _fractions(by_pass)]
        cells += [errors(by_pass), *ratios, f"{mib(both['peak_mib'])} / {mib(both['extra_mib'])}"]
        lines.append(Row(cells, "own" if key.backend in BACKENDS else ""))
    if entries:
        cells = ["roofline", "", *(MS.format(_floor(record)) for record in (fwd, bwd, both))]
        lines.append(Row([*cells, *[""] * (len(head) - len(cells))], "quiet"))
    return Table("", head, lines, 2)


def _baseline(entries: dict[Key, ByPass], key: Key, backend: str, function: str) -> ByPass | None:
    """A contender in the case's own layout, in the precision of ``key`` if it has several."""
    found = {
        other.precision: by_pass
        for other, by_pass in entries.items()
        if (other.backend, other.function, other.layout) == (backend, function, None)
    }
    return found.get(key.precision) or next(iter(found.values()), None)


def _floor(record: dict[str, Any]) -> float:
    """Milliseconds; the same for every contender of a case."""
    return record["median_ms"] * record["floor_fraction"]


def _time(record: dict[str, Any]) -> Cell:
    return Cell(MS.format(record["median_ms"]), f"{MS.format(record['p20_ms'])}–{MS.format(record['p80_ms'])}")


def _ratio(base: ByPass, by_pass: ByPass, which: str) -> str:
    """~ where the spread exceeds the difference."""
    mine, theirs = by_pass[which], base[which]
    doubt = "~" if mine is not theirs and noise.uncertain(mine, theirs) else ""
    return f"{doubt}{noise.ratio(mine, theirs):.2f}"
