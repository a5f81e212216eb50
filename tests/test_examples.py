"""Every example runs, and what it trains gets better."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    first, last = runpy.run_path(str(path))["main"]()
    assert last < 0.8 * first


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        "own_function",
        "jagged_self_attention",
        "pma_pooling",
        "pffn",
        "small_gpt",
    }
