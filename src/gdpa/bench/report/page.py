"""A result document as one HTML file that needs nothing else: tables, plots and what was not run, and why."""

from __future__ import annotations

import base64
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpa.backends import BACKENDS
from gdpa.bench.kernels.passes import PASSES
from gdpa.bench.report.plot import pictures
from gdpa.bench.report.tables import MS, errors, mib, number, percent, title, unit
from gdpa.bench.report.template import STYLE, TABLE, TEMPLATE
from gdpa.bench.results import SOFTMAX, ByPass, Key, groups, key_of, product_rate, rows

# What every contender is compared with: name shown, backend, whether its function must be the same.
BASELINES = (("cuDNN", "sdpa-cudnn", False), ("triton", "triton", True), ("eager", "eager", True))


@dataclass(frozen=True)
class Row:
    cells: list[str]
    ours: bool = False


@dataclass(frozen=True)
class HtmlTable:
    """``names``: how many columns on the left hold words."""

    head: list[str]
    rows: list[Row]
    names: int


def write_page(document: dict[str, Any], path: Path) -> str:
    """Write the report; returns what was done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(document), encoding="utf-8")
    return f"report: {path}"


def page(document: dict[str, Any]) -> str:
    """The report. Without matplotlib there are no plots."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True)
    layout = environment.from_string(TABLE)
    has_plots = importlib.util.find_spec("matplotlib") is not None
    return environment.from_string(TEMPLATE).render(
        title=title(document),
        style=Markup(STYLE),
        gpu=document["gpu"],
        product="cuBLAS" if document["gpu"] else "matrix product",
        facts=facts(document),
        rates=rates_table(document),
        overview=overview(document),
        pictures=[
            (name, base64.b64encode(png).decode()) for name, png in (pictures(document) if has_plots else {}).items()
        ],
        cases=[_case(document, name) for name in document["cases"]],
        table=lambda table: Markup(layout.render(table=table)),
    )


def facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    """What the result's head says of the machine and the run."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    found = [("GPU", document["gpu"]), ("CPU", f"{document['cpu']}, {document['threads']} threads")]
    found += [("versions", versions), ("dtype", document["dtype"]), ("date", document["date"])]
    found += [("commit", document["commit"]), ("took", f"{document['took_s']:.0f} s" if "took_s" in document else None)]
    return [(name, value) for name, value in found if value]


def rates_table(document: dict[str, Any]) -> HtmlTable:
    """Every reading of the rates, with the clocks at that moment."""
    readings, clocks = document["rates"]["readings"], document["clocks"]
    prefix, factor = unit(document)
    product = product_rate(document)
    sizes = list(readings[0].get("products", {}))
    sensors = list(next((c for c in clocks if c), {}))
    lines = []
    for i, (reading, clock) in enumerate(zip(readings, clocks, strict=True)):
        products = [number(factor * reading["products"][size]) for size in sizes]
        sensed = [f"{(clock or {}).get(sensor, float('nan')):g}" for sensor in sensors]
        best = [number(factor * reading[product]), number(factor * reading["copy_tb_s"])]
        lines.append(Row([reading.get("when", str(i + 1)), *best, *products, *sensed]))
    head = ["reading", f"product {prefix}FLOP/s", f"copy {prefix}B/s", *sizes, *sensors]
    return HtmlTable(head, lines, 1)


def overview(document: dict[str, Any]) -> HtmlTable:
    """A line per case and function, a column per contender."""
    every = groups(document)
    contenders = list(dict.fromkeys(name for entries in every.values() for name in entries))
    lines = [
        Row([case, function, *(_fractions(entries.get(contender)) for contender in contenders)])
        for (case, function), entries in every.items()
    ]
    return HtmlTable(["case", "function", *contenders], lines, 2)


def _fractions(by_pass: ByPass | None) -> str:
    return f"{percent(by_pass['fwd'])} / {percent(by_pass['bwd'])}" if by_pass else ""


def _case(document: dict[str, Any], name: str) -> dict[str, Any]:
    """One case: in words, its table, and who did not run."""
    skipped = [
        f"{key_of(document, s).label} ({s['function']}) was not run: {s['why']}"
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
    return (
        f"{case['batch']} sequences, {case['heads']} heads of {case['d']}; queries {length('q')}; keys {length('k')}"
        f"{band}; {work}."
    )


def case_table(document: dict[str, Any], name: str) -> HtmlTable:
    """Every contender's times, speeds, fractions of the floor, errors and ratios on one case."""
    prefix, factor = unit(document)
    entries = {key: by_pass for key, by_pass in rows(document) if key.case == name}
    baselines = [b for b in BASELINES if b[1] in {key.backend for key in entries}]
    head = [
        "backend",
        "precision",
        "layout",
        "function",
        *(f"{which} ms" for which in PASSES),
        f"{prefix}FLOP/s fwd / bwd",
        "of floor fwd / bwd",
        "rms error fwd / bwd",
    ]
    head += [*(f"x {shown} fwd / bwd" for shown, _, _ in baselines), "peak MiB", "extra MiB"]
    lines = []
    for key, by_pass in entries.items():
        fwd, bwd, both = (by_pass[which] for which in PASSES)
        ratios = []
        for _, of, same in baselines:
            base = _baseline(entries, key, of, key.function if same else SOFTMAX)
            ratios.append(" / ".join(_ratio(base, by_pass, which) for which in ("fwd", "bwd")) if base else "")
        cells = [key.backend, key.precision or "", fwd["layout"], key.function]
        cells += [_time(record) for record in (fwd, bwd, both)]
        cells += [f"{number(factor * fwd['tflops'])} / {number(factor * bwd['tflops'])}", _fractions(by_pass)]
        cells += [errors(by_pass), *ratios, mib(both["peak_mib"]), mib(both["extra_mib"])]
        lines.append(Row(cells, ours=key.backend in BACKENDS))
    if entries:
        cells = ["floor", "", "", "", *(MS.format(_floor(record)) for record in (fwd, bwd, both))]
        lines.append(Row(cells + [""] * (len(head) - len(cells))))
    return HtmlTable(head, lines, 4)


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


def _time(record: dict[str, Any]) -> str:
    return f"{MS.format(record['median_ms'])} ({MS.format(record['p20_ms'])}–{MS.format(record['p80_ms'])})"


def _ratio(base: ByPass, by_pass: ByPass, which: str) -> str:
    return f"{base[which]['median_ms'] / by_pass[which]['median_ms']:.2f}"
