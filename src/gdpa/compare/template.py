"""The layout of the comparison's report, in the demonstration's style; page.py fills it."""

from __future__ import annotations

# More functions than the demonstration has, and code that is opened by a click.
MORE_STYLE = """\
:root { --series-5: #6d28d9; --series-6: #4d7c0f; --series-7: #0369a1; }
@media (prefers-color-scheme: dark) { :root { --series-5: #b794f6; --series-6: #a3e635; --series-7: #7dd3fc; } }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--muted); }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); } .card { min-width: 0; }
.card pre { background: var(--paper); }
"""

TEMPLATE = """\
{% macro figure(name, caption="") %}{% if name in figures %}<figure id="figure-{{ name }}">{{ figures[name] }}
{% if caption %}<figcaption>{{ caption }}</figcaption>{% endif %}</figure>{% endif %}{% endmacro %}
{% macro table(t) %}<div class="scroll"><table id="{{ t.id }}"><thead><tr>{% for cell in t.head %}\
<th{% if loop.index0 < t.names %} class="name"{% endif %}>{{ cell }}</th>{% endfor %}</tr></thead><tbody>
{% for row in t.rows %}<tr{% if row.kind %} class="{{ row.kind }}"{% endif %}>{% for cell in row.cells %}\
<td{% if loop.index0 < t.names %} class="name"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gdpa compare: {{ names | join(", ") }}</title>
<style>
{{ style }}</style>
</head>
<body><main>
<header>
<h1>{{ names | join(", ") }}</h1>
<p class="lead">{{ names | length }} attention functions side by side: whether their kernels are right, what they cost,
and how {{ model }} learns with them.</p>
{% if failures %}<p class="bad" id="verdict">{{ failures | length }} of the checks failed:</p>
<ul>{% for line in failures %}<li class="bad">{{ line }}</li>{% endfor %}</ul>
{% else %}<p class="good" id="verdict">All checks passed.</p>{% endif %}
{% for line in conclusions %}<p class="conclusion">{{ line }}</p>
{% endfor %}
{% if quick %}<p class="note">This is the quick form: one seed and {{ training.steps }} steps, just to show that
everything runs. Its accuracies mean nothing.</p>{% endif %}
{% if not figures %}<p class="note" id="no-figures">Without figures: matplotlib is not installed
(pip install '.[plot]' in a clone of gdpa).</p>{% endif %}
<div class="tiles">{% for tile in tiles %}<div class="tile"><b>{{ tile[0] }}</b><span>{{ tile[1] }}</span></div>
{% endfor %}</div>
</header>

<section id="functions">
<h2>The functions, and the kernels that they become</h2>
{{ figure("curves") }}
<div class="cards">{% for card in cards %}<div class="card"><h3><span class="key"
style="background: var(--series-{{ card.series }})"></span>{{ card.name }}</h3>
<p class="note">{{ card.words }}</p>
<pre>{{ card.written }}</pre>
<details><summary>The code in the kernels, {{ card.lines }} lines ({{ card.file }})</summary>
<pre class="long">{{ card.emitted }}</pre></details></div>
{% endfor %}</div>
</section>

<section id="correctness">
<h2>Are they right?</h2>
<p>Outputs and all gradients against float64, on dense and on jagged sequences (some of them empty). In 16 bits, how
large the error is beside that of the definition's own roundings (at most 1.15 is allowed), then beside plain
PyTorch's (1); in float32, gdpa's largest error and PyTorch's in brackets.</p>
{{ table(correctness) }}
{% if not_run %}<p class="note">Not run here: {{ not_run | join("; ") }}.</p>{% endif %}
</section>

<section id="speed">
<h2>What do they cost?</h2>
<p>One call of gdpa.attention, {{ speed_setting }}. The functions took turns on the same tensors; the range after a
median holds the middle three fifths of the calls.</p>
{% for line in speed_warnings %}<p class="note">{{ line }}</p>{% endfor %}
{{ figure("speed") }}
{{ table(speed) }}
</section>

<section id="accuracy">
<h2>How does a model learn with them?</h2>
<p>{{ about }}</p>
<div class="pair">{{ figure("accuracy") }}{{ figure("gain") }}</div>
{{ table(accuracy) }}
<div class="pair">{{ figure("losses", "Means over the seeds, and over some steps.") }}
<div><h3>How to read this</h3>
{% for text in caveat %}<p class="note">{{ text }}</p>{% endfor %}</div></div>
</section>

<section id="machine">
<h2>The machine and the run</h2>
<div class="scroll"><table>{% for key, value in facts %}<tr><th class="name">{{ key }}</th>\
<td class="name" style="white-space: normal">{{ value }}</td></tr>
{% endfor %}</table></div>
<p class="note">The numbers of this page are in compare.json beside it.</p>
</section>
</main></body>
</html>
"""
