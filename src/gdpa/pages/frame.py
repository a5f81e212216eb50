"""The layout that all reports share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpa.pages.palette import STYLE

if TYPE_CHECKING:
    from markupsafe import Markup

CONTENTS = "<!-- contents -->"  # where a report wants them
_LONGEST = 24  # letters that are kept in one line: they fit on a phone, in a column too
_WHOLE = re.compile(r"\S+ / \S+|\(\S+\)|\S*\w-\w\S*")
_LONG_NAME = 32  # letters; names beyond that may be broken anywhere
_SECTION = re.compile(r'<section id="([^"]+)">\s*<h2>(.*?)</h2>', re.DOTALL)

FRAME = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
{{ style }}</style>
</head>
<body><main>
{{ body }}
</main></body>
</html>
"""

MACROS = """\
{% macro table(t) %}<div class="scroll" tabindex="0"><table{% if t.id %} id="{{ t.id }}"{% endif %}>\
<thead><tr>{% for cell in t.head %}\
<th{% if loop.index0 < t.names %} class="name"{% endif %}>{{ cell | whole }}</th>{% endfor %}</tr></thead><tbody>
{% for row in t.rows %}<tr{% if row.kind %} class="{{ row.kind }}"{% endif %}>{% for cell in row.cells %}\
{% set heat = cell.heat is defined and cell.heat is not none %}\
<td{% if loop.index0 < t.names %} class="name{% if cell | string | length > long_name %} wraps{% endif %}"\
{% elif heat %} class="heat" \
style="background: rgba(var(--heat), {{ "%.2f" | format(0.6 * cell.heat) }})"\
{% endif %}>{{ cell }}{% if cell.under %}<small>{{ cell.under }}</small>{% endif %}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endmacro %}
{% macro facts(pairs) %}<div class="scroll"><table>{% for key, value in pairs %}<tr><th class="name">{{ key }}</th>\
<td class="name wraps">{{ value }}</td></tr>
{% endfor %}</table></div>{% endmacro %}
{% macro figure(drawing, name, caption="", wide=false) %}{% if drawing %}<figure id="figure-{{ name }}"\
{% if wide %} class="wide" tabindex="0"{% endif %}>{{ drawing }}
{% if caption %}<figcaption>{{ caption }}</figcaption>{% endif %}</figure>{% endif %}{% endmacro %}
{% macro code(text, lines, where="") %}{% if lines > 18 %}<pre class="long" tabindex="0">{{ text }}</pre>
<p class="note">{{ lines }} lines: scroll inside the panel to see the rest{% if where %}, or open {{ where }}\
{% endif %}.</p>{% else %}<pre tabindex="0">{{ text }}</pre>{% endif %}{% endmacro %}
{% macro scale(low, high, what) %}<p class="scale"><span>{{ low }}</span><i></i><span>{{ high }}</span>\
<span>{{ what }}</span></p>{% endmacro %}
{% macro tiles(found) %}{% if found %}<div class="tiles">{% for figure, words in found %}<div class="tile">\
<b>{{ figure }}</b><span>{{ words }}</span></div>
{% endfor %}</div>{% endif %}{% endmacro %}
"""


def whole(text: object) -> Markup:
    """The text, in which what belongs together is not broken between lines: 2.4e-3, fwd / bwd, (p20–p80)."""
    from markupsafe import Markup, escape

    found, at = Markup(""), 0
    for match in _WHOLE.finditer(str(text)):
        if len(match[0]) <= _LONGEST:
            found += escape(str(text)[at : match.start()]) + Markup('<span class="whole">{}</span>').format(match[0])
            at = match.end()
    return found + escape(str(text)[at:])


def render(template: str, title: str, /, **values: Any) -> str:
    """A report: ``template`` is the body, with sections (id, h2), and may use the macros above; values are escaped
    unless they are Markup. The contents, links to the sections, go where CONTENTS stands."""
    from jinja2 import DictLoader, Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, loader=DictLoader({"macros": MACROS}))
    environment.filters["whole"] = whole
    environment.globals["long_name"] = _LONG_NAME
    names = ", ".join(re.findall(r"macro (\w+)", MACROS))
    body = environment.from_string(f'{{% from "macros" import {names} %}}{template}').render(**values)
    links = " ".join(f'<a href="#{id}">{heading}</a>' for id, heading in _SECTION.findall(body))
    body = body.replace(CONTENTS, f'<nav class="contents" aria-label="contents">{links}</nav>')
    return environment.from_string(FRAME).render(title=title, style=Markup(STYLE), body=Markup(body.strip()))


def write(text: str, path: Path) -> str:
    """Write a report; returns what was done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return f"report: {path}"
