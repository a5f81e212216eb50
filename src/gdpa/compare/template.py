"""The sections of the comparison's report, for page.py to fill; gdpa.pages has the frame and the look."""

from __future__ import annotations

TEMPLATE = """\
<header>
<h1>{{ names | join(", ") }}</h1>
<p class="lead">{{ names | length }} attention functions side by side: whether their kernels are right, what they cost,
and how {{ model }} learns with them.</p>
{% if failures %}<p class="bad" id="verdict">{{ failures | length }} of the checks failed:</p>
<ul>{% for line in failures %}<li class="bad">{{ line }}</li>{% endfor %}</ul>
{% else %}<p class="good" id="verdict">All checks passed.</p>{% endif %}
{% for line in conclusions %}<p class="conclusion">{{ line }}</p>
{% endfor %}
{% if quick %}<p class="note">This is the quick form: {{ seeds }} and {{ training.steps }} steps, just to show that
everything runs. Its accuracies mean nothing.</p>{% endif %}
{% if not figures %}<p class="note" id="no-figures">Without figures: matplotlib is not installed
(pip install '.[plot]' in a clone of gdpa).</p>{% endif %}
{% for line in doubts %}<p class="warn">{{ line }}</p>
{% endfor %}{{ tiles(figures_to_remember) }}
<!-- contents -->
</header>

<section id="functions">
<h2>The functions, and the kernels that they become</h2>
{{ figure(figures.curves, "curves") }}
<div class="cards">{% for card in cards %}<div class="card"><h3><span class="key"
style="background: var(--series-{{ card.series }})"></span>{{ card.name }}</h3>
<p class="note">{{ card.words }}</p>
{{ code(card.written, 1) }}
<details><summary>The code in the kernels, {{ card.lines }} lines</summary>
{{ code(card.emitted, card.lines, card.file ~ " beside this file") }}</details></div>
{% endfor %}</div>
</section>

<section id="correctness">
<h2>Are they right?</h2>
<p>Outputs and all gradients against float64, on dense and on jagged sequences (some of them empty). In 16 bits: gdpa's
error divided by that of exact arithmetic rounded only where the definition rounds (at most 1.15 passes), then divided
by plain PyTorch's (at most 1); a ratio above its limit passes if so few numbers are compared that it may be chance. In
float32: gdpa's largest error, and PyTorch's in brackets.</p>
{{ table(correctness) }}
{% if not_run %}<p class="note">Not run here: {{ not_run | join("; ") }}.</p>{% endif %}
</section>

<section id="speed">
<h2>What do they cost?</h2>
<p>One call of gdpa.attention, {{ speed_setting }}. The functions took turns on the same tensors; below each
median is its range from p20 to p80.</p>
{{ figure(figures.speed, "speed") }}
{{ table(speed) }}
</section>

<section id="accuracy">
<h2>How does a model learn with them?</h2>
<p>{{ about }}</p>
<div class="pair">{{ figure(figures.accuracy, "accuracy") }}{{ figure(figures.gain, "gain") }}</div>
{{ table(accuracy) }}
<div class="pair">{{ figure(figures.losses, "losses", "Means over the seeds, and over some steps.") }}
<div><h3>How to read this</h3>
{% for text in caveat %}<p class="note">{{ text }}</p>{% endfor %}</div></div>
</section>

<section id="machine">
<h2>The machine and the run</h2>
{{ facts(about_machine) }}
<p class="note">The numbers of this page are in compare.json beside it.</p>
</section>
"""
