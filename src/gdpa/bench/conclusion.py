"""What a result of `gdpa bench` comes to: the lines and figures that its report opens with."""

from __future__ import annotations

from statistics import median
from typing import Any

from gdpa.backends import BACKENDS
from gdpa.bench import noise
from gdpa.bench.report.tables import number, unit
from gdpa.bench.results import ByPass, groups

PASSES = (("fwd", "forward"), ("bwd", "backward"))
# Who gdpa is compared with, and what is to be known of them.
RIVALS = {
    "sdpa-cudnn": "cuDNN's softmax attention, which computes another function",
    "sdpa-flash": "PyTorch's flash attention, which computes softmax",
    "torch-varlen": "PyTorch's attention of packed rows, which computes softmax",
    "flash-attn": "FlashAttention, which computes softmax",
    "flex-log": "FlexAttention on the same function",
    "eager-compiled": "compiled PyTorch on the same function",
    "eager": "eager PyTorch on the same function",
}
Pair = tuple[str, ByPass, ByPass]  # case and function, ours, theirs


def ours(document: dict[str, Any]) -> str | None:
    """The backend that gdpa prefers among those measured."""
    measured = {name for entries in groups(document).values() for name in entries}
    return next((name for name in (f"{b}{p}" for p in ("", " fast") for b in BACKENDS) if name in measured), None)


def pairs(document: dict[str, Any], rival: str) -> list[Pair]:
    """Every case on which both were measured."""
    own = ours(document)
    return [
        (f"{case}, {function}", entries[own], entries[rival])
        for (case, function), entries in groups(document).items()
        if own in entries and rival in entries
    ]


def lines(document: dict[str, Any]) -> list[str]:
    """The conclusion: speed, then a line for each rival, then errors and what the noise leaves open."""
    own = ours(document)
    if own is None:
        return ["No backend of gdpa was measured."]
    entries = [found[own] for found in groups(document).values() if own in found]
    prefix, factor = unit(document)
    speeds = (_range([factor * e[which]["tflops"] for e in entries]) for which, _ in PASSES)
    floors = (_range([round(100 * e[which]["floor_fraction"]) for e in entries]) for which, _ in PASSES)
    found = [
        f"gdpa ({own}) runs at {' / '.join(speeds)} {prefix}FLOP/s forward / backward on "
        f"{_count(len(entries), 'case')}, {' / '.join(floors)} % of what the machine's own matrix products and "
        "copies allow."
    ]
    found += [line for rival in RIVALS if (line := beside(document, rival)) is not None]
    return [*found, *_errors(document, own), *_warnings(document)]


def beside(document: dict[str, Any], rival: str) -> str | None:
    """In how many cases gdpa is faster, and by how much."""
    both = pairs(document, rival)
    if not both:
        return None
    parts = []
    for which, name in PASSES:
        ratios = [noise.ratio(mine[which], theirs[which]) for _, mine, theirs in both]
        faster = sum(r > 1 for r in ratios)
        parts.append(f"{name} faster in {faster} of {len(both)} ({noise.between(min(ratios), max(ratios))})")
    return f"Beside {RIVALS[rival]}: {'; '.join(parts)}."


def doubtful(document: dict[str, Any]) -> list[str]:
    """Comparisons of gdpa that say nothing, since the spread from p20 to p80 exceeds the difference."""
    return [
        f"{case}, {name}, beside {rival}"
        for rival in RIVALS
        for case, mine, theirs in pairs(document, rival)
        for which, name in PASSES
        if noise.uncertain(mine[which], theirs[which])
    ]


def tiles(document: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures to remember."""
    own = ours(document)
    entries = [found[own] for found in groups(document).values() if own in found] if own else []
    if not entries:
        return []
    prefix, factor = unit(document)
    found = []
    for which, name in PASSES:
        best = max(entries, key=lambda e: e[which]["tflops"])[which]
        found.append((f"{number(factor * best['tflops'])} {prefix}FLOP/s", f"{name}, at best ({best['case']})"))
    for rival, word in (("sdpa-cudnn", "cuDNN's softmax"), ("eager", "eager PyTorch")):
        both = pairs(document, rival)
        if both:
            middle = median(noise.ratio(mine["both"], theirs["both"]) for _, mine, theirs in both)
            found.append(
                (noise.than(middle, "faster", "slower"), f"than {word}, forward and backward, median of the cases")
            )
    return found


def _errors(document: dict[str, Any], own: str) -> list[str]:
    rows = [own, *(rival for rival in RIVALS if pairs(document, rival))]
    parts = []
    for name in rows:
        found = [e[name]["fwd"]["rms_error"] for e in groups(document).values() if name in e]
        if found and None not in found:
            parts.append(f"{name} {max(found):.1e}".replace("e-0", "e-"))
    return [f"Largest relative RMS error of an output against float64: {', '.join(parts)}."] if parts else []


def _warnings(document: dict[str, Any]) -> list[str]:
    """A busy machine, and where the spread exceeds a difference."""
    busy = [f"Warning: {noise.load_words(document)}."] if noise.busy(document) else []
    found = doubtful(document)
    if not found:
        return busy
    some = "; ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
    many = _count(len(found), "comparison")
    return [*busy, f"Warning: the spread from p20 to p80 exceeds the difference in {many}: {some}."]


def _range(values: list[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low}–{high}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
