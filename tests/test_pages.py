"""What all reports share: the frame, words for comparisons, and pages that nothing is cut off of in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import browser
from gdpa import pages
from gdpa.bench import conclusion, noise, results
from gdpa.bench.models import page as model_page
from gdpa.bench.report import page
from gdpa.pages import frame
from gdpa.pages.palette import DARK, LIGHT, STYLE

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LOAD = {"others": 1.0, "cores": 2}
SCREENSHOTS = ROOT / "build" / "screenshots"  # to look at; `make clean` removes them


def record(median: float, spread: float = 0.0) -> dict[str, float]:
    return {"median_ms": median, "p20_ms": median - spread, "p80_ms": median + spread}


# ---- words -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("times", "words"),
    [(1.83, "1.83x faster"), (2.04, "2.0x faster"), (0.5, "2.0x slower"), (0.9, "1.11x slower"), (1.001, "equal")],
)
def test_a_factor_is_never_below_one(times: float, words: str) -> None:
    assert noise.than(times, "faster", "slower") == words


def test_nothing_is_said_where_the_spread_exceeds_the_difference() -> None:
    assert noise.speed(record(10), record(12)) == "1.20x faster"
    assert noise.speed(record(12), record(10)) == "1.20x slower"
    assert noise.speed(record(10, 1.5), record(12, 1.0)) == "within the noise"
    assert noise.speed(record(12, 1.0), record(10, 1.5)) == "within the noise"


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.2, 1.8, "1.20x to 1.80x faster"),
        (0.5, 0.8, "1.25x to 2.0x slower"),
        (0.8, 1.2, "1.25x slower to 1.20x faster"),
        (1.5, 1.5, "1.50x faster"),
    ],
)
def test_ranges_of_factors(low: float, high: float, words: str) -> None:
    assert noise.between(low, high) == words


def test_what_others_do_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own work is not load."""
    seconds = iter([100.0, 103.0])
    monkeypatch.setattr(noise, "_busy_seconds", lambda: next(seconds))
    own = iter([10.0, 11.0])
    monkeypatch.setattr(noise, "_own_seconds", lambda: next(own))
    clock = iter([0.0, 4.0])
    monkeypatch.setattr(noise.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(noise.os, "cpu_count", lambda: 2)
    found = noise.Others().load()
    assert found == {"others": 0.5, "cores": 2}
    assert noise.busy({"load": found})
    assert "other processes used 0.50 of 2 cores" in str(noise.load_words({"load": found}))
    assert not noise.busy({})
    assert noise.load_words({"load": None}) is None


def test_a_report_opens_with_its_conclusion() -> None:
    document = results.read(RESULTS / "h200.json")
    lines = conclusion.lines(document)
    assert lines[0].startswith("gdpa (hopper) runs at ")
    assert any("cuDNN's softmax attention, which computes another function" in line for line in lines)
    assert any(line.startswith("Warning: the spread from p20 to p80 exceeds the difference") for line in lines)
    text = page.page(document)
    assert text.index('id="conclusion"') < text.index('class="contents"') < text.index("<table")
    assert any("other processes used 1.00 of 2 cores" in line for line in conclusion.lines({**document, "load": LOAD}))
    calm = {
        **document,
        "records": [{**r, "p20_ms": r["median_ms"], "p80_ms": r["median_ms"]} for r in document["records"]],
    }
    assert not any("Warning" in line for line in conclusion.lines(calm))
    assert conclusion.lines({**document, "records": []}) == ["No backend of gdpa was measured."]


# ---- the frame -------------------------------------------------------------------------------------------------------
def test_contents_come_from_the_sections() -> None:
    template = '<!-- contents --><section id="a"><h2>{{ word }}</h2></section><section id="b">\n<h2>Two</h2></section>'
    text = pages.render(template, "A <title>", word="a < b")
    assert '<a href="#a">a &lt; b</a> <a href="#b">Two</a>' in text
    assert "<title>A &lt;title&gt;</title>" in text


def test_tables_scroll_and_escape() -> None:
    rows = [pages.Row(["x", pages.Cell("<1>", under="0–2", heat=0.5)], "own")]
    text = pages.render("{{ table(t) }}", "t", t=pages.Table("n", ["name", "value"], rows))
    assert '<div class="scroll"' in text
    assert '<tr class="own"><td class="name">x</td>' in text
    assert 'rgba(var(--heat), 0.30)">&lt;1&gt;<small>0–2</small></td>' in text


def test_what_belongs_together_is_not_broken_between_lines() -> None:
    def kept(text: str) -> list[str]:
        return re.findall(r'<span class="whole">(.*?)</span>', frame.whole(text))

    assert kept("hopper 2.4e-3, sdpa-cudnn 1.8e-3.") == ["2.4e-3,", "sdpa-cudnn", "1.8e-3."]
    assert kept("TFLOP/s fwd / bwd") == ["fwd / bwd"]
    assert kept("ms a step (p20–p80)") == ["(p20–p80)"]
    assert kept("one - two") == kept(f"{'a' * 20}-{'b' * 20}") == []
    assert frame.whole("<b> & x-<y>-z") == "&lt;b&gt; &amp; x-&lt;y&gt;-z"
    assert re.sub("</?span[^>]*>", "", frame.whole("a < b-c > (d)")) == "a &lt; b-c &gt; (d)"
    rows = [pages.Row(["short", "1"]), pages.Row(["long" * 10, "1"])]
    text = pages.render("{{ table(t) }}", "t", t=pages.Table("", ["p-q", "v"], rows)).partition("<main>")[2]
    assert '<th class="name"><span class="whole">p-q</span></th><th>v</th>' in text
    assert text.count('class="name wraps"') == 1


def test_long_code_says_that_more_follows() -> None:
    shown = pages.render("{{ code(text, 40, 'kernel.py') }}", "t", text="x")
    assert '<pre class="long"' in shown
    assert "40 lines: scroll inside the panel to see the rest, or open kernel.py." in shown
    assert "lines" not in pages.render("{{ code(text, 4) }}", "t", text="x").partition("<main>")[2]


@pytest.mark.parametrize("stored", sorted(RESULTS.glob("*.html")), ids=lambda path: path.stem)
def test_stored_reports_are_those_of_the_template(stored: Path) -> None:
    """Plots aside: releases of matplotlib draw the same in other words."""
    document = results.read(stored.with_suffix(".json"))
    made = (model_page if document.get("kind") == "model" else page).page(document)
    assert without_plots(made) == without_plots(stored.read_text(encoding="utf-8")), f"{stored.name}: run `make readme`"


def without_plots(text: str) -> str:
    return re.sub(r"<svg.*?</svg>", "<svg>", text, flags=re.DOTALL)


def test_every_colour_is_light_and_dark() -> None:
    assert set(LIGHT) == set(DARK)
    assert set(re.findall(r"var\(--([\w-]+)\)", STYLE)) <= set(LIGHT)


# ---- in a browser ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def opened() -> Iterator[browser.Browser]:
    path = browser.installed()
    if path is None:
        pytest.skip(f"no browser installed: looked for {', '.join(browser.BROWSERS)}")
    with browser.Browser(path) as found:
        yield found


def reports() -> dict[str, Any]:
    return {
        "h200": lambda: page.page(results.read(RESULTS / "h200.json")),
        "h200-d64": lambda: page.page(results.read(RESULTS / "h200-d64.json")),
        "h200-model": lambda: model_page.page(results.read(RESULTS / "h200-model.json")),
        "cpu": lambda: page.page(results.read(RESULTS / "cpu.json")),
    }


@pytest.mark.parametrize("name", reports())
def test_nothing_is_cut_off(name: str, opened: browser.Browser, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.html"
    path.write_text(reports()[name](), encoding="utf-8")
    browser.check(opened, path, SCREENSHOTS, name)


def test_the_check_sees_what_is_cut_off(opened: browser.Browser, tmp_path: Path) -> None:
    wide = '<div style="width: 2000px">x</div>'
    cases = {
        "page": (wide, True),
        "hidden": (f'<div style="overflow: hidden; width: 100px" id="h">{wide}</div>', True),
        "scrolling": (f'<div style="overflow-x: auto">{wide}</div>', False),
    }
    for name, (body, clipped) in cases.items():
        path = tmp_path / f"{name}.html"
        path.write_text(f"<!doctype html><body>{body}</body>")
        opened.open(path.as_uri(), 390)
        assert bool(opened.clipped()) is clipped, name


def test_names_of_rows_stay_in_sight_on_a_phone(opened: browser.Browser, tmp_path: Path) -> None:
    rows = [pages.Row(["a name", *["12345.67"] * 9], kind) for kind in ("", "own")]
    text = pages.render("{{ table(t) }}", "t", t=pages.Table("", ["name", *["a value"] * 9], rows))
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    opened.open(path.as_uri(), 390)
    opened.evaluate("document.querySelector('.scroll').scrollLeft = 300")
    lefts = "[...document.querySelectorAll('tr :first-child')].map(e => Math.round(e.getBoundingClientRect().left))"
    box = opened.evaluate("Math.round(document.querySelector('.scroll').getBoundingClientRect().left)")
    assert opened.evaluate("document.querySelector('.scroll').scrollLeft") == 300
    assert opened.evaluate(lefts) == [box] * 3


def test_search_in_a_browser(opened: browser.Browser, tmp_path: Path) -> None:
    """The script alone, on a page as small as can be."""
    index = [{"title": "Masks", "page": "Positions", "url": "positions.html#masks", "text": "a window of keys"},
             {"title": "window", "page": "gdpa.masks", "url": "gdpa/masks.html#window", "text": "(left, right)"},
             {"title": "Data", "page": "Data", "url": "data.html", "text": "tables"}]  # fmt: skip
    script = (ROOT / "docs" / "templates" / "search.js").read_text().replace("= null;", f"= {json.dumps(index)};", 1)
    (tmp_path / "search.js").write_text(script)
    path = tmp_path / "page.html"
    path.write_text(
        '<!doctype html><input id="search" data-root="../"><main>text</main><script src="search.js"></script>'
    )
    opened.open(f"{path.as_uri()}?q=window", 1280)
    links = "[...document.querySelectorAll('.results a')].map(a => a.getAttribute('href'))"
    assert opened.evaluate(links) == ["../gdpa/masks.html#window", "../positions.html#masks"]
    opened.evaluate("(() => { const i = document.getElementById('search'); i.value = ''; "
                    "i.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert opened.evaluate("document.querySelector('main').textContent") == "text"
