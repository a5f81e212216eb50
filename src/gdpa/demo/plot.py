"""The pictures of the report, as SVG; everything they show is in the document that they are made of."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from gdpa.demo.contest import BASELINE, RIVAL
from gdpa.pages.svg import GRID, INK, MINUS, MUTED, PLUS, SERIES, drawing, plain_ticks, to_svg

WIDE, HIGH = 5.2, 3.0  # inches; the page scales them
BIN = 10  # steps whose losses are shown as one point, at most


def possible() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def figures(document: dict[str, Any]) -> dict[str, str]:
    """By name: accuracy, gain (if there are several seeds), losses, time, memory, curve-NAME and weights-NAME."""
    training, cost = document["training"], document["cost"]
    colours = dict(zip(training["models"], SERIES, strict=False))
    found = {"accuracy": accuracy(training, colours), "losses": losses(training, colours)}
    if len(training["plan"]["seeds"]) > 1:
        found["gain"] = gain(training, colours)
    for field, label in (("ms", "time (ms)"), ("mib", "peak memory beyond q, k, v (MiB)")):
        found["time" if field == "ms" else "memory"] = growth(cost, field, label)
    for name, seen in training["attention"].items():
        found[f"curve-{name}"] = curve(name, seen, colours[name])
        found[f"weights-{name}"] = weights(name, seen)
    return found


def accuracy(training: dict[str, Any], colours: dict[str, str]) -> str:
    """AUC of every run, means and intervals, and the best there can be."""
    models = training["models"]
    with drawing(WIDE, 0.9 + 0.36 * len(models)) as (figure, ax):
        dots(ax, {name: model["auc"] for name, model in models.items()}, colours)
        for y, model in enumerate(models.values()):
            ax.plot([run["auc"] for run in model["runs"]], [y + 0.22] * len(model["runs"]), "|", color=MUTED, ms=5)
        best = training["best"]["auc"]
        ax.axvline(best, color=MUTED, ls="--", lw=1)
        ax.annotate(
            f"best possible {best:.3f}", (best, 0.02), (-4, 0), ("data", "axes fraction"), textcoords="offset points",
            ha="right", va="bottom", color=MUTED, fontsize=8,
        )  # fmt: skip
        ax.set_xlabel("test AUC: mean, 95 % interval, and every run (small strokes)")
        ax.margins(x=0.06)
        return to_svg(figure, "accuracy", "Test AUC of each function with its confidence interval")


def gain(training: dict[str, Any], colours: dict[str, str]) -> str:
    """What a function adds to softmax, seed by seed."""
    models = {name: m["gain"] for name, m in training["models"].items() if "gain" in m and name != BASELINE}
    return differences(models, "test AUC", RIVAL, colours)


def differences(models: dict[str, Any], what: str, rival: str, colours: dict[str, str]) -> str:
    """Of each function to ``rival``, with their intervals."""
    with drawing(WIDE, 0.9 + 0.36 * len(models)) as (figure, ax):
        dots(ax, models, colours)
        ax.axvline(0, color=MUTED, lw=1)
        ax.set_xlabel(f"{what} minus that of {rival}, by seed (95 % interval)")
        ax.margins(x=0.08)
        ax.locator_params(axis="x", nbins=6)
        return to_svg(figure, "gain", f"{what[0].upper()}{what[1:]} of each function minus that of {rival}")


def dots(ax: Any, intervals: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    for y, (name, found) in enumerate(intervals.items()):
        if found["low"] is not None:
            ax.plot([found["low"], found["high"]], [y, y], color=colours[name], lw=2, solid_capstyle="butt")
        ax.plot(found["mean"], y, "o", color=colours[name], ms=6)
    ax.set_yticks(range(len(intervals)), list(intervals), color=INK)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(intervals) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.spines["left"].set_visible(False)


def in_a_point(steps: int) -> int:
    """Of so many steps, those whose losses are shown as one point."""
    return max(1, min(BIN, steps // 5))


def losses(training: dict[str, Any], colours: dict[str, str]) -> str:
    """Mean over the seeds and over some steps; on samples never seen before."""
    with drawing(WIDE, HIGH) as (figure, ax):
        for name, model in training["models"].items():
            mean = np.mean([run["losses"] for run in model["runs"]], axis=0)
            size = in_a_point(len(mean))
            points = mean[: len(mean) // size * size].reshape(-1, size).mean(1)
            steps = (np.arange(len(points)) + 0.5) * size
            style = {"ls": "--"} if name == BASELINE else {}
            ax.plot(steps, points, color=colours[name], label=name, **style)
        ax.axhline(training["best"]["logloss"], color=MUTED, ls=":", lw=1.2, label="best possible")
        ax.set_xlabel("step")
        ax.set_ylabel("training loss")
        ax.set_xlim(left=0)
        figure.legend(loc="outside upper left", ncols=3)
        return to_svg(figure, "losses", "Training loss of each function over the steps")


def curve(name: str, seen: dict[str, Any], colour: str) -> str:
    """f(s), and below it where the scores are."""
    edges, counts = (np.array(seen["scores"][key]) for key in ("edges", "counts"))
    s, p = (np.array(seen["curve"][key]) for key in ("s", "p"))
    with drawing(4.4, 2.5) as (figure, ax):
        top = max(p.max(), 1e-9)
        density = counts / max(counts.max(), 1) * top * 0.6
        ax.bar(edges[:-1], density, np.diff(edges), align="edge", color=MUTED, alpha=0.25, lw=0)
        ax.plot(s, p, color=colour, lw=2.2)
        ax.axhline(0, color=GRID, lw=1)
        ax.set_xlim(edges[0], edges[-1])
        ax.set_xlabel("score s")
        ax.set_ylabel("exp(s)" if name == RIVAL else "weight p = f(s)")
        return to_svg(
            figure, f"curve-{name}", f"{name}: weight as a function of the score, and a histogram of the scores"
        )


def weights(name: str, seen: dict[str, Any]) -> str:
    """The weights of one history, with the scale of its colours."""
    p = np.array(seen["weights"])
    largest = max(float(np.abs(p).max()), 1e-9)
    labels = seen["labels"]
    with drawing(4.4, 3.7) as (figure, ax):
        ax.imshow(_coloured(p, largest), interpolation="none", aspect="equal")
        _scale(figure, ax, min(float(p.min()), 0.0), largest)
        ax.set_yticks(range(len(labels)), labels, fontsize=7)
        ax.set_xticks(range(len(labels)), labels, fontsize=7, rotation=90)
        for axis in (ax.xaxis, ax.yaxis):
            for text in axis.get_ticklabels():
                if text.get_text().startswith("★"):
                    text.set_color(INK)
        ax.tick_params(length=0, pad=2)
        ax.grid(visible=False)
        ax.spines[["top", "right"]].set_visible(True)
        for spine in ax.spines.values():
            spine.set_color(GRID)
        return to_svg(figure, f"weights-{name}", f"{name}: attention weights between the tokens of one history")


def _coloured(p: np.ndarray, largest: float) -> np.ndarray:
    """RGBA: sign as colour, strength as opacity."""
    image = np.empty((*p.shape, 4))
    image[..., :3] = np.where(p[..., None] >= 0, PLUS, MINUS) / np.array(255.0)
    image[..., 3] = np.abs(p) / largest
    return image


def _scale(figure: Any, ax: Any, low: float, largest: float) -> None:
    """The colours of weights, beside the picture: from ``low``, which is 0 where no weight is negative."""
    low = -largest if low < 0 else 0.0
    beside = figure.colorbar(_mappable(low, largest), ax=ax, shrink=0.85, pad=0.02, aspect=25)
    beside.ax.clear()
    values = np.linspace(low, largest, 64)[:, None]
    beside.ax.imshow(_coloured(values, largest), aspect="auto", origin="lower", extent=(0, 1, low, largest))
    beside.ax.set_xticks([])
    beside.ax.yaxis.tick_right()
    beside.ax.tick_params(labelsize=7)
    beside.ax.grid(visible=False)
    beside.ax.set_ylabel("weight p", fontsize=7)
    beside.ax.yaxis.set_label_position("right")


def _mappable(low: float, high: float) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    return ScalarMappable(Normalize(low, high))


def growth(cost: dict[str, Any], field: str, label: str) -> str:
    """gdpa and eager PyTorch against length, both axes logarithmic."""
    from matplotlib.ticker import NullLocator

    with drawing(WIDE, HIGH) as (figure, ax):
        for name, entries in cost["series"].items():
            points = [(entry["length"], entry[field]) for entry in entries if entry.get(field)]
            if not points:
                continue
            eager = name == "eager"
            style: dict[str, Any] = {"color": MUTED, "ls": "--"} if eager else {"color": SERIES[4]}
            said = "eager PyTorch" if eager else f"gdpa ({name})"
            ax.plot(*zip(*points, strict=True), marker="o", ms=4, label=said, **style)
            ax.annotate(f"{points[-1][1]:,.0f}", points[-1], textcoords="offset points", xytext=(6, -3), fontsize=8)
        lengths = [entry["length"] for entry in next(iter(cost["series"].values()))]
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
        ax.xaxis.set_minor_locator(NullLocator())
        plain_ticks(ax.yaxis)
        ax.margins(x=0.12, y=0.1)
        ax.set_xlabel("sequence length")
        ax.set_ylabel(label)
        ax.legend(loc="upper left")
        return to_svg(figure, field, f"{label} against sequence length, gdpa and eager PyTorch")
