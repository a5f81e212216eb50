"""The sections of the demonstration's report, for page.py to fill; gdpa.pages has the frame and the look."""

from __future__ import annotations

TEMPLATE = """\
<header>
<h1>Attention with {{ name }}{% if name != "softmax" %} in place of softmax{% endif %}</h1>
<p class="lead">gdpa computes attention in which softmax is replaced by any function you write. This report is about one
of them, <b>{{ name }}</b>: the kernel that it becomes, its errors, how well a small recommendation model learns with it
beside {{ others | join(" and ") }}, and what it costs.</p>
{% if failures %}<p class="bad" id="verdict">{{ failures | length }} of the checks failed:</p>
<ul>{% for line in failures %}<li class="bad">{{ line }}</li>{% endfor %}</ul>
{% else %}<p class="good" id="verdict">All checks passed.</p>{% endif %}
{% if quick %}<p class="note">This is the quick form: one seed and {{ plan.steps }} steps, just to show that everything
runs. Its accuracies mean nothing.</p>{% endif %}
{% if not figures %}<p class="note" id="no-figures">Without figures: matplotlib is not installed
(pip install '.[plot]' in a clone of gdpa).</p>{% endif %}
{% for line in doubts %}<p class="warn">{{ line }}</p>
{% endfor %}{{ tiles(figures_to_remember) }}
<!-- contents -->
</header>

<section id="function">
<h2>The function, and the kernel that it becomes</h2>
<p>Each attention weight is p = f(s) of its own score s = &lang;q, k&rang; / &radic;d, no sum over the row. The params
after s are learned, one value per head. This is all that has to be written:</p>
{{ code(written, 1) }}
<p>gdpa traces it, differentiates it, and emits value and derivatives together, with the parts they share computed once.
This is the code inside the GPU kernels, for bfloat16 on an NVIDIA GPU:</p>
{{ code(emitted, emitted_lines, "kernel.py beside this file") }}
</section>

<section id="correctness">
<h2>Is it right?</h2>
<p>Outputs and all gradients against float64, on dense and on jagged sequences (some of them empty). In float32:
max |x &minus; exact| / max |exact|, in brackets that of plain PyTorch; 2 times as much (values) or 3 times (gradients)
passes. In 16 bits: gdpa's RMS error divided by that of exact arithmetic rounded only where the definition rounds (at
most 1.15 passes), then divided by plain PyTorch's (at most 1), the worst of several means and spreads of scores. A
ratio above its limit passes if so few numbers are compared that it may be chance, as with dparams; 0.00 is an error
of a few float32 roundings, or less.</p>
{{ table(correctness) }}
{% if not_run %}<p class="note">Not run here: {{ not_run | join("; ") }}.</p>{% endif %}
<p>The trained models below, computed again in float64 by plain padded PyTorch from the same weights
(limit {{ "%.0e" | format(limit) }} of the largest logit):</p>
{{ table(agreement) }}
</section>

<section id="accuracy">
<h2>Does it learn?</h2>
<p>InterFormer, a click model in which a user's history and the context inform each other, trained on gdpa's synthetic
click log with {{ many_functions }} in all of its attention; and, for scale, a model of the context alone, without any
history. {{ about }}</p>
<div class="pair">{{ figure(figures.accuracy, "accuracy") }}{{ figure(figures.gain, "gain") }}</div>
{{ table(accuracy) }}
<div class="pair">{{ figure(figures.losses, "losses", loss_caption) }}
<div><h3>What this is, and what it is not</h3>
{% for text in caveat %}<p class="note">{{ text }}</p>{% endfor %}</div></div>
</section>

<section id="attention">
<h2>What do the functions do?</h2>
<p>The self-attention of the trained models (seed {{ plan.seeds[0] }}, the head whose weights vary most) on one
history of the test set. Above, the function, and in grey how often each score occurs in {{ many }} histories. Below,
the weights: the row's token attends to the column's, with the scale of each picture beside it. A star marks events in
the category of the candidate.</p>
<div class="cards">{% for card in cards %}<div class="card"><h3><span class="key"
style="background: var(--series-{{ card.series }})"></span>{{ card.name }}</h3>
<p class="note">{{ card.words }}</p>
{{ figure(figures["curve-" ~ card.name], "curve-" ~ card.name) }}\
{{ figure(figures["weights-" ~ card.name], "weights-" ~ card.name) }}</div>
{% endfor %}</div>
</section>

<section id="cost">
<h2>What does it cost?</h2>
<p>{{ name }}, forward and backward, {{ cost_setting }}, beside the same function in eager PyTorch, which stores a score
for every pair. {{ cost_verdict }}</p>
<div class="pair">{{ figure(figures.time, "time") }}{{ figure(figures.memory, "memory") }}</div>
{{ table(cost) }}
</section>

<section id="machine">
<h2>The machine and the run</h2>
{{ facts(about_machine) }}
<p class="note">Again: <code>gdpa demo</code>. Everything is seeded: a second run on this machine differs only in its
times. The numbers of this page are in demo.json beside it.</p>
</section>
"""
