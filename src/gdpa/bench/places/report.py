"""The result of `gdpa bench --positions` in words and tables."""

from __future__ import annotations

from typing import Any

from gdpa.bench import noise
from gdpa.bench.places.batches import DENSE, JAGGED
from gdpa.bench.places.cases import CASES, is_mask
from gdpa.bench.places.run import FLEX, GDPA
from gdpa.bench.report.tables import title, unit

Record = dict[str, Any]
Records = dict[tuple[str, str, str], Record]  # by case, layout and contender
WAYS = ("fwd", "bwd")


def by_names(document: dict[str, Any]) -> Records:
    return {(r["case"], r["layout"], r["contender"]): r for r in document["records"]}


def biases_markdown(document: dict[str, Any]) -> str:
    """Speed with each bias, and of the call without it."""
    prefix, _ = unit(document)
    records, rows = by_names(document), []
    for name, what in document["cases"].items():
        if not is_mask(CASES[name]):
            cells = [_relative(document, records, name, layout) for layout in (DENSE, JAGGED)]
            rows.append([what, *(cell for pair in cells for cell in pair), *_flex_speed(document, records, name)])
    head = ["silu with", f"dense, {prefix}FLOP/s", "of silu", f"jagged, {prefix}FLOP/s", "of silu",
            f"FlexAttention, dense, {prefix}FLOP/s", "gdpa is so many times as fast"]  # fmt: skip
    return "\n".join([_table(head, rows), "", biases_note(document)])


def masks_markdown(document: dict[str, Any]) -> str:
    """Milliseconds behind each mask, and the speed by visible pairs."""
    records, rows = by_names(document), []
    for name, what in document["cases"].items():
        if is_mask(CASES[name]):
            row = [what]
            for layout in (DENSE, JAGGED):
                row += [_ms(records.get((name, layout, GDPA))), _relative(document, records, name, layout)[1]]
            rows.append([*row, *_flex_times(records, name)])
    head = ["mask", "dense, ms", "of causal's speed", "jagged, ms", "of causal's speed", "FlexAttention, dense, ms",
            "gdpa is so many times as fast"]  # fmt: skip
    return "\n".join([_table(head, rows), "", masks_note(document)])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _relative(document: dict[str, Any], records: Records, name: str, layout: str) -> tuple[str, str]:
    """Speeds with errors, and those of the call that it is compared with."""
    found, beside = records.get((name, layout, GDPA)), records.get((CASES[name].beside, layout, GDPA))
    if found is None:
        return "", ""
    worst = max(found["error_bwd"], found.get("error_tables", 0.0))
    errors = f" ({1e3 * found['error']:.1f} / {1e3 * worst:.1f})" if document["gpu"] else ""
    ratios = "" if beside is None else " / ".join(f"{found[f'{w}_tflops'] / beside[f'{w}_tflops']:.2f}" for w in WAYS)
    return _speeds(document, found) + errors, ratios


def _speeds(document: dict[str, Any], record: Record) -> str:
    _, factor = unit(document)
    return " / ".join(f"{factor * record[f'{way}_tflops']:.3g}" for way in WAYS)


def _flex_speed(document: dict[str, Any], records: Records, name: str) -> tuple[str, str]:
    ours, other = (records.get((name, DENSE, who)) for who in (GDPA, FLEX))
    if ours is None or other is None:
        return "", ""
    return _speeds(document, other), " / ".join(f"{ours[f'{w}_tflops'] / other[f'{w}_tflops']:.2f}" for w in WAYS)


def _ms(record: Record | None) -> str:
    return "" if record is None else " / ".join(f"{record[f'{way}_median_ms']:.3g}" for way in WAYS)


def _flex_times(records: Records, name: str) -> tuple[str, str]:
    ours, other = (records.get((name, DENSE, who)) for who in (GDPA, FLEX))
    if ours is None or other is None:
        return "", ""
    ratios = [other[f"{way}_median_ms"] / ours[f"{way}_median_ms"] for way in ("fwd", "both")]
    return _ms(other), " / ".join(f"{ratio:.2f}" for ratio in ratios)


def biases_note(document: dict[str, Any]) -> str:
    return (
        f"Forward / backward; gradients of tables are part of the backward, but for slopes. {_errors(document)} "
        f"FlexAttention computes softmax, without gradients of tables. {_where(document)}"
    )


def masks_note(document: dict[str, Any]) -> str:
    return (
        "silu, forward / backward; speeds count visible pairs. FlexAttention computes softmax, and lists the blocks of "
        "its mask in every forward, as a new batch would need it, by compiled code; the last column is of the forward "
        f"/ of both passes. {_where(document)}"
    )


def _errors(document: dict[str, Any]) -> str:
    if not document["gpu"]:
        return ""
    return (
        "In brackets the RMS error against float64 relative to its result, in 10⁻³, of the first "
        f"{document['checked']} sequences: of out / of the worst of dq, dk, dv and the gradients of tables."
    )


def _where(document: dict[str, Any]) -> str:
    s = document["scale"]
    return (
        f"Dense: {s['dense']} sequences of {s['rows']}; jagged: {s['jagged']} of U[1, {s['rows']}]; {s['heads']} heads "
        f"of {s['d']}. {title(document)}, commit {document['commit']}. Medians; all cases of a layout in turns."
    )


def show(console: Any, document: dict[str, Any]) -> None:
    """On the terminal."""
    for made in (biases_markdown, masks_markdown):
        console.print(made(document), markup=False)
    if noise.busy(document):
        console.print(f"Warning: {noise.load_words(document)}", style="yellow", markup=False)
    for entry in document["skipped"]:
        console.print(f"{entry['case']} {entry['contender']}: {entry['reason']}", style="dim", markup=False)
