"""Every example in a docstring runs and gives what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import gdpa.models
import gdpa.models.cores

MODULES = ["gdpa.models", *(f"gdpa.models.{m.name}" for m in pkgutil.iter_modules(gdpa.models.__path__))]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    if name.endswith("torchrec_tables"):
        pytest.importorskip("torchrec", reason="needs torchrec")
    names = {"torch": torch, "gdpa": gdpa, **{n: getattr(gdpa.models, n) for n in gdpa.models.__all__}}
    result = doctest.testmod(importlib.import_module(name), extraglobs=names, raise_on_error=False)
    assert result.failed == 0


@pytest.mark.parametrize("name", gdpa.models.MODELS)
def test_every_model_has_an_example(name: str) -> None:
    assert ">>>" in (gdpa.models.MODELS[name].__doc__ or "")
