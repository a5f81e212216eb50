"""The pictures of the report, as SVG, made of the document alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gdpa.demo.contest import BASELINE
from gdpa.demo.plot import HIGH, WIDE, differences, dots, in_a_point, possible
from gdpa.pages.svg import GRID, INK, MUTED, SERIES, drawing, plain_ticks, to_svg

S_MOST = 6.0  # scores that curves are drawn for: from minus that


def figures(document: dict[str, Any], colours: dict[str, str]) -> dict[str, str]:
    """By name: curves, speed, losses, and where there is an AUC accuracy and, with several seeds, gain; none without
    matplotlib."""
    if not possible():
        return {}
    training = document["training"]
    found = {
        "curves": curves(document["functions"], colours),
        "speed": speed(document["speed"], colours),
        "losses": losses(training, colours),
    }
    if any(model["auc"]["mean"] is None for model in training["models"].values()):
        return found
    found["accuracy"] = accuracy(training, colours)
    if len(training["seeds"]) > 1:
        found["gain"] = gain(training, colours)
    return found


def colours_of(names: list[str]) -> dict[str, str]:
    """The model without history has the quiet one."""
    return {BASELINE: SERIES[0], **dict(zip(names, SERIES[1:], strict=False))}


def curve_points(evaluate: Any, params: tuple[float, ...]) -> dict[str, list[float]]:
    """f at some scores, as it is written."""
    s = torch.linspace(-S_MOST, S_MOST, 121, dtype=torch.float64)
    with torch.no_grad():
        p = evaluate(s, *(torch.full_like(s, value) for value in params))
    return {"s": s.tolist(), "p": p.clamp(-1e6, 1e6).nan_to_num(0.0).tolist()}


def curves(functions: list[dict[str, Any]], colours: dict[str, str]) -> str:
    with drawing(WIDE, HIGH) as (figure, ax):
        ax.axhline(0, color=GRID, lw=1)
        for f in functions:
            label = f"{f['name']} (before normalisation)" if f["normalize"] else f["name"]
            ax.plot(f["curve"]["s"], f["curve"]["p"], color=colours[f["name"]], label=label)
        ax.set_xlim(-S_MOST, S_MOST)
        ax.set_ylim(-2.5, 8)
        ax.set_xlabel("score s")
        ax.set_ylabel("p = f(s)")
        figure.legend(loc="outside upper left", ncols=2)
        return to_svg(figure, "curves", "Each function of the score")


def speed(document: dict[str, Any], colours: dict[str, str]) -> str:
    """Medians and ranges from p20 to p80, a group of dots for each case."""
    cases = document["cases"]
    names = list(cases[0]["times"])
    with drawing(WIDE, 0.8 + 0.24 * len(cases) * (len(names) + 0.7)) as (figure, ax):
        ticks, y = [], 0.0
        for case in cases:
            ticks.append((y + (len(names) - 1) / 2, f"{case['length']:,}\n{_words(case['pass'])}"))
            for name in names:
                t = case["times"][name]
                ax.plot([t["p20_ms"], t["p80_ms"]], [y, y], color=colours[name], lw=2, solid_capstyle="butt")
                ax.plot(t["median_ms"], y, "o", color=colours[name], ms=5, label=name if case is cases[0] else None)
                y += 1
            y += 0.7
        ax.set_yticks([at for at, _ in ticks], [text for _, text in ticks], color=INK)
        ax.set_ylim(y - 1.2, -0.8)
        ax.set_xscale("log")
        plain_ticks(ax.xaxis)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("ms: median, p20 to p80")
        figure.legend(loc="outside upper left", ncols=3)
        return to_svg(figure, "speed", "Time of each function by length and pass")


def _words(which: str) -> str:
    return "forward" if which == "forward" else "forward + backward"


def accuracy(training: dict[str, Any], colours: dict[str, str]) -> str:
    models = training["models"]
    with drawing(WIDE, 0.9 + 0.36 * len(models)) as (figure, ax):
        dots(ax, {name: model["auc"] for name, model in models.items()}, colours)
        for y, model in enumerate(models.values()):
            ax.plot([run["auc"] for run in model["runs"]], [y + 0.22] * len(model["runs"]), "|", color=MUTED, ms=5)
        ax.set_xlabel(f"{training['part']} AUC: mean, 95 % interval, and every run (small strokes)")
        ax.margins(x=0.06)
        return to_svg(figure, "accuracy", "AUC of each function with its confidence interval")


def gain(training: dict[str, Any], colours: dict[str, str]) -> str:
    models = {n: m["auc_gain"] for n, m in training["models"].items() if "auc_gain" in m and n != BASELINE}
    return differences(models, "AUC", training["rival"], colours)


def losses(training: dict[str, Any], colours: dict[str, str]) -> str:
    with drawing(WIDE, HIGH) as (figure, ax):
        for name, model in training["models"].items():
            mean = np.mean([run["losses"] for run in model["runs"]], axis=0)
            steps = np.array(model["runs"][0]["loss_steps"])
            size = in_a_point(len(mean))
            whole = len(mean) // size * size
            points, at = (x[:whole].reshape(-1, size).mean(1) for x in (mean, steps))
            style = {"ls": "--"} if name == BASELINE else {}
            ax.plot(at, points, color=colours[name], label=name, **style)
        ax.set_xlabel("step")
        ax.set_ylabel("training loss")
        ax.set_xlim(left=0)
        figure.legend(loc="outside upper left", ncols=3)
        return to_svg(figure, "losses", "Training loss with each function over the steps")
