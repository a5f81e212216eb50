"""Every example in a docstring runs and gives what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import gdpa.nn

MODULES = ["gdpa.nn", *(m.name for m in pkgutil.walk_packages(gdpa.nn.__path__, "gdpa.nn.") if not m.ispkg)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    names = {"torch": torch, "gdpa": gdpa, **{n: getattr(gdpa.nn, n) for n in gdpa.nn.__all__}}
    result = doctest.testmod(module, extraglobs=names, raise_on_error=False)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", gdpa.nn.__all__)
def test_everything_public_has_an_example(name: str) -> None:
    assert ">>>" in (getattr(gdpa.nn, name).__doc__ or "")
