"""benchmarks/ordering.py runs, on next to no data; what it finds is in benchmarks/results/ordering.json."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[1]


@pytest.mark.usefixtures("spawned_by_forking")
def test_it_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import ordering

    out = tmp_path / "ordering.json"
    monkeypatch.setattr(ordering, "LADDER", {"no sequence": {"name": "dlrm"}, "DIN": {"name": "din"}})
    monkeypatch.setattr(ordering, "FUNCTIONS", {})
    given = ["--seeds", "2", "--steps", "8", "--test-size", "200", "--workers", "1", "--out", str(out)]
    done = CliRunner().invoke(ordering.main, given, catch_exceptions=False)
    assert done.exit_code == 0
    assert "DIN" in done.output
    assert [len(found) for found in json.loads(out.read_text())["runs"].values()] == [2, 2]


def test_the_stored_result_is_in_order() -> None:
    """Every seed: no sequence < DIN < one way < both ways."""
    runs = json.loads((ROOT / "benchmarks/results/ordering.json").read_text())["runs"]
    names = ["no sequence", "DIN", "InterFormer, one way", "InterFormer, both ways"]
    aucs = [[metrics["auc"] for metrics in runs[name]] for name in names]
    for below, above in itertools.pairwise(aucs):
        assert all(a < b for a, b in zip(below, above, strict=True))
    assert statistics.fmean(aucs[-1]) > 0.8
