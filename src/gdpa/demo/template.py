"""The layout of the demonstration's report, for page.py to fill. Everything is inline: the file can be mailed."""

from __future__ import annotations

STYLE = """\
:root { color-scheme: light dark; --paper: #ffffff; --card: #f6f7f9; --ink: #1c2330; --muted: #667085; --grid: #e3e6eb;
  --good: #15803d; --bad: #b91c1c; --series-0: #8a93a3; --series-1: #c2620a; --series-2: #2563eb; --series-3: #0d8a7d;
  --series-4: #be185d; --k: #7c3aed; --s: #15803d; --c: #8a93a3; --n: #b45309; }
@media (prefers-color-scheme: dark) { :root { --paper: #12151b; --card: #1a1f28; --ink: #e6e9ef; --muted: #98a2b3;
  --grid: #2c3340; --good: #4ade80; --bad: #f87171; --series-0: #98a2b3; --series-1: #f59e42; --series-2: #6ea0ff;
  --series-3: #2dd4bf; --series-4: #f472b6; --k: #b794f6; --s: #7ee2a8; --c: #7a8496; --n: #f0b072; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.6 system-ui, -apple-system, "Segoe UI",
  Roboto, sans-serif; }
main { max-width: 1020px; margin: 0 auto; padding: 2.5rem 1.2rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.02em; }
h2 { font-size: 1.35rem; margin: 3.2rem 0 .6rem; letter-spacing: -.01em; }
h3 { font-size: 1rem; margin: 0 0 .3rem; }
p { margin: .5rem 0 1rem; max-width: 46rem; }
.lead { font-size: 1.12rem; }
.note, figcaption { color: var(--muted); font-size: .9rem; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(195px, 1fr)); gap: .9rem; margin: 1.6rem 0; }
.tile { background: var(--card); border-radius: 12px; padding: .9rem 1.1rem; }
.tile b { display: block; font-size: 1.55rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: .88rem; line-height: 1.4; display: block; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1.2rem;
  align-items: start; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 1.2rem; }
.card { background: var(--card); border-radius: 12px; padding: 1rem 1.1rem; }
figure { margin: .6rem 0; max-width: 560px; }
figure svg { width: 100%; height: auto; display: block; overflow: visible; }
figure svg text { font-family: inherit; }
.scroll { overflow-x: auto; margin: .6rem 0 1rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { color: var(--muted); font-weight: 600; }
.name { text-align: left; }
tr.own td { font-weight: 600; }
tr.quiet td { color: var(--muted); }
pre { background: var(--card); border-radius: 12px; padding: 1rem 1.1rem; overflow-x: auto; font: 13px/1.5 ui-monospace,
  SFMono-Regular, Menlo, Consolas, monospace; margin: .6rem 0; }
pre.long { max-height: 26rem; overflow-y: auto; }
.k, .kn, .kc, .ow { color: var(--k); } .s1, .s2, .sd { color: var(--s); } .c1, .ch { color: var(--c); }
.mi, .mf, .nd { color: var(--n); }
.key { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .45em; }
@media print { .tile, .card, pre { border: 1px solid var(--grid); } }
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
<title>gdpa demo: {{ name }}</title>
<style>
{{ style }}</style>
</head>
<body><main>
<header>
<h1>An attention function of our own</h1>
<p class="lead">gdpa computes attention in which softmax is replaced by any function you write. This report takes one
that nobody has a kernel for, <b>{{ name }}</b>: shows the kernel that it becomes, checks it, trains a recommendation
model with it beside softmax, gelu and silu, and says what it costs.</p>
{% if failures %}<p class="bad" id="verdict">{{ failures | length }} of the checks failed:</p>
<ul>{% for line in failures %}<li class="bad">{{ line }}</li>{% endfor %}</ul>
{% else %}<p class="good" id="verdict">All checks passed.</p>{% endif %}
{% if quick %}<p class="note">This is the quick form: one seed and {{ plan.steps }} steps, just to show that everything
runs. Its accuracies mean nothing.</p>{% endif %}
{% if not figures %}<p class="note" id="no-figures">Without figures: matplotlib is not installed
(pip install '.[plot]' in a clone of gdpa).</p>{% endif %}
<div class="tiles">{% for tile in tiles %}<div class="tile"><b>{{ tile[0] }}</b><span>{{ tile[1] }}</span></div>
{% endfor %}</div>
</header>

<section id="function">
<h2>The function, and the kernel that it becomes</h2>
<p>Each attention weight is p = f(s) of its own score s = &lang;q, k&rang; / &radic;d, no sum over the row. The params
after s are learned, one value per head. This is all that has to be written:</p>
<pre>{{ written }}</pre>
<p>gdpa traces it, derives it, and emits value and derivatives together, with the parts they share computed once. This
is the code inside the GPU kernels, for bfloat16 on an NVIDIA GPU:</p>
<pre class="long">{{ emitted }}</pre>
</section>

<section id="correctness">
<h2>Is it right?</h2>
<p>Outputs and all gradients against float64, on dense and on jagged sequences (some of them empty):
max |x &minus; exact| / max |exact|. A result passes if it is at most 2 times (values) or 3 times (gradients) as far off
as plain PyTorch in the same precision, which is the number in brackets.</p>
{{ table(correctness) }}
{% if not_run %}<p class="note">Not run here: {{ not_run | join("; ") }}.</p>{% endif %}
<p>The trained models below, computed again in float64 by plain padded PyTorch from the same weights
(limit {{ "%.0e" | format(limit) }} of the largest logit):</p>
{{ table(agreement) }}
</section>

<section id="accuracy">
<h2>Does it learn?</h2>
<p>InterFormer, a click model in which a user's history and the context inform each other, trained on gdpa's synthetic
click log with four functions in all of its attention; and, for scale, a model of the context alone, without any
history. {{ about }}</p>
<div class="pair">{{ figure("accuracy") }}{{ figure("gain") }}</div>
{{ table(accuracy) }}
<div class="pair">{{ figure("losses", loss_caption) }}
<div><h3>What this is, and what it is not</h3>
{% for text in caveat %}<p class="note">{{ text }}</p>{% endfor %}</div></div>
</section>

<section id="attention">
<h2>What do the functions do?</h2>
<p>The self-attention of the trained models (seed {{ plan.seeds[0] }}, the head whose weights vary most) on one
history of the test set. Above, the function, and in grey how often each score occurs in {{ many }} histories. Below,
the weights: the row's token attends to the column's; <b style="color: rgb{{ plus }}">blue</b> is above zero,
<b style="color: rgb{{ minus }}">orange</b> below, and the strongest weight of each picture is opaque. A star marks
events in the category of the candidate.</p>
<div class="cards">{% for card in cards %}<div class="card"><h3><span class="key"
style="background: var(--series-{{ card.series }})"></span>{{ card.name }}</h3>
<p class="note">{{ card.words }}</p>
{{ figure("curve-" ~ card.name) }}{{ figure("weights-" ~ card.name) }}</div>
{% endfor %}</div>
</section>

<section id="cost">
<h2>What does it cost?</h2>
<p>{{ name }}, forward and backward, {{ cost_setting }}, beside the same function in eager PyTorch, which stores a score
for every pair. {{ cost_verdict }}</p>
<div class="pair">{{ figure("time") }}{{ figure("memory") }}</div>
{{ table(cost) }}
</section>

<section id="machine">
<h2>The machine and the run</h2>
<div class="scroll"><table>{% for key, value in facts %}<tr><th class="name">{{ key }}</th>\
<td class="name" style="white-space: normal">{{ value }}</td></tr>
{% endfor %}</table></div>
<p class="note">Again: <code>gdpa demo</code>. Everything is seeded: a second run on this machine differs only in its
times. The numbers of this page are in demo.json beside it.</p>
</section>
</main></body>
</html>
"""
