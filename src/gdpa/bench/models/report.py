"""Results of `gdpa bench --model` as tables: in the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from rich.table import Table

from gdpa.bench import noise
from gdpa.bench.models.contenders import USUAL
from gdpa.bench.models.profile import IDLE, NAMES
from gdpa.bench.report.tables import LOOK, number, skipped, spread, title, unit
from gdpa.bench.results import product_rate

OURS = USUAL[0].name
Entries = dict[str, dict[str, Any]]  # records by contender
NOTES = (
    "A step is forward, BCE loss, backward and AdamW; useful work is that of the jagged model for all alike (padding "
    "and pairs outside a window earn nothing); MFU: its rate as a fraction of {product}, measured in the same run"
)


def by_case(document: dict[str, Any]) -> dict[str, Entries]:
    """{case: {contender: record}}."""
    found: dict[str, Entries] = {name: {} for name in document["cases"]}
    for record in document["records"]:
        found[record["case"]][record["backend"]] = record
    return found


def notes(document: dict[str, Any]) -> str:
    """What the columns are, and the rate that MFU is taken against."""
    product, (prefix, factor) = ("cuBLAS" if document["gpu"] else "plain matrix products"), unit(document)
    rate = document["rates"][product_rate(document)]
    how = "torch.compile for all" if document["compiled"] else "not compiled"
    text = NOTES.format(product=f"{number(factor * rate)} {prefix}FLOP/s, the rate of {product}")
    turns = sorted({len(r["turns_ms"]) for r in document["records"] if "turns_ms" in r})  # older results have none
    interleaved = f"; contenders took turns, {' or '.join(map(str, turns))} each" if turns else ""
    return f"{text}; {document['dtype']}, {how}, optimizer {document['optimizer']}{interleaved}"


def case_words(name: str, case: dict[str, Any]) -> str:
    """A case in a line."""
    return (
        f"{name}: {case['batch']} samples, {case['mean']:.0f} events on average, padded to {case['longest']}; "
        f"{number(case['gflop'] / 1e3)} TFLOP of useful work a step"
    )


def advantage(entries: Entries) -> tuple[float, str] | None:
    """How many times as many samples gdpa trains as the best padded contender, and which that is."""
    others = {name: r for name, r in entries.items() if not name.startswith(OURS)}
    if OURS not in entries or not others:
        return None
    best = max(others, key=lambda name: others[name]["samples_s"])
    return entries[OURS]["samples_s"] / others[best]["samples_s"], best


def conclusions(document: dict[str, Any]) -> list[str]:
    """A line for each case: gdpa against the best of the others, in speed and memory."""
    lines = []
    for case, entries in by_case(document).items():
        if (found := advantage(entries)) is None:
            continue
        ratio, best = found
        ours, theirs = entries[OURS]["peak_mib"], entries[best]["peak_mib"]
        memory = f", with {100 * ours / theirs:.0f} % of its memory" if ours and theirs else ""
        faster = noise.than(ratio, "faster", "slower")
        lines.append(f"{case}: gdpa trains {faster} than {best}, the fastest of the others{memory}")
        if noise.uncertain(entries[OURS], entries[best]):
            lines.append(f"Warning: {case}: the spread of step times from p20 to p80 exceeds that difference")
    return lines


def table(document: dict[str, Any]) -> Table:
    """Everything measured: a line per case and contender."""
    shown = Table(
        title=title(document),
        caption=f"± half the spread from p20 to p80. {notes(document)}.",
        collapse_padding=True,
        pad_edge=False,
        **LOOK,
    )
    for name in ("case", "contender", "function"):
        shown.add_column(name, no_wrap=True)
    for name in ("ms a step", *measures(document), "loss", "compile s"):
        shown.add_column(name, justify="right", no_wrap=True)
    for case, entries in by_case(document).items():
        for backend, r in entries.items():
            graphs = "" if not r["graphs"] or r["graphs"] == 1 else f" ({r['graphs']} graphs)"
            shown.add_row(
                case, backend, r["function"], f"{r['median_ms']:.1f} ±{spread(r):.0f}%", *figures(document, entries, r),
                f"{r['loss']:.4f}", f"{r['compile_s']:.0f}{graphs}",
            )  # fmt: skip
        for s in document["skipped"]:
            if s["case"] == case:
                shown.add_row(case, s["backend"], s["function"], shortened(s["why"]))
        shown.add_section()
    return shown


def measures(document: dict[str, Any]) -> list[str]:
    """The head of ``figures``."""
    return ["samples/s", "speed vs gdpa", f"{unit(document)[0]}FLOP/s", "MFU", "peak GiB"]


def figures(document: dict[str, Any], entries: Entries, r: dict[str, Any]) -> list[str]:
    """Samples/s, its ratio to gdpa's, speed, MFU, memory."""
    ours = entries.get(OURS)
    ratio = f"{r['samples_s'] / ours['samples_s']:.2f}x" if ours else "-"
    return [f"{r['samples_s']:,.0f}", ratio, number(unit(document)[1] * r["tflops"]), f"{100 * r['mfu']:.1f} %",
            gib(r["peak_mib"])]  # fmt: skip


def profile_table(document: dict[str, Any], case: str) -> Table:
    """Where the time of a step goes: a line per group of kernels, a column per contender, ms."""
    head, rows = profile_rows(document, case)
    where = "kernels" if document["gpu"] else "operators"
    shown = Table(title=f"{case}: ms of a step by {where}", collapse_padding=True, pad_edge=False, **LOOK)
    for i, name in enumerate(head):
        shown.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def profile_rows(document: dict[str, Any], case: str) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the profile of a case. Results of a GPU have rooflines; of a CPU's operators there are
    more than kernels."""
    groups = {name: r["profile"]["groups_ms"] for name, r in by_case(document)[case].items()}
    names = [n for n in (*NAMES, IDLE) if any(found.get(n, 0.0) >= 0.005 for found in groups.values())]
    rows = [[n, *(f"{found.get(n, 0.0):.2f}" for found in groups.values())] for n in names]
    head = ["kernels" if document["gpu"] else "operators", *groups]
    floors = document.get("floors_ms", {}).get(case) if document["gpu"] else None  # older results have none
    if floors is None:
        return head, rows
    for row in rows:
        floor, ours = floors.get(row[0], 0.0), groups.get(OURS, {}).get(row[0], 0.0)
        row += [f"{floor:.2f}" if floor else "-", f"{floor / ours:.2f}" if floor and ours else "-"]
    return [*head, "roofline", f"{OURS} of it"], rows


def lines(document: dict[str, Any]) -> list[str]:
    """What was not run, and what follows."""
    busy = [f"Warning: {noise.load_words(document)}"] if noise.busy(document) else []
    return [*skipped(document), *conclusions(document), *busy]


def markdown(document: dict[str, Any], patterns: Iterable[str] = ()) -> str:
    """The table of the README: cases that match ``patterns``, all if there are none."""
    head = ["case", "contender", "ms a step", *measures(document)]
    rows = []
    for case, entries in _chosen(document, patterns).items():
        for backend, r in entries.items():
            rows.append((case, backend, f"{r['median_ms']:.1f}", *figures(document, entries, r)))
        for s in document["skipped"]:
            if s["case"] == case:
                rows.append((case, s["backend"], shortened(s["why"]), *[""] * (len(head) - 3)))
    cases = [case_words(name, document["cases"][name]) for name in _chosen(document, patterns)]
    under = f"{title(document)}, commit {document['commit']}. {notes(document)}. {'. '.join(cases)}. Medians."
    return "\n".join([*_markdown_table(head, rows, 2), "", under])


def profile_markdown(document: dict[str, Any], patterns: Iterable[str] = ()) -> str:
    """Where the time goes, a table for each case."""
    parts = []
    for case in _chosen(document, patterns):
        head, rows = profile_rows(document, case)
        parts.append("\n".join([f"{case}, ms of a step:", "", *_markdown_table(head, rows, 1)]))
    return "\n\n".join(parts)


def headline_markdown(document: dict[str, Any], patterns: Iterable[str] = ()) -> str:
    """A sentence: gdpa beside the best of the others, over the cases."""
    found = [advantage(entries) for entries in _chosen(document, patterns).values()]
    ratios = sorted(one[0] for one in found if one is not None)
    others = ", ".join(dict.fromkeys(one[1] for one in found if one is not None))
    if not ratios:
        raise ValueError("the result has no case that gdpa and another contender ran")
    models = ", ".join(dict.fromkeys(name.split("-")[0] for name in _chosen(document, patterns)))
    ends = noise.between(ratios[0], ratios[-1])
    where = f"{title(document)}, commit {document['commit']}"
    return f"Training steps of whole models ({models}) are {ends} than the best padded ones ({others}; {where})."


def _chosen(document: dict[str, Any], patterns: Iterable[str]) -> dict[str, Entries]:
    wanted = list(patterns) or ["*"]
    found = {c: e for c, e in by_case(document).items() if any(fnmatchcase(c, pattern) for pattern in wanted)}
    if not found:
        raise ValueError(f"no case of the result matches {' '.join(wanted)}; it has {', '.join(document['cases'])}")
    return found


def _markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]], names: int) -> list[str]:
    """``names``: how many columns on the left hold words."""
    head = list(head)
    ruler = ["---" if i < names else "---:" for i in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, ruler, *rows)]


def gib(mib: float | None) -> str:
    return "-" if mib is None else f"{mib / 1024:.1f}"


def shortened(why: str) -> str:
    """For a cell; the whole reason stands below the table."""
    return why if why == "out of memory" else why.partition(":")[0]
