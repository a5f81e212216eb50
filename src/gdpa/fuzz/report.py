"""A call, a failure and a whole run in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdpa.fuzz.draw import Call
from gdpa.fuzz.outcomes import Outcome, Report, Target

if TYPE_CHECKING:
    from rich.table import Table


OUTPUTS = ("out", "sums", "dq", "dk", "dv", "dparams", "dtables", "dsink")


def describe(call: Call) -> str:
    """Everything about a call, on a few lines."""
    c, case = call.config, call.case
    lines = [
        f"seed {call.seed}: {c.layout}, {c.function}, {c.dtype}, D {c.d}, Dv {c.dv}, heads {case.heads} / {c.heads_k}",
        f"  len_q {_lengths(case.len_q)}{_unused(case.slots_q, case.spare[0])}",
        f"  len_k {_lengths(case.len_k)}{_unused(case.slots_k, case.spare[1])}",
        f"  causal {c.causal}, window {c.window}, scale {call.scale}, out_scale {call.out_scale:g}",
        f"  scores of mean {call.scores.mean:.3g}, spread {call.scores.spread:.3g}; v of mean {call.v_mean:g}",
        f"  memory: q {c.styles[0]}, k {c.styles[1]}, v {c.styles[2]}, do {c.grad_style}, storage offset {call.shift}",
    ]
    if c.f.at:
        tables = f"; {c.table_dtype} tables {'with' if c.learned else 'without'} gradients" if c.f.tables else ""
        lines.append(f"  positions {', '.join(c.f.at)}{tables}")
    if c.mask or c.normalize:
        sums = f"row sums: {c.normalize or 'none'}, {c.sums}, sink: {c.sink}"
        lines.append(f"  mask: {c.mask or 'none'}; {sums}")
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


def _unused(slots: tuple[int, ...] | None, spare: int) -> str:
    """Rows that belong to no sequence, after the lengths of those that do."""
    return (f", used of {_lengths(slots)}" if slots is not None else "") + (f", and {spare} rows more" if spare else "")


def describe_failure(outcome: Outcome, target: Target) -> str:
    """A failure: what, where, in which call, and how to see it again."""
    lines = [f"FAILED on {outcome.backend}", describe(outcome.call)]
    for finding in outcome.findings:
        lines.append(f"  {finding.output}: {finding.where}{': ' if finding.where else ''}{finding.what}")
    return "\n".join([*lines, f"reproduce: {target.command(outcome.call.seed)}"])


# ---- coverage --------------------------------------------------------------------------------------------------------


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

    table = Table(title="worst error, in brackets its seed", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("dtype")
    table.add_column("what")
    for name in OUTPUTS:
        table.add_column(name, justify="right")
    for dtype, kind in sorted({key[:2] for key in report.worst}):
        found = [report.worst.get((dtype, kind, name)) for name in OUTPUTS]
        table.add_row(dtype, KINDS[kind], *("" if f is None else f"{f[0]:.2f} ({f[1]})" for f in found))
    return table
