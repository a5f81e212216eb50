"""The layout of the HTML report, for page.py to fill. Everything is inline: the file can be mailed."""

from __future__ import annotations

STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; }
h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
h3 { font-size: 1rem; margin: 1.8rem 0 0.2rem; }
p.note { color: #555; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; margin: 0.4rem 0; }
th, td { padding: 0.2rem 0.7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #eee; }
th { color: #555; font-weight: 600; border-bottom: 1px solid #bbb; }
.name { text-align: left; }
tr.ours td { background: #eef4fb; }
img { max-width: 100%; height: auto; }
ul.skipped { color: #555; font-size: 13px; margin: 0.2rem 0; }
"""

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gdpa bench: {{ title }}</title>
<style>
{{ style }}</style>
</head>
<body>
<h1>gdpa bench</h1>
<p class="note">{{ title }}</p>
<h2>The machine and the run</h2>
<div class="scroll"><table>
{% for name, value in facts %}<tr><th class="name">{{ name }}</th><td class="name">{{ value }}</td></tr>
{% endfor %}</table></div>
<p>The floor of a case is max(flops / {{ product }} rate, bytes / copy rate), with the best of the rates below: medians,
measured in the same run.</p>
{{ table(rates) }}
<h2>How to read the figures</h2>
<ul>
<li>Times are medians (p20 to p80 in brackets){% if gpu %}, by CUDA events, with the L2 cache overwritten before each
call{% endif %}. <b>bwd</b> is the backward alone, <b>both</b> a forward and a backward.</li>
<li>TFLOP/s count the query-key pairs that the mask keeps, for every contender alike: padding earns nothing.</li>
<li>Errors are relative RMS errors against float64 of the function that each computes: of the output / of the worst of
dq, dk and dv, in the very call that is timed (one sequence of it).</li>
<li><b>exact</b> is gdpa's default precision, <b>fast</b> an explicit choice. Layouts: <b>heads</b> (B, H, L, D),
<b>rows</b> (B, L, H, D) seen as that, <b>packed</b> (T, H, D) with cu_seqlens and max_seqlen, <b>packed-nohint</b>
without max_seqlen, <b>qkv</b> packed from one projection.</li>
<li>Contenders of softmax compute another function. They are here because their kernels are the best known.</li>
<li>A ratio above 1 means faster than the one it is taken against.</li>
<li>Peak memory is that of forward and backward beyond the inputs; <b>extra</b>: beyond outputs and gradients too.</li>
</ul>
<h2>Overview: fraction of the floor, forward / backward</h2>
{{ table(overview) }}
{% if pictures %}<h2>Plots</h2>
{% for name, data in pictures %}<p><img alt="{{ name }}" src="data:image/png;base64,{{ data }}"></p>
{% endfor %}{% endif %}
<h2>Every case</h2>
{% for case in cases %}<h3 id="{{ case.name }}">{{ case.name }}</h3>
<p class="note">{{ case.words }}</p>
{% if case.table.rows %}{{ table(case.table) }}{% endif %}
{% if case.skipped %}<ul class="skipped">
{% for line in case.skipped %}<li>{{ line }}</li>
{% endfor %}</ul>{% endif %}
{% endfor %}
</body>
</html>
"""

# A table's first columns are names. `ours` marks the rows of gdpa's backends.
TABLE = """\
<div class="scroll"><table>
<tr>{% for cell in table.head %}<th{% if loop.index0 < table.names %} class="name"{% endif %}>{{ cell }}</th>\
{% endfor %}</tr>
{% for row in table.rows %}<tr{% if row.ours %} class="ours"{% endif %}>\
{% for cell in row.cells %}<td{% if loop.index0 < table.names %} class="name"{% endif %}>{{ cell }}</td>\
{% endfor %}</tr>
{% endfor %}</table></div>
"""
