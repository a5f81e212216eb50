"""The sections of the HTML report of kernels, for page.py to fill; gdpa.pages has the frame and the look."""

from __future__ import annotations

TEMPLATE = """\
<header>
<h1>gdpa bench</h1>
<p class="note">{{ title }}</p>
<ul class="words lead" id="conclusion">
{% for line in conclusion %}<li{% if line.startswith("Warning") %} class="warn"{% endif %}>{{ line | whole }}</li>
{% endfor %}</ul>
{{ tiles(figures) }}
<!-- contents -->
</header>

<section id="overview">
<h2>Overview: percent of the roofline</h2>
<p>Forward / backward, of each contender on each case. 100 % would be as fast as the machine's own {{ product }}
or, where memory is the limit, its own copies.</p>
{{ scale("0 %", "100 %", "mean of forward and backward") }}
{{ table(overview) }}
</section>

{% if drawings %}<section id="plots">
<h2>Plots</h2>
{% for name, drawing, caption in drawings %}{{ figure(drawing, name, caption, wide=true) }}
{% endfor %}</section>{% endif %}

<section id="cases">
<h2>Every case</h2>
<p class="note">{% for case in cases %}\
<a href="#{{ case.name }}">{{ case.name | whole }}</a>{{ ", " if not loop.last }}\
{% endfor %}</p>
{% for case in cases %}<h3 id="{{ case.name }}">{{ case.name }}</h3>
<p class="note">{{ case.words }}</p>
{% if case.table.rows %}{{ table(case.table) }}{% endif %}
{% if case.skipped %}<ul class="note">
{% for line in case.skipped %}<li>{{ line }}</li>
{% endfor %}</ul>{% endif %}
{% endfor %}
</section>

<section id="reading">
<h2>How to read the figures</h2>
<ul class="words">
<li>Times are medians in ms, with p20–p80 below{% if gpu %}, by CUDA events, with the L2 cache overwritten before each
call{% endif %}. <b>bwd</b> is the backward alone, <b>both</b> a forward and a backward.</li>
<li>{{ prefix }}FLOP/s count the query-key pairs that the mask keeps, for every contender alike: work on padding
does not count.</li>
<li>Errors are relative RMS errors against float64 of the function that each computes: of the output / of the worst of
dq, dk and dv, in the very call that is timed (one sequence of it).</li>
<li><b>exact</b> is gdpa's default precision, <b>fast</b> an explicit choice. Layouts: <b>heads</b> (B, H, L, D),
<b>rows</b> (B, L, H, D) passed as a transposed view, <b>packed</b> (T, H, D) with cu_seqlens and max_seqlen,
<b>packed-nohint</b> without max_seqlen, <b>qkv</b> packed from one projection.</li>
<li>Contenders marked softmax compute another function. They are shown because their kernels are the fastest known.</li>
<li><b>Speed vs</b> another contender is its time divided by this one's: above 1 this one is faster, below 1 slower. A
tilde (~) marks ratios within the noise: the ranges from p20 to p80 overlap.</li>
<li>Peak memory, in MiB, is that of forward and backward beyond the inputs; <b>extra</b>: beyond outputs and gradients
too.</li>
</ul>
</section>

<section id="machine">
<h2>The machine and the run</h2>
{{ facts(about) }}
<p>The roofline of a case is max(flops / {{ product }} rate, bytes / copy rate), with the best of the rates below:
medians, measured in the same run.</p>
{{ table(rates) }}
</section>
"""
