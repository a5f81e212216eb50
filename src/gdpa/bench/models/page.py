"""A result of `gdpa bench --model` as one HTML file that needs nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gdpa import pages
from gdpa.bench.models import report as model_report
from gdpa.bench.report.page import facts, rates_table
from gdpa.bench.report.tables import skipped, title
from gdpa.pages import Cell, Row, Table

TEMPLATE = """\
<header>
<h1>gdpa bench --model</h1>
<p class="note">{{ title }}</p>
{% if conclusions %}<ul class="words lead" id="conclusion">
{% for line in conclusions %}<li{% if line.startswith("Warning") %} class="warn"{% endif %}>{{ line | whole }}</li>
{% endfor %}</ul>
{% endif %}<p class="note">{{ notes }}.</p>
<!-- contents -->
</header>
{% for case in cases %}<section id="{{ case.name }}">
<h2>{{ case.name }}</h2>
<p class="note">{{ case.words }}.</p>
{% if case.table.rows %}{{ table(case.table) }}
<h3>Where the time of a step goes, ms</h3>
{{ scale("0 ms", case.most, "of a step") }}
{{ table(case.profile) }}
<details><summary>The longest kernels</summary>
{% for name, kernels in case.kernels %}<h3>{{ name }}</h3>
{{ table(kernels) }}
{% endfor %}</details>{% endif %}
</section>
{% endfor %}
{% if skipped %}<section id="skipped">
<h2>What was not run</h2>
<ul class="note">
{% for line in skipped %}<li>{{ line }}</li>
{% endfor %}</ul></section>
{% endif %}<section id="machine">
<h2>The machine and the run</h2>
{{ facts(about) }}
{{ table(rates) }}
</section>
<section id="models">
<h2>The models</h2>
{% for name, options in models %}<h3>{{ name }}</h3>
{{ code(options, options.count("\n") + 1) }}
{% endfor %}</section>
"""


def write_page(document: dict[str, Any], path: Path) -> str:
    """Write the report; returns what was done."""
    return pages.write(page(document), path)


def page(document: dict[str, Any]) -> str:
    """The report."""
    return pages.render(
        TEMPLATE,
        f"gdpa bench --model: {title(document)}",
        title=title(document),
        conclusions=model_report.conclusions(document),
        notes=model_report.notes(document),
        cases=[_case(document, name) for name in document["cases"]],
        skipped=skipped(document),
        about=facts(document),
        rates=rates_table(document),
        models=[(name, json.dumps(options, indent=1)) for name, options in document["models"].items()],
    )


def _case(document: dict[str, Any], name: str) -> dict[str, Any]:
    entries = model_report.by_case(document)[name]
    in_turns = any("turns_ms" in r for r in entries.values())  # older results are not
    head = ["contender", "function", "ms a step (p20–p80)", *(["median of each turn"] if in_turns else []),
            *model_report.measures(document), "loss", "compile s"]  # fmt: skip
    rows = [
        Row(
            [backend, r["function"], Cell(f"{r['median_ms']:.1f}", f"{r['p20_ms']:.1f}–{r['p80_ms']:.1f}"),
             *([" ".join(f"{ms:.1f}" for ms in r["turns_ms"])] if in_turns else []),
             *model_report.figures(document, entries, r), f"{r['loss']:.4f}", f"{r['compile_s']:.0f}"],
            "own" if backend.startswith(model_report.OURS) else "",
        )
        for backend, r in entries.items()
    ]  # fmt: skip
    profile_head, profile_rows = model_report.profile_rows(document, name)
    timed = slice(1, 1 + len(entries))  # behind them are floors, of which some are unknown
    most = max((float(cell) for row in profile_rows for cell in row[timed]), default=0.0)
    return {
        "name": name,
        "words": model_report.case_words(name, document["cases"][name]),
        "table": Table("", head, rows, 2),
        "profile": Table("", profile_head, [_heated(row, timed, most) for row in profile_rows]),
        "most": f"{most:.1f} ms",
        "kernels": [(backend, _kernels(r)) for backend, r in entries.items()],
    }


def _heated(row: list[str], timed: slice, most: float) -> Row:
    heated = [Cell(cell, heat=pages.heat_scale(float(cell), 0, most)) for cell in row[timed]]
    return Row([*row[: timed.start], *heated, *row[timed.stop :]])


def _kernels(record: dict[str, Any]) -> Table:
    rows = [Row([k["name"], k["group"], f"{k['ms']:.2f}"]) for k in record["profile"]["kernels"]]
    return Table("", ["kernel", "group", "ms a step"], rows, 2)
