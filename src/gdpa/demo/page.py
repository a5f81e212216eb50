"""The report of the demonstration: one HTML file that needs nothing else, made from the document alone."""

from __future__ import annotations

from typing import Any

from gdpa import pages
from gdpa.bench import noise
from gdpa.bench.report.tables import cpu
from gdpa.commands import verification
from gdpa.demo import attending, measure, plot
from gdpa.demo.contest import BASELINE, RIVAL
from gdpa.demo.statistics import shown
from gdpa.demo.template import TEMPLATE
from gdpa.pages import Cell, Row, Table


def page(document: dict[str, Any], limit: float) -> str:
    """``limit``: of the trained models' error."""
    from markupsafe import Markup

    training, function = document["training"], document["function"]
    drawn = plot.figures(document) if plot.possible() else {}
    return pages.render(
        TEMPLATE,
        f"gdpa demo: {function['name']}",
        name=function["name"],
        others=[name for name in training["models"] if name not in (BASELINE, function["name"])],
        quick=document["quick"],
        failures=document["failures"],
        figures={name: Markup(drawing) for name, drawing in drawn.items()},
        figures_to_remember=tiles(document),
        doubts=measure.doubts(document["cost"]),
        written=Markup(coloured(function["written"])),
        emitted=Markup(coloured(function["emitted"])),
        emitted_lines=function["emitted"].count("\n") + 1,
        correctness=correctness(document["check"]),
        not_run=verification.not_run(document["check"]["not_run"]),
        limit=limit,
        agreement=agreement(training),
        plan=training["plan"],
        many_functions=counted(len(training["models"]) - 1),
        about=about(training["plan"]),
        accuracy=accuracy(training, function["name"]),
        loss_caption=loss_caption(training["plan"]["steps"]),
        caveat=caveat(training["plan"]),
        cards=cards(training, function),
        many=attending.MANY,
        cost_setting=document["cost"]["setting"],
        cost_verdict=measure.verdict(document["cost"]).replace("%", " %"),
        cost=cost(document["cost"]),
        about_machine=facts(document),
    )  # fmt: skip


def coloured(code: str) -> str:
    """HTML with the classes of pygments, which comes with rich; the palette has their colours."""
    from pygments import highlight  # type: ignore[import-untyped]
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
    from pygments.lexers import PythonLexer  # type: ignore[import-untyped]

    return highlight(code, PythonLexer(), HtmlFormatter(nowrap=True)).rstrip()


def tiles(document: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures to remember."""
    training, name = document["training"], document["function"]["name"]
    models = training["models"]
    auc = {model: shown(models[model]["auc"]["mean"], 3) for model in (name, RIVAL, BASELINE)}
    others = f"{RIVAL} {auc[RIVAL]}, without history {auc[BASELINE]}"
    found = [(f"AUC {auc[name]}", f"{name}; {others}, best possible {training['best']['auc']:.3f}")]
    rows = document["check"]["rows"]
    passed = sum(not row["failed"] for row in rows)
    backends = dict.fromkeys(row["backend"] for row in rows)
    found.append(
        (f"{passed} of {len(rows)}", f"checks against float64 passed, values and gradients: {', '.join(backends)}")
    )
    if (both := measure.last_of_both(document["cost"])) is not None:
        ours, eager = both
        at = f"of eager PyTorch at length {ours['length']:,}, forward and backward"
        speed = measure.faster(ours, eager)
        found.append((speed, at.replace("of", "than" if speed.endswith("er") else "beside", 1)))
        found.append((f"{ours['mib'] / eager['mib']:.0%}".replace("%", " %"), f"of the memory {at}"))
    return found


def correctness(check: dict[str, Any]) -> Table:
    """Of every result what decides: two ratios in 16 bits, errors in float32."""
    names = list(dict.fromkeys(name for row in check["rows"] for name in row["errors"]))
    lines = []
    for row in check["rows"]:
        cells = [error(row, name) if name in row["errors"] else "" for name in names]
        verdict = f"FAIL: {', '.join(row['failed'])}" if row["failed"] else "ok"
        lines.append(Row([row["backend"], row["dtype"], row["case"], verdict, *cells]))
    return Table("correctness-table", ["backend", "dtype", "case", "verdict", *names], lines, 4)


def error(row: dict[str, Any], quantity: str) -> str:
    """In 16 bits the ratios to the definition's error and to PyTorch's, which the rules are about; in float32 gdpa's
    error, and PyTorch's in brackets."""
    if quantity in row["ratios"]:
        definition, plain = row["ratios"][quantity]
        return f"{definition:.2f}, {plain:.2f}"
    ours, theirs = row["errors"][quantity]
    return f"{ours:.1e} ({theirs:.1e})"


def agreement(training: dict[str, Any]) -> Table:
    rows = [Row([name, f"{error:.1e}"]) for name, error in training["agreement"].items()]
    return Table("agreement-table", ["function", "max |logit − exact| / max |exact|"], rows, 1)


def loss_caption(steps: int) -> str:
    size = plot.in_a_point(steps)
    over = f" and over {size} steps" if size > 1 else ""
    return f"Means over the seeds{over}; every batch is of samples not seen before."


def accuracy(training: dict[str, Any], own: str) -> Table:
    """Means and intervals; the best possible last."""
    lines = []
    for name, model in training["models"].items():
        cells = [
            spread(model["auc"]),
            spread(model["logloss"]),
            spread(model["gain"], sign=True) if "gain" in model else "",
        ]
        kind = "own" if name == own else "quiet" if name == BASELINE else ""
        lines.append(Row([name, *cells, str(model["auc"]["n"])], kind))
    best = training["best"]
    lines.append(Row(["best possible", f"{best['auc']:.4f}", f"{best['logloss']:.4f}", "", ""], "quiet"))
    return Table(
        "accuracy-table", ["function", "test AUC", "test LogLoss", f"AUC − {RIVAL}, by seed", "seeds"], lines, 1
    )


def spread(found: dict[str, Any], sign: bool = False) -> str:
    """mean ± half the 95 % interval; - where there is none."""
    if found["mean"] is None:
        return "-"
    mean = f"{found['mean']:+.4f}".replace("-", "−") if sign else f"{found['mean']:.4f}"
    return mean if found["high"] is None else f"{mean} ± {found['high'] - found['mean']:.4f}"


def counted(n: int) -> str:
    """In words, as in a sentence."""
    return {1: "one function", 2: "two functions", 3: "three functions", 4: "four functions"}.get(n, f"{n} functions")


def about(plan: dict[str, Any]) -> str:
    n = len(plan["seeds"])
    return (
        f"{'One seed' if n == 1 else f'{n} seeds'}, {plan['steps']} steps of {plan['batch_size']} samples, each sample "
        f"seen once; {plan['test_size']:,} test samples, the same for all. Intervals are 95 % confidence intervals of "
        "the mean over seeds (Student's t). The best possible values are those of a model that knows the true "
        "probability of every click."
    )


def caveat(plan: dict[str, Any]) -> list[str]:
    """In paragraphs."""
    return [
        f"These are small models (one layer, width {plan['dim']}) in a small world ({plan['items']} items in "
        f"{plan['categories']} categories, histories of up to {plan['longest']} events), trained for seconds, far from "
        "what longer training reaches. Histories help by construction: the log is made that way. Learning rate and "
        "sizes are the same for all functions, and chosen to be fast. Sums over keys are divided by the greatest "
        f"length, except with {RIVAL}.",
        "A seed decides the training samples and the starting weights. All functions of a seed share both, so that "
        "differences by seed say more than the values themselves. Where the interval of a difference contains zero, "
        f"these runs do not tell the function from {RIVAL}; the test samples are the same in all runs, and their own "
        "chance is not in the intervals. What holds here need not hold on your data: gdpa train is how to find out.",
    ]


def cards(training: dict[str, Any], function: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each function, with what its picture says in numbers."""
    found = []
    for name, seen in training["attention"].items():
        flat = [p for row in seen["weights"] for p in row]
        low, high = (f"{p:.2f}".replace("-", "−") for p in (min(flat), max(flat)))
        words = [f"Weights from {low} to {high}."]
        if name == RIVAL:
            words.append("The curve is divided by its sum over the row.")
        moved = zip(seen["params"], function["params"], function["param_names"], strict=False)
        for value, start, param in moved if name == function["name"] else ():
            words.append(f"Its {param} has moved from {start:g} to {value:.2f}.")
        series = list(training["models"]).index(name)
        found.append({"name": name, "words": " ".join(words), "series": series})
    return found


def cost(document: dict[str, Any]) -> Table:
    head = ["length"]
    for name in document["series"]:
        who = "eager" if name == "eager" else f"gdpa ({name})"
        head += [f"{who}, ms", f"{who}, MiB"]
    lines = [Row([_with_range(cell) for cell in cells]) for cells in measure.cells(document)]
    return Table("cost-table", [*head, "gdpa is", "gdpa needs"], lines, 0)


def _with_range(cell: str) -> str | Cell:
    """1.2 (1.1-1.3) with the range below."""
    value, _, rest = cell.partition(" (")
    return Cell(value, rest.rstrip(")").replace("-", "–")) if rest else cell


def facts(document: dict[str, Any], timed: str = "cost") -> list[tuple[str, str]]:
    """Of the machine and the run; ``timed`` names the part that has the load while times were measured."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    found = [("GPU", document["gpu"]), ("CPU", cpu(document))]
    found += [("versions", versions), ("date", document["date"]), ("commit", document["commit"])]
    found += [("took", f"{document['took_s']:.0f} s"), ("load", noise.load_words(document[timed]))]
    return [(key, value) for key, value in found if value]
