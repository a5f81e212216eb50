"""Private names of PyTorch: each one is there, and gdpa.compat is the only place that has any."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

import gdpa
from gdpa import compat

PACKAGE = Path(gdpa.__file__).parent
NEEDS = {"RuntimeSchemaInfo": torch.distributed, "dtensor_dispatcher": torch.distributed}


@pytest.mark.parametrize("name", compat.PRIVATE)
def test_this_torch_has(name: str) -> None:
    if name in NEEDS and not NEEDS[name].is_available():
        pytest.skip("this build of PyTorch has no torch.distributed")
    assert getattr(compat, name) is resolve_name(compat.PRIVATE[name])


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
