"""`gdpa bench --host`: a record for every contender, the parts of a call, and the tables made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from gdpa.bench.host import calls
from gdpa.bench.report import documents
from gdpa.cli import main

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host") / "host.json"
    done = CliRunner().invoke(main, ["bench", "--host", "--quick", "--device", "cpu", "--out", str(path)])
    assert done.exit_code == 0, done.output
    assert "without a GPU" in done.output
    return path


def test_records(stored: Path) -> None:
    document = json.loads(stored.read_text())
    found = {r["contender"] for r in document["records"]} | {r["contender"] for r in document["skipped"]}
    assert found == set(calls.CONTENDERS)
    assert {r["contender"] for r in document["records"]} >= {"gdpa", "gdpa-lambda", "gdpa-varlen", "sdpa"}
    for r in document["records"]:
        assert set(r) == {"case", "contender", "forward_us", "both_us"}
        assert 0 < r["forward_us"] < r["both_us"]
    (parts,) = document["parts"].values()
    assert list(parts) == ["checks", "plan", "buffers", "launch", "dispatch"]


def test_a_stored_result_is_shown_and_made_into_tables(stored: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["bench", "--from", str(stored)])
    assert shown.exit_code == 0, shown.output
    assert "gdpa-lambda" in shown.output
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- table: host host.json -->\n<!-- end -->\n<!-- table: host-parts host.json -->\n<!-- end -->\n"
    )
    (tmp_path / "host.json").write_text(stored.read_text())
    assert documents.refresh(page) == 2
    assert "| sdpa |" in page.read_text()
    assert "1.00" in page.read_text()


def test_options_that_it_would_ignore_are_refused() -> None:
    done = CliRunner().invoke(main, ["bench", "--host", "--case", "self-*"])
    assert done.exit_code == 2
    assert "--case has no meaning with --host" in done.output


def test_a_contender_that_cannot_run_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(shape: Any, device: Any) -> Any:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(calls, "CONTENDERS", {"sdpa": calls.CONTENDERS["sdpa"], "flex": broken})
    document = calls.run(CPU, quick=True)
    assert document["skipped"] == [{"case": "b1-h1-l16-d8", "contender": "flex", "reason": "RuntimeError: no compiler"}]
    monkeypatch.setattr(calls, "CONTENDERS", {"gdpa": broken})
    with pytest.raises(RuntimeError, match="no compiler"):
        calls.run(CPU, quick=True)


def test_varlen_has_other_lengths_at_every_call() -> None:
    prepared = calls.CONTENDERS["gdpa-varlen"]((2, 1, 16, 8), CPU)
    assert len({prepared.call().shape[0] for _ in range(20)}) > 5
