"""The source of device code, as Triton finds it here and as Python would find it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest

pytest.importorskip("triton")

import gdpa.backends
import gdpa.device
from gdpa.device.sources import lines_of, read_quickly


def functions() -> dict[str, Any]:
    """All of the modules with device code, kernels and others."""
    found = {}
    for package in (gdpa.backends, gdpa.device):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(info.name)).items():
                value = getattr(value, "fn", value)  # of a kernel
                if inspect.isfunction(value) and value.__module__ == info.name:
                    found[f"{info.name}.{name}"] = value
    return found


def test_every_source_is_what_python_finds() -> None:
    found = functions()
    assert len(found) > 400
    assert {name for name, f in found.items() if lines_of(f) != inspect.getsourcelines(f)} == set()


def nested() -> Any:
    # fmt: off
    def inner(
        a: int,
    ) -> int:
        return a
        # a comment that belongs to it

    # and one that does not
    return inner
    # fmt: on


def test_functions_of_others_are_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(nested) is None
    assert lines_of(len) is None
    with read_quickly():
        assert inspect.getsource(nested).startswith("def nested()")


def test_where_a_function_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdpa, "__path__", [__file__])
    for f in (nested, nested(), functions, test_where_a_function_ends):
        assert lines_of(f) == inspect.getsourcelines(f)


def test_python_has_its_own_again() -> None:
    ordinary = inspect.getsourcelines
    with read_quickly():
        with pytest.raises(ZeroDivisionError), read_quickly():
            1 / 0  # noqa: B018
        assert inspect.getsourcelines is not ordinary
    assert inspect.getsourcelines is ordinary
