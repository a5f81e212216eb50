"""`make docs`: guides and API pages as HTML, of docs/*.md and of the docstrings of gdpa's public names.

    python docs/build.py build/docs

Pages stand in groups, as in docs/README.md, and one search finds sections of guides and names of the API. pdoc renders.
Public is what ``__all__`` says: nothing else is listed, and no kernel is imported.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import importlib
import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import markdown2
import pdoc.doc
import pdoc.render
from pdoc.render_helpers import markdown_extensions

import gdpa
from gdpa.pages.palette import DARK, LIGHT, shadows

ROOT = Path(__file__).resolve().parents[1]
FRONT = ROOT / "docs" / "README.md"
README = ROOT / "README.md"
GROUPS = {
    "Start": (FRONT, README, "tour", "coming-from", "guide-recsys", "guide-researchers"),
    "Functions": ("functions", "compare", "positions", "rowsums", "transformers"),
    "Models": ("nn", "models", "data", "train", "serving", "distributed"),
    "Numbers": ("results", "accuracy", "benchmark", "tuning"),
    "Internals": ("design", "kernels", "kernels-log", "backends", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"),
}
GROUPED = {
    group: [ROOT / "docs" / f"{d}.md" if isinstance(d, str) else d for d in given] for group, given in GROUPS.items()
}
LISTED = [document for given in GROUPED.values() for document in given]
# A page that nobody has put into a group is one of the last.
OTHERS = [document for document in sorted((ROOT / "docs").glob("*.md")) if document not in LISTED]
DOCUMENTS = [*LISTED, *OTHERS]
HEADING = re.compile(r'<h([1-3]) id="([^"]+)">(.*?)</h\1>', re.DOTALL)
FILE_NAME = re.compile(r"\[[\w/.-]+\.md(?:#[\w-]*)?\]\(([^)#\s]+)")  # as the text of a link; pages have titles
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
# Public modules that import a library which an installation need not have.
OPTIONAL = ("gdpa.integrations.transformers",)
# What a reader comes for; the others are in the order of __all__, which is sorted.
FIRST = {"gdpa": ("attention", "attention_varlen")}
# As GitHub has them: ids of headings in lower case, and no links but those that are written.
EXTENSIONS: dict[str, Any] = {**markdown_extensions, "header-ids": None}
del EXTENSIONS["link-patterns"]


def build(out: Path) -> list[Path]:
    """Writes everything below ``out`` and returns the pages: index.html, the guides, gdpa.html, gdpa/nn.html, ..."""
    pdoc.render.configure(
        docformat="google", show_source=False, search=False, template_directory=ROOT / "docs" / "templates"
    )
    names = public_modules()
    pdoc.render.env.globals.update(groups=groups(names), light=LIGHT, dark=DARK, shadows=shadows)
    modules = {name: public_module(name) for name in names}
    found = {module_page(name): pdoc.render.html_module(m, modules) for name, m in modules.items()}
    pages, index = documents(out)
    found.update(pages)
    for module in modules.values():
        index += api_entries(module)
    found["search.js"] = search_script(index)
    for name, text in found.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in found if name.endswith(".html")]


def groups(modules: list[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The navigation: (group, [(page, its title)]); the API last."""
    found = [(group, [(page_name(d), title(d)) for d in given]) for group, given in GROUPED.items()]
    if OTHERS:
        found.append(("More", [(page_name(d), title(d)) for d in OTHERS]))
    return [*found, ("API", [(module_page(name), name) for name in modules])]


# ---- search ----------------------------------------------------------------------------------------------------------
def search_script(index: list[dict[str, str]]) -> str:
    """A script rather than JSON: pages opened from a folder may not fetch."""
    text = (ROOT / "docs" / "templates" / "search.js").read_text(encoding="utf-8")
    return text.replace("const INDEX = null;", f"const INDEX = {json.dumps(index, ensure_ascii=False)};", 1)


def sections(page: str, page_title: str, body: str) -> list[dict[str, str]]:
    """An entry of the index for every heading of a page, with the text below it."""
    marks = list(HEADING.finditer(body))
    ends = [mark.start() for mark in marks[1:]] + [len(body)]
    return [
        {"title": plain(mark[3]), "page": page_title, "url": f"{page}#{mark[2]}", "text": plain(body[mark.end() : end])}
        for mark, end in zip(marks, ends, strict=True)
    ]


def api_entries(module: pdoc.doc.Module) -> list[dict[str, str]]:
    """An entry for every public name, and for the methods of classes."""
    page, found = module_page(module.modulename), []
    for member in module.own_members:
        inside = member.own_members if isinstance(member, pdoc.doc.Class) else []
        for each in (member, *inside):
            if each.docstring and "@private" not in each.docstring and not each.name.startswith("_"):
                entry = {"title": each.qualname, "page": module.modulename, "url": f"{page}#{each.qualname}"}
                text = re.sub(r":\w+:`|`", "", each.docstring)  # marks of references and of code
                found.append({**entry, "text": " ".join(text.split())})
    return found


def plain(body: str) -> str:
    """HTML without its tags, of which some are inside words."""
    words = re.sub(r"<[^>]+>", " ", re.sub(r"</?(?:span|a|code|em|strong)\b[^>]*>", "", body))
    return " ".join(html.unescape(words).split())


# ---- API pages -------------------------------------------------------------------------------------------------------
def public_modules() -> list[str]:
    """gdpa, and those of its modules that say what is public and can be imported here."""
    found = [f"gdpa.{name}" for name in gdpa.MODULES if hasattr(getattr(gdpa, name), "__all__")]
    return ["gdpa", *sorted([*found, *filter(importable, OPTIONAL)])]


def importable(name: str) -> bool:
    """Whether the library that module ``name`` needs is installed. If not, the page is left out, and said to be."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"no page of {name}: {error}", file=sys.stderr)
        return False
    return True


def public_module(name: str) -> pdoc.doc.Module:
    """The public names of module ``name``, with the docstrings that pdoc does not find by itself."""
    module = importlib.import_module(name)
    for each in module.__all__:  # names may be imported when they are first asked for
        getattr(module, each)
    found = pdoc.doc.Module(module)
    found.members = {**{first: found.members[first] for first in FIRST.get(name, ())}, **found.members}
    origins = imported_from(found.obj)
    for member in found.members.values():
        if isinstance(member, pdoc.doc.Class):
            _complete(member)
        elif isinstance(member, pdoc.doc.Variable):
            _complete_constant(member, origins)
    return found


def imported_from(package: ModuleType) -> dict[str, str]:
    """Where the names that ``package`` imports are defined: pdoc looks for the string below a constant only in the
    module that it shows."""
    nodes = ast.walk(ast.parse(inspect.getsource(package)))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


def _complete_constant(constant: pdoc.doc.Variable, origins: dict[str, str]) -> None:
    """Its docstring from where it is defined; of a dictionary only the keys, since its values are documented apart."""
    if not constant.docstring and constant.name in origins:
        defined = pdoc.doc.Module(importlib.import_module(origins[constant.name])).get(constant.name)
        constant.docstring = "" if defined is None else defined.docstring
    if isinstance(constant.default_value, dict):
        constant.default_value_str = "{" + ", ".join(f"{key!r}: ..." for key in constant.default_value) + "}"


def _complete(cls: pdoc.doc.Class) -> None:
    """Its members without the docstrings of nn.Module, which would say nothing here, and with those of its options."""
    fields = dataclasses.fields(cls.obj) if dataclasses.is_dataclass(cls.obj) else ()
    helps = {field.name: field.metadata["help"] for field in fields if "help" in field.metadata}  # gdpa.train.Config
    declared = {*vars(cls.obj), *inspect.get_annotations(cls.obj)}
    own = {member.name for member in cls.own_members}
    for member in cls.members.values():
        if member.name not in own and isinstance(member, pdoc.doc.Variable):
            member.docstring = "@private"  # parts of a module that a class behind the scenes has
    for member in cls.own_members:
        value = inspect.getattr_static(cls.obj, member.name, None)
        if member.name == "extra_repr" or member.name not in declared:  # parts of a module are not its interface
            member.docstring = "@private"  # pdoc does not show it then
        elif member.name == "Config" and dataclasses.is_dataclass(value):
            member.docstring = _options(value)
        elif isinstance(member, pdoc.doc.Function) and member.obj.__doc__ is None:
            member.docstring = ""
        elif member.name in helps:
            member.docstring = helps[member.name]


def _options(config: Any) -> str:
    """The docstring of a model's options and their defaults: their class is not listed itself."""
    defaults = config()  # all of them have one, some by a factory
    lines = [f"    {f.name}: {f.type} = {getattr(defaults, f.name)!r}" for f in dataclasses.fields(config)]
    return "\n".join([inspect.getdoc(config) or "", "", "They are, with their defaults,", "", *lines])


# ---- guides ----------------------------------------------------------------------------------------------------------
def documents(out: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The HTML of every document by the name of its page, and what search finds in them; files that they link to are
    copied below ``out``."""
    template, found, index = pdoc.render.env.get_template("page.html.jinja2"), {}, []
    for document in DOCUMENTS:
        name = page_name(document)
        body = markdown2.markdown(relink(document, out), extras=EXTENSIONS)
        index += sections(name, title(document), body)
        wrapped = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace(
            "</table>", "</table></div>"
        )
        found[name] = template.render(
            title=title(document), name=name, body=wrapped, toc=body.toc_html, front=document == FRONT
        )
    return found, index


def title(document: Path) -> str:
    """Its heading; that of the README, gdpa, is also that of a page of the API."""
    if document == README:
        return "README"
    return "Overview" if document == FRONT else document.read_text(encoding="utf-8").partition("\n")[0].strip("# ")


def module_page(name: str) -> str:
    return f"{name.replace('.', '/')}.html"


def page_name(document: Path) -> str:
    """docs/README.md is the front page, docs/nn.md is nn.html, README.md is readme.html."""
    return "index.html" if document == FRONT else f"{document.stem.lower()}.html"


def relink(document: Path, out: Path) -> str:
    """The text of ``document`` with links to the pages that others become, and to copies of what is no page."""

    def one(match: re.Match[str]) -> str:
        target = (document.parent / match[1]).resolve()
        if target in DOCUMENTS:
            return f"]({page_name(target)}{match[2] or ''})"
        if not target.exists():
            return match[0]  # code that looks like a link
        inside = target.relative_to(ROOT)
        (out / inside).parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            shutil.copytree(target, out / inside, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(target, out / inside)
        return f"]({inside.as_posix()})"

    def titled(match: re.Match[str]) -> str:
        target = (document.parent / match[1]).resolve()
        return f"[{title(target)}]({match[1]}" if target in DOCUMENTS else match[0]

    return LINK.sub(one, FILE_NAME.sub(titled, document.read_text(encoding="utf-8")))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/build.py FOLDER")
    written = build(Path(sys.argv[1]))
    print(f"{len(written)} pages: open {Path(sys.argv[1]) / 'index.html'}")
