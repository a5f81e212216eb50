"""`gdpa bench --positions`: every bias and mask, right by float64, and the tables made of the result."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from gdpa.bench.places import flex, report, run
from gdpa.bench.places.batches import CPU_SCALE, DENSE, JAGGED, make_batch
from gdpa.bench.places.cases import BIASES, CASES, MASKS
from gdpa.bench.report import documents
from gdpa.cli import main

CPU = torch.device("cpu")
SOME = ["silu", "alibi", "relative", "causal", "prefix"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("positions") / "positions.json"
    chosen = [word for name in SOME for word in ("--case", name)]
    done = CliRunner().invoke(main, ["bench", "--positions", "--quick", "--device", "cpu", "--out", str(path), *chosen])
    assert done.exit_code == 0, done.output
    assert "a table by relative position" in done.output
    return path


def test_records(stored: Path) -> None:
    document = json.loads(stored.read_text())
    found = {(r["case"], r["layout"], r["contender"]) for r in document["records"]}
    assert found == {(name, layout, "gdpa") for name in SOME for layout in (DENSE, JAGGED)}
    for r in document["records"]:
        assert r["error"] < 1e-5
        assert r["error_bwd"] < 1e-5
        assert ("error_tables" in r) is (r["case"] == "relative")  # ALiBi's slopes are fixed
        assert math.isclose(r["fwd_tflops"], r["flops"] / r["fwd_median_ms"] / 1e9)


def test_tables(stored: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["bench", "--from", str(stored)])
    assert shown.exit_code == 0, shown.output
    assert "`causal=True`" in shown.output
    page = tmp_path / "page.md"
    page.write_text("<!-- table: biases p.json -->\n<!-- end -->\n<!-- table: masks p.json -->\n<!-- end -->\n")
    (tmp_path / "p.json").write_text(stored.read_text())
    assert documents.refresh(page) == 2
    text = page.read_text()
    assert "| nothing |" in text
    assert text.count("1.00 / 1.00") == 4  # silu and causal beside themselves


def test_a_result_beside_flexattention(stored: Path) -> None:
    """As a GPU has it."""
    document = json.loads(stored.read_text())
    ours = next(r for r in document["records"] if (r["case"], r["layout"]) == ("causal", DENSE))
    slower = {key: 2 * value if key.endswith("_ms") else value for key, value in ours.items()}
    document["records"].append({**slower, "contender": "flex"})
    assert "| 2.00 / 2.00 |" in report.masks_markdown(document)
    assert "2.00 / 2.00" not in report.biases_markdown(document)


def test_unknown_cases_are_refused() -> None:
    done = CliRunner().invoke(main, ["bench", "--positions", "--case", "nothing*"])
    assert done.exit_code == 1
    assert "cases: silu, alibi-small" in done.output
    done = CliRunner().invoke(main, ["bench", "--positions", "--dtype", "bfloat16"])
    assert done.exit_code == 2


@pytest.mark.parametrize("layout", [DENSE, JAGGED])
@pytest.mark.parametrize("name", [name for name in CASES if name not in SOME])
def test_every_case_is_right(name: str, layout: str) -> None:
    batch = make_batch(layout, CPU_SCALE, CPU, torch.float32)
    assert all(value < 1e-5 for value in run.errors(CASES[name], batch).values())


def test_visible_pairs_are_counted() -> None:
    dense, jagged = (make_batch(layout, CPU_SCALE, CPU, torch.float32) for layout in (DENSE, JAGGED))
    assert run.visible(CASES["silu"], jagged) == sum(n * n for n in jagged.lengths)
    for batch in (dense, jagged):
        half = sum(n * (n + 1) // 2 for n in batch.lengths)
        assert run.visible(CASES["causal"], batch) == run.visible(CASES["causal-mask"], batch) == half
        assert run.visible(CASES["window"], batch) == run.visible(CASES["window-mask"], batch) < half


def test_flexattention_is_asked_for_the_same_pairs() -> None:
    batch = make_batch(DENSE, CPU_SCALE, CPU, torch.float32)
    n, rows = len(batch.lengths), batch.longest
    b, i, j = torch.arange(n)[:, None, None], torch.arange(rows)[:, None], torch.arange(rows)
    asked = 0
    for case in MASKS:
        mod = flex.mask_mod(case, batch)
        if mod is not None:
            asked += 1
            seen = torch.broadcast_to(mod(b, 0, i, j), (n, rows, rows))
            assert int(seen.sum()) == run.visible(case, batch), case.name
    assert asked == 6


def test_flexattention_is_asked_for_the_same_scores() -> None:
    batch = make_batch(DENSE, CPU_SCALE, CPU, torch.float32)
    b, h, i, j = (
        torch.arange(2)[:, None, None, None],
        torch.arange(2)[:, None, None],
        torch.arange(24)[:, None],
        torch.arange(24),
    )
    s = torch.randn(2, 2, 24, 24, generator=torch.Generator().manual_seed(0))
    asked = 0
    for case in BIASES:
        mod = flex.score_mod(case, batch)
        if mod is None or case.function == "silu":
            continue
        asked += 1
        row = 24 * b
        places = {"h": h, "q_idx": i, "kv_idx": j, "q_row": row + i, "kv_row": row + j}
        assert callable(case.function)
        names = case.function.__kwdefaults__ or case.function.__annotations__
        given = {name: value for name, value in places.items() if name in names}
        want = case.function(s, *case.tables(batch), **given)
        torch.testing.assert_close(torch.nn.functional.silu(mod(s, b, h, i, j)), want)
    assert asked == 4
