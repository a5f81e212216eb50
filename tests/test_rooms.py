"""How the package is laid out: folders and modules of a size one can survey, imports without cycles, tests beside."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import gdpa
from gdpa.testing import cases

PACKAGE = Path(gdpa.__file__).parent
TESTS = Path(__file__).parent
LINES, MODULES = 400, 15
# What tests have no folder or module of their own for. The cases of gdpa.testing are what other tests run.
ELSEWHERE = {"commands": "cli", "testing": "support.py"}
PATHS = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


NAMES = {dotted(path): path for path in PATHS}


def ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def imported(node: ast.AST) -> Iterator[str]:
    """Modules of gdpa that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in NAMES else node.module


def statements(node: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    """All inside ``node``; without ``lazy`` only what runs when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if not lazy and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if not lazy and isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from statements(child, lazy)


def graph(lazy: bool) -> dict[str, set[str]]:
    """Which modules each one imports, packages on the way included, other than those it is in itself."""
    found = {}
    for name, path in NAMES.items():
        direct = {m for node in statements(ast.parse(path.read_text()), lazy) for m in imported(node)} & {*NAMES}
        above = {*ancestors(name), "gdpa", name}
        found[name] = (direct | {a for m in direct for a in ancestors(m)}) - above
    return found


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan's)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            component = sorted(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.append(component)

    for name in edges:
        if name not in index:
            visit(name)
    return found


def test_no_module_is_long() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in PATHS}
    assert {name: n for name, n in lengths.items() if n > LINES} == {}


def test_no_folder_is_full() -> None:
    folders = {path.parent for path in PATHS}
    sizes = {str(folder.relative_to(PACKAGE)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: n for name, n in sizes.items() if n > MODULES} == {}


def test_every_folder_says_what_it_is_for() -> None:
    for folder in {path.parent for path in PATHS}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_tests_mirror_the_package() -> None:
    """Every package has a folder or a module of tests of its name; every folder of tests but gpu and simulator is named
    after what it tests, a package or a module anywhere in gdpa."""
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    tests = {path.name for path in TESTS.iterdir()}
    without = {name for name in packages if not {name, f"test_{name}.py"} & tests}
    assert without == {*ELSEWHERE}
    assert {*ELSEWHERE.values()} <= tests
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.rglob("*/test_*.py")}
    assert folders - {path.stem for path in PATHS} - {path.parent.name for path in PATHS} == {"gpu", "simulator"}


def test_imports_have_no_cycles() -> None:
    assert cycles(graph(lazy=False)) == []


def test_neither_do_late_imports() -> None:
    """Imports inside functions and for types, too: what needs one the other way round is in the wrong module. The one
    exception: Vocabularies.build, a constructor that reads tables, which hold vocabularies."""
    edges = graph(lazy=True)
    edges["gdpa.data.vocabulary"] -= {"gdpa.data.sources", "gdpa.data.tables.counting", "gdpa.data.tables"}
    assert cycles(edges) == []


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_the_old_name_of_the_cases_warns() -> None:
    """Documents told people to import it."""
    with pytest.warns(DeprecationWarning, match=r"gdpa\.bench\.cases is gdpa\.testing\.cases now"):
        old = importlib.import_module("gdpa.bench.cases")
    assert old.dense is cases.dense
