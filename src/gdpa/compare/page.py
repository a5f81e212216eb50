"""The report of a comparison: one HTML file that needs nothing else, made from the document alone."""

from __future__ import annotations

from typing import Any

from gdpa import pages
from gdpa.bench import noise
from gdpa.commands import verification
from gdpa.compare import plot, speed, training
from gdpa.compare.template import TEMPLATE
from gdpa.demo.contest import BASELINE
from gdpa.demo.page import coloured, error, facts, spread
from gdpa.demo.statistics import shown
from gdpa.pages import Cell, Row, Table
from gdpa.pages.svg import SERIES


def page(document: dict[str, Any]) -> str:
    from markupsafe import Markup

    functions, learned = document["functions"], document["training"]
    names = [f["name"] for f in functions]
    colours = plot.colours_of(names)
    drawn = plot.figures(document, colours)
    return pages.render(
        TEMPLATE,
        f"gdpa compare: {', '.join(names)}",
        names=names,
        model=learned["model"],
        quick=document["quick"],
        failures=document["failures"],
        conclusions=conclusions(document),
        figures={name: Markup(drawing) for name, drawing in drawn.items()},
        figures_to_remember=tiles(document),
        cards=[card(f, colours) for f in functions],
        correctness=correctness(document["checks"]),
        not_run=not_run(document["checks"]),
        speed_setting=document["speed"]["setting"],
        doubts=speed.warnings(document["speed"]),
        speed=speeds(document["speed"]),
        training=learned,
        seeds=_seeds(learned),
        about=about(learned),
        accuracy=accuracy(learned),
        caveat=caveat(learned),
        about_machine=facts(document, "speed"),
    )  # fmt: skip


def conclusions(document: dict[str, Any]) -> list[str]:
    """What came out, in a sentence for each function beside the rival."""
    learned, rival = document["training"], document["training"]["rival"]
    last = document["speed"]["cases"][-1]
    found = []
    for name, model in learned["models"].items():
        if name in (rival, BASELINE):
            continue
        said = _sentence(training.verdict(model), rival, learned["part"])
        metric, key = ("LogLoss", "logloss_gain") if model["auc_gain"]["mean"] is None else ("AUC", "auc_gain")
        gain = spread(model[key], sign=True)
        cost = noise.speed(last["times"][name], last["times"][rival])
        beside = f"{cost} than {rival}" if cost.endswith("er") else f"as fast as {rival} ({cost})"
        found.append(f"{name}: {said} ({metric} {gain}); {beside} at length {last['length']:,}, forward and backward.")
    return found


def _sentence(verdict: str, rival: str, part: str) -> str:
    if verdict == training.NO_AUC:
        return f"the {part} samples are all of one class, and have no AUC to tell it from {rival}"
    if verdict in (training.BETTER, training.WORSE):
        return f"{verdict} than {rival}"
    return f"no difference from {rival} shown{' by one seed' if verdict == training.ONE_SEED else ''}"


def tiles(document: dict[str, Any]) -> list[tuple[str, str]]:
    learned = document["training"]
    found = [
        (f"AUC {shown(model['auc']['mean'], 3)}", name if name != BASELINE else "a model without history")
        for name, model in learned["models"].items()
    ]
    if learned["best"]:
        found.append((f"AUC {learned['best']['auc']:.3f}", "the best possible on this data"))
    return found


def card(f: dict[str, Any], colours: dict[str, str]) -> dict[str, Any]:
    from markupsafe import Markup

    words = [f"{f['spec']}." if f["spec"] != f["name"] else "A built-in."]
    if f["normalize"]:
        words.append("Outputs are divided by the sum of a row's weights.")
    if f["params"]:
        words.append(f"Params start at {', '.join(f'{p:g}' for p in f['params'])} and are learned.")
    return {
        "name": f["name"], "series": SERIES.index(colours[f["name"]]), "words": " ".join(words), "file": f["file"],
        "written": Markup(coloured(f["written"])), "emitted": Markup(coloured(f["emitted"])),
        "lines": f["emitted"].count("\n") + 1,
    }  # fmt: skip


def correctness(checks: dict[str, dict[str, Any]]) -> Table:
    """The output, and the gradient that is furthest off."""
    lines = []
    for name, found in checks.items():
        for row in found["rows"]:
            gradients = [key for key in row["errors"] if key != "out"]
            numbers = row["ratios"] or row["errors"]
            worst = max(gradients, key=lambda key: numbers[key][0]) if gradients else None
            verdict = f"FAIL: {', '.join(row['failed'])}" if row["failed"] else "ok"
            cells = [error(row, "out"), error(row, worst) + f" {worst}" if worst else ""]
            lines.append(Row([name, row["backend"], row["dtype"], row["case"], verdict, *cells]))
    head = ["function", "backend", "dtype", "case", "verdict", "output", "worst gradient"]
    return Table("correctness-table", head, lines, 5)


def not_run(checks: dict[str, dict[str, Any]]) -> list[str]:
    """The same for all functions, mostly: each once."""
    return list(dict.fromkeys(line for found in checks.values() for line in verification.not_run(found["not_run"])))


def speeds(document: dict[str, Any]) -> Table:
    rival, lines = document["rival"], []
    for case in document["cases"]:
        what = "forward" if case["pass"] == "forward" else "both"
        for name, t in case["times"].items():
            time = Cell(f"{t['median_ms']:.2f}", f"{t['p20_ms']:.2f}–{t['p80_ms']:.2f}")
            beside = "" if name == rival else noise.speed(t, case["times"][rival])
            lines.append(Row([f"{case['length']:,}, {what}", name, time, beside]))
    return Table("speed-table", ["length, pass", "function", "ms (p20–p80)", f"beside {rival}"], lines, 2)


def accuracy(learned: dict[str, Any]) -> Table:
    rival, part, lines = learned["rival"], learned["part"], []
    for name, model in learned["models"].items():
        gains = [spread(model[key], sign=True) if key in model else "" for key in ("auc_gain", "logloss_gain")]
        words = "" if name == BASELINE else training.verdict(model)
        cells = [spread(model["auc"]), spread(model["logloss"]), *gains, words]
        lines.append(Row([name, *cells], "quiet" if name == BASELINE else ""))
    if learned["best"]:
        best = learned["best"]
        lines.append(Row(["best possible", f"{best['auc']:.4f}", f"{best['logloss']:.4f}", "", "", ""], "quiet"))
    head = ["function", f"{part} AUC", f"{part} LogLoss", f"AUC − {rival}", f"LogLoss − {rival}", "verdict"]
    return Table("accuracy-table", head, lines, 1)


def _seeds(learned: dict[str, Any]) -> str:
    n = len(learned["seeds"])
    return "one seed" if n == 1 else f"{n} seeds"


def about(learned: dict[str, Any]) -> str:
    options = ", ".join(f"{key} {value}" for key, value in learned["options"].items())
    what = "gdpa's synthetic click log" if learned["synthetic"] else "the data of the given settings"
    return (
        f"{learned['model']}{f' ({options})' if options else ''} on {what}, {_seeds(learned)}, "
        f"{learned['steps']} steps of {learned['batch_size']} samples. Intervals are 95 % confidence intervals of the "
        "mean over seeds (Student's t); differences are taken seed by seed."
    )


def caveat(learned: dict[str, Any]) -> list[str]:
    rival = learned["rival"]
    found = [
        "All functions of a seed share the samples, their order and the starting weights, so that differences by seed "
        "say more than the values themselves. Where the interval of a difference contains zero, these runs do not tell "
        f"the function from {rival}. Learning rate and sizes are the same for all functions, and may suit one of them.",
    ]
    if learned["synthetic"]:
        found.append(
            "The log is synthetic and small, and training takes seconds: what holds here need not hold on your data. "
            "gdpa compare --config FILE.toml takes the settings of a run of gdpa train, with your data and model."
        )
    return found
