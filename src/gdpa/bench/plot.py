"""The picture of a result document: TFLOP/s of every contender on every case, beside what the machine allows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpa.bench.report import title, unit
from gdpa.bench.run import rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (("fwd", "forward"), ("bwd", "backward"))
COLOURS = {
    "hopper": "#0b3c5d",
    "triton": "#1f77b4",
    "cpu": "#1f77b4",
    "reference": "#9ecae1",
    "eager": "#bbbbbb",
    "sdpa-cudnn": "#e08a2e",
    "sdpa-flash": "#f2c48d",
}
OTHER = "#6b4c9a"
NO_PLOT = "no plot: matplotlib is not installed (pip install 'gdpa[plot]')"


def new_figure(columns: int, width: float, height: float) -> tuple[Any, Any]:
    """(figure, axes) without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained")


def plot(document: dict[str, Any], path: Path) -> str:
    """Write a PNG (a group of bars per case and function, the floor of each as a line); returns what was done."""
    if importlib.util.find_spec("matplotlib") is None:
        return NO_PLOT
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for (case, function, backend), by_pass in rows(document):
        key = (case, "" if function == "softmax" else function)
        groups.setdefault(key, {})[backend] = by_pass
    names = [function for _, function in groups if function]
    softmax = {case: entries for (case, function), entries in groups.items() if not function}
    labelled = {
        case if len(set(names)) == 1 else f"{case} {function}": {**entries, **softmax.get(case, {})}
        for (case, function), entries in groups.items()
        if function or not names
    }
    figure, axes = new_figure(2, 13, 1.6 + 0.55 * len(labelled))
    prefix, factor = unit(document)
    for ax, (which, label) in zip(axes, PANELS, strict=True):
        _bars(ax, labelled, which, factor)
        ax.set_title(label, loc="left", fontweight="bold")
        ax.set_xlabel(f"{prefix}FLOP/s (higher is better)")
    axes[0].set_yticks(range(len(labelled)), list(labelled))
    axes[1].set_yticks(range(len(labelled)), [""] * len(labelled))
    handles = {text: handle for handle, text in zip(*axes[0].get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title(document), fontsize=9, x=0.01, ha="left", color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return f"plot: {path}"


def _bars(ax: Axes, groups: dict[str, dict[str, dict[str, Any]]], which: str, factor: float) -> None:
    for y, entries in enumerate(groups.values()):
        height = 0.8 / len(entries)
        limit = 0.0
        for i, (backend, by_pass) in enumerate(entries.items()):
            record = by_pass[which]
            speed = factor * record["tflops"]
            limit = speed / record["floor_fraction"]
            label = f"{backend} (softmax)" if record["function"] == "softmax" else backend
            centre = y - 0.4 + (i + 0.5) * height
            ax.barh(centre, speed, 0.9 * height, color=COLOURS.get(backend, OTHER), label=label)
            ax.text(speed, centre, f" {speed:.3g}", va="center", fontsize=7, color="#333333")
        ax.plot([limit, limit], [y - 0.42, y + 0.42], color="#c0392b", linewidth=1.5, label="floor")
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.margins(x=0.08)
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
