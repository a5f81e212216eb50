"""The pictures of a result document, made from it alone.

``lengths``: TFLOP/s against length, forward and backward, where a family of cases has several lengths; one picture for
each head dimension. ``cases``: bars for everything else. ``layouts``: bars where gdpa was given q, k, v in several. All
of them show what the machine allows. ``errors``: relative RMS errors of everybody in a case's own layout.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpa.bench.report.tables import title, unit
from gdpa.bench.results import SOFTMAX, ByPass, by_layout, groups
from gdpa.pages import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Groups = dict[tuple[str, str], dict[str, ByPass]]
Labelled = dict[str, dict[str, ByPass]]  # records by a group of bars and a bar
Family = dict[int, dict[str, ByPass]]  # records by length and contender

PANELS = (("fwd", "forward"), ("bwd", "backward"))
COLOURS = {
    "hopper": "#0b3c5d",
    "triton": "#1f77b4",
    "cpu": "#1f77b4",
    "reference": "#9ecae1",
    "eager": "#bbbbbb",
    "eager-compiled": "#7f7f7f",
    "flex-log": "#2e8b57",
    "sdpa-cudnn": "#e08a2e",
    "sdpa-flash": "#f2c48d",
    "torch-varlen": "#d98a9c",
    "flash-attn": "#a65628",
    "heads": "#0b3c5d",
    "rows": "#1f77b4",
    "packed": "#2e8b57",
    "packed-nohint": "#98c9a3",
    "qkv": "#e08a2e",
}
# The same on a page, whose colours are light or dark. No case has both sdpa-cudnn and torch-varlen.
ON_PAGE = {
    "hopper": 2, "triton": 3, "cpu": 2, "reference": 7, "eager": 0, "eager-compiled": 7, "flex-log": 3, "sdpa-cudnn": 1,
    "sdpa-flash": 6, "torch-varlen": 1, "flash-attn": 6, "heads": 2, "rows": 5, "packed": 3, "packed-nohint": 6,
    "qkv": 1,
}  # fmt: skip
FAST = " fast"  # ends the name of a contender that is not exact
CAPTIONS = {
    "lengths": "Speed against length, forward and backward; the dotted line is the roofline.",
    "cases": "Speed on each case; the vertical strokes are the roofline of each.",
    "layouts": "Speed of the same call with its tensors in different layouts.",
    "errors": "Errors of the calls that were timed.",
}
SOFTWARE = "gdpa bench, with Matplotlib"  # by which gdpa.cli.claiming knows a plot that it may replace
NO_PLOT = "no plot: matplotlib is not installed (pip install '.[plot]' in a clone of gdpa)"
NOTHING = "no plot: nothing was measured in a case's own layout"
FAMILIES = {
    "self": "self-attention, full length",
    "uniform": "queries U[1, N], full keys",
    "jagged": "jagged self-attention U[1, N]",
    "kv128": "128 keys",
    "kv256": "256 keys",
}


@dataclass(frozen=True)
class Look:
    """Colours of a picture."""

    contenders: Mapping[str, str]
    other: str
    limit: str
    numbers: str
    caption: str
    grid: str
    edge: str

    def colour(self, contender: str) -> str:
        return self.contenders.get(contender.removesuffix(FAST), self.other)


PRINTED = Look(COLOURS, "#6b4c9a", "#c0392b", "#333333", "#555555", "#dddddd", "white")
INLINE = Look(
    {name: svg.SERIES[i] for name, i in ON_PAGE.items()}, svg.SERIES[5], svg.SERIES[4], svg.INK, svg.MUTED, svg.GRID,
    svg.PAPER,
)  # fmt: skip


def new_figure(columns: int, width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    """(figure, axes) without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained")


def plot(document: dict[str, Any], path: Path) -> str:
    """Write the pictures beside ``path`` (its own name for the bars); returns what was done."""
    if importlib.util.find_spec("matplotlib") is None:
        return NO_PLOT
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for name, png in pictures(document).items():
        target = path if name == "cases" else path.with_stem(f"{path.stem}-{name}")
        target.write_bytes(png)
        written.append(str(target))
    return f"plots: {', '.join(written)}" if written else NOTHING


def pictures(document: dict[str, Any]) -> dict[str, bytes]:
    """The PNGs by name: ``lengths``, ``lengths-d64``, ``cases``, ``layouts``, ``errors``, as far as the document has
    something to show."""
    return {name: _png(figure) for name, figure in figures(document, PRINTED)}


def drawings(document: dict[str, Any]) -> dict[str, str]:
    """The same as SVG elements, in the colours of a page."""
    import matplotlib
    from matplotlib import pyplot

    found = {}
    with matplotlib.rc_context(svg.STYLE):
        for name, figure in figures(document, INLINE):
            found[name] = svg.to_svg(figure, name, CAPTIONS[name.partition("-")[0]])
            pyplot.close(figure)
    return found


def figures(document: dict[str, Any], look: Look) -> Iterator[tuple[str, Figure]]:
    every = groups(document)
    function = main_function(every)
    families, rest = split(every, function)
    for d in sorted({d for _, d in families}, reverse=True):
        chosen = {name: family for (name, of), family in families.items() if of == d}
        what = f"{function}, head dimension {d}"
        yield "lengths" if d == 128 else f"lengths-d{d}", lengths_figure(document, chosen, what, look)
    if rest:
        yield "cases", speeds_figure(document, labelled(rest), look)
    layouts = {"\n".join((f"{case}, {of}", who)): entries for (case, of, who), entries in by_layout(document).items()}
    if layouts:
        yield "layouts", speeds_figure(document, layouts, look)
    known = {
        key: {name: by_pass for name, by_pass in entries.items() if by_pass["fwd"]["rms_error"] is not None}
        for key, entries in every.items()
    }
    known = {key: entries for key, entries in known.items() if entries}
    if known:
        yield "errors", errors_figure(document, labelled(known), look)


def main_function(every: Groups) -> str:
    """The function that ran on most cases: lines show one."""
    counts = Counter(function for _, function in every)
    return counts.most_common(1)[0][0] if counts else ""


def split(every: Groups, function: str) -> tuple[dict[tuple[str, int], Family], Groups]:
    """({(family, head dimension): records by length} of ``function`` where there are several lengths, all the rest)."""
    families: dict[tuple[str, int], Family] = {}
    members: dict[tuple[str, str], tuple[str, int]] = {}
    for (case, of), entries in every.items():
        match = re.fullmatch(r"(self|uniform|jagged|kv128|kv256)-q?(\d+)(-d64)?", case)
        if match and of == function:
            key = (match[1], 64 if match[3] else 128)
            families.setdefault(key, {})[int(match[2])] = entries
            members[case, of] = key
    lines = {key: family for key, family in families.items() if len(family) > 1}
    return lines, {key: entries for key, entries in every.items() if members.get(key) not in lines}


def lengths_figure(document: dict[str, Any], families: dict[str, Family], what: str, look: Look) -> Figure:
    """A column for each family, forward above backward; one family has them side by side."""
    names = [name for name in FAMILIES if name in families]
    many = len(names)
    figure, axes = new_figure(many, 1.5 + 3.4 * many, 7.2, rows=2) if many > 1 else new_figure(2, 9.6, 4.0)
    axes = axes.reshape(2, many)
    prefix, factor = unit(document)
    for row, (which, label) in zip(axes, PANELS, strict=True):
        for ax, name in zip(row, names, strict=True):
            _lines(ax, families[name], which, factor, look)
            ax.set_title(f"{FAMILIES[name]}, {label}", loc="left", fontsize=9)
        row[0].set_ylabel(f"{prefix}FLOP/s")
    for ax, name in zip(axes[1] if many > 1 else axes.flat, names * 2, strict=False):
        ax.set_xlabel("queries" if name.startswith("kv") else "sequence length N")
    _finish(figure, axes, f"{what}; {title(document)}", look)
    return figure


def _lines(ax: Axes, family: Family, which: str, factor: float, look: Look) -> None:
    lengths = sorted(family)
    for backend in dict.fromkeys(name for n in lengths for name in family[n]):
        points = [(n, factor * family[n][backend][which]["tflops"]) for n in lengths if backend in family[n]]
        softmax = any(family[n][backend][which]["function"] == SOFTMAX for n in lengths if backend in family[n])
        style: dict[str, Any] = {"linestyle": "--", "marker": "s"} if softmax else {"marker": "o"}
        if backend.endswith(FAST):
            style = {"linestyle": "-.", "marker": "^"}
        label = f"{backend} (softmax)" if softmax else backend
        ax.plot(*zip(*points, strict=True), color=look.colour(backend), label=label, markersize=4, **style)
    limits = [factor * _limit(next(iter(family[n].values()))[which]) for n in lengths]
    ax.plot(lengths, limits, color=look.limit, linewidth=1.2, linestyle=":", label="roofline")
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{n}" for n in lengths])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.grid(color=look.grid, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def labelled(chosen: Groups) -> Labelled:
    """A group of bars per case and function."""
    several = len({function for _, function in chosen if function != SOFTMAX}) > 1
    return {f"{case}\n{function}" if several else case: entries for (case, function), entries in chosen.items()}


def speeds_figure(document: dict[str, Any], shown: Labelled, look: Look) -> Figure:
    """Bars of TFLOP/s, the roofline of each group as a line."""
    prefix, factor = unit(document)
    what = f"{prefix}FLOP/s (higher is better)"
    figure, axes = _bars_figure(shown, lambda record: factor * record["tflops"], what, look)
    for ax, (which, _) in zip(axes, PANELS, strict=True):
        for y, entries in enumerate(shown.values()):
            limit = factor * _limit(next(iter(entries.values()))[which])
            ax.plot([limit, limit], [y - 0.42, y + 0.42], color=look.limit, linewidth=1.5, label="roofline")
        ax.set_xlim(left=0)
    _finish(figure, axes, title(document), look)
    return figure


def errors_figure(document: dict[str, Any], shown: Labelled, look: Look) -> Figure:
    """Bars of relative RMS errors."""
    figure, axes = _bars_figure(
        shown, lambda record: record["rms_error"], "RMS error relative to float64's result (lower is better)", look
    )
    for ax in axes:
        ax.set_xlim(left=0)
    _finish(figure, axes, title(document), look)
    return figure


def _bars_figure(
    shown: Labelled, value: Callable[[dict[str, Any]], float], what: str, look: Look
) -> tuple[Figure, Any]:
    figure, axes = new_figure(2, 13, 1.6 + 0.14 * sum(2 + len(entries) for entries in shown.values()))
    for ax, (which, label) in zip(axes, PANELS, strict=True):
        _bars(ax, shown, which, value, look)
        ax.set_title(label, loc="left", fontweight="bold")
        ax.set_xlabel(what)
    axes[0].set_yticks(range(len(shown)), list(shown), fontsize=8)
    axes[1].set_yticks(range(len(shown)), [""] * len(shown))
    return figure, axes


def _bars(ax: Axes, shown: Labelled, which: str, value: Callable[[dict[str, Any]], float], look: Look) -> None:
    for y, entries in enumerate(shown.values()):
        height = 0.8 / len(entries)
        for i, (name, by_pass) in enumerate(entries.items()):
            record = by_pass[which]
            label = f"{name} (softmax)" if record["function"] == SOFTMAX else name
            centre, length = y - 0.4 + (i + 0.5) * height, value(record)
            hatch = "///" if name.endswith(FAST) else None
            ax.barh(
                centre, length, 0.9 * height, color=look.colour(name), label=label, hatch=hatch, edgecolor=look.edge
            )
            ax.text(length, centre, f" {length:.3g}", va="center", fontsize=7, color=look.numbers)
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.margins(x=0.08)
    ax.grid(axis="y", visible=False)  # would cross the numbers
    ax.grid(axis="x", color=look.grid, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _limit(record: dict[str, Any]) -> float:
    """TFLOP/s at the roofline; the same for every contender of a case."""
    return record["tflops"] / record["floor_fraction"]


def _finish(figure: Figure, axes: Any, caption: str, look: Look) -> None:
    """One legend for all panels, and what was measured on."""
    handles = {text: handle for ax in axes.flat for handle, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(handles), int(figure.get_figwidth() / 1.6)),
        frameon=False,
    )
    figure.suptitle(caption, fontsize=9, x=0.01, ha="left", color=look.caption)


def _png(figure: Figure) -> bytes:
    from matplotlib import pyplot

    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": SOFTWARE})
    pyplot.close(figure)
    return out.getvalue()
