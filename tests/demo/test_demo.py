"""`gdpa demo`: its report is complete, says what the numbers say, needs nothing else, and fails when a check does."""

from __future__ import annotations

import copy
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

import browser
from gdpa import demo
from gdpa.bench.kernels import memory
from gdpa.cli import main
from gdpa.cli.claiming import claim_report
from gdpa.commands import verification
from gdpa.demo import measure, page, plot
from gdpa.pages import svg
from gdpa.train import NonFiniteError
from processes import elsewhere

SECTIONS = ("function", "correctness", "accuracy", "attention", "cost", "machine")
FUNCTIONS = ("softmax", "silu", "soft_threshold")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that `gdpa demo --quick` writes, and what it prints."""
    out = tmp_path_factory.mktemp("demo") / "somewhere"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "cpu_peaks", lambda request: elsewhere(memory._answer, request))  # imports nothing
        result = CliRunner().invoke(main, ["demo", "--quick", "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return out, result.output


@pytest.fixture(scope="module")
def document(quick: tuple[Path, str]) -> dict[str, Any]:
    return json.loads((quick[0] / "demo.json").read_text())


@pytest.fixture(scope="module")
def report(quick: tuple[Path, str]) -> str:
    return (quick[0] / "report.html").read_text(encoding="utf-8")


class Parsed(HTMLParser):
    """Tags with their attributes, and the cells of the tables by the id of the table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._table, self._cell = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self._table = dict(attrs).get("id") or ""
            self.tables.setdefault(self._table, [])
        if tag == "tr":
            self.tables[self._table].append([])
        if tag == "small" and self._cell:  # a range, below the value
            self.tables[self._table][-1][-1] += " "
        if tag in ("td", "th"):
            self.tables[self._table][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.tables[self._table][-1][-1] += data


# ---- what is there ---------------------------------------------------------------------------------------------------
def test_the_terminal_shows_every_part(quick: tuple[Path, str]) -> None:
    out, output = quick
    words = ("def soft_threshold", "@triton.jit", "soft_threshold_backward", "dparams", "eager", "MiB", "report.html")
    for word in (*words, "LogLoss", "no sequence", *FUNCTIONS):
        assert word in output
    assert "inline_asm" not in output  # long lines, for the file alone
    assert "def soft_threshold_forward" in (out / "kernel.py").read_text()
    claim_report("demo", out, True, ["kernel.py"])  # it may be run again


def test_the_document_is_complete(document: dict[str, Any]) -> None:
    assert document["failures"] == []
    assert set(document["training"]["models"]) == {"no sequence", *FUNCTIONS}
    for model in document["training"]["models"].values():
        for run in model["runs"]:
            assert len(run["losses"]) == document["training"]["plan"]["steps"]
    for entries in document["cost"]["series"].values():
        assert all(entry["ms"] > 0 and entry["mib"] > 0 for entry in entries)
    assert 0.5 < document["training"]["best"]["auc"] < 1


def test_the_report_has_all_sections_and_figures(report: str) -> None:
    parsed = Parsed(report)
    ids = [attrs["id"] for _, attrs in parsed.tags if attrs.get("id")]
    for section in SECTIONS:
        assert section in ids
    pictures = [f"{kind}-{name}" for kind in ("curve", "weights") for name in FUNCTIONS]
    for name in ("accuracy", "losses", "time", "memory", *pictures):
        assert f"figure-{name}" in ids
    assert len(ids) == len(set(ids))
    assert "All checks passed" in report


def test_the_report_needs_nothing_else(report: str) -> None:
    assert "http" not in report
    assert "url(" not in report.replace("url(#", "")
    for tag, attrs in Parsed(report).tags:
        assert tag not in ("script", "link", "iframe", "object", "embed")
        for name in ("src", "href", "xlink:href"):
            assert (attrs.get(name) or "#").startswith(("#", "data:"))


def test_figures_take_their_colours_from_the_page(report: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", report, re.DOTALL)
    assert len(drawings) == 4 + 2 * len(FUNCTIONS)
    for drawing in drawings:
        ElementTree.fromstring(drawing)  # well formed
        assert "var(--muted)" in drawing
        for colour in (svg.INK, svg.MUTED, svg.GRID, *svg.SERIES):
            assert colour not in drawing
    style = re.search(r"<style>(.*?)</style>", report, re.DOTALL)
    assert style is not None
    for name in set(re.findall(r"var\((--[\w-]+)\)", report)):
        assert style[1].count(f"{name}:") == 2, f"{name} needs a light and a dark value"


def test_the_report_says_what_the_numbers_say(report: str, document: dict[str, Any]) -> None:
    tables = Parsed(report).tables
    training = document["training"]
    shown = {cells[0]: cells[1:] for cells in tables["accuracy-table"][1:]}
    for name, model in training["models"].items():
        assert shown[name][:2] == [f"{model['auc']['mean']:.4f}", f"{model['logloss']['mean']:.4f}"]
        assert model["auc"]["mean"] == model["runs"][0]["auc"]  # one seed: no interval
        assert shown[name][3] == "1"
    assert shown["best possible"][0] == f"{training['best']['auc']:.4f}"
    rows = tables["correctness-table"][1:]
    assert len(rows) == len(document["check"]["rows"])
    for cells, row in zip(rows, document["check"]["rows"], strict=True):
        ours, theirs = row["errors"]["out"]
        definition, plain = row["ratios"].get("out", (0.0, 0.0))
        said = f"{definition:.2f}, {plain:.2f}" if row["ratios"] else f"{ours:.1e} ({theirs:.1e})"
        assert cells[:5] == [row["backend"], row["dtype"], row["case"], "ok", said]
    ours, eager = document["cost"]["series"].values()
    for cells, mine, theirs in zip(tables["cost-table"][1:], ours, eager, strict=True):
        assert cells[0] == f"{mine['length']:,}"
        assert float(cells[1].split()[0].replace(",", "")) == pytest.approx(mine["ms"], abs=0.06, rel=0.006)
        assert cells[4] == f"{theirs['mib']:,.1f}"
    assert f"AUC {training['models']['soft_threshold']['auc']['mean']:.3f}" in report
    assert "<h1>Attention with soft_threshold in place of softmax</h1>" in report
    assert "learns with it\nbeside softmax and silu, and" in report


def test_intervals_are_shown_where_there_are_several_seeds(document: dict[str, Any]) -> None:
    several = copy.deepcopy(document)
    several["training"]["plan"]["seeds"] = [0, 1]
    for model in several["training"]["models"].values():
        model["auc"] |= {"low": model["auc"]["mean"] - 0.0123, "high": model["auc"]["mean"] + 0.0123, "n": 2}
    text = page.page(several, demo.AGREEMENT)
    assert "± 0.0123" in text
    assert "figure-gain" in text
    assert "2 seeds" in text


@pytest.fixture
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without matplotlib, which takes seconds to draw those of a report."""
    monkeypatch.setattr(plot, "possible", lambda: False)


@pytest.mark.usefixtures("_no_figures")
def test_without_matplotlib_the_report_says_so(document: dict[str, Any]) -> None:
    text = page.page(document, demo.AGREEMENT)
    assert "matplotlib is not installed" in text
    assert "<svg" not in text
    assert "accuracy-table" in text


def test_without_the_training_extras_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gdpa.train", None)
    result = CliRunner().invoke(main, ["demo", "--quick", "--out", str(tmp_path / "x")])
    assert result.exit_code == 1
    assert "gdpa.train" in result.output
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("steps", "words"), [(200, "seeds and over 10 steps;"), (20, "over 4 steps;"), (3, "seeds;")])
def test_the_caption_says_how_many_steps_are_a_point(steps: int, words: str) -> None:
    assert words in page.loss_caption(steps)


def test_it_opens_in_a_browser(quick: tuple[Path, str]) -> None:
    """Whole, at both widths; code that is longer than its panel says so."""
    path = browser.installed()
    if path is None:
        pytest.skip(f"no browser installed: looked for {', '.join(browser.BROWSERS)}")
    with browser.Browser(path) as opened:
        browser.check(opened, quick[0] / "report.html", Path(__file__).parents[2] / "build" / "screenshots", "demo")
        assert opened.evaluate("document.querySelectorAll('svg').length") == 4 + 2 * len(FUNCTIONS)
        assert "All checks passed" in opened.evaluate("document.body.innerText")
        panel = "document.querySelector('pre.long')"
        assert opened.evaluate(f"{panel}.scrollHeight > {panel}.clientHeight")


# ---- what fails ------------------------------------------------------------------------------------------------------
def test_a_wrong_kernel_fails_the_command(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(verification, "limit", lambda *_: 0.0)  # nothing is that exact
    monkeypatch.setattr(demo, "show_training", lambda *_: document["training"])
    monkeypatch.setattr(demo, "show_cost", lambda *_: document["cost"])
    result = CliRunner().invoke(main, ["demo", "--quick", "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 1
    assert "FAILED: cpu, float32, dense: out" in result.output
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "All checks passed" not in text
    assert "FAIL: out" in text
    assert json.loads((tmp_path / "demo.json").read_text())["failures"]


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_a_trained_model_that_disagrees_is_a_failure(document: dict[str, Any], error: float) -> None:
    wrong = copy.deepcopy(document)
    wrong["training"]["agreement"]["silu"] = error
    assert demo.failures(document) == []
    assert len(demo.failures(wrong)) == 1
    assert "silu" in demo.failures(wrong)[0]


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_run_without_accuracy_is_a_failure(document: dict[str, Any], value: float | None) -> None:
    wrong = copy.deepcopy(document)
    wrong["training"]["models"]["silu"]["runs"][0]["auc"] = value
    assert len(demo.failures(wrong)) == 1
    wrong["training"]["models"]["silu"]["runs"][0]["auc"] = 0.0  # the worst that there is, and one all the same
    assert demo.failures(wrong) == []


def test_nothing_checked_is_a_failure(document: dict[str, Any]) -> None:
    assert demo.failures({**document, "check": {**document["check"], "rows": []}}) == ["no backend could be checked"]


@pytest.mark.usefixtures("_no_figures")
def test_slower_is_said_as_such_and_noise_too(document: dict[str, Any]) -> None:
    def entry(ms: float, spread: float) -> dict[str, float]:
        return {"length": 8, "ms": ms, "p20_ms": ms - spread, "p80_ms": ms + spread, "mib": 4.0 / ms}

    cost = {**document["cost"], "load": {"others": 1.0, "cores": 2}}
    cost["series"] = {"cpu": [entry(2.0, 0.1)], "eager": [entry(1.0, 0.1)]}
    assert measure.cells(cost)[0][-2:] == ["2.0x slower", "2.0x less"]
    assert "2.0x slower, with 50% of the memory" in measure.verdict(cost)
    assert "gdpa is slower" not in measure.verdict(cost)
    longer = {"cpu": [entry(2.0, 0.1), entry(1.0, 0.1)], "eager": [entry(1.0, 0.1), entry(3.0, 0.1)]}
    longer["cpu"][1]["length"] = longer["eager"][1]["length"] = 16
    assert measure.verdict({**cost, "series": longer}).endswith("of the memory. Up to length 8 gdpa is slower.")
    assert len(measure.doubts(cost)) == 1
    assert "other processes used 1.00 of 2 cores" in measure.doubts(cost)[0]
    cost["series"] = {"cpu": [entry(2.0, 0.8)], "eager": [entry(1.0, 0.8)]}
    assert measure.cells(cost)[0][-2] == "within the noise"
    text = page.page({**document, "cost": cost}, demo.AGREEMENT)
    assert "exceeds the difference at length 8" in text
    assert "faster" not in text[text.index('id="cost"') : text.index('id="machine"')]


@pytest.mark.usefixtures("_no_figures")
def test_it_says_where_eager_does_not_fit(document: dict[str, Any]) -> None:
    ours = [{"length": 8, "ms": 1.0, "p20_ms": 1.0, "p80_ms": 1.0, "mib": 2.0}]
    cost = {**document["cost"], "series": {"cpu": ours, "eager": [{"length": 8, "why": "too large"}]}}
    assert measure.table(cost).row_count == 1
    assert "Only one" in measure.verdict(cost)
    assert "does not fit" in page.page({**document, "cost": cost}, demo.AGREEMENT)


def test_a_loss_that_is_not_finite_is_said_without_a_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def diverge(*_: Any) -> dict[str, Any]:
        raise NonFiniteError("step 3: the loss is nan", 3)

    monkeypatch.setattr(demo, "show_training", diverge)
    result = CliRunner().invoke(main, ["demo", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "Error: step 3: the loss is nan" in result.output


def test_what_is_not_run_for_one_reason_is_one_line() -> None:
    reasons = {"hopper, float32": "no GPU", "hopper, float16": "no GPU", "triton": "not installed"}
    assert verification.not_run(reasons) == ["hopper float32, float16: no GPU", "triton: not installed"]
