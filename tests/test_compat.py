"""Private names of PyTorch: each one is there, and gdpa.compat is the only place that has any."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

import gdpa
from gdpa import compat

PACKAGE = Path(gdpa.__file__).parent
WATCHERS = (*compat.NAMES, compat.AUTOCAST, compat.FORWARD_MODE)
NEEDS = {"RuntimeSchemaInfo": torch.distributed, "dtensor_dispatcher": torch.distributed}


@pytest.mark.parametrize("name", compat.PRIVATE)
def test_this_torch_has(name: str) -> None:
    if name in NEEDS and not NEEDS[name].is_available():
        pytest.skip("this build of PyTorch has no torch.distributed")
    assert getattr(compat, name) is resolve_name(compat.PRIVATE[name])


@pytest.mark.parametrize("name", WATCHERS)
def test_this_torch_has_what_tells_who_watches(name: str) -> None:
    assert compat.found(name) is not None
    assert name not in compat.missing


@pytest.mark.parametrize("name", WATCHERS)
def test_a_name_that_is_gone_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of the module that loads where torch lacks the name. Then somebody may always be watching."""

    def without(wanted: str) -> Any:
        if wanted == name:
            raise AttributeError(f"no {wanted}")
        return resolve_name(wanted)

    spec = importlib.util.find_spec("gdpa.compat")
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as m:
        m.setattr(pkgutil, "resolve_name", without)
        spec.loader.exec_module(copy)
    assert copy.missing == (name,)
    assert compat.nobody_watches()
    assert not copy.nobody_watches()
    assert copy.forward_mode() == (name == compat.FORWARD_MODE)
    assert not copy.transformed()


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match=r"'gdpa\.compat' has no attribute 'no_such_name'"):
        compat.no_such_name  # noqa: B018


def test_nested_tensors_tell_their_lengths() -> None:
    rows, offsets = torch.zeros(5, 2), torch.tensor([0, 2, 5])
    nested = torch.nested.nested_tensor_from_jagged(rows, offsets, min_seqlen=2, max_seqlen=3)
    assert compat.ragged_dim(nested) == 1
    assert compat.known_lengths(nested) == (2, 3)
    assert compat.known_lengths(torch.nested.nested_tensor_from_jagged(rows, offsets)) == (None, None)


def test_views_are_known() -> None:
    rows = torch.zeros(5, 2)
    assert compat.is_view(rows[1:])
    assert not compat.is_view(rows)


def private_names(path: Path) -> Iterator[str]:
    """Names of torch with an underscore in front that a module uses."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            if re.fullmatch(r"torch(\.\w+)*", name) and re.search(r"\._[^_]", name):
                yield name


def test_private_names_are_in_one_place() -> None:
    found = {path.relative_to(PACKAGE): list(private_names(path)) for path in PACKAGE.rglob("*.py")}
    assert {str(path): names for path, names in found.items() if names and path != Path("compat.py")} == {}
    assert list(private_names(PACKAGE / "compat.py"))  # or the search above finds nothing anywhere
