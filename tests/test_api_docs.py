"""`make docs`: everything public has a docstring and a place on the pages, and every link on them leads somewhere."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from torch import nn

import browser
import gdpa
from gdpa.cli import main
from support import FULL

ROOT = Path(__file__).parents[1]
MODULES = [
    "gdpa",
    "gdpa.data",
    "gdpa.distributed",
    "gdpa.integrations.transformers",
    "gdpa.masks",
    "gdpa.models",
    "gdpa.nn",
    "gdpa.serving",
    "gdpa.train",
]
if importlib.util.find_spec("transformers") is None:
    MODULES.remove("gdpa.integrations.transformers")
modules = pytest.mark.parametrize("name", MODULES)
guides = pytest.mark.parametrize("guide", sorted((ROOT / "docs").glob("guide-*.md")), ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Page(HTMLParser):
    """Ids, links, what a browser would fetch, and the ids of top-level sections."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.sections: list[str] = []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag in ("script", "img", "iframe", "link"):
            self.fetched.append(found.get("src") or found.get("href") or "")
        if tag == "section" and found.get("id"):
            self.sections.append(str(found["id"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs")


@pytest.fixture(scope="module")
def site(builder: ModuleType, folder: Path) -> dict[Path, Page]:
    return {path.relative_to(folder): Page(path) for path in builder.build(folder)}


def public(name: str) -> dict[str, Any]:
    module = importlib.import_module(name)
    found = {each: getattr(module, each) for each in module.__all__}
    return {each: value for each, value in found.items() if not isinstance(value, ModuleType)}


# ---- docstrings ------------------------------------------------------------------------------------------------------
def test_public_modules(builder: ModuleType) -> None:
    assert builder.public_modules() == MODULES
    assert all(importlib.import_module(name).__doc__ for name in MODULES)


def test_without_transformers_its_page_is_left_out(
    builder: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "gdpa.integrations.transformers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails, as if it were not installed
    assert builder.public_modules() == [name for name in MODULES if name != "gdpa.integrations.transformers"]
    assert "no page of gdpa.integrations.transformers" in capsys.readouterr().err


@modules
def test_every_public_name_has_a_docstring(name: str, builder: ModuleType) -> None:
    """Its own: not that of a base class, and not the signature that dataclasses make up."""
    without = [member.name for member in builder.public_module(name).members.values() if not member.docstring]
    for each, value in public(name).items():
        if inspect.isclass(value):
            text = vars(value).get("__doc__") or ""
            without += [each] if not text or text.startswith(f"{each}(") else []
    assert without == []


@modules
def test_examples_parse(name: str) -> None:
    """They need tensors that a docstring does not make, so they are read, not run; the documents' blocks are run."""
    for each, value in public(name).items():
        for example in doctest.DocTestParser().get_examples(inspect.getdoc(value) or "", each):
            compile(example.source, each, "exec")


def test_layers_models_and_operators_have_an_example() -> None:
    operators = [gdpa.attention, gdpa.attention_varlen, gdpa.explain, gdpa.activation]
    operators += [value for each, value in public("gdpa.distributed").items() if each != "clip_grad_norm_"]
    layers = [
        value
        for name in ("gdpa.nn", "gdpa.models")
        for value in public(name).values()
        if inspect.isclass(value) and issubclass(value, nn.Module) and value is not gdpa.models.Model
    ]
    assert len(layers) > 15
    for each in (*operators, *layers):
        assert ">>>" in (each.__doc__ or ""), each


# ---- pages -----------------------------------------------------------------------------------------------------------
@modules
def test_a_page_lists_the_public_names_and_no_others(name: str, site: dict[Path, Page]) -> None:
    page = site[Path(f"{name.replace('.', '/')}.html")]
    assert sorted(page.sections) == sorted(set(importlib.import_module(name).__all__) - _submodules(name, page))
    assert not any(part.startswith("_") for id in page.ids for part in id.split(".") if not part.startswith("__"))


def test_the_page_of_gdpa_begins_with_what_readers_come_for(site: dict[Path, Page]) -> None:
    assert site[Path("gdpa.html")].sections[:2] == ["attention", "attention_varlen"]


def _submodules(name: str, page: Page) -> set[str]:
    """Those that pdoc lists under "Submodules" in place of a section."""
    inside = {each for each in importlib.import_module(name).__all__ if f"{name}.{each}" in MODULES}
    return inside - set(page.sections)


def test_links_lead_somewhere(site: dict[Path, Page], tmp_path_factory: pytest.TempPathFactory) -> None:
    assert Path("index.html") in site
    for path, page in site.items():
        for link in page.links:
            target, _, fragment = link.partition("#")
            if target.startswith("http"):
                continue
            where = Path(*_resolved(path.parent / target)) if target else path
            if where in site:
                assert not fragment or fragment in site[where].ids, f"{path} links to {link}"
            else:
                assert (ROOT / where).exists(), f"{path} links to {link}"  # a copy of it


def _resolved(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return parts


def test_front_page_leads_to_guides_and_modules(site: dict[Path, Page]) -> None:
    links = site[Path("index.html")].links
    assert {"guide-recsys.html", "guide-researchers.html", "gdpa.html", "gdpa/nn.html", "gdpa/train.html"} <= {*links}


def test_pages_need_no_network_and_name_no_machine(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        assert not any(address.startswith(("http", "//")) for address in page.fetched), path
        assert str(ROOT) not in page.text, path
        assert not re.search(r" at 0x[0-9a-f]{6}", page.text), path


def test_navigation_is_grouped_on_every_page(site: dict[Path, Page], builder: ModuleType) -> None:
    """Titles, not names of files; the group of the page is open, and every document is in one."""
    assert builder.OTHERS == []
    for path, page in site.items():
        found = re.findall(r"<details( open)?>\s*<summary>(.*?)</summary>", page.text)
        assert [name for _, name in found] == [*builder.GROUPS, "API"], path
        assert [opened for opened, _ in found].count(" open") == 1, path
        assert page.text.count('aria-current="page"') == 1, path
        assert not re.search(r">[\w/-]+\.md</a>", page.text), f"{path} has a file name as a link"


def test_search_finds_sections_of_guides_and_names_of_the_api(builder: ModuleType, tmp_path: Path) -> None:
    """Without the pages of the API, which take seconds: their entries are made from the modules."""
    import pdoc.render

    pdoc.render.configure(template_directory=ROOT / "docs" / "templates")
    pdoc.render.env.globals.update(groups=builder.groups(MODULES), light={}, dark={}, shadows=lambda box: "")
    _, index = builder.documents(tmp_path)
    for name in MODULES:
        if name in ("gdpa.masks", "gdpa.integrations.transformers"):
            index += builder.api_entries(builder.public_module(name))
    by_url = {entry["url"]: entry for entry in index}
    assert len(by_url) == len(index)
    assert "SDPA" in by_url["coming-from.html#fscaled_dot_product_attention"]["text"]
    assert by_url["gdpa/masks.html#prefix"]["page"] == "gdpa.masks"
    if "gdpa.integrations.transformers" in MODULES:
        assert "attn_implementation" in by_url["gdpa/integrations/transformers.html#register"]["text"]
    assert not any("<" in entry["title"] or "</" in entry["text"] for entry in index)
    script = builder.search_script(index)
    found = re.search(r"^const INDEX = (\[.*\]);$", script, re.MULTILINE)
    assert found is not None
    assert json.loads(found[1]) == index


def test_options_of_models_and_settings_of_training_are_explained(site: dict[Path, Page]) -> None:
    assert "Options of" in site[Path("gdpa/models.html")].text
    assert "hidden_units: int = 16" in site[Path("gdpa/models.html")].text
    assert "Samples per step, over all ranks." in site[Path("gdpa/train.html")].text


def test_nothing_is_cut_off_in_a_browser(site: dict[Path, Page], folder: Path) -> None:
    """Code and tables scroll in boxes of their own, on a phone too; the search finds guides and names of the API."""
    path = browser.installed()
    if path is None:
        pytest.skip(f"no browser installed: looked for {', '.join(browser.BROWSERS)}")
    with browser.Browser(path) as opened:
        for page in site:
            name = "-".join(("docs", *page.with_suffix("").parts))
            if FULL or page.name in ("index.html", "gdpa.html"):  # of each kind one picture
                browser.check(opened, folder / page, ROOT / "build" / "screenshots", name, dark=False, most=1500)
            else:
                browser.check_widths(opened, folder / page)
        opened.open(f"{(folder / 'gdpa' / 'nn.html').as_uri()}?q=window", 390)
        links = opened.evaluate("[...document.querySelectorAll('.results a')].map(a => a.getAttribute('href'))")
        assert "../gdpa/masks.html#window" in links
        assert "../positions.html#masks" in links
        assert opened.clipped() == []


# ---- commands in the guides ------------------------------------------------------------------------------------------
@guides
def test_commands_of_guides_exist(guide: Path) -> None:
    """Indented lines that begin with gdpa, or with torchrun and gdpa.cli: the command and its options are known."""
    lines = re.findall(
        r"^    (?:torchrun .* -m gdpa\.cli|gdpa) (.*)$", guide.read_text().replace("\\\n", ""), re.MULTILINE
    )
    assert lines
    for line in lines:
        name, *words = shlex.split(line, comments=True)
        command = main.commands[name]
        known = {option for each in command.get_params(click.Context(command)) for option in each.opts}
        assert {word for word in words if word.startswith("--")} <= known, line
