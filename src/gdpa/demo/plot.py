"""The picture of the demonstration: time and peak memory against length, both on logarithmic axes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from gdpa.bench.plot import COLOURS, NO_PLOT, OTHER, new_figure

PANELS = (("ms", "time (ms)"), ("mib", "peak memory beyond q, k, v (MiB)"))


def plot(document: dict[str, Any], path: Path) -> str:
    """Write the PNG; returns what was done."""
    if importlib.util.find_spec("matplotlib") is None:
        return NO_PLOT
    figure, axes = new_figure(2, 11, 4.6)
    for ax, (field, label) in zip(axes, PANELS, strict=True):
        for name, entries in document["series"].items():
            points = [(entry["length"], entry[field]) for entry in entries if entry.get(field)]
            if points:
                style = {"color": COLOURS.get(name, OTHER), "label": f"gdpa ({name})"}
                if name == "eager":
                    style = {"color": "#888888", "label": "eager PyTorch", "linestyle": "--"}
                ax.plot(*zip(*points, strict=True), marker="o", linewidth=2, **style)
                ax.annotate(f"{points[-1][1]:,.0f}", points[-1], textcoords="offset points", xytext=(6, 4), fontsize=8)
        lengths = [entry["length"] for entry in next(iter(document["series"].values()))]
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
        ax.yaxis.set_major_formatter("{x:,g}")
        ax.minorticks_off()
        ax.margins(x=0.12)
        ax.set_xlabel("sequence length")
        ax.set_title(label, loc="left", fontweight="bold", fontsize=11)
        ax.grid(color="#e0e0e0", linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="upper left")
    figure.suptitle(
        f"{document['function']}(q, k, v), forward and backward: {document['setting']}",
        fontsize=9, x=0.01, ha="left", color="#555555",
    )  # fmt: skip
    figure.savefig(path, dpi=150)
    return f"plot: {path}"
