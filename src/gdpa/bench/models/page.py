"""A result of `gdpa bench --model` as one HTML file that needs nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gdpa.bench.models import report
from gdpa.bench.report.page import HtmlTable, Row, facts, rates_table
from gdpa.bench.report.tables import skipped, title
from gdpa.bench.report.template import STYLE, TABLE

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gdpa bench --model: {{ title }}</title>
<style>
{{ style }}</style>
</head>
<body>
<h1>gdpa bench --model</h1>
<p class="note">{{ title }}</p>
{% if conclusions %}<ul>
{% for line in conclusions %}<li>{{ line }}</li>
{% endfor %}</ul>
{% endif %}<p>{{ notes }}.</p>
{% for case in cases %}<h2 id="{{ case.name }}">{{ case.name }}</h2>
<p class="note">{{ case.words }}.</p>
{% if case.table.rows %}{{ table(case.table) }}
<h3>Where the time of a step goes, ms</h3>
{{ table(case.profile) }}
<details><summary>The longest kernels</summary>
{% for name, kernels in case.kernels %}<h3>{{ name }}</h3>
{{ table(kernels) }}
{% endfor %}</details>{% endif %}
{% endfor %}
{% if skipped %}<ul class="skipped">
{% for line in skipped %}<li>{{ line }}</li>
{% endfor %}</ul>
{% endif %}<h2>The machine and the run</h2>
<div class="scroll"><table>
{% for name, value in facts %}<tr><th class="name">{{ name }}</th><td class="name">{{ value }}</td></tr>
{% endfor %}</table></div>
{{ table(rates) }}
<h2>The models</h2>
{% for name, options in models %}<h3>{{ name }}</h3>
<pre>{{ options }}</pre>
{% endfor %}
</body>
</html>
"""


def write_page(document: dict[str, Any], path: Path) -> str:
    """Write the report; returns what was done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(document), encoding="utf-8")
    return f"report: {path}"


def page(document: dict[str, Any]) -> str:
    """The report."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True)
    layout = environment.from_string(TABLE)
    return environment.from_string(TEMPLATE).render(
        title=title(document),
        style=Markup(STYLE),
        conclusions=report.conclusions(document),
        notes=report.notes(document),
        cases=[_case(document, name) for name in document["cases"]],
        skipped=skipped(document),
        facts=facts(document),
        rates=rates_table(document),
        models=[(name, json.dumps(options, indent=1)) for name, options in document["models"].items()],
        table=lambda table: Markup(layout.render(table=table)),
    )


def _case(document: dict[str, Any], name: str) -> dict[str, Any]:
    entries = report.by_case(document)[name]
    head = ["contender", "function", "ms (p20–p80)", *report.measures(document), "loss", "compile s"]
    rows = [
        Row(
            [backend, r["function"], f"{r['median_ms']:.1f} ({r['p20_ms']:.1f}–{r['p80_ms']:.1f})",
             *report.figures(document, entries, r), f"{r['loss']:.4f}", f"{r['compile_s']:.0f}"],
            ours=backend.startswith(report.OURS),
        )
        for backend, r in entries.items()
    ]  # fmt: skip
    profile_head, profile_rows = report.profile_rows(document, name)
    return {
        "name": name,
        "words": report.case_words(name, document["cases"][name]),
        "table": HtmlTable(head, rows, 2),
        "profile": HtmlTable(profile_head, [Row(row) for row in profile_rows], 1),
        "kernels": [(backend, _kernels(r)) for backend, r in entries.items()],
    }


def _kernels(record: dict[str, Any]) -> HtmlTable:
    rows = [Row([k["name"], k["group"], f"{k['ms']:.2f}"]) for k in record["profile"]["kernels"]]
    return HtmlTable(["kernel", "group", "ms"], rows, 2)
