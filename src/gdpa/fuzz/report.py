"""A call, a failure and a whole run in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gdpa.backends import interpreting
from gdpa.fuzz.draw import FAR, Call

if TYPE_CHECKING:
    from rich.table import Table

    from gdpa.fuzz.run import Outcome, Report, Target

OUTPUTS = ("out", "dq", "dk", "dv", "dparams")


def command(seed: int, device: str, backend: str | None, dtypes: tuple[str, ...]) -> str:
    """What to type to run one seed again."""
    words = ["gdpa fuzz", f"--only-seed {seed}", f"--device {device}"]
    words += [f"--backend {backend}"] if backend else []
    words += [f"--dtype {dtype}" for dtype in dtypes]
    return " ".join(["TRITON_INTERPRET=1", *words] if interpreting() else words)


def describe(call: Call) -> str:
    """Everything about a call, on a few lines."""
    c, case = call.config, call.case
    lines = [
        f"seed {call.seed}: {c.layout}, {c.function}, {c.dtype}, D {c.d}, Dv {c.dv}, heads {case.heads} / {c.heads_k}",
        f"  len_q {_lengths(case.len_q)}",
        f"  len_k {_lengths(case.len_k)}",
        f"  causal {c.causal}, window {c.window}, scale {call.scale}, out_scale {call.out_scale:g}",
        f"  scores of mean {call.scores.mean:.3g}, spread {call.scores.spread:.3g}; v of mean {call.v_mean:g}",
        f"  memory: q {c.styles[0]}, k {c.styles[1]}, v {c.styles[2]}, do {c.grad_style}, storage offset {call.shift}",
    ]
    if case.varlen:
        offsets = "int64" if c.long_offsets else "int32"
        lines.append(f"  offsets {offsets}, max_seqlen_q {call.max_q}, max_seqlen_k {call.max_k}")
    if c.f.params:
        lines.append(f"  params of shape {'(Hq,)' if c.per_head_params else '()'}, about {c.f.params}")
    more = ["deterministic"] * c.deterministic + ["run twice"] * call.repeat
    if call.poison:
        more.append(f"and with sequence {call.poison[0]} filled with {call.poison[1]}")
    return "\n".join([*lines, *([f"  {', '.join(more)}"] if more else [])])


def _lengths(lengths: tuple[int, ...]) -> str:
    if len(set(lengths)) == 1 and len(lengths) > 2:
        return f"{len(lengths)} times {lengths[0]}"
    return " ".join(map(str, lengths)) or "none"


def describe_failure(outcome: Outcome, target: Target) -> str:
    """A failure: what, where, in which call, and how to see it again."""
    lines = [f"FAILED on {outcome.backend}", describe(outcome.call)]
    for finding in outcome.findings:
        lines.append(f"  {finding.output}: {finding.where}{': ' if finding.where else ''}{finding.what}")
    return "\n".join([*lines, f"reproduce: {target.command(outcome.call.seed)}"])


# ---- coverage --------------------------------------------------------------------------------------------------------
def features(call: Call) -> Iterator[tuple[str, str]]:
    """(group, value) of everything worth counting."""
    c, case = call.config, call.case
    yield "layout", c.layout
    yield "dtype", c.dtype
    yield "D, Dv", f"{c.d}" if c.d == c.dv else f"{c.d}/{c.dv}"
    yield "heads", "equal" if c.group == 1 else "MQA" if c.heads_k == 1 else "GQA"
    yield "function", c.function
    yield "lengths", call.pattern
    yield from (("has lengths", name) for name in _special_lengths(call))
    yield "band", _band(call)
    for style in dict.fromkeys(c.styles):
        yield "memory", style
    yield "memory", "aligned" if c.aligned else "unaligned"
    yield "do", c.grad_style
    if case.varlen:
        yield "offsets", "int64" if c.long_offsets else "int32"
        yield "max_seqlen", "given" if (call.max_q, call.max_k) != (None, None) else "not given"
    if c.f.params:
        yield "params", "per head" if c.per_head_params else "scalar"
    yield "scores", "centred" if call.scores.mean == 0 else "near" if call.scores.near else "far"
    yield "mean of v", f"{call.v_mean:g}"
    yield "mode", "deterministic" if c.deterministic else "any order"
    yield from (("also", name) for name in _disturbances(call))
    yield "scale", "default" if call.scale is None else "zero" if call.scale == 0 else "given"
    yield "out_scale", "1" if call.out_scale == 1 else "zero" if call.out_scale == 0 else "given"


def _special_lengths(call: Call) -> Iterator[str]:
    both = (*call.case.len_q, *call.case.len_k)
    if not both:
        yield "no sequences"
    elif not any(both):
        yield "all empty"
    elif 0 in both:
        yield "0"
    if 1 in both:
        yield "1"
    if any(n > 1 and (n % 64 in (0, 1, 63)) for n in both):
        yield "64 m - 1, 0, + 1"
    if call.case.pairs == 0 and any(both):
        yield "no pair"


def _band(call: Call) -> str:
    left, right = call.case.band
    if left is None and right is None:
        return "none"
    if call.case.window is None:
        return "causal"
    longest = max((*call.case.len_q, *call.case.len_k), default=0)
    if all(side is None or longest <= side <= FAR for side in (left, right)):
        return "wider than everything"
    kind = "one-sided" if left is None or right is None else "diagonal" if left == right == 0 else "two-sided"
    return f"{kind}, causal" if call.case.causal else kind


def _disturbances(call: Call) -> Iterator[str]:
    if call.poison:
        yield f"{call.poison[1]} in a neighbour"
    if call.repeat:
        yield "run twice"


def coverage_table(report: Report) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=f"{report.calls} calls", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("feature")
    table.add_column("calls", overflow="fold")
    for group, counts in report.coverage.items():
        table.add_row(group, ", ".join(f"{value} {n}" for value, n in counts.most_common()))
    for reason, n in report.skipped.most_common():
        table.add_row("not run", f"{n}: {reason}")
    return table


def error_table(report: Report) -> Table:
    from rich import box
    from rich.table import Table

    from gdpa.fuzz.compare import KINDS

    table = Table(title="worst error, and its seed", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("dtype")
    table.add_column("what")
    for name in OUTPUTS:
        table.add_column(name, justify="right")
    for dtype, kind in sorted({key[:2] for key in report.worst}):
        found = [report.worst.get((dtype, kind, name)) for name in OUTPUTS]
        table.add_row(dtype, KINDS[kind], *("" if f is None else f"{f[0]:.2f} (seed {f[1]})" for f in found))
    return table
