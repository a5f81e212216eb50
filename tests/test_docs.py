"""The documents: every Python block runs, every link leads somewhere, every table is what its result file says."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import gdpa
from gdpa.bench.report import documents

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """(line, code) of each fenced block of Python."""
    text = page.read_text()
    fences = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in fences]


@pages
def test_snippets_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace. torch.compile makes its graph and runs that: code would need a C++ compiler, and what
    autograd makes of graphs is tested elsewhere."""
    if page.name == "transformers.md":
        pytest.importorskip("transformers")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    namespace = {"__name__": "snippet"}
    for line, code in python_blocks(page):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pages
def test_tables_are_up_to_date(page: Path) -> None:
    """`make readme` would change nothing."""
    text = page.read_text()
    for match in documents.MARKED.finditer(text):
        expected = documents.make(match["what"], ROOT)
        assert expected in match[0], f"{page.name}: run `make readme`"


def test_the_readme_is_short() -> None:
    """It has five rows of figures; all of them are in docs/results.md."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 8192
    table = next(match[0] for match in documents.MARKED.finditer(text) if match["what"].startswith("headline "))
    assert len(re.findall(r"^\| (?!case|---)", table, re.MULTILINE)) == 5
    assert text.count("![") == 1
    everything = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for name in ("h200.json", "h200-model.json", "cpu.json"):
        assert f"benchmarks/results/{name}" in everything


@pages
def test_links_have_titles(page: Path) -> None:
    """Not the names of files."""
    if not page.name.startswith("kernels"):
        assert not re.findall(r"\[[\w/-]+\.md(?:#[\w-]*)?\]\(", page.read_text(encoding="utf-8"))


def test_no_document_names_a_machine() -> None:
    for page in PAGES:
        assert not re.search(r"/(work|home|root|tmp)/", page.read_text()), page


def test_functions_page_has_every_builtin_and_operation() -> None:
    """A page that lists what is supported must not fall behind the table it describes."""
    from gdpa.functions.tracing.lower import COMPOSITE, PRIMITIVE

    text = (ROOT / "docs" / "functions.md").read_text()
    for name in gdpa.activations():
        assert f"`{name}`" in text
    spelled = {"add", "sub", "mul", "div", "lt", "le", "gt", "ge", "eq", "ne", "sgn", "rsub", "clamp_min", "clamp_max"}
    for name in sorted({*PRIMITIVE, *COMPOSITE} - spelled):
        if not name.startswith(("logical_", "bitwise_")) and not name.endswith("_backward"):
            assert re.search(rf"\b{name}\b", text), f"docs/functions.md does not mention {name}"
