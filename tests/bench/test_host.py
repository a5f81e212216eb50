"""`gdpa bench --host`: a record for every contender, the parts of a call, and the tables made of them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import gdpa
from gdpa.backends.hopper import HopperBackend
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
        times = {f"{what}_{which}us" for what in ("forward", "both") for which in ("", "p20_", "p80_")}
        assert set(r) == {"case", "contender", *times}
        assert 0 < r["forward_p20_us"] <= r["forward_us"] <= r["forward_p80_us"]
        assert 0 < r["forward_us"] < r["both_us"]
    assert document["load"] is None or document["load"]["cores"] >= 1
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
    assert "--case does not apply with --host" in done.output


def test_a_contender_that_cannot_run_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(shape: Any, device: Any) -> Any:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(calls, "CONTENDERS", {"sdpa": calls.CONTENDERS["sdpa"], "flex": broken})
    document = calls.run(CPU, quick=True)
    assert document["skipped"] == [{"case": "b1-h1-l16-d8", "contender": "flex", "reason": "RuntimeError: no compiler"}]
    monkeypatch.setattr(calls, "CONTENDERS", {"gdpa": broken})
    with pytest.raises(RuntimeError, match="no compiler"):
        calls.run(CPU, quick=True)


def test_parts_of_calls_that_repeat_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the backend has a quick way of its own."""
    pytest.importorskip("triton.experimental.gluon")
    from fake_gpu import fake_hopper

    inputs = [torch.zeros(2, 4, 128, 64, dtype=torch.bfloat16) for _ in range(3)]
    monkeypatch.setattr(calls, "_inputs", lambda shape, device: inputs)
    monkeypatch.setattr(gdpa, "attention", partial(gdpa.attention, backend="hopper"))
    with fake_hopper() as fake:
        gdpa.attention(*inputs)
        fake.launches.clear()
        monkeypatch.setattr(HopperBackend, "forward", lambda *args: pytest.fail("the ordinary way"))
        found = calls.parts((2, 4, 128, 64), torch.device("cpu"), rounds=1)
        assert fake.launches
    assert {"checks", "plan", "buffers", "launch", "dispatch"} <= {*found}


def test_varlen_has_other_lengths_at_every_call() -> None:
    prepared = calls.CONTENDERS["gdpa-varlen"]((2, 1, 16, 8), CPU)
    assert len({prepared.call().shape[0] for _ in range(20)}) > 5


def test_contenders_take_turns() -> None:
    """Nobody always comes first, and all of them have had as many turns at any time."""
    seen: list[str] = []
    found = calls.in_turns({name: lambda name=name: seen.append(name) for name in "abc"}, CPU, 3)
    assert [len(times) for times in found.values()] == [3, 3, 3]
    order = seen[::5]  # every turn is of five calls
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert calls.in_turns({}, CPU, 3) == {}


def test_what_the_spread_exceeds_is_marked() -> None:
    def record(contender: str, us: float, spread: float) -> dict[str, Any]:
        times = {f"{w}_us": us for w in ("forward", "both")}
        times |= {f"{w}_p20_us": us - spread for w in ("forward", "both")}
        return {
            "case": "x",
            "contender": contender,
            **times,
            **{f"{w}_p80_us": us + spread for w in ("forward", "both")},
        }

    near = {"records": [record("gdpa", 10.0, 2.0), record("sdpa", 11.0, 2.0)], "load": {"others": 1.9, "cores": 2}}
    assert "| gdpa | 10.0 (8.0–12.0) | ~0.91 |" in calls.markdown(near)
    busy, close = calls.doubts(near)
    assert "other processes used 1.90 of 2 cores" in busy
    assert "exceeds the difference from SDPA: x gdpa, forward; x gdpa, forward and backward" in close
    far = {"records": [record("gdpa", 10.0, 0.1), record("sdpa", 20.0, 0.1)]}
    assert "| 0.50 |" in calls.markdown(far)
    assert calls.doubts(far) == []
    old = {"records": [{"case": "x", "contender": "sdpa", "forward_us": 1.0, "both_us": 2.0}]}
    assert "| x | sdpa | 1.0 | 1.00 | 2.0 | 1.00 |" in calls.markdown(old)
